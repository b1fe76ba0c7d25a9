"""The local engine over a real log: slots, threads, ends, retries, logs, files, shutdown."""

from __future__ import annotations

import asyncio
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ledger import events as e
from playledger import Retry, Run, RunFailed, Superseded, play
from playledger.testing import drive
from tests.local_node import POLICY, completed, node


@play
async def leaf(_run: Run, n: int) -> int:
    return n * 2


@play
async def parent(run: Run, n: int) -> int:
    return await run.child(leaf, n, key="leaf")


@play
def plain_leaf(_run: Run, n: int) -> int:
    return n * 2


@play
def plain_parent(run: Run, n: int) -> int:
    return run.wait(run.child(plain_leaf, n, key="leaf"))


@pytest.mark.parametrize(("outer", "inner"), [(parent, leaf), (plain_parent, plain_leaf)])
def test_more_parents_than_slots_that_each_await_a_child_do_not_deadlock(
    tmp_path: Path, outer: Any, inner: Any
) -> None:
    """A waiting instance holds no slot, and a waiting plain play holds no pooled thread."""

    async def main() -> None:
        async with node(tmp_path, outer, inner, max_instances=3) as given:
            runs = [await given.ledger.submit(outer, n, run_id=f"r{n}") for n in range(24)]
            assert completed([await given.end(run.id) for run in runs])
            assert [await run.result() for run in runs] == [n * 2 for n in range(24)]

    asyncio.run(main())


def test_a_play_that_blocks_its_loop_does_not_stop_the_coordinator(tmp_path: Path) -> None:
    """Plays have a loop thread of their own: while one computes, the log is written and read."""
    release, began = threading.Event(), threading.Event()

    @play(name="blocks")
    async def blocks(_run: Run) -> str:
        began.set()
        release.wait(30)
        return "done"

    async def main() -> None:
        async with node(tmp_path, blocks) as given:
            run = await given.ledger.submit(blocks, run_id="r")
            await asyncio.get_running_loop().run_in_executor(None, began.wait)
            async with asyncio.timeout(10):
                await run.signal("anything")
                assert (await run.status()).run.status == "running"
                await given.ledger.submit(blocks, run_id="another")
            release.set()
            assert await given.end("r") == "completed"

    asyncio.run(main())


def test_a_play_runs_in_another_thread_than_the_coordinator(tmp_path: Path) -> None:
    """An async play on the loop of the plays, a plain one in a thread of its own."""
    threads: list[str] = []

    @play(name="async")
    async def on_loop(_run: Run) -> None:
        threads.append(threading.current_thread().name)

    @play(name="plain")
    def in_thread(_run: Run) -> None:
        threads.append(threading.current_thread().name)

    async def main() -> None:
        async with node(tmp_path, on_loop, in_thread) as given:
            await given.run(on_loop)
            await given.run(in_thread)

    asyncio.run(main())
    assert threads == ["plays", "play"]


def test_a_run_with_one_finished_child_before_it_is_started_again_asks_for_no_second(
    tmp_path: Path,
) -> None:
    """A child that a play starts is driven by this node, though it was offered only by the play."""

    async def main() -> None:
        async with node(tmp_path, parent) as given:
            assert await given.run(parent, 4, run_id="r") == "completed"
            assert await given.ledger.run("r").result() == 8

    asyncio.run(main())


def test_an_exception_fails_the_run_once() -> None:
    """The error class is user_error, there is no retry, and the text is kept."""

    async def raises(_run: Run, order: str) -> None:
        raise LookupError(f"no {order}")

    ended = drive(raises, "order-7")
    assert (ended.status, ended.error_class, ended.code) == ("failed", "user_error", "LookupError")
    assert (ended.error, ended.attempt) == ("no order-7", 0)
    assert ended.types.count("retry.decided") == 1
    assert "retry.claimed" not in ended.types


@pytest.mark.parametrize(
    "raised", [SystemExit(3), KeyboardInterrupt(), StopIteration(), MemoryError()]
)
@pytest.mark.parametrize("plain", [False, True])
def test_what_ends_a_process_ends_only_the_attempt(raised: BaseException, plain: bool) -> None:
    """sys.exit() in a play fails its run; the loop of all the others lives on."""

    async def in_task(_run: Run) -> None:
        raise raised

    def in_thread(_run: Run) -> None:
        raise raised

    ended = drive(in_thread if plain else in_task)
    assert (ended.status, ended.error_class) == ("failed", "user_error")


def test_a_task_that_a_play_began_and_that_exits_does_not_end_the_loop(tmp_path: Path) -> None:
    """Another run completes after it."""

    @play(name="exits")
    async def exits(_run: Run) -> str:
        async def leave() -> None:
            sys.exit(3)

        task = asyncio.create_task(leave())
        await asyncio.wait([task])
        return "survived"

    async def main() -> None:
        async with node(tmp_path, exits, leaf) as given:
            await given.ledger.submit(exits, run_id="exits")
            assert await given.run(leaf, 1) == "completed"

    asyncio.run(main())


def test_C032_a_result_over_the_limit_fails_the_run_and_is_not_retried(tmp_path: Path) -> None:
    """32 MiB pass, one byte more is RESULT_TOO_LARGE; the run never hangs."""

    @play(name="large")
    async def large(_run: Run, size: int) -> str:
        return "x" * (size - 2)  # and its quotes

    async def main() -> None:
        async with node(tmp_path, large) as given:
            limit = 32 * 1024 * 1024
            assert await given.run(large, limit, run_id="fits") == "completed"
            assert await given.run(large, limit + 1, run_id="r") == "failed"
            view = await given.ledger.status("r")
            assert (view.run.code, view.run.attempt) == ("RESULT_TOO_LARGE", 0)

    asyncio.run(main())


def test_retry_is_granted_within_the_budget_and_its_pause_is_recorded() -> None:
    """`retries` attempts more, the second one after the policy's backoff; then the run fails."""

    @play(retries=2)
    async def busy(run: Run) -> None:
        raise Retry(f"the till is busy ({run.attempt})")

    ended = drive(busy)
    assert (ended.status, ended.error_class, ended.attempt) == ("failed", "play_retry", 2)
    asked = [
        (r.at, r.data.not_before_at)
        for r in ended.events
        if isinstance(r.data, e.InstanceCreateRequested)
    ]
    pauses = [not_before - at for at, not_before in asked if not_before is not None]
    assert len(asked) == 3
    assert len(pauses) == 1
    assert 4_000 <= pauses[0] <= 6_000
    decided = [r.data for r in ended.events if isinstance(r.data, e.RetryDecided)]
    assert [d.retry for d in decided] == [True, True, False]
    assert decided[-1].reason == "limit_reached"


def test_retry_after_says_not_before_when() -> None:
    """The play's own pause is recorded with the attempt that asked for it."""

    @play(retries=1)
    async def cooled(run: Run) -> int:
        if run.attempt == 0:
            raise Retry("over the limit", after=timedelta(hours=2))
        return run.attempt

    ended = drive(cooled)
    assert ended.result == 1
    claimed = next(r for r in ended.events if isinstance(r.data, e.RetryClaimed))
    second = [r for r in ended.events if isinstance(r.data, e.InstanceCreateRequested)][1]
    assert isinstance(second.data, e.InstanceCreateRequested)
    assert second.data.not_before_at == claimed.at + 2 * 3600 * 1000
    started = [r for r in ended.events if isinstance(r.data, e.InstanceStarted)]
    assert started[1].at >= second.data.not_before_at


def test_retry_without_a_budget_fails_the_run() -> None:
    """`@play(retries=)` is 0 by default: asking is then like failing."""

    async def asks(_run: Run) -> None:
        raise Retry("please")

    ended = drive(asks)
    assert (ended.status, ended.error_class, ended.attempt) == ("failed", "play_retry", 0)


def test_cancel_unwinds_the_play_which_may_still_write() -> None:
    """CancelledError is raised where it waits; its finally runs, and may use the run context."""

    async def tidy(run: Run) -> None:
        try:
            await run.signal("never")
        finally:
            run.log("tidied")

    ended = drive(tidy, cancel_at="run.wait_started")
    assert (ended.status, ended.logs) == ("cancelled", ("tidied",))


def test_a_play_that_swallows_cancel_is_cancelled_all_the_same() -> None:
    """What it returns is kept as `refused`, and never becomes a result."""

    async def swallows(run: Run) -> str:
        try:
            await run.signal("never")
        except asyncio.CancelledError:
            return "done anyway"
        return "?"

    ended = drive(swallows, cancel_at="run.wait_started")
    assert ended.status == "cancelled"
    end = ended.events[-1].data
    assert isinstance(end, e.RunCancelled)
    assert end.refused == "completed"


def test_a_play_that_will_not_end_is_cancelled_after_the_grace() -> None:
    """The run does not wait for it; what it says afterwards is refused."""

    async def stubborn(run: Run) -> None:
        try:
            await run.signal("never")
        except asyncio.CancelledError:
            await run.sleep("longer than the grace", timedelta(hours=1))

    ended = drive(stubborn, cancel_at="run.wait_started")
    assert ended.status == "cancelled"
    asked = next(r for r in ended.events if isinstance(r.data, e.RunCancelRequested))
    assert next(r for r in ended.events if r.type == "run.cancelled").at - asked.at == 10_000


def test_cancel_before_the_play_has_begun_is_not_lost() -> None:
    """Asked at its start, it is cancelled before or at its first step, and its slot is free."""

    async def never(run: Run) -> None:
        await run.signal("never")

    for at in ("run.submitted", "instance.created", "instance.started"):
        ended = drive(never, cancel_at=at)
        assert ended.status == "cancelled", at


def test_an_attempt_over_its_timeout_ends_as_engine_timeout() -> None:
    """Slow is never lost: only the play's own timeout ends it, and that is not retried."""

    @play(timeout=timedelta(minutes=5))
    async def slow(run: Run) -> None:
        await run.signal("never")

    ended = drive(slow)
    assert (ended.status, ended.error_class) == ("failed", "engine_timeout")
    assert ended.code == "ENGINE_TIMEOUT"


def test_INV_22_a_lost_instance_that_lives_on_is_superseded(tmp_path: Path) -> None:
    """What it asks raises Superseded, what it returns is refused; its successor's result counts."""
    go_on, asked, seen = threading.Event(), threading.Event(), []

    @play(name="thread")
    def thread(run: Run) -> str:
        if run.attempt == 0:
            asked.set()
            go_on.wait(30)
            try:
                run.wait(run.sleep("nap", timedelta(0)))
            except Superseded as error:
                seen.append(str(error))
                raise
        return f"attempt {run.attempt}"

    async def main() -> None:
        async with node(tmp_path, thread) as given:
            run = await given.ledger.submit(thread, run_id="r")
            await asyncio.get_running_loop().run_in_executor(None, asked.wait)
            engine = given.driver.engine
            engine.loop.call_soon_threadsafe(engine.kill_run, "r")
            await given.seen("r", "instance.lost")
            go_on.set()
            assert await given.end("r") == "completed"
            assert await run.result() == "attempt 1"

    asyncio.run(main())
    assert len(seen) == 1


def test_C058_shutdown_ends_what_runs_and_costs_nothing(tmp_path: Path) -> None:
    """`coordinator_shutdown` uses no budget; the next node plays the run again to its end."""

    @play(name="waits")
    async def waits(run: Run) -> str:
        await run.signal("go")
        return f"attempt {run.attempt}"

    async def first() -> None:
        async with node(tmp_path, waits) as given:
            await given.ledger.submit(waits, run_id="r")
            await given.seen("r", "run.wait_started")

    async def then(n: int) -> None:
        async with node(tmp_path, waits) as given:
            await given.seen("r", "instance.started", n)

    async def last() -> None:
        async with node(tmp_path, waits) as given:
            await given.ledger.signal("r", "go")
            assert await given.end("r") == "completed"
            assert await given.ledger.run("r").result() == "attempt 5"
            lost = await given.events("r", e.InstanceLost)
            assert {event.error_class for event in lost} == {"coordinator_shutdown"}
            assert [d.used for d in await given.events("r", e.RetryDecided)] == [0] * 5

    asyncio.run(first())
    for n in range(2, 6):
        asyncio.run(then(n))
    asyncio.run(last())


def test_a_plain_play_that_hangs_keeps_nobody_from_closing(tmp_path: Path) -> None:
    """Its thread is left to run out; closing the node does not wait for it."""
    hang = threading.Event()
    began = threading.Event()

    @play(name="hangs")
    def hangs(_run: Run) -> None:
        began.set()
        hang.wait(60)

    async def main() -> None:
        async with asyncio.timeout(20):
            async with node(tmp_path, hangs) as given:
                await given.ledger.submit(hangs, run_id="r")
                await asyncio.get_running_loop().run_in_executor(None, began.wait)

    asyncio.run(main())
    hang.set()


def test_a_failed_run_raises_run_failed_with_its_code(tmp_path: Path) -> None:
    """The handle of a run raises what its end was."""

    @play(name="fails")
    async def fails(_run: Run) -> None:
        raise ValueError("x")

    async def main() -> None:
        async with node(tmp_path, fails, policy=replace(POLICY)) as given:
            run = await given.ledger.submit(fails)
            with pytest.raises(RunFailed, match="ValueError"):
                await run.result(timedelta(seconds=20))

    asyncio.run(main())


def test_a_play_that_says_it_was_superseded_and_was_not_is_lost_not_forgotten() -> None:
    """It is retried within lostLimit, and then the run fails: nothing hangs without an instance."""

    async def lies(_run: Run) -> None:
        raise Superseded

    ended = drive(lies)
    assert (ended.status, ended.error_class, ended.attempt) == ("failed", "instance_lost", 2)
