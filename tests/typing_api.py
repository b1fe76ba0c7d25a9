"""The play API as its users write it: checked by mypy, never run (UX sections 1 and 2).

Each assignment says what is inferred; an `ignore` here is itself checked, so it proves an error.
"""

from __future__ import annotations

from asyncio import gather
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import playledger
from ledger.canonical import Json
from playledger import Retry, Run, play
from playledger.testing import Ended, drive, drive_killed_everywhere


class Year(BaseModel):
    year: str
    days: int
    rain_mm: float


class Approval(BaseModel):
    approved: bool
    by: str


@play
async def hello(_run: Run, name: str) -> str:
    return f"hello, {name}"


@play
async def one_year(run: Run, year: str) -> Year:
    days = [row for row in run.csv() if row["date"].startswith(year)]
    run.log("read the year", days=len(days))
    return Year(year=year, days=len(days), rain_mm=sum(float(d["precipitation"]) for d in days))


@play
async def yearly_report(run: Run) -> list[Year]:
    years = sorted({row["date"][:4] for row in run.csv()})
    return await gather(*(run.child(one_year, year, key=year) for year in years))


@play
async def refund(run: Run, order: str) -> str:
    try:
        approval = await run.signal("approval", Approval, timeout=timedelta(days=2))
    except TimeoutError:
        return "expired"
    return (
        await run.child(pay, order, key="pay") if approval.approved else f"refused by {approval.by}"
    )


@play(retries=5)
async def pay(_run: Run, order: str) -> str:
    if order == "again":
        raise Retry("stripe is over its limit", after=timedelta(seconds=30))
    return order


@play(name="sums", timeout=timedelta(minutes=1))
def total(run: Run, numbers: list[int]) -> int:
    said: Approval = run.wait(run.signal("go", Approval))
    return sum(numbers) + len(said.by)


async def the_context(run: Run) -> None:
    years: list[Year] = await run.child(yearly_report)
    greeting: str = await run.child(hello, "world", key="k", on_parent_end="abandon")
    plain: int = await run.child(total, [1, 2], key="sum")
    unknown: Any = await run.child("elsewhere:play", {"any": "thing"})
    approval: Approval = await run.signal("approval", Approval)
    free: Json = await run.signal("go")
    path: Path = run.file("a.csv")
    rows: Iterator[dict[str, str]] = run.csv("a.csv")
    await run.sleep("nap", timedelta(seconds=1))
    run.progress(1, of=2, note="half")
    child = run.child(hello, "x")
    child_id: str = await child.id()
    await child.cancel("no longer needed")
    print(years, greeting, plain, unknown, approval, free, path, rows, child_id, run.attempt)


async def what_is_refused(run: Run) -> None:
    await run.child(hello, 3)  # type: ignore[arg-type]
    run.progress("1")  # type: ignore[arg-type]
    run.log("x", level="loud")  # type: ignore[arg-type]


def test_refund_needs_a_yes() -> None:
    ended = drive(refund, "order-7", signals={"approval": {"approved": False, "by": "ada"}})
    assert ended.status == "completed"
    assert ended.result == "refused by ada"


def test_the_report_survives_a_kill_after_any_event() -> None:
    for ended in drive_killed_everywhere(
        yearly_report, files=["examples/data/seattle-weather.csv"]
    ):
        assert len(ended.result) == 4
        assert ended.children_started == 4


def what_drive_infers() -> None:
    text: Ended[str] = drive(hello, "world")
    years: list[Year] = drive(yearly_report).result
    plain: int = drive(total, [1]).result
    types: tuple[str, ...] = text.types
    print(years, plain, types)


async def main() -> None:
    async with playledger.open("plays.db", plays=[hello, refund, pay]) as ledger:
        run = await ledger.submit(hello, "world", run_id="hello-1")
        print(await run.result(timeout=timedelta(seconds=30)))
        status = await ledger.status("hello-1", min_position=run.position)
        async for event in ledger.events(after=status.as_of_position, follow=True):
            print(event.position, event.type)
