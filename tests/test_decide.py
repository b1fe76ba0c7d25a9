"""What may be recorded: every fact, in the states that allow it and those that do not."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest
from msgspec.structs import replace

from handlers import decide as decide_module
from handlers.commands import CHILDREN_MAX, EVENTS_MAX, Command, fact_id
from handlers.decide import decide
from handlers.decision import Rejected
from ledger import events as e
from ledger.errors import (
    Conflict,
    IntentNotFound,
    NotFound,
    RunConflict,
    RunNotFound,
    RunTerminal,
    RunTooLarge,
    StaleAttempt,
)
from ledger.events import RunEvent
from ledger.ids import event_id
from projections.state import Counts
from tests.given import (
    HOST,
    RUN,
    T0,
    Fact,
    Later,
    Said,
    Story,
    cancel,
    check_decision,
    child,
    child_ended,
    completed,
    create_failed,
    created,
    errored,
    fired,
    instance,
    loaded,
    lost,
    signal,
    started,
    submitted,
    terminated,
    wait,
)

RUNNING: list[Fact] = [submitted(), created()]
ENDED: list[Fact] = [*RUNNING, completed()]
RETRIED: list[Fact] = [*RUNNING, lost(), loaded(), created(1)]


# --- submit ---------------------------------------------------------------------------------------


def test_a_new_run_is_recorded() -> None:
    check_decision(given=[], when=submitted(), then=[submitted()])


def test_a_second_submit_that_is_no_resubmit_is_a_conflict() -> None:
    """The writer compares digests before it decides; what comes this far differs."""
    check_decision(given=[submitted()], when=submitted(digest="other"), then=RunConflict)


@pytest.mark.parametrize(
    "fact",
    [created(), started(), completed(), lost(), signal(), cancel(), child(), wait(), loaded()],
    ids=lambda fact: type(fact).__name__,
)
def test_a_run_that_is_not_in_the_log_takes_nothing(fact: RunEvent) -> None:
    command = Command(stream="run/nobody", fact=fact, actor="cli/local", cause="x")
    refused = decide(command, None, 0)
    assert isinstance(refused, Rejected)
    assert isinstance(refused.error, RunNotFound)
    assert refused.error.details == {"runId": "nobody"}


# --- create and start -----------------------------------------------------------------------------


def test_a_local_create_is_its_start() -> None:
    """Both facts in one append, so whoever gets it in runs the play."""
    begun = e.InstanceStarted(instance_id=instance(), attempt=0, host=HOST, start_gap_ms=1)
    check_decision(given=[submitted()], when=created(), then=[created(), begun])


def test_the_start_gap_begins_when_a_paused_retry_is_due() -> None:
    """A pause that was asked for is no delay."""
    given: list[Fact] = [
        submitted(play_retries=1),
        created(),
        errored("play_retry", again_in=500),
        loaded(),
    ]
    story = Story(*given)
    decision = decide(story.command(Later(507, created(1))), story.state, story.at)
    assert isinstance(decision, tuple)
    begun = decision[1]
    assert isinstance(begun, e.InstanceStarted)
    assert begun.start_gap_ms == 7


def test_a_create_by_another_engine_is_recorded_alone() -> None:
    check_decision(given=[submitted()], when=created(host=None), then=[created(host=None)])


def test_INV_14_an_instance_is_created_once() -> None:
    """A second node that comes with its own create starts nothing."""
    check_decision(given=RUNNING, when=created(host="n-2"), then=Conflict)


def test_a_local_create_of_an_ended_run_starts_nothing() -> None:
    check_decision(given=[submitted(), cancel()], when=created(), then=RunTerminal)


def test_a_create_elsewhere_is_recorded_even_after_the_end() -> None:
    """It exists: it has to be known before it can be asked to end."""
    given: list[Fact] = [submitted(), cancel()]
    check_decision(given=given, when=created(host=None), then=[created(host=None)])


@pytest.mark.parametrize("end", [completed(), errored()], ids=["completed", "errored"])
def test_a_create_that_is_reported_behind_the_end_of_its_instance_settles_the_intent(
    end: RunEvent,
) -> None:
    """An engine elsewhere may be that quick; without the outcome its row would stay for ever."""
    given: list[Fact] = [submitted(), started(), end]
    check_decision(given=given, when=created(host=None), then=[created(host=None)])


def test_a_failed_create_behind_the_end_of_its_instance_settles_the_intent() -> None:
    """So it is when another node takes over a create whose run has ended meanwhile."""
    given: list[Fact] = [submitted(), started(), completed()]
    gone = create_failed("permanent", code="RUN_TERMINAL")
    check_decision(given=given, when=gone, then=[gone])


def test_a_start_before_its_create_is_recorded() -> None:
    check_decision(given=[submitted()], when=started(), then=[started()])


@pytest.mark.parametrize(
    ("given", "when"),
    [
        ([submitted(), started()], started()),
        ([*RUNNING, errored()], started()),
        ([submitted()], started(1)),
    ],
    ids=["twice", "after the end", "of an attempt that nobody asked for"],
)
def test_a_start_out_of_place_is_refused(given: list[Fact], when: Fact) -> None:
    check_decision(given=given, when=when, then=Conflict)


@pytest.mark.parametrize("kind", ["transient", "permanent", "conflict"])
def test_a_failed_create_is_recorded(kind: e.CreateFailure) -> None:
    check_decision(given=[submitted()], when=create_failed(kind), then=[create_failed(kind)])


def test_a_failed_create_of_what_was_created_is_refused() -> None:
    check_decision(given=RUNNING, when=create_failed("permanent"), then=Conflict)


# --- what an instance says ------------------------------------------------------------------------

LINES = e.RunLog(
    instance_id=instance(),
    attempt=0,
    n=0,
    count=1,
    dropped=0,
    lines=e.Seal(sd=("x" * 43,), bytes=2),
)
PROGRESS = e.RunProgress(instance_id=instance(), attempt=0, n=0, done=1)
FENCE = e.InstanceOutputFenced(instance_id=instance(), attempt=0, current_attempt=1, what="log")
REPORTS: list[tuple[RunEvent, str]] = [
    (completed(), "completed"),
    (errored(), "errored"),
    (LINES, "log"),
    (PROGRESS, "progress"),
    (child(), "child"),
    (wait(), "wait"),
]


@pytest.mark.parametrize("fact", [fact for fact, _ in REPORTS])
def test_the_current_instance_is_heard(fact: RunEvent) -> None:
    check_decision(given=RUNNING, when=Said(fact), then=[fact])


@pytest.mark.parametrize(("fact", "what"), REPORTS, ids=[what for _, what in REPORTS])
@pytest.mark.parametrize(
    ("given", "host", "current"),
    [
        (RETRIED, HOST, 1),
        (RUNNING, "n-2", 0),
        (ENDED, HOST, 0),
        ([*RUNNING, errored("platform_reset")], HOST, 0),
    ],
    ids=["superseded", "another host", "after the run's end", "after its own end"],
)
def test_INV_22_C013_what_others_say_is_fenced_and_kept_once(
    fact: RunEvent, what: str, given: list[Fact], host: str, current: int
) -> None:
    """Everything it says is refused with the current attempt, so that it can stop."""
    fence = e.InstanceOutputFenced(
        instance_id=instance(), attempt=0, current_attempt=current, what=what
    )
    check_decision(
        given=given,
        when=Said(fact, host=host),
        then=StaleAttempt,
        keeps=fence,
        code="STALE_ATTEMPT",
    )


def test_a_fence_names_both_attempts() -> None:
    story = Story(*RETRIED)
    refused = decide(story.command(Said(completed())), story.state, story.at)
    assert isinstance(refused, Rejected)
    assert refused.error.details == {"attempt": 0, "currentAttempt": 1}


def test_an_instance_of_another_run_is_not_found() -> None:
    fact = replace(completed(), instance_id="run-of-others")
    check_decision(given=RUNNING, when=fact, then=NotFound)


def test_C010_only_a_live_instance_is_lost() -> None:
    """One that reported its end before the finder came is not lost as well."""
    check_decision(given=RUNNING, when=lost(), then=[lost()])
    check_decision(given=[*RUNNING, errored("platform_reset")], when=lost(), then=[])
    check_decision(given=[submitted()], when=lost(), then=[])


def test_a_terminate_is_settled_once() -> None:
    asked: list[Fact] = [*RUNNING, cancel()]
    check_decision(given=asked, when=terminated(), then=[terminated()])
    check_decision(given=RUNNING, when=terminated(), then=[])


# --- signals, waits, timers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [[submitted()], RUNNING, [*RUNNING, errored("platform_reset")], [*RUNNING, cancel()]]
)
def test_a_run_takes_signals_until_it_has_ended(given: list[Fact]) -> None:
    check_decision(given=given, when=signal(), then=[signal()])


def test_C011_a_signal_after_the_end_is_refused() -> None:
    check_decision(given=ENDED, when=signal(), then=RunTerminal)


TIMED: list[tuple[list[Fact], e.TimerPurpose, int]] = [
    ([*RUNNING, wait(until=T0 + 500)], "wait", 500 - 3),
    ([*RUNNING, wait(kind="sleep", until=T0 + 500)], "wait", 500 - 3),
    ([*RUNNING, cancel()], "cancel_grace", 10_000),
    ([submitted(timeout_ms=500), created()], "timeout", 500),
]


@pytest.mark.parametrize(("given", "purpose", "due"), TIMED)
def test_a_timer_fires_when_it_is_due_and_no_millisecond_before(
    given: list[Fact], purpose: e.TimerPurpose, due: int
) -> None:
    """By the log's clock, which may stand behind that of the process that asks."""
    early = Later(due - 1, fired(purpose))
    check_decision(given=given, when=early, then=IntentNotFound, code="NOT_DUE")
    story = Story(*given)
    decision = decide(story.command(Later(due, fired(purpose))), story.state, story.at)
    assert isinstance(decision, tuple)
    assert [type(fact) for fact in decision] == [e.TimerFired]


@pytest.mark.parametrize(
    ("given", "when"),
    [
        ([*RUNNING, wait(until=T0 + 500), signal()], fired("wait")),
        ([*RUNNING, cancel(), completed()], fired("cancel_grace")),
        ([submitted(timeout_ms=500), created(), errored("platform_reset")], fired("timeout")),
        ([submitted(timeout_ms=500), created(), completed()], fired("timeout")),
    ],
    ids=["wait ended", "run ended", "instance ended", "completed"],
)
def test_a_timer_of_what_has_ended_does_nothing(given: list[Fact], when: RunEvent) -> None:
    check_decision(given=given, when=Later(100_000, when), then=[])


# --- cancel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [[submitted()], RUNNING, [*RUNNING, wait()], [*RUNNING, errored("platform_reset")]],
    ids=["requested", "running", "waiting", "in a retry"],
)
def test_C056_a_run_that_has_not_ended_can_be_cancelled(given: list[Fact]) -> None:
    check_decision(given=given, when=cancel(), then=[cancel()])


def test_C056_a_second_cancel_records_nothing() -> None:
    check_decision(given=[*RUNNING, cancel()], when=cancel("c2"), then=[])
    check_decision(given=[submitted(), cancel()], when=cancel("c2"), then=[])


def test_C056_a_cancel_after_the_end_is_refused_and_kept_once() -> None:
    check_decision(
        given=ENDED, when=cancel(), then=RunTerminal, keeps=e.RunCancelRefused(status="completed")
    )
    story = Story(*ENDED)
    story.append(story.command(cancel()), [e.RunCancelRefused(status="completed")])
    refused = decide(story.command(cancel("c2")), story.state, story.at)
    assert isinstance(refused, Rejected)
    assert refused.record is None


# --- children -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[*RUNNING, cancel()], ENDED], ids=["cancelling", "completed"])
def test_C005_a_parent_that_ends_starts_no_child(given: list[Fact]) -> None:
    check_decision(given=given, when=child(), then=RunTerminal, code="PARENT_TERMINAL")


def test_INV_62_the_first_terminal_of_a_child_stands() -> None:
    """A second one is kept as a conflict, and settles the intent it came from."""
    given = [*RUNNING, child()]
    check_decision(given=given, when=child_ended(), then=[child_ended()])
    check_decision(given=RUNNING, when=child_ended(), then=[child_ended()])
    conflict = e.ChildTerminalConflict(event_key="k", child_run_id=child_ended().child_run_id)
    check_decision(
        given=[*given, child_ended()], when=child_ended(status="failed"), then=[conflict]
    )


def test_a_childs_end_is_recorded_whatever_the_parent_does() -> None:
    check_decision(given=[*RUNNING, child(), completed()], when=child_ended(), then=[child_ended()])


def test_a_failed_child_submit_is_recorded_even_if_a_signal_ended_the_child() -> None:
    """It settles the intent."""
    failed = e.ChildSubmitFailed(child_key="k", child_run_id="c", code="PLAY_NOT_FOUND")
    by_signal = signal(name="integration_event", key="k")
    check_decision(given=[*RUNNING, child(), by_signal], when=failed, then=[failed])
    check_decision(given=RUNNING, when=failed, then=[])


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fact", [signal(), wait(), LINES, PROGRESS, child()])
def test_a_run_holds_100_000_events(fact: RunEvent) -> None:
    """What users add is refused at the limit; what ends a run is not."""
    story = Story(*RUNNING)
    assert story.state is not None
    full = replace(story.state, run=replace(story.state.run, version=EVENTS_MAX))
    refused = decide(story.command(fact), full, story.at)
    assert isinstance(refused, Rejected)
    assert refused.error.code == "RUN_TOO_LARGE"
    for last in (completed(), cancel(), errored(), lost()):
        assert decide(story.command(last), full, story.at) == (last,)


def test_a_run_has_10_000_children() -> None:
    story = Story(*RUNNING)
    assert story.state is not None
    run = replace(story.state.run, children=Counts(total=CHILDREN_MAX))
    refused = decide(story.command(child()), replace(story.state, run=run), story.at)
    assert isinstance(refused, Rejected)
    assert isinstance(refused.error, RunTooLarge)


# --- what is no fact ------------------------------------------------------------------------------


def test_a_choice_is_never_decided() -> None:
    """Only react makes choices: a command that carries one is a mistake of ours."""
    story = Story(*RUNNING)
    choice = e.RunCompleted(attempt=0)
    with pytest.raises(AssertionError, match="only react makes it"):
        decide(Command(stream=story.stream, fact=choice, actor="x"), story.state, 0)
    with pytest.raises(AssertionError, match="is no fact without a cause"):
        fact_id(Command(stream=story.stream, fact=choice, actor="x"), choice)


def test_every_event_of_a_run_has_its_case() -> None:
    """An event nobody thought of is found by mypy, and here."""
    source = inspect.getsource(decide_module.decide)
    for kind in get_args(RunEvent):
        assert f"e.{kind.__name__}" in source, kind


def test_the_natural_key_of_a_fact_never_changes() -> None:
    """A log of the first day is read for ever (CONTRACTS A.4)."""
    stream = "run/" + RUN
    command = Command(stream=stream, fact=submitted(), actor="x", request="r")
    outcome = replace(command, cause="f" * 32)
    labels: list[tuple[Command, RunEvent, str]] = [
        (command, submitted(), "submit"),
        (command, cancel("c1"), "cancel/c1"),
        (outcome, e.RunCancelRefused(status="failed"), "cancel-refused"),
        (command, signal(1), "signal/s1"),
        (outcome, started(), f"started/{instance()}"),
        (command, completed(), f"ended/{instance()}"),
        (command, errored(), f"ended/{instance()}"),
        (command, lost(), f"ended/{instance()}"),
        (command, child("k"), "child/k"),
        (command, wait("go", 2), "wait/signal/go/2"),
        (command, LINES, f"log/{instance()}/0"),
        (command, PROGRESS, f"progress/{instance()}/0"),
        (command, FENCE, f"fenced/{instance()}/log"),
        (command, e.EffectResumed(intent_id="i"), "resume/i/r"),
    ]
    for said, fact, label in labels:
        assert fact_id(said, fact) == event_id(stream, label), label
    for fact in (submitted(), created(), create_failed("permanent"), loaded(), terminated()):
        assert fact_id(outcome, fact) == event_id("f" * 32, "done")
    assert fact_id(outcome, create_failed(tries=3)) == event_id("f" * 32, "try/3")
