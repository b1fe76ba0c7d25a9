"""Children: found by their key, awaited in any order, ended with their parent."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from handlers.commands import Command
from ledger import events as e
from ledger.errors import ChildKeyConflict, RunTerminal
from ledger.ids import child_run_id, run_stream
from playledger import ChildFailed, InputInvalid, Run, play
from playledger.testing import drive, drive_killed_everywhere
from tests.local_node import Given, node


@play
async def double(_run: Run, n: int) -> int:
    return n * 2


@play
async def fails(_run: Run) -> None:
    raise ValueError("no")


@play
async def waits(run: Run, n: int = 0) -> int:
    await run.signal("go")
    return n


@play
async def family(run: Run) -> list[int]:
    return list(await asyncio.gather(*(run.child(double, n, key=f"k{n}") for n in range(4))))


@play
async def late(run: Run, name: str) -> str:
    """Asks for a child, and awaits it only when it is told that the child has ended."""
    child = run.child(name, key="c")
    await child.id()
    await run.signal("it has ended")
    began = time.monotonic()
    try:
        said = f"result {await child}"
    except ChildFailed as error:
        said = f"{error.details['status']}"
    run.log("awaited", ms=round((time.monotonic() - began) * 1000))
    return said


async def ended_child(given: Given, parent: str) -> None:
    await given.seen(parent, "child.terminal_set")
    await given.ledger.signal(parent, "it has ended")


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled", "exhausted"])
def test_C004_a_child_that_ended_before_the_await_answers_at_once(tmp_path: Path, how: str) -> None:
    """Whichever end it was: the stored fact is read, nobody has to be woken."""

    @play(name="completes")
    async def completes(_run: Run) -> int:
        return 7

    @play(name="exhausted")
    async def exhausted(_run: Run) -> None:
        await asyncio.Event().wait()

    plays: dict[str, Any] = {
        "completed": completes,
        "failed": fails,
        "cancelled": waits,
        "exhausted": exhausted,
    }
    expected = {"completed": "result 7", "cancelled": "cancelled"}.get(how, "failed")

    async def main() -> None:
        async with node(tmp_path, late, plays[how]) as given:
            name = next(name for name in given.ledger.plays if not name.endswith(":late"))
            run = await given.ledger.submit(late, name, run_id="r")
            requested: Any = (await given.seen("r", "child.requested")).data
            child = requested.child_run_id
            if how == "cancelled":
                await given.seen(child, "run.wait_started")
                await given.ledger.cancel(child)
            if how == "exhausted":
                engine = given.driver.engine
                for n in (1, 2, 3):
                    await given.seen(child, "instance.started", n)
                    engine.loop.call_soon_threadsafe(engine.kill_run, child)
            await ended_child(given, "r")
            assert await given.end("r") == "completed"
            assert await run.result() == expected
            (line,) = await given.logs("r")
            assert line["fields"]["ms"] < 100

    asyncio.run(main())


def test_C004_ten_children_of_which_five_are_done_are_joined(tmp_path: Path) -> None:
    """Those that have ended and those that still run are awaited alike."""

    @play(name="joins")
    async def joins(run: Run) -> list[int]:
        quick = [run.child(double, n, key=f"quick{n}") for n in range(5)]
        for child in quick:
            await child
        slow = [run.child(waits, n, key=f"slow{n}") for n in range(5)]
        return list(await asyncio.gather(*quick, *slow))

    async def main() -> None:
        async with node(tmp_path, joins, double, waits) as given:
            run = await given.ledger.submit(joins, run_id="r")
            await given.seen("r", "child.requested", 10)
            for n in range(5):
                child = child_run_id(_name(given, "waits"), "r", f"slow{n}")
                await given.seen(child, "run.submitted")
                await given.ledger.signal(child, "go")
            assert await given.end("r") == "completed"
            assert await run.result() == [0, 2, 4, 6, 8, 0, 1, 2, 3, 4]

    asyncio.run(main())


def _name(given: Given, function: str) -> str:
    return next(name for name in given.ledger.plays if name.endswith(":" + function))


def test_C004_an_end_between_the_look_and_the_wait_is_never_missed(tmp_path: Path) -> None:
    """200 children whose ends fall anywhere around their awaits: no await waits for ever."""

    @play(name="races")
    async def races(run: Run) -> int:
        total = 0
        for n in range(200):
            total += await run.child(double, n, key=f"k{n}")
        return total

    async def main() -> None:
        async with node(tmp_path, races, double) as given:
            run = await given.ledger.submit(races, run_id="r")
            assert await given.end("r") == "completed"
            assert await run.result() == 200 * 199

    asyncio.run(main())


def test_C004_a_terminal_that_comes_before_its_request_is_the_answer(tmp_path: Path) -> None:
    """An `integration_event` may bring a child's end before the parent asks for the child."""

    @play(name="asks")
    async def asks(run: Run) -> Any:
        await run.signal("now")
        return await run.child("nobody's:play", key="ext")

    async def main() -> None:
        async with node(tmp_path, asks) as given:
            run = await given.ledger.submit(asks, run_id="r")
            await given.ledger.signal("r", "ext", {"x": 1}, signal="integration_event")
            await given.ledger.signal("r", "now")
            assert await given.end("r") == "completed"
            assert await run.result() == {"x": 1}

    asyncio.run(main())


def test_C005_children_end_with_a_cancelled_parent_at_every_depth(tmp_path: Path) -> None:
    """Cancel in the middle of a fan-out reaches grandchildren; nothing is left without an end."""

    @play(name="middle")
    async def middle(run: Run) -> int:
        return await run.child(waits, 1, key="grandchild")

    @play(name="top")
    async def top(run: Run) -> None:
        children = [run.child(waits, n, key=f"k{n}") for n in range(50)]
        await run.child(middle, key="middle")
        await asyncio.gather(*children)

    async def main() -> None:
        async with node(tmp_path, top, middle, waits) as given:
            run = await given.ledger.submit(top, run_id="r")
            await given.seen("r", "child.requested", 20)
            await run.cancel()
            assert await given.end("r") == "cancelled"
            asked = await given.events("r", e.ChildRequested)
            grandchild = child_run_id(
                _name(given, "waits"), child_run_id("middle", "r", "middle"), "grandchild"
            )
            for child in asked:
                await _ended_or_never_submitted(given, "r", child)
            line = [line.run for line in await given.ledger.runs(limit=1000)]
            assert {run.status for run in line} == {"cancelled"}, grandchild

    asyncio.run(main())


async def _ended_or_never_submitted(given: Given, parent: str, child: e.ChildRequested) -> None:
    """Waits until the parent's stream says how a child ended, or that it was never submitted."""
    async with asyncio.timeout(30):
        async for recorded in given.ledger.events(stream=run_stream(parent), follow=True):
            event = recorded.data
            if isinstance(event, e.ChildTerminalSet) and event.event_key == child.child_key:
                return
            if isinstance(event, e.ChildSubmitFailed) and event.child_key == child.child_key:
                return


def test_C005_children_end_with_a_failed_parent_but_for_the_abandoned(tmp_path: Path) -> None:
    """`on_parent_end="abandon"` lets a child go on; the others are cancelled."""

    @play(name="top")
    async def top(run: Run) -> None:
        kept = run.child(waits, 1, key="kept", on_parent_end="abandon")
        ended = run.child(waits, 2, key="ended")
        await asyncio.gather(kept.id(), ended.id())
        await run.signal("fail")
        raise ValueError("enough")

    async def main() -> None:
        async with node(tmp_path, top, waits) as given:
            await given.ledger.submit(top, run_id="r")
            name = _name(given, "waits")
            for key in ("kept", "ended"):
                await given.seen(child_run_id(name, "r", key), "run.wait_started")
            await given.ledger.signal("r", "fail")
            assert await given.end("r") == "failed"
            assert await given.end(child_run_id(name, "r", "ended")) == "cancelled"
            kept = child_run_id(name, "r", "kept")
            assert not (await given.ledger.status(kept)).run.terminal
            await given.ledger.signal(kept, "go")
            assert await given.end(kept) == "completed"

    asyncio.run(main())


def test_C005_a_child_under_an_ended_parent_is_refused_in_the_same_transaction(
    tmp_path: Path,
) -> None:
    """The writer refuses it; nothing is stored, whoever asks."""

    async def main() -> None:
        async with node(tmp_path, double) as given:
            assert await given.run(double, 1, run_id="r") == "completed"
            before = await given.types("r")
            (requested,) = await given.events("r", e.RunSubmitted)
            with pytest.raises(RunTerminal):
                await given.ledger.log.transact(
                    Command(
                        stream="run/r",
                        fact=e.ChildRequested(
                            child_key="k",
                            child_run_id="x",
                            play_name="p",
                            input=requested.params,
                            on_parent_end="cancel",
                        ),
                        actor="cli/local",
                    )
                )
            assert await given.types("r") == before

    asyncio.run(main())


def test_C005_a_lost_parent_finds_its_children_again() -> None:
    """Killed after any event, no child is started twice and every one is joined."""
    for ended in drive_killed_everywhere(family):
        assert ended.result == [0, 2, 4, 6], ended.killed_after
        assert ended.children_started == 4


def test_INV_55_the_same_child_key_twice_is_one_child() -> None:
    """Same play and input under a key: one run, and its result twice."""

    async def twice(run: Run) -> list[int]:
        return [await run.child(double, 4, key="k"), await run.child(double, 4, key="k")]

    ended = drive(twice)
    assert (ended.result, ended.children_started) == ([8, 8], 1)


def test_INV_55_the_same_child_key_with_another_input_is_a_conflict() -> None:
    """ChildKeyConflict names both; the first child stands, and the play may go on."""

    async def conflict(run: Run) -> str:
        first = await run.child(double, 4, key="k")
        try:
            await run.child(double, 5, key="k")
        except ChildKeyConflict as error:
            return f"{first} {error.code}"
        return "?"

    ended = drive(conflict)
    assert (ended.result, ended.children_started) == ("8 CHILD_KEY_CONFLICT", 1)


def test_children_without_a_key_are_told_apart_by_play_input_and_occurrence() -> None:
    """Two of one input are two children; killed anywhere they are found, not repeated."""

    async def unnamed(run: Run) -> list[int]:
        pair = [run.child(double, 4), run.child(double, 4), run.child(double, 5)]
        return list(await asyncio.gather(*pair))

    for ended in drive_killed_everywhere(unnamed):
        assert (ended.result, ended.children_started) == ([8, 8, 10], 3), ended.killed_after


def test_a_failed_child_raises_child_failed_and_stays_failed_for_its_key() -> None:
    """Another try is another key."""

    async def tries(run: Run) -> list[str]:
        said = []
        for key in ("a", "a", "b"):
            try:
                await run.child(fails, key=key)
            except ChildFailed as error:
                said.append(str(error.details["childKey"]))
        return said

    ended = drive(tries)
    assert (ended.result, ended.children_started) == (["a", "a", "b"], 2)


def test_an_input_that_does_not_fit_a_child_is_refused_where_it_is_given() -> None:
    """InputInvalid at the call, nothing stored."""

    async def wrong(run: Run) -> str:
        try:
            run.child(double, "x", key="k")  # type: ignore[arg-type]
        except InputInvalid as error:
            return error.code
        return "?"

    ended = drive(wrong)
    assert (ended.result, ended.children_started) == ("INPUT_INVALID", 0)


def test_a_child_of_a_play_that_nobody_offers_fails_with_its_code() -> None:
    """child.submit_failed PLAY_NOT_FOUND ends the await."""

    async def asks(run: Run) -> str:
        try:
            await run.child("no:such", key="k")
        except ChildFailed as error:
            return str(error)
        return "?"

    ended = drive(asks)
    assert "PLAY_NOT_FOUND" in ended.result


def test_a_child_can_be_cancelled_by_its_parent() -> None:
    """`child.cancel()` ends it; the await says that it was cancelled."""

    async def cancels(run: Run) -> str:
        child = run.child(waits, 1, key="k")
        await child.cancel("no longer needed")
        try:
            await child
        except ChildFailed as error:
            return str(error.details["status"])
        return "?"

    assert drive(cancels).result == "cancelled"


def test_a_child_that_is_not_awaited_is_started_all_the_same() -> None:
    """It is asked for at once; the parent's end cancels it unless it is abandoned."""

    async def forgets(run: Run) -> str:
        run.child(double, 1, key="k", on_parent_end="abandon")
        return "done"

    ended = drive(forgets)
    assert (ended.result, ended.children_started) == ("done", 1)
