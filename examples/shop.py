"""A refund that waits for a person, and a payment that asks for another attempt.

playledger submit examples/shop.py:refund --input '"order-7"' --run-id refund-7
playledger signal refund-7 approval --data '{"approved": true, "by": "ada"}'
"""

from datetime import timedelta

from pydantic import BaseModel

from playledger import Retry, Run, play


class Approval(BaseModel):
    approved: bool
    by: str


@play
async def refund(run: Run, order: str) -> str:
    """Waits two days at most, and those survive any number of restarts."""
    try:
        approval = await run.signal("approval", Approval, timeout=timedelta(days=2))
    except TimeoutError:
        return "expired"
    if not approval.approved:
        return f"refused by {approval.by}"
    return await run.child(pay, order, key="pay")


@play(retries=5)
async def pay(run: Run, order: str) -> str:
    """Finds the till busy twice; each time the backoff before the next attempt is recorded."""
    if run.attempt < 2:
        raise Retry(f"the till is busy with {order}")
    run.log("paid", order=order)
    return f"receipt for {order}"
