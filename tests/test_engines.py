"""Every engine here passes the same checks; the scripted one also fails in every way there is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.plays import Plays, as_play
from engines.scripted import (
    Outcome,
    ScriptedEngine,
    VirtualClock,
    complete,
    error,
    in_turn,
    lost,
    never,
)
from handlers.effects import EffectLoop
from handlers.engine import CreateRequest, Engine
from handlers.node import Node
from handlers.outbox import Scope
from ledger import events as e
from ledger.log import system_clock
from ledger.writer import Clock
from playledger import Run, play
from playledger.embed import Ledger
from playledger.wiring import Driver, open_log
from tests.engine_conformance import CHECKS, Bench
from tests.local_node import POLICY, Given, node

Script = Callable[[CreateRequest], Outcome]


@play(name="work")
async def work(_run: Run) -> None:
    """Stands for a play that runs elsewhere."""


@asynccontextmanager
async def scripted(
    folder: Path, script: Script, *, clock: Clock = system_clock, policy: e.Policy = POLICY
) -> AsyncIterator[tuple[Given, ScriptedEngine]]:
    """Opens a node whose one engine does what the script says."""
    log = await open_log(folder / "t.db", clock=clock)
    plays = Plays([as_play(work)])
    ledger = Ledger(log, plays, policy=policy, clock=clock)
    engine = ScriptedEngine(log, script, name="local")
    this = Node(log.path)
    loop = EffectLoop(log, this, {"local": engine}, Scope(plays), ledger.submitter, clock)
    await loop.start()
    try:
        yield Given(ledger, Driver(this, engine, loop)), engine  # type: ignore[arg-type]
    finally:
        await loop.stop(clean=True)
        await engine.close()
        this.close()
        await log.close()


def local_bench(folder: Path) -> Bench:
    """The local engine, with plays that count themselves."""
    begun: Counter[str] = Counter()

    @play(name="completes")
    async def completes(run: Run) -> str:
        begun[run.id] += 1
        return "done"

    @play(name="fails")
    async def fails(run: Run) -> None:
        begun[run.id] += 1
        raise ValueError("no")

    @play(name="never")
    async def waits(run: Run) -> None:
        begun[run.id] += 1
        await run.signal("never")

    @asynccontextmanager
    async def opened() -> AsyncIterator[tuple[Given, Engine]]:
        async with node(folder, completes, fails, waits) as given:
            yield given, given.driver.engine

    return Bench(opened, "completes", "fails", "never", lambda run_id: begun[run_id])


def scripted_bench(folder: Path) -> Bench:
    """The scripted engine, one outcome by play name."""
    begun: Counter[str] = Counter()
    outcomes = {"completes": complete(), "fails": error("user_error"), "never": never()}

    def script(request: CreateRequest) -> Outcome:
        begun[request.run.run_id] += 1
        return outcomes[request.run.play_name]

    @asynccontextmanager
    async def opened() -> AsyncIterator[tuple[Given, Engine]]:
        async with scripted(folder, script) as (given, engine):
            for name in outcomes:
                given.ledger.plays.add(as_play(play(name=name)(_copy_of_work()), trusted=True))
            yield given, engine

    return Bench(opened, "completes", "fails", "never", lambda run_id: begun[run_id])


def _copy_of_work() -> Callable[..., Any]:
    async def another(_run: Run) -> None:
        return None

    return another


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("bench", [local_bench, scripted_bench])
def test_an_engine_does(
    tmp_path: Path,
    bench: Callable[[Path], Bench],
    check: Callable[[Bench], Awaitable[None]],
) -> None:
    """One conformance suite for every adapter."""

    async def main() -> None:
        await check(bench(tmp_path))

    asyncio.run(main())


def test_a_platform_reset_is_retried_within_its_budget(tmp_path: Path) -> None:
    """RetryLimit 2: three attempts, then the run fails with the last cause."""

    async def main() -> None:
        async with scripted(tmp_path, lambda _r: error("platform_reset")) as (given, engine):
            assert await given.run(work, run_id="r") == "failed"
            assert sorted(engine.creates.values()) == [1, 1, 1]
            decided = await given.events("r", e.RetryDecided)
            assert [(d.retry, d.budget, d.used) for d in decided] == [
                (True, "retry", 0), (True, "retry", 1), (False, "retry", 2),
            ]  # fmt: skip

    asyncio.run(main())


def test_the_attempt_after_a_reset_completes_the_run(tmp_path: Path) -> None:
    """Its result is the run's; the failed instance keeps its own end."""

    async def main() -> None:
        script = in_turn(error("platform_internal"), lost(), complete(42))
        async with scripted(tmp_path, script) as (given, _engine):
            run = await given.ledger.submit(work, run_id="r")
            assert await given.end("r") == "completed"
            assert await run.result() == 42

    asyncio.run(main())


def test_a_create_that_fails_for_now_is_tried_again(tmp_path: Path) -> None:
    """Each failed try is an event; one instance comes of it."""

    async def main() -> None:
        script = in_turn(complete(1, fails=2, creation="created"))
        async with scripted(tmp_path, script) as (given, engine):
            assert await given.run(work, run_id="r") == "completed"
            failed = await given.events("r", e.InstanceCreateFailed)
            assert [(f.kind, f.try_number) for f in failed] == [("transient", 1), ("transient", 2)]
            assert list(engine.creates.values()) == [3]

    asyncio.run(main())


def test_a_create_that_is_refused_for_good_fails_the_run(tmp_path: Path) -> None:
    """permanent, with the engine's code."""

    async def main() -> None:
        script = in_turn(complete(creation="permanent", code="QUOTA"))
        async with scripted(tmp_path, script) as (given, _engine):
            assert await given.run(work, run_id="r") == "failed"
            assert (await given.ledger.status("r")).run.code == "QUOTA"

    asyncio.run(main())


def test_an_instance_that_exists_already_is_taken_as_created(tmp_path: Path) -> None:
    """A create whose answer was lost finds what it made: alreadyExisted, and nothing twice."""

    async def main() -> None:
        async with scripted(tmp_path, in_turn(complete(creation="exists"))) as (given, _engine):
            assert await given.run(work, run_id="r") == "completed"
            (created,) = await given.events("r", e.InstanceCreated)
            assert created.already_existed

    asyncio.run(main())


def test_INV_22_the_end_of_a_superseded_instance_changes_nothing(tmp_path: Path) -> None:
    """The old instance completes after its successor began: refused and recorded once."""

    async def main() -> None:
        late, go = asyncio.Event(), asyncio.Event()
        script = in_turn(complete("old", after=late, unwinds=False), complete("new", after=go))
        async with scripted(tmp_path, script) as (given, engine):
            run = await given.ledger.submit(work, run_id="r")
            started = (await given.seen("r", "instance.started")).data
            assert isinstance(started, e.InstanceStarted)
            await given.ledger.log.transact(_lost(started))
            await given.seen("r", "retry.started")
            late.set()
            await given.seen("r", "instance.terminate_requested")
            go.set()
            assert await given.end("r") == "completed"
            assert await run.result() == "new"
            assert engine.creates.total() == 2

    asyncio.run(main())


def _lost(started: e.InstanceStarted) -> Any:
    from handlers.commands import Command

    return Command(
        stream="run/r",
        fact=e.InstanceLost(
            instance_id=started.instance_id,
            attempt=started.attempt,
            error_class="instance_lost",
            evidence="the test says so",
        ),
        actor="node/test",
    )


def test_an_instance_that_does_not_unwind_is_asked_on_after_the_grace(tmp_path: Path) -> None:
    """The run is cancelled after cancelGraceMs, by the virtual clock; the engine was asked."""
    clock = VirtualClock()

    async def main() -> None:
        script = in_turn(never(unwinds=False))
        async with scripted(tmp_path, script, clock=clock) as (given, engine):
            run = await given.ledger.submit(work, run_id="r")
            await given.seen("r", "instance.started")
            await run.cancel()
            await given.seen("r", "instance.terminate_requested")
            clock.advance(POLICY.cancel_grace_ms)
            given.driver.loop.pump()
            assert await given.end("r") == "cancelled"
            assert engine.terminates[0][1] == "cancelled"

    asyncio.run(main())


def test_the_virtual_clock_goes_neither_back_nor_over_work_in_flight() -> None:
    """Both are errors of the test, said with both values."""
    clock = VirtualClock(1000)
    busy = [True]
    clock.guard(lambda: busy[0])
    with pytest.raises(RuntimeError, match="work is in flight"):
        clock.advance(5)
    busy[0] = False
    clock.advance(5)
    assert clock() == 1005
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance_to(1000)
