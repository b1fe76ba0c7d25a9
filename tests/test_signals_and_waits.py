"""Signals and waits: early, late, repeated, with deadlines that outlive a restart."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from engines.scripted import VirtualClock
from ledger import events as e
from ledger.errors import Conflict, RunNotFound, RunTerminal
from playledger import Run, SignalInvalid, play
from playledger.testing import Waited, drive, drive_killed_everywhere
from tests.local_node import node


class Approval(BaseModel):
    approved: bool
    by: str


@play
async def waits_for_three(run: Run) -> list[Any]:
    return [await run.signal("go") for _ in range(3)]


@play
async def waits_late(run: Run) -> Any:
    """Does something else first, so that a signal can come before its wait."""
    await run.signal("ready")
    return await run.signal("go")


@play
async def outer(run: Run) -> Any:
    return await run.child(waits_late, key="inner")


def test_C002_a_signal_right_after_submit_is_delivered(tmp_path: Path) -> None:
    """a, c, d: before the wait, three in a row in order, a repeated id once."""

    async def main() -> None:
        async with node(tmp_path, waits_for_three) as given:
            run = await given.ledger.submit(waits_for_three, run_id="r")
            for n in (1, 2):
                await given.ledger.signal("r", "go", n, signal_id=f"s{n}")
            again = await given.ledger.signal("r", "go", 2, signal_id="s2")
            assert again.replayed
            await given.ledger.signal("r", "go", 3)
            assert await given.end("r") == "completed"
            assert await run.result() == [1, 2, 3]

    asyncio.run(main())


def test_C002_a_signal_before_any_instance_exists_is_delivered(tmp_path: Path) -> None:
    """b, g: nobody drives the run when it is sent; the node that comes later finds it."""

    async def early() -> None:
        async with node(tmp_path) as given:  # offers no play, so it starts no instance
            given.ledger.plays.add(_as_play())
            await given.ledger.submit(waits_late, run_id="r")
            await given.ledger.signal("r", "go", {"n": 1})
            await given.ledger.signal("r", "ready")

    async def later() -> None:
        async with node(tmp_path, waits_late) as given:
            assert await given.end("r") == "completed"
            assert await given.ledger.run("r").result() == {"n": 1}

    asyncio.run(early())
    asyncio.run(later())


def _as_play() -> Any:
    from engines.plays import as_play

    return as_play(waits_late)


def test_C002_a_signal_to_a_child_the_moment_it_exists_is_delivered(tmp_path: Path) -> None:
    """e: the child's own stream holds it, however early."""

    async def main() -> None:
        async with node(tmp_path, outer, waits_late) as given:
            run = await given.ledger.submit(outer, run_id="r")
            requested: Any = (await given.seen("r", "child.requested")).data
            await given.seen(requested.child_run_id, "run.submitted")
            await given.ledger.signal(requested.child_run_id, "go", "early")
            await given.ledger.signal(requested.child_run_id, "ready")
            assert await given.end("r") == "completed"
            assert await run.result() == "early"

    asyncio.run(main())


def test_C002_a_signal_to_an_unknown_run_is_refused_and_not_stored(tmp_path: Path) -> None:
    """f: RUN_NOT_FOUND, and the log is as it was."""

    async def main() -> None:
        async with node(tmp_path, waits_late) as given:
            before = await given.ledger.log.position()
            with pytest.raises(RunNotFound):
                await given.ledger.signal("nobody", "go")
            assert await given.ledger.log.position() == before

    asyncio.run(main())


def test_C002_a_signal_before_a_restart_of_the_coordinator_is_delivered_after_it(
    tmp_path: Path,
) -> None:
    """g: a wait that was open at the restart takes it; nothing has to be sent again."""

    async def first() -> None:
        async with node(tmp_path, waits_late) as given:
            await given.ledger.submit(waits_late, run_id="r")
            await given.ledger.signal("r", "ready")
            await given.seen("r", "run.wait_started", 2)

    async def between() -> None:
        async with node(tmp_path) as given:
            await given.ledger.signal("r", "go", 7)

    async def last() -> None:
        async with node(tmp_path, waits_late) as given:
            assert await given.end("r") == "completed"
            assert await given.ledger.run("r").result() == 7
            assert len(await given.events("r", e.RunWaitStarted)) == 2

    for step in (first, between, last):
        asyncio.run(step())


def test_a_signal_id_used_with_other_data_is_a_conflict(tmp_path: Path) -> None:
    """The same id and data is the same signal; other data is refused, the first one stands."""

    async def main() -> None:
        async with node(tmp_path, waits_late) as given:
            await given.ledger.submit(waits_late, run_id="r")
            await given.ledger.signal("r", "go", 1, signal_id="s")
            with pytest.raises(Conflict, match="was used with another body"):
                await given.ledger.signal("r", "go", 2, signal_id="s")

    asyncio.run(main())


def test_C011_a_late_signal_changes_nothing(tmp_path: Path) -> None:
    """An ended run refuses it with its status."""

    @play(name="quick")
    async def quick(_run: Run) -> str:
        return "done"

    async def main() -> None:
        async with node(tmp_path, quick) as given:
            await given.run(quick, run_id="r")
            before = await given.types("r")
            with pytest.raises(RunTerminal):
                await given.ledger.signal("r", "go")
            assert await given.types("r") == before

    asyncio.run(main())


def test_a_polling_wait_takes_the_signal_that_comes_in_a_later_poll() -> None:
    """A wait that timed out took none: the first signal belongs to the wait that is open then."""

    async def polls(run: Run) -> Any:
        for n in range(5):
            try:
                return n, await run.signal("go", timeout=timedelta(minutes=1))
            except TimeoutError:
                if n == 1:
                    await run.signal("begin")
        return None

    ended = drive(polls, signals={"begin": None})
    assert ended.result is None
    ended = drive(polls, signals={"begin": None, "go": []})
    assert [w.outcome for w in ended.waits if w.key == "go"] == ["timeout"] * 5


def test_a_signal_after_two_timeouts_is_delivered_to_the_third_wait(tmp_path: Path) -> None:
    """Amendment 7: waits 0 and 1 time out, the signal comes in wait 2 and is its answer."""
    clock = VirtualClock()

    @play(name="polls")
    async def polls(run: Run) -> Any:
        for n in range(5):
            try:
                return [n, await run.signal("go", timeout=timedelta(minutes=1))]
            except TimeoutError:
                continue
        return None

    async def main() -> None:
        async with node(tmp_path, polls, clock=clock) as given:
            run = await given.ledger.submit(polls, run_id="r")
            for n in (1, 2):
                await given.seen("r", "run.wait_started", n)
                clock.advance(60_000)
                given.driver.loop.pump()
                await given.seen("r", "run.wait_ended", n)
            await given.seen("r", "run.wait_started", 3)
            await given.ledger.signal("r", "go", "at last")
            assert await given.end("r") == "completed"
            assert await run.result() == [2, "at last"]

    asyncio.run(main())


def test_a_deadline_is_that_of_the_first_wait_whatever_a_later_attempt_asks() -> None:
    """Two days survive any number of kills: the run expires two days after it first waited."""

    async def waits(run: Run) -> str:
        try:
            await run.signal("approval", Approval, timeout=timedelta(days=2))
        except TimeoutError:
            return "expired"
        return "?"

    for ended in drive_killed_everywhere(waits):
        assert ended.result == "expired"
        started = [r for r in ended.events if isinstance(r.data, e.RunWaitStarted)]
        assert len(started) == 1
        over = next(r for r in ended.events if r.type == "run.wait_ended")
        assert over.at - started[0].at == 2 * 24 * 3600 * 1000


def test_a_sleep_is_due_once_and_outlives_a_restart(tmp_path: Path) -> None:
    """The due time stands in the log; the next node's timer fires it, not a second later."""
    clock = VirtualClock()
    length = timedelta(days=3)

    @play(name="sleeper")
    async def sleeper(run: Run) -> int:
        await run.sleep("nap", length)
        return run.attempt

    async def first() -> None:
        async with node(tmp_path, sleeper, clock=clock) as given:
            await given.ledger.submit(sleeper, run_id="r")
            await given.seen("r", "run.wait_started")

    async def last() -> None:
        async with node(tmp_path, sleeper, clock=clock) as given:
            await given.seen("r", "instance.started", 2)
            clock.advance(2 * 24 * 3600 * 1000)
            given.driver.loop.pump()
            assert (await given.ledger.status("r")).run.status == "running"
            clock.advance(24 * 3600 * 1000)
            given.driver.loop.pump()
            assert await given.end("r") == "completed"
            (started,) = await given.events("r", e.RunWaitStarted)
            assert started.until_at is not None

    asyncio.run(first())
    asyncio.run(last())


def test_a_signal_that_does_not_fit_is_taken_and_the_next_wait_takes_the_next() -> None:
    """SignalInvalid with the place that does not fit; the play may wait on."""

    async def asks(run: Run) -> list[str]:
        said = []
        for _ in range(2):
            try:
                said.append((await run.signal("approval", Approval)).by)
            except SignalInvalid as error:
                said.append(error.code)
        return said

    said = [{"approved": "perhaps"}, {"approved": True, "by": "ada"}]
    ended = drive(asks, signals={"approval": said})
    assert ended.result == ["SIGNAL_INVALID", "ada"]


def test_a_signal_in_hand_is_not_taken_twice_by_a_later_attempt() -> None:
    """Killed anywhere, the play gets each signal once and in order."""

    async def two(run: Run) -> list[Any]:
        return [await run.signal("go"), await run.signal("go")]

    for ended in drive_killed_everywhere(two, signals={"go": [1, 2]}):
        assert ended.result == [1, 2], ended.killed_after


def test_a_wait_with_a_deadline_in_the_past_ends_at_once() -> None:
    """A negative or zero timeout is a deadline now, a recorded signal still comes first."""

    async def now(run: Run) -> str:
        try:
            await run.signal("go", timeout=timedelta(seconds=-5))
        except TimeoutError:
            return "too late"
        return "?"

    ended = drive(now)
    assert ended.result == "too late"
    assert ended.waits == (Waited("signal", "go", "timeout"),)


def test_waits_of_different_keys_are_answered_in_any_order() -> None:
    """Two waits at a time, each by its own key."""

    async def both(run: Run) -> list[Any]:
        return list(await asyncio.gather(run.signal("a"), run.signal("b")))

    assert drive(both, signals={"b": 2, "a": 1}).result == [1, 2]


def test_keys_of_waits_are_checked_where_they_are_given() -> None:
    """An invisible character in a key is refused before anything is asked."""

    async def odd(run: Run) -> None:
        await run.signal("go\u200b")

    assert drive(odd).code == "ID_INVALID"


def test_a_wait_that_was_given_up_takes_no_signal_from_the_next(tmp_path: Path) -> None:
    """`asyncio.timeout` around a wait leaves it open in the log: the next wait takes it over."""

    @play(name="impatient")
    async def impatient(run: Run) -> list[Any]:
        said = []
        for _ in range(2):
            try:
                async with asyncio.timeout(0.05):
                    said.append(await run.signal("go"))
            except TimeoutError:
                said.append("given up")
        run.log("gave up twice")
        return [*said, await run.signal("go")]

    async def main() -> None:
        async with node(tmp_path, impatient) as given:
            run = await given.ledger.submit(impatient, run_id="r")
            await given.seen("r", "run.log")
            await given.ledger.signal("r", "go", "heard")
            assert await given.end("r") == "completed"
            assert await run.result() == ["given up", "given up", "heard"]
            assert len(await given.events("r", e.RunWaitStarted)) == 1

    asyncio.run(main())
