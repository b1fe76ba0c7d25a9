"""A command inside the transaction: asked twice, answered by what is recorded, never half."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from handlers import execute as execute_module
from handlers.commands import Command, Reporter
from handlers.decision import NOTHING
from ledger import events as e
from ledger.errors import (
    ChildKeyConflict,
    Conflict,
    PlayledgerError,
    Reseal,
    RunConflict,
    RunNotFound,
    RunTerminal,
    StaleAttempt,
    TooLarge,
    WrongExpectedVersion,
)
from ledger.ids import event_id, run_stream
from tests.given import (
    HOST,
    KEY,
    RUN,
    Ticks,
    World,
    cancel,
    child,
    child_ended,
    completed,
    created,
    errored,
    instance,
    loaded,
    lost,
    sealed,
    signal,
    submitted,
    terminated,
    wait,
    world,
)


async def twice(given: World, fact: Any, **how: Any) -> None:
    """Sends one command two times; the second is answered by what the first recorded."""
    command = await given.command(fact, **how)
    first = await given.log.transact(command)
    before = await given.log.position()
    second = await given.log.transact(command)
    assert second.replayed
    assert second.events == ()
    assert second.recorded == first.recorded
    assert await given.log.position() == before


# --- asked twice ----------------------------------------------------------------------------------


def test_every_command_asked_twice_is_one(tmp_path: Path) -> None:
    """The first id of a command says whether it was done, whoever asks again."""

    async def main() -> None:
        async with world(tmp_path) as given:
            for fact in (
                submitted(),
                created(),
                signal(),
                wait(),
                child(),
                child_ended(),
                errored("platform_reset"),
                loaded(),
                created(1),
                cancel(),
                lost("coordinator_restart", 1),
            ):
                await twice(given, fact)
            assert await given.status() == "cancelled"

    asyncio.run(main())


def test_INV_09_S19_a_resubmit_finds_its_run_at_every_stage(tmp_path: Path) -> None:
    """Same digest: the same answer, nothing new.  Other digest: 409 with both."""

    async def main() -> None:
        async with world(tmp_path) as given:
            (first, *_) = await given.tell(submitted())
            for fact in (created(), wait(), errored("platform_reset"), loaded(), cancel()):
                again = await given.log.transact(await given.command(submitted()))
                assert again.replayed
                assert again.recorded == first
                with pytest.raises(RunConflict) as caught:
                    await given.tell(submitted(digest="other"))
                assert caught.value.details["stored"] == "d"
                assert caught.value.details["given"] == "other"
                await given.tell(fact)

    asyncio.run(main())


def test_a_resubmit_under_another_key_is_asked_to_seal_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            with pytest.raises(Reseal):
                await given.tell(submitted(), run_key=bytes(32))

    asyncio.run(main())


def test_a_resubmit_of_what_was_erased_is_refused(tmp_path: Path) -> None:
    """Nobody can compare it any more."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            await given.log.run_job(
                lambda connection, _: connection.execute("update vault_keys set key = null")
            )
            with pytest.raises(RunConflict) as caught:
                await given.tell(submitted())
            assert caught.value.code == "REQUEST_ERASED"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("one", "other", "error", "code"),
    [
        (signal(1), replace(signal(1), data=sealed("x")), Conflict, "IDEMPOTENCY_CONFLICT"),
        (signal(1), replace(signal(1), signal="stop"), Conflict, "IDEMPOTENCY_CONFLICT"),
        (cancel(), replace(cancel(), reason=sealed("x")), Conflict, "IDEMPOTENCY_CONFLICT"),
        (child(), child(input="x"), ChildKeyConflict, "CHILD_KEY_CONFLICT"),
        (child(), child(on_parent_end="abandon"), ChildKeyConflict, "CHILD_KEY_CONFLICT"),
    ],
    ids=["signal data", "signal name", "cancel", "child input", "child rule"],
)
def test_INV_85_the_same_key_with_another_content_is_refused(
    tmp_path: Path, one: Any, other: Any, error: type[Exception], code: str
) -> None:
    """A caller's fact is compared; the first stands."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), one)
            before = await given.events()
            with pytest.raises(error) as caught:
                await given.tell(other)
            assert isinstance(caught.value, PlayledgerError)
            assert caught.value.code == code
            assert await given.events() == before

    asyncio.run(main())


def test_an_outcome_stands_whatever_a_second_one_says(tmp_path: Path) -> None:
    """Two nodes did one intent: the first answer is the answer (first wins, never compared)."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            command = await given.command(created())
            await given.log.transact(command)
            late = replace(command, fact=created(host="n-2"))
            answer = await given.log.transact(late)
            assert answer.replayed
            assert answer.recorded is not None
            assert answer.recorded.data == created()

    asyncio.run(main())


def test_a_wait_asked_again_is_answered_by_the_first(tmp_path: Path) -> None:
    """With its deadline and outcome, even by an attempt that asks for another deadline."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), wait(until=10**13))
            answer = await given.log.transact(await given.command(wait(until=10**12)))
            assert answer.replayed
            assert answer.recorded is not None
            assert answer.recorded.data == wait(until=10**13)

    asyncio.run(main())


def test_an_end_reported_differently_is_fenced(tmp_path: Path) -> None:
    """It shares one id with the first end, and goes on to be refused; kept once."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), errored("platform_reset"))
            reporter = Reporter(instance(), HOST)
            for _ in range(2):
                with pytest.raises(StaleAttempt):
                    await given.tell(completed(), reporter=reporter)
            assert (await given.types()).count("instance.output_fenced") == 1

    asyncio.run(main())


def test_C056_the_first_cancel_after_the_end_is_kept_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), completed())
            for n in range(3):
                with pytest.raises(RunTerminal):
                    await given.tell(cancel(f"c{n}"))
            assert (await given.types()).count("run.cancel_refused") == 1

    asyncio.run(main())


# --- refused --------------------------------------------------------------------------------------


def test_a_refused_command_leaves_no_trace(tmp_path: Path) -> None:
    """Not in the log, the head, the rows, the vault or the state, beside others in its batch."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), child())
            before = [given.loaded(), given.rows("select position from log_head")]
            commands = [
                await given.command(completed(), reporter=Reporter("nobody", None)),
                await given.command(signal(), run="nobody"),
                await given.command(signal(), expected_version=1),
                await given.command(child(input="other")),
            ]
            answers = await asyncio.gather(
                *(given.log.transact(c) for c in commands), return_exceptions=True
            )
            assert all(isinstance(answer, PlayledgerError) for answer in answers)
            assert [given.loaded(), given.rows("select position from log_head")] == before
            assert given.rows("select count(*) from vault_values") == [(0,)]

    asyncio.run(main())


def test_an_event_that_does_not_fit_fails_its_own_command_alone(tmp_path: Path) -> None:
    """A fact and the closure of its choices are all or nothing."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            large = replace(signal(1), event_type="x" * 17_000)
            answers = await asyncio.gather(
                given.log.transact(await given.command(signal(2))),
                given.log.transact(await given.command(large)),
                given.log.transact(await given.command(signal(3))),
                return_exceptions=True,
            )
            assert isinstance(answers[1], TooLarge)
            assert (await given.types())[-2:] == ["signal.received"] * 2
            positions = [r.position for r in await given.events()]
            assert positions == list(range(2, 2 + len(positions)))

    asyncio.run(main())


def test_a_closure_that_would_not_end_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the rules fails one command, not the log."""
    from handlers.react import react as real

    def endless(state: Any, recorded: Any) -> Any:
        if isinstance(recorded.data, e.SignalReceived | e.EffectParked):
            return (e.EffectParked(intent_id="i", tries=1),)
        return real(state, recorded)

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            monkeypatch.setattr(execute_module, "react", endless)
            with pytest.raises(AssertionError, match="over 64 events"):
                await given.tell(signal())
            monkeypatch.setattr(execute_module, "react", real)
            assert (await given.types())[-1] == "instance.create_requested"
            await given.tell(signal())

    asyncio.run(main())


def test_a_precondition_is_checked_in_the_writer(tmp_path: Path) -> None:
    """`If-Match`: equal passes, anything else is 412 with both values."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            await given.tell(signal(1), expected_version=3)
            with pytest.raises(WrongExpectedVersion) as caught:
                await given.tell(signal(2), expected_version=3)
            assert caught.value.details == {"expected": 3, "actual": 4}

    asyncio.run(main())


def test_an_unknown_run_is_not_found(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            with pytest.raises(RunNotFound):
                await given.tell(signal())
            assert await given.types() == []

    asyncio.run(main())


# --- order and causes -----------------------------------------------------------------------------


def test_the_order_of_the_log_is_the_order_of_the_queue(tmp_path: Path) -> None:
    """Breadth-first, each choice naming what it follows from, ids by place among the choices."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            for key in ("b", "a"):
                await given.tell(child(key))
            events = await given.tell(errored())
            assert [r.type for r in events] == [
                "instance.errored",
                "retry.decided",
                "run.failed",
                "child.cancel_requested",
                "child.cancel_requested",
            ]
            assert [r.causationid for r in events] == [None, *(events[i].id for i in (0, 1, 2, 2))]
            assert events[4].id == event_id(events[2].id, "1")
            assert {r.time for r in events} == {events[0].time}
            assert {r.correlationid for r in events} == {RUN}
            assert [r.data.child_key for r in events[3:]] == ["a", "b"]  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_childs_submit_is_the_outcome_of_its_parents_request(tmp_path: Path) -> None:
    """In the child's stream, under the id that closes the parent's row."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            (asked,) = await given.tell(child())
            kid = child().child_run_id
            row = "select kind from outbox where intent_id = ?"
            assert given.rows(row, asked.id) == [("child_submit",)]
            (first, *_) = await given.tell(submitted(kid, parent=RUN), run=kid, cause=asked.id)
            assert first.id == event_id(asked.id, "done")
            assert given.rows(row, asked.id) == []

    asyncio.run(main())


def test_a_child_that_was_given_up_is_not_submitted_by_a_node_that_wakes(tmp_path: Path) -> None:
    """An intent has one outcome in the whole log; the others of the batch are not harmed."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            (asked,) = await given.tell(child())
            kid = child().child_run_id
            failed = e.ChildSubmitFailed(child_key="k", child_run_id=kid, code="PARENT_TERMINAL")
            await given.tell(failed)
            late, other = await asyncio.gather(
                given.log.transact(
                    await given.command(submitted(kid, parent=RUN), run=kid, cause=asked.id)
                ),
                given.log.transact(await given.command(submitted("r2"), run="r2")),
            )
            assert late.replayed
            assert late.recorded is not None
            assert late.recorded.data == failed
            assert given.loaded(kid) is None
            assert len(other.events) == 3

    asyncio.run(main())


def test_INV_55_two_nodes_that_submit_one_child_make_one_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            (asked,) = await given.tell(child())
            kid = child().child_run_id
            command = await given.command(submitted(kid, parent=RUN), run=kid, cause=asked.id)
            answers = await asyncio.gather(*(given.log.transact(command) for _ in range(5)))
            assert [answer.replayed for answer in answers] == [False, True, True, True, True]
            assert len({answer.recorded.id for answer in answers if answer.recorded}) == 1

    asyncio.run(main())


def test_values_are_kept_with_the_fact_that_carries_them_and_not_with_a_refusal(
    tmp_path: Path,
) -> None:
    """The one trace of a refusal has no value."""
    from ledger.transaction import Disclosure

    def value(digest: str) -> tuple[Disclosure, ...]:
        return (Disclosure(digest=digest, subject=run_stream(RUN), text="t"),)

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            await given.tell(signal(), values=value("taken"))
            with pytest.raises(StaleAttempt):
                await given.tell(
                    completed(), values=value("fenced"), reporter=Reporter(instance(), "n-2")
                )
            assert given.rows("select digest from vault_values") == [("taken",)]

    asyncio.run(main())


# --- cold and warm --------------------------------------------------------------------------------


def test_INV_24_a_cold_process_answers_as_a_warm_one(tmp_path: Path) -> None:
    """From the rows of the run, with no history read: the cache changes nothing."""

    async def main() -> None:
        facts: list[Any] = [created(), wait(), signal(), child(), errored("platform_reset")]
        clock = Ticks()
        for name, cold in (("cold.db", True), ("warm.db", False)):
            async with world(tmp_path, name=name, clock=clock) as given:
                await given.tell(submitted())
                for fact in facts:
                    if cold:
                        given.log.writer._cache.clear()
                    await given.tell(fact)
        async with (
            world(tmp_path, name="cold.db") as cold_one,
            world(tmp_path, name="warm.db") as warm_one,
        ):
            assert [r.data for r in await cold_one.events()] == [
                r.data for r in await warm_one.events()
            ]
            assert cold_one.loaded() == warm_one.loaded()

    asyncio.run(main())


def test_an_ended_run_leaves_the_cache(tmp_path: Path) -> None:
    """Memory holds what is alive."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            assert set(given.log.writer._cache) == {run_stream(RUN)}
            await given.tell(cancel(), terminated())
            assert set(given.log.writer._cache) == set()
            with pytest.raises(RunTerminal):
                await given.tell(signal())
            assert set(given.log.writer._cache) == set()

    asyncio.run(main())


def test_the_system_stream_records_and_decides_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        fact = e.NodeStarted(node_id="n-1", version="0", plays=1)
        command = Command(stream="system", fact=fact, actor="node/n-1")
        async with world(tmp_path) as given:
            first = await given.log.transact(command)
            again = await given.log.transact(command)
            assert (first.replayed, again.replayed) == (False, True)
            stopped = replace(command, fact=e.NodeStopped(node_id="n-1", clean=True))
            answer = await given.log.transact(stopped)
            assert answer.recorded is not None
            assert answer.recorded.version == 3
        async with world(tmp_path) as given:  # another process goes on behind it
            answer = await given.log.transact(
                replace(command, fact=e.NodeStarted(node_id="n-2", version="0", plays=1))
            )
            assert answer.recorded is not None
            assert answer.recorded.version == 4

    asyncio.run(main())


def test_nothing_to_do_is_an_answer(tmp_path: Path) -> None:
    async def main() -> None:
        assert NOTHING == ()
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), cancel())
            answer = await given.log.transact(await given.command(cancel("c2"), run_key=KEY))
            assert answer.replayed
            assert answer.recorded is None
            assert answer.state is not None
            assert answer.state.run.status == "cancelling"

    asyncio.run(main())
