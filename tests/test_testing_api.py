"""drive and drive_killed_everywhere: what users test their plays with."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from playledger import ChildFailed, Retry, Run, play
from playledger.testing import NeverEnds, Waited, drive, drive_killed_everywhere

CSV = "examples/data/seattle-weather.csv"


class Approval(BaseModel):
    approved: bool
    by: str


@play(retries=5)
async def pay(run: Run, order: str) -> str:
    if run.attempt < 2:
        raise Retry("the till is busy")
    return f"receipt for {order}"


@play
async def refund(run: Run, order: str) -> str:
    try:
        approval = await run.signal("approval", Approval, timeout=timedelta(days=2))
    except TimeoutError:
        return "expired"
    if not approval.approved:
        return f"refused by {approval.by}"
    return await run.child(pay, order, key="pay")


@play
async def one_year(run: Run, year: str) -> int:
    return sum(row["date"].startswith(year) for row in run.csv())


@play
async def yearly_report(run: Run) -> list[int]:
    years = sorted({row["date"][:4] for row in run.csv()})
    return list(await asyncio.gather(*(run.child(one_year, year, key=year) for year in years)))


@play
def plain_report(run: Run, n: int) -> list[str]:
    return [run.wait(run.child(pay, str(i), key=str(i))) for i in range(n)]


def test_refund_needs_a_yes() -> None:
    """The three lines of UX section 1."""
    ended = drive(refund, "order-7", signals={"approval": {"approved": False, "by": "ada"}})
    assert ended.status == "completed"
    assert ended.result == "refused by ada"


def test_two_days_pass_in_no_time() -> None:
    """The clock jumps to the recorded deadline; the log says that two days passed."""
    began = time.monotonic()
    ended = drive(refund, "order-7")
    assert time.monotonic() - began < 5
    assert ended.result == "expired"
    assert ended.waits == (Waited("signal", "approval", "timeout"),)
    assert ended.events[-1].at - ended.events[0].at == 2 * 24 * 3600 * 1000


def test_what_ended_holds() -> None:
    """Result as the play returns it, the run's own events, its children counted."""
    ended = drive(refund, "order-7", signals={"approval": {"approved": True, "by": "ada"}})
    assert ended.result == "receipt for order-7"
    assert (ended.attempt, ended.error, ended.code, ended.children_started) == (0, None, None, 1)
    assert ended.types[0] == "run.submitted"
    assert ended.types[-1] == "run.completed"
    assert "signal.received" in ended.types


def test_children_are_answered_by_key_instead_of_running() -> None:
    """A value completes the child, an exception fails it; the requests are counted alike."""
    yes = {"approval": {"approved": True, "by": "ada"}}
    ended = drive(refund, "order-7", signals=yes, children={"pay": "ch_1"})
    assert (ended.result, ended.children_started) == ("ch_1", 1)
    ended = drive(refund, "order-7", signals=yes, children={"pay": ValueError("no money")})
    assert (ended.status, ended.code) == ("failed", "CHILD_FAILED")


def test_a_child_named_by_a_string_may_be_answered_without_existing() -> None:
    """Such a child needs no play here."""

    async def asks(run: Run) -> Any:
        return await run.child("elsewhere:play", {"a": 1}, key="k")

    assert drive(asks, children={"k": {"b": 2}}).result == {"b": 2}


def test_a_run_that_can_never_end_says_what_it_waits_for() -> None:
    """NEVER_ENDS with the waits, instead of a test that hangs."""

    async def waits(run: Run) -> None:
        await run.signal("go")

    with pytest.raises(NeverEnds, match='waits for signal "go", and for ever'):
        drive(waits)


@pytest.mark.parametrize("at", [timedelta(hours=5), 6, "run.wait_started"])
def test_cancel_at_a_time_a_version_or_a_type(at: Any) -> None:
    """Each of the three cancels the run while it waits."""
    ended = drive(refund, "order-7", cancel_at=at)
    assert ended.status == "cancelled"
    if isinstance(at, timedelta):
        asked = next(r for r in ended.events if r.type == "run.cancel_requested")
        assert asked.at - ended.events[0].at == 5 * 3600 * 1000


def test_real_work_is_waited_for_while_the_clock_stands_still() -> None:
    """Time does not jump over what is in flight: a deadline of 1 ms is not missed by real 100."""

    async def works(_run: Run) -> str:
        await asyncio.sleep(0.1)
        return "done"

    @play
    async def races(run: Run) -> Any:
        child = run.child(works, key="k")
        return await child

    ended = drive(races)
    assert ended.result == "done"
    assert ended.events[-1].at == ended.events[0].at


def test_logs_are_the_messages_of_the_run() -> None:
    """In order, those of the run itself."""

    async def talks(run: Run) -> None:
        run.log("one")
        run.log("two", level="warning", n=2)

    assert drive(talks).logs == ("one", "two")


def test_a_file_is_staged_by_its_path() -> None:
    """As `--input @file` does."""
    ended = drive(yearly_report, files=[CSV])
    assert ended.result == [366, 365, 365, 365]


def test_the_report_survives_a_kill_after_any_event() -> None:
    """The second test of UX section 1, and it is about more than forty kills."""
    kills = 0
    attempts = set()
    for ended in drive_killed_everywhere(yearly_report, files=[CSV]):
        assert len(ended.result) == 4, ended.killed_after
        assert ended.children_started == 4
        kills += 1
        attempts.add(ended.attempt)
    assert kills > 40
    assert attempts == {0, 1}


def test_refund_survives_a_kill_after_any_event() -> None:
    """Signals, the retries of a child and the await of it, each killed just after."""
    yes = {"approval": {"approved": True, "by": "ada"}}
    for ended in drive_killed_everywhere(refund, "order-7", signals=yes):
        assert ended.result == "receipt for order-7", ended.killed_after


def test_a_plain_play_survives_a_kill_after_any_event() -> None:
    """Its thread lives on and is fenced; the next attempt finds its children."""
    for ended in drive_killed_everywhere(plain_report, 2):
        assert ended.result == ["receipt for 0", "receipt for 1"], ended.killed_after


def test_a_play_that_is_wrong_is_found_out_by_a_kill() -> None:
    """A child under a key that changes with the attempt is started twice: the count shows it."""

    async def wrong(run: Run) -> str:
        return await run.child(pay, "x", key=f"pay-{run.attempt}")

    assert drive(wrong).children_started == 1
    assert max(ended.children_started for ended in drive_killed_everywhere(wrong)) == 2


def test_drive_works_inside_a_running_event_loop() -> None:
    """It is sync, also where a test framework runs the test in a loop."""

    async def main() -> str:
        return drive(refund, "order-7").result

    assert asyncio.run(main()) == "expired"


def test_a_failed_child_is_an_exception_the_play_may_catch() -> None:
    """ChildFailed carries the child's status."""

    async def catches(run: Run) -> str:
        try:
            await run.child(pay, "x", key="k")
        except ChildFailed as error:
            return str(error.details["status"])
        return "?"

    assert drive(catches, children={"k": RuntimeError("no")}).result == "failed"


def test_a_drive_is_quick() -> None:
    """Well under 100 ms where nothing else runs; this bound is for a busy machine."""
    drive(refund, "warm")
    began = time.monotonic()
    for _ in range(10):
        drive(refund, "order-7")
    assert (time.monotonic() - began) / 10 < 0.5
