"""`why`: sentences that name the events they rest on, now and as of any position."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import playledger
from handlers.commands import Command
from ledger import events as e
from playledger import Ledger, Retry, Run, play
from playledger.why import Why, explain
from playledger.wiring import plays_of, submitter_for


@play(name="w:gate")
async def gate(run: Run) -> Any:
    return await run.signal("approval", timeout=timedelta(days=2))


@play(name="w:nap")
async def nap(run: Run) -> None:
    await run.sleep("nap", timedelta(hours=1))


@play(name="w:bad")
async def bad(_run: Run) -> None:
    raise ValueError("12,50 is no amount")


@play(name="w:family")
async def family(run: Run) -> Any:
    return await run.child(bad, key="pay")


@play(name="w:join")
async def join(run: Run) -> Any:
    return await asyncio.gather(*(run.child(gate, key=key) for key in ("a", "b")))


@play(name="w:again", retries=2)
async def again(_run: Run) -> None:
    raise Retry("the till is busy", after=timedelta(hours=1))


@play(name="w:work")
async def work(run: Run) -> list[int]:
    run.progress(3, of=10)
    await run.signal("end")
    return [1, 2, 3]


PLAYS = (gate, nap, bad, family, join, again, work)


async def _reach(ledger: Ledger, run_id: str, kind: str) -> int:
    async with asyncio.timeout(20):
        async for recorded in ledger.events(stream=f"run/{run_id}", follow=True):
            if recorded.type == kind:
                return recorded.position
    raise AssertionError("unreachable")


async def _checked(ledger: Ledger, run_id: str, at: int | None = None) -> Why:
    """Explains, and checks that every sentence rests on events that are there."""
    why = await explain(ledger, run_id, at=at)
    known = {r.position: r async for r in ledger.events()}
    for sentence in why.sentences:
        assert sentence.positions, sentence.text
        assert all(position in known for position in sentence.positions)
        assert all(position <= why.as_of_position for position in sentence.positions)
        assert sentence.text.endswith(".")
    assert why.sentences[0].text.startswith(f"{run_id} is {why.status}")
    return why


def _texts(why: Why) -> list[str]:
    return [sentence.text for sentence in why.sentences]


def test_a_wait_for_a_signal_names_the_signal_and_what_came_instead(tmp_path: Path) -> None:
    """The first transcript of UX section 3."""

    async def main() -> None:
        async with playledger.open(tmp_path / "w.db", plays=PLAYS) as ledger:
            await ledger.submit(gate, run_id="r1")
            started = await _reach(ledger, "r1", "run.wait_started")
            note = await ledger.signal("r1", "note", {})
            why = await _checked(ledger, "r1")
            assert why.sentences[0].text == 'r1 is running; it waits for signal "approval".'
            assert why.sentences[0].positions == (started,)
            assert " and times out on " in why.sentences[1].text
            assert why.sentences[2].text == (
                'One other signal has arrived, "note"; none named "approval".'
            )
            assert why.sentences[2].positions == (note.position,)
            assert why.to_json()["movedBy"] == [{"type": "signal.received", "key": "approval"}]
            assert why.commands == ("playledger signal r1 approval --data '{...}'",)
            assert why.movement == 'It moves when signal.received "approval" is recorded'

    asyncio.run(main())


def test_a_sleep_and_children_and_work_are_told_apart(tmp_path: Path) -> None:
    """What ends each of them is named."""

    async def main() -> None:
        async with playledger.open(tmp_path / "w.db", plays=PLAYS) as ledger:
            await ledger.submit(nap, run_id="sleeps")
            await ledger.submit(join, run_id="joins")
            await ledger.submit(work, run_id="works")
            await _reach(ledger, "sleeps", "run.wait_started")
            await _reach(ledger, "works", "run.progress")
            async with asyncio.timeout(10):
                async for recorded in ledger.events(stream="run/joins", follow=True):
                    asked = recorded.data
                    if isinstance(asked, e.ChildRequested) and asked.child_key == "b":
                        break
            sleeps = await _checked(ledger, "sleeps")
            assert "it waits for its own sleep until" in sleeps.sentences[0].text
            assert [moved.type for moved in sleeps.moved_by] == ["timer.fired"]
            joins = await _checked(ledger, "joins")
            assert joins.sentences[0].text.startswith("joins is running; it waits for")
            assert '"a" and "b"' in joins.sentences[0].text
            assert {moved.key for moved in joins.moved_by} == {"a", "b"}
            assert joins.commands[0].startswith("playledger why w-gate-")
            works = await _checked(ledger, "works")
            assert any(text.startswith("It reported 3 of 10 done") for text in _texts(works))

    asyncio.run(main())


def test_a_backoff_says_which_retry_it_is_and_when_it_starts(tmp_path: Path) -> None:
    """The third transcript: budget, cause, and the command that skips it."""

    async def main() -> None:
        async with playledger.open(tmp_path / "w.db", plays=PLAYS) as ledger:
            await ledger.submit(again, run_id="r1")
            claimed = await _reach(ledger, "r1", "retry.claimed")
            why = await _checked(ledger, "r1")
            assert why.sentences[0].text == "r1 is running; retry 1 of 2 waits out its backoff."
            assert why.sentences[0].positions == (claimed + 1,)
            assert any("the play asked for a pause of 1 h" in text for text in _texts(why))
            assert "Attempt 0 ended by play_retry." in _texts(why)
            assert why.commands == ("playledger retry r1",)
            assert [moved.type for moved in why.moved_by] == ["instance.created"]

    asyncio.run(main())


def test_a_run_that_nobody_offers_says_how_to_start_somebody(tmp_path: Path) -> None:
    """Submitted, and no process on this machine drives the log."""

    async def main() -> None:
        async with playledger.open(tmp_path / "w.db") as ledger:
            ledger.submitter = submitter_for(ledger.log, plays_of(PLAYS))
            await ledger.submit("w:gate", run_id="r1")
            why = await _checked(ledger, "r1")
            assert why.sentences[0].text == (
                "r1 is submitted; no process that offers w:gate runs, so nobody takes its first "
                "instance."
            )
            assert why.commands == ("playledger serve w.py",)

    asyncio.run(main())


def test_a_failure_is_followed_to_the_child_that_began_it(tmp_path: Path) -> None:
    """The cause chain, each link with its events, in both streams."""

    async def main() -> None:
        async with playledger.open(tmp_path / "w.db", plays=PLAYS) as ledger:
            await ledger.submit(family, run_id="r1")
            await ledger.wait_for_end("r1")
            why = await _checked(ledger, "r1")
            texts = _texts(why)
            assert texts[0] == "r1 is failed; nothing will move it."
            assert "user_error is never retried" in texts[1]
            assert any(text.startswith('Its child "pay" had failed before') for text in texts)
            assert any("ValueError: 12,50 is no amount" in text for text in texts)
            assert why.moved_by == ()
            assert why.movement == ""
            assert "playledger rerun r1" in why.commands

    asyncio.run(main())


def test_a_completed_and_a_cancelled_run_say_that_nothing_moves_them(tmp_path: Path) -> None:
    """Who asked and why stays; what came after the end is told as refused."""

    async def main() -> None:
        async with playledger.open(tmp_path / "w.db", plays=PLAYS) as ledger:
            await ledger.submit(work, run_id="done")
            await ledger.signal("done", "end")
            await ledger.wait_for_end("done")
            try:
                await ledger.cancel("done")
            except playledger.RunTerminal:
                texts = _texts(await _checked(ledger, "done"))
            assert texts[0] == "done is completed; nothing will move it."
            assert texts[1] == "The play returned [1,2,3]."
            assert texts[-1] == "library/local asked to cancel it after its end; that was refused."
            await ledger.submit(gate, run_id="ended")
            await _reach(ledger, "ended", "run.wait_started")
            await ledger.cancel("ended", "order withdrawn\x1b[2J")
            await ledger.wait_for_end("ended")
            texts = _texts(await _checked(ledger, "ended"))
            assert texts[0] == "ended is cancelled; nothing will move it."
            assert texts[1] == "library/local asked for it, because: order withdrawn\\x1b[2J."
            assert "Its instance ended as it was asked to." in texts

    asyncio.run(main())


def test_an_explanation_as_of_any_position_is_what_was_true_then(tmp_path: Path) -> None:
    """At every position of a run's life there is one, and none looks beyond its position."""

    async def main() -> None:
        async with playledger.open(tmp_path / "w.db", plays=PLAYS) as ledger:
            await ledger.submit(family, run_id="r1")
            await ledger.submit(gate, run_id="r2")
            await _reach(ledger, "r2", "run.wait_started")
            await ledger.signal("r2", "approval", {"by": "ada"})
            await ledger.wait_for_end("r1")
            await ledger.wait_for_end("r2")
            for run_id in ("r1", "r2"):
                first = (await ledger.log.read(stream=f"run/{run_id}"))[0].position
                seen = set()
                for at in range(first, await ledger.log.position() + 1):
                    seen.add((await _checked(ledger, run_id, at)).status)
                assert {"submitted", "running"} < seen

    asyncio.run(main())


def test_a_parked_item_says_what_failed_and_how_to_try_again(tmp_path: Path) -> None:
    """The fourth transcript: the run goes nowhere until somebody resumes it."""

    async def main() -> None:
        async with playledger.open(tmp_path / "w.db") as ledger:
            ledger.submitter = submitter_for(ledger.log, plays_of(PLAYS))
            await ledger.submit("w:gate", run_id="r1")
            asked = (await ledger.log.read(stream="run/r1"))[2]
            assert isinstance(asked.data, e.InstanceCreateRequested)
            fact = e.EffectFailed(
                intent_id=asked.id,
                kind="create",
                try_number=1,
                code="ENGINE_ANSWERED_403",
                error_class="permanent",
            )
            await ledger.log.transact(
                Command(stream="run/r1", fact=fact, actor="node/n-1", cause=asked.id)
            )
            why = await _checked(ledger, "r1")
            assert why.sentences[0].text == "r1 is submitted, and 1 item of it is parked."
            assert any("ENGINE_ANSWERED_403" in text for text in _texts(why))
            assert "effect.resumed" in [moved.type for moved in why.moved_by]
            assert "playledger retry r1" in why.commands
            await ledger.retry("r1")
            assert "parked" not in (await _checked(ledger, "r1")).sentences[0].text

    asyncio.run(main())
