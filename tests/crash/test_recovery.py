"""What a restart finds and how it goes on: SPEC section 6, one failure each."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import playledger
from engines.plays import as_play
from handlers.submit import Submission
from ledger import events as e
from ledger.codec import Recorded
from ledger.events import Event
from playledger.embed import Ledger
from playledger.wiring import open_log, plays_of, submitter_for
from tests.crash.checks import check_log
from tests.crash.conftest import KILLED, Crasher
from tests.crash.driver import Job, files_of
from tests.crash.outside import driving_outside, folder_of
from tests.crash.scenarios import EFFECTS_VARIABLE, PLAYS, POLICY, endless


def of(events: list[Recorded[Event]], kind: type) -> list[Any]:
    """Returns what the events of a kind say."""
    return [recorded.data for recorded in events if isinstance(recorded.data, kind)]


def test_a_rerun_attempt_that_asks_for_its_timed_wait_finds_the_first_deadline(
    crasher: Crasher, log_path: Path
) -> None:
    """Killed when the deadline came: the second attempt waits no second time, it times out."""
    crasher.crash(log_path, "patient", "before_timer_fired")
    events = check_log(log_path)
    (wait,) = of(events, e.RunWaitStarted)
    (timer,) = [r for r in events if isinstance(r.data, e.TimerFired)]
    (start,) = [r for r in events if isinstance(r.data, e.RetryStarted)]
    assert wait.until_at <= start.at <= timer.at < start.at + 400
    assert [ended.outcome for ended in of(events, e.RunWaitEnded)] == ["timeout"]


def test_a_rerun_attempt_that_asks_for_its_timed_wait_finds_the_first_outcome(
    crasher: Crasher, log_path: Path
) -> None:
    """A signal that came after the timeout changes nothing, though the attempt is a new one."""
    assert crasher.run(Job("patient", str(log_path), "after_timer_fired")) == KILLED

    async def too_late() -> None:
        async with playledger.open(log_path) as ledger:
            await ledger.signal("patient", "go", "late", signal_id="s1")

    asyncio.run(too_late())
    crasher.finish(log_path, "patient")
    events = check_log(log_path)
    assert len(of(events, e.InstanceCreated)) == 2
    assert [ended.outcome for ended in of(events, e.RunWaitEnded)] == ["timeout"]


@pytest.mark.parametrize(
    "place", ["before_create", "before_commit:4", "after_commit:4", "before_play", "after_create"]
)
def test_INV_14_a_crash_around_the_create_leaves_one_create_per_attempt(
    crasher: Crasher, log_path: Path, place: str
) -> None:
    """Whatever was recorded of it, no attempt is created twice, and attempts have no gap."""
    crasher.crash(log_path, "reset", place)
    attempts = [created.attempt for created in of(check_log(log_path), e.InstanceCreated)]
    assert attempts == list(range(len(attempts)))


def test_INV_25_S16_a_create_that_was_not_recorded_finds_its_instance(
    crasher: Crasher, log_path: Path
) -> None:
    """The service made it, the record was lost: the same id is asked for again, and exists."""
    crasher.crash(log_path, "service", "created_outside")
    (created,) = of(check_log(log_path), e.InstanceCreated)
    assert created.already_existed
    assert len(list(folder_of(log_path).iterdir())) == 1


def test_S12_a_run_that_was_only_recorded_is_created_by_the_next_process(
    crasher: Crasher, log_path: Path
) -> None:
    """Nobody has to ask again, and no retry is spent on it."""
    assert crasher.run(Job("timers", str(log_path), "after_submit")) == KILLED
    assert len(of(check_log(log_path), e.InstanceCreateRequested)) == 1
    crasher.finish(log_path, "timers")
    events = check_log(log_path)
    assert [created.attempt for created in of(events, e.InstanceCreated)] == [0]
    assert of(events, e.RetryDecided) == []


@pytest.mark.parametrize("place", ["after_params_load", "before_create:2", "before_commit:6"])
def test_INV_30_R6_a_claim_is_followed_by_its_instance(
    crasher: Crasher, log_path: Path, place: str
) -> None:
    """Killed between decision and create: the attempt is not burnt, the next process goes on."""
    crasher.crash(log_path, "reset", place)
    events = check_log(log_path)
    claims = [claim.attempt for claim in of(events, e.RetryClaimed)]
    assert claims == [start.attempt for start in of(events, e.RetryStarted)]
    if place != "before_commit:6":
        assert claims == [1]


def test_R8_a_retry_whose_create_was_recorded_and_never_ran_is_replaced(
    crasher: Crasher, log_path: Path
) -> None:
    """The instance died with its process: it is lost, and charged to the restart alone."""
    crasher.crash(log_path, "reset", "before_play:2")
    decided = of(check_log(log_path), e.RetryDecided)
    assert [d.error_class for d in decided] == ["platform_reset", "coordinator_restart"]
    assert [(d.budget, d.used) for d in decided] == [("retry", 0), ("restart", 0)]


def test_R7_a_create_that_fails_is_asked_for_again_under_the_same_id(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy service costs tries, no attempt."""
    events = _served(log_path, monkeypatch, failures=2)
    failed = of(events, e.InstanceCreateFailed)
    assert [(f.kind, f.attempt, f.try_number) for f in failed] == [
        ("transient", 0, 1),
        ("transient", 0, 2),
    ]
    (created,) = of(events, e.InstanceCreated)
    assert {f.instance_id for f in failed} == {created.instance_id}
    assert len(of(events, e.RunCompleted)) == 1


def test_R7_a_retry_that_cannot_be_created_is_abandoned_and_the_run_fails(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim does not hang: it is closed with the service's own code."""
    events = _served(log_path, monkeypatch, resets=(0,), refused=(1,))
    (abandoned,) = of(events, e.RetryAbandoned)
    (ended,) = of(events, e.RunFailed)
    assert (abandoned.attempt, abandoned.reason, ended.code) == (1, "NO_MORE", "NO_MORE")


def _served(path: Path, monkeypatch: pytest.MonkeyPatch, **engine: Any) -> list[Recorded[Event]]:
    """Runs one run on the outside engine to its end, and returns the events."""
    monkeypatch.setenv(EFFECTS_VARIABLE, str(files_of(path)["effects"]))

    async def main() -> None:
        log, plays = await open_log(path), plays_of(PLAYS)
        submitter = submitter_for(log, plays)
        async with asyncio.timeout(20), driving_outside(log, plays, submitter, **engine):
            await submitter.submit(
                Submission(
                    run_id="r",
                    play_name=as_play(endless).name,
                    input=None,
                    actor="library/local",
                    policy=POLICY,
                    engine="outside",
                )
            )
            await Ledger(log, plays).wait_for_end("r")
        await log.close()

    asyncio.run(main())
    return check_log(path)


@pytest.mark.parametrize(
    "place", ["after_child_submit", "before_commit:5", "before_child_terminal"]
)
def test_C7_a_parent_that_did_not_learn_of_its_child_finds_it_again(
    crasher: Crasher, log_path: Path, place: str
) -> None:
    """The parent runs again and asks for the same keys: no child is submitted twice (INV-55)."""
    crasher.crash(log_path, "family", place)
    events = check_log(log_path)
    submitted = of(events, e.RunSubmitted)
    children = [r.lineage.child_key for r in submitted if r.lineage.parent_run_id == "family"]
    assert sorted(children) == ["n-1", "n2", "n3"]
    assert len(of(events, e.ChildRequested)) == 3
    assert len(of(events, e.ChildTerminalSet)) == 3


@pytest.mark.parametrize("scenario", ["early", "late"])
def test_INV_66_an_answered_signal_is_never_lost(
    crasher: Crasher, log_path: Path, scenario: str
) -> None:
    """Killed with the answer on its way: the signal is there, once, and reaches its wait."""
    assert crasher.run(Job(scenario, str(log_path), "signal_acknowledged")) == KILLED
    received = of(check_log(log_path), e.SignalReceived)
    assert [signal.signal_id for signal in received] == ["s1"]
    crasher.finish(log_path, scenario)
    received = of(check_log(log_path), e.SignalReceived)
    assert [signal.signal_id for signal in received] == ["s1", "s2"]


def test_G1_a_terminal_and_the_signal_that_brings_it_are_one_append(
    crasher: Crasher, log_path: Path
) -> None:
    """At no kill does one stand without the other, and the awaiting play gets it (INV-67)."""
    for number in range(1, 7):
        path = log_path.with_name(f"{number}.db")
        status = crasher.run(Job("outside", str(path), f"before_commit:{number}"))
        assert status in (KILLED, 0)
        events = check_log(path)
        assert len(of(events, e.SignalReceived)) == len(of(events, e.ChildTerminalSet))
        crasher.finish(path, "outside")
        events = check_log(path)
        signal, terminal = (
            next(r for r in events if isinstance(r.data, kind))
            for kind in (e.SignalReceived, e.ChildTerminalSet)
        )
        assert (terminal.causationid, terminal.time) == (signal.id, signal.time)


def test_G2_a_signal_sent_again_after_a_lost_answer_is_one_signal(
    crasher: Crasher, log_path: Path
) -> None:
    """Recorded, but never answered: the client's second try finds it."""
    assert crasher.run(Job("early", str(log_path), "signal_acknowledged")) == KILLED
    crasher.finish(log_path, "early")
    with closing(sqlite3.connect(log_path)) as connection:
        taken = connection.execute("select signal_id, taken_by from signals order by n").fetchall()
    assert taken == [("s1", "signal/part/0"), ("s2", "signal/part/1")]
