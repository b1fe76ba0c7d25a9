"""A child's end told by a signal: before it is asked for, and before it is submitted (SPEC 4.3)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import playledger
from handlers.commands import Command, Reporter
from ledger import events as e
from ledger.events import Seal
from ledger.ids import event_id, instance_id, run_stream
from playledger.embed import Ledger
from playledger.wiring import DEFAULT_SCOPE, open_log, plays_of
from projections.load import outbox_query
from tests.crash.scenarios import POLICY

TOLD = threading.Event()


@playledger.play
async def sleeper(run: playledger.Run) -> None:
    """Never ends by itself."""
    await run.signal("never")


@playledger.play
async def asks_late(run: playledger.Run) -> object:
    """Asks for its child when the test lets it."""
    await asyncio.to_thread(TOLD.wait, 15)
    answer: object = await run.child("tests.crash.test_terminals:sleeper", key="c")
    return answer


def test_INV_63_an_end_that_came_before_the_child_was_asked_for_is_its_end(log_path: Path) -> None:
    """The signal stands in the parent's stream; asking finds it, and waits for nobody."""
    TOLD.clear()

    async def main() -> object:
        async with (
            asyncio.timeout(10),
            playledger.open(log_path, plays=[asks_late], policy=POLICY) as ledger,
        ):
            run = await ledger.submit(asks_late, run_id="p")
            await ledger.signal("p", "c", [7], signal="integration_event", signal_id="s")
            TOLD.set()
            return await run.result()

    assert asyncio.run(main()) == [7]


def test_a_child_that_was_never_submitted_and_has_ended_by_a_signal_leaves_nothing_to_do(
    log_path: Path,
) -> None:
    """The failed submit is recorded and changes nothing; else it would be tried for ever."""
    stream, instance = run_stream("p"), instance_id(DEFAULT_SCOPE, "p", 0)

    async def main() -> None:
        log, plays = await open_log(log_path), plays_of([asks_late])
        ledger = Ledger(log, plays, policy=POLICY)
        await ledger.submit(asks_late, run_id="p")
        (create,) = await log.reader.ask(outbox_query("p"))
        created = e.InstanceCreated(
            instance_id=instance, attempt=0, host="n-1", already_existed=False
        )
        await log.transact(
            Command(stream=stream, fact=created, actor="node/n-1", cause=create.intent_id)
        )
        asked = e.ChildRequested(
            child_key="c",
            child_run_id="c-1",
            play_name="sleeper",
            input=Seal(sd=("x" * 43,), bytes=1),
            on_parent_end="cancel",
        )
        reporter = Reporter(instance_id=instance, host="n-1")
        await log.transact(
            Command(stream=stream, fact=asked, actor="instance/" + instance, reporter=reporter)
        )
        await ledger.signal("p", "c", 7, signal="integration_event", signal_id="s")
        failed = e.ChildSubmitFailed(child_key="c", child_run_id="c-1", code="PARENT_TERMINAL")
        intent = event_id(stream, "child/c")
        assert [row.intent_id for row in await log.reader.ask(outbox_query("p"))] == [intent]
        await log.transact(Command(stream=stream, fact=failed, actor="node/n-1", cause=intent))
        assert await log.reader.ask(outbox_query("p")) == []
        await log.close()

    asyncio.run(main())
