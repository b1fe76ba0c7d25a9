"""The fold: total over the catalogue, deaf to what is not allowed, and pure."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from ledger import events as e
from ledger.codec import Recorded
from ledger.errors import CorruptStream
from ledger.events import Event, RunEvent
from projections import rows as rows_module
from projections import run as run_module
from projections.rows import project
from projections.run import AFTER_THE_END, charge, evolve, fold
from projections.state import Used
from tests.given import (
    RUN,
    Fact,
    Later,
    Story,
    cancel,
    child,
    child_ended,
    completed,
    created,
    errored,
    fired,
    instance,
    loaded,
    lost,
    record,
    sealed,
    signal,
    started,
    submitted,
    terminated,
    wait,
)

RUNNING: list[Fact] = [submitted(), created()]
LONG: list[Fact] = [
    *RUNNING,
    child("a"),
    child("b"),
    wait(),
    signal(),
    lost(),
    loaded(),
    created(1),
    child_ended("a"),
    wait("stop", until=10**13),
    cancel(),
    errored("platform_reset", 1),
]


def corrupts(story: Story, event: RunEvent, why: str) -> None:
    """A stored event that no rule allows stops this stream, and says where and why."""
    n = len(story.events) + 1
    with pytest.raises(CorruptStream, match=why) as caught:
        evolve(story.state, record(event, n, n, cause="f" * 32))
    assert f"{story.stream} v{n} (@{n})" in caught.value.message


def test_every_event_of_a_run_has_its_case_in_both_projections() -> None:
    for function in (run_module.evolve, rows_module.project_parts):
        source = inspect.getsource(function)
        for kind in get_args(RunEvent):
            assert f"e.{kind.__name__}" in source, (function.__name__, kind)


@pytest.mark.parametrize(
    ("given", "event", "why"),
    [
        ([submitted()], submitted(), "the run was submitted before"),
        ([submitted()], e.RunLaunchStatePut(params_bytes=1, externalized=False, expires_at=1),
         "launch state was put before"),
        ([submitted()], e.InstanceCreateRequested(instance_id="x", attempt=0, engine="local"),
         "attempt 1 was expected"),
        ([submitted()], e.InstanceCreateRequested(instance_id="x", attempt=2, engine="local"),
         "attempt 1 was expected"),
        (RUNNING, created(), "the instance was created before"),
        (RUNNING, started(), "was started or has ended before"),
        ([submitted()], created(1), "attempt 1 was never requested"),
        ([*RUNNING, errored("platform_reset")], lost(), "the instance ended before, errored"),
        ([*RUNNING, child(), child_ended()], child_ended(), "had ended before, completed"),
        ([*RUNNING, child()], child(), "was requested before"),
        (RUNNING, e.ChildSubmitFailed(child_key="k", child_run_id="c", code="X"),
         "was never requested"),
        ([*RUNNING, wait()], wait(), "was started before"),
        (RUNNING, e.RunWaitEnded(wait_id="signal/go/0", outcome="timeout"), "is not open"),
        ([*RUNNING, wait()],
         e.RunWaitEnded(wait_id="signal/go/0", outcome="signal", signal_id="s9"),
         "is not there to take"),
        ([*RUNNING, cancel()], cancel("c2"), "cancel was asked for before"),
        ([*RUNNING, cancel()], e.RunCompleted(attempt=0), "a cancelling run cannot complete"),
    ],
)  # fmt: skip
def test_a_stored_event_that_is_not_allowed_stops_the_stream(
    given: list[Fact], event: RunEvent, why: str
) -> None:
    corrupts(Story(*given), event, why)


def test_a_run_begins_with_its_submit_as_version_1() -> None:
    with pytest.raises(CorruptStream, match="a run begins with"):
        evolve(None, record(cancel(), 1, 1))
    with pytest.raises(CorruptStream, match="a run begins with"):
        evolve(None, record(submitted(), 2, 2))


def test_INV_69_versions_are_gapless_within_a_run() -> None:
    """A gap or a repeat is no stream of ours; positions may have others between them."""
    story = Story(*RUNNING)
    n = len(story.events)
    for version in (n, n + 2):
        with pytest.raises(CorruptStream, match=f"version {n + 1} was expected"):
            evolve(story.state, record(signal(), 99, version))
    assert evolve(story.state, record(signal(), 99, n + 1)).run.position == 99


def test_INV_01_a_create_before_its_launch_state_is_corrupt() -> None:
    first = evolve(None, record(submitted(), 1, 1))
    asked = e.InstanceCreateRequested(instance_id=instance(), attempt=0, engine="local")
    with pytest.raises(CorruptStream, match="no launch state stands before it"):
        evolve(first, record(asked, 2, 2))


# --- the end --------------------------------------------------------------------------------------

ENDS: list[list[Fact]] = [
    [*RUNNING, completed()],
    [*RUNNING, errored()],
    [*RUNNING, cancel(), terminated()],
]


def samples() -> dict[type[Event], RunEvent]:
    """Returns one event of each type that a run of `RUNNING` may have had next."""
    made: list[RunEvent] = [
        submitted(), cancel(), e.RunCancelRefused(status="failed"), wait(), signal(), child("z"),
        created(), started(), completed(), errored(), lost(), terminated(), loaded(),
        child_ended("z"),
        e.RunLaunchStatePut(params_bytes=1, externalized=False, expires_at=1),
        e.RunCompleted(attempt=0), e.RunCancelled(attempt=0),
        e.RunFailed(attempt=0, error_class="unknown", code="X"),
        e.RunWaitEnded(wait_id="signal/go/0", outcome="timeout"),
        e.RunLog(instance_id=instance(), attempt=0, n=0, count=1, dropped=0, lines=sealed()),
        e.RunProgress(instance_id=instance(), attempt=0, n=0, done=1),
        e.InstanceCreateRequested(instance_id=instance(1), attempt=1, engine="local"),
        e.InstanceCreateFailed(
            instance_id=instance(), attempt=0, kind="permanent", try_number=1, code="X"
        ),
        e.InstanceTerminateRequested(instance_id=instance(), attempt=0, reason="orphan"),
        e.InstanceOutputFenced(instance_id=instance(), attempt=0, current_attempt=0, what="log"),
        e.RetryDecided(failed_instance_id=instance(), failed_attempt=0, error_class="unknown",
                       retry=False, reason="x", budget="none", used=0, limit=0),
        e.RetryParamsRequested(failed_instance_id=instance()),
        e.RetryParamsFailed(failed_instance_id=instance(), code="X"),
        e.RetryClaimed(failed_instance_id=instance(), failed_attempt=0, attempt=1,
                       instance_id=instance(1), budget="retry", reason="platform_reset"),
        e.RetryStarted(attempt=1, instance_id=instance(1)),
        e.RetryDenied(failed_instance_id=instance(), reason="x"),
        e.RetryAbandoned(attempt=1, reason="x"),
        e.ChildSubmitFailed(child_key="z", child_run_id="c", code="X"),
        e.ChildTerminalConflict(event_key="z"),
        e.ChildCancelRequested(child_key="z", child_run_id="c", reason="x"),
        e.ChildCancelDelivered(child_key="z", answer="x"),
        e.TimerFired(purpose="wait", armed_by="x"),
        e.EffectFailed(intent_id="i", kind="timer", try_number=1, code="X",
                       error_class="permanent"),
        e.InstanceMapped(instance_id=instance(), attempt=0, mapped_id="run-abc"),
        e.RetryClaimRequested(failed_instance_id=instance(), failed_attempt=0, max_attempts=1),
        e.SessionStored(session_count=1, expires_at=1, sessions=sealed()),
        e.SessionRevokeRequested(session_count=1),
        e.SessionRevoked(session_count=1),
        e.EffectParked(intent_id="i", tries=1), e.EffectResumed(intent_id="i"),
    ]  # fmt: skip
    return {type(event): event for event in made}


def test_the_samples_are_every_event_of_a_run() -> None:
    assert set(samples()) == set(get_args(RunEvent))


@pytest.mark.parametrize("given", ENDS, ids=["completed", "failed", "cancelled"])
@pytest.mark.parametrize("kind", get_args(RunEvent), ids=lambda kind: kind.__name__)
def test_C011_INV_31_what_is_no_cleanup_may_not_follow_the_end(
    given: list[Fact], kind: type[RunEvent]
) -> None:
    """The rule sits in the fold: no reader can meet a run that ended twice or went on."""
    story = Story(*given)
    if kind not in AFTER_THE_END:
        corrupts(story, samples()[kind], f"the run is {story.status}")


CLEANUPS: list[RunEvent] = [
    child_ended("k"),
    terminated(),
    samples()[e.InstanceTerminateRequested],
    samples()[e.InstanceOutputFenced],
    e.ChildTerminalConflict(event_key="k"),
    e.ChildCancelRequested(child_key="k", child_run_id="c", reason="x"),
    e.ChildCancelDelivered(child_key="k", answer="x"),
    e.TimerFired(purpose="wait", armed_by="x"),
    e.RunCancelRefused(status="completed"),
    loaded(),
    samples()[e.EffectParked],
]


@pytest.mark.parametrize("event", CLEANUPS, ids=lambda event: type(event).__name__)
def test_C011_the_end_stays_as_it_was_whatever_may_follow(event: RunEvent) -> None:
    """Status, result and time of the end are those of the first terminal event."""
    story = Story(*RUNNING, child("k"), completed())
    before = story.state
    assert before is not None
    n = len(story.events) + 1
    after = evolve(before, record(event, n, n, at=10**13, cause="f" * 32)).run
    assert (after.status, after.result, after.ended_at, after.attempt) == (
        before.run.status,
        before.run.result,
        before.run.ended_at,
        before.run.attempt,
    )


# --- split, order, purity -------------------------------------------------------------------------


def test_INV_89_a_fold_split_anywhere_is_the_same() -> None:
    story = Story(*LONG)
    for n in range(1, len(story.events)):
        assert fold(story.events[n:], fold(story.events[:n])) == story.state


def test_an_old_state_stays_as_it_was() -> None:
    """The maps are persistent: what a rule holds does not move under it."""
    story = Story(*RUNNING)
    states = [story.state]
    copies = [fold(story.events)]
    for fact in LONG[2:]:
        story.tell(fact)
        states.append(story.state)
        copies.append(fold(story.events))
    assert states == copies


def test_the_counts_of_children_are_those_of_the_map() -> None:
    story = Story(*LONG)
    assert story.state is not None
    kids, counts = story.state.children, story.state.run.children
    assert counts.total == len(kids) == 2
    assert counts.running == sum(kid.status == "requested" for kid in kids.values())
    assert counts.completed == sum(kid.status == "completed" for kid in kids.values())


def test_a_state_keeps_untaken_signals_and_open_waits_only() -> None:
    """The others are rows that no rule needs, so a long run stays small."""
    story = Story(*RUNNING)
    for n in range(20):
        story.tell(signal(n))
        story.tell(wait("go", n))
    assert story.state is not None
    assert len(story.state.signals) == len(story.state.waits) == 0
    assert story.state.run.signals == 20


def test_charging_a_budget_moves_that_one() -> None:
    used = Used(1, 1, 1, 1)
    assert charge(used, "retry") == Used(2, 1, 1, 1)
    assert charge(used, "lost") == Used(1, 2, 1, 1)
    assert charge(used, "restart") == Used(1, 1, 2, 1)
    assert charge(used, "play") == Used(1, 1, 1, 2)
    assert charge(used, "none") == used


# --- the outbox as a projection -------------------------------------------------------------------


def outbox(story: Story) -> dict[str, tuple[str, int]]:
    """Folds the outbox rows of a story: kind and due time by the type of the intent."""
    rows: dict[object, tuple[str, int] | None] = {}
    before = None
    for recorded in story.events:
        after = evolve(before, recorded)
        for change in project(recorded, before, after):
            if change.table != "outbox":
                continue
            key = change.key[0]
            if change.row is None:
                rows[key] = None
            elif isinstance(change.row, tuple):
                rows[key] = (str(change.row[3]), int(change.row[6]))  # type: ignore[arg-type]
        before = after
    by_id = {r.id: r for r in story.events}
    return {by_id[str(key)].type: row for key, row in rows.items() if row is not None}


def kinds(story: Story) -> dict[str, str]:
    return {type_: kind for type_, (kind, _) in outbox(story).items()}


def test_an_intent_is_open_until_its_outcome() -> None:
    story = Story(submitted())
    assert kinds(story) == {"instance.create_requested": "create"}
    story.tell(created())
    assert kinds(story) == {}
    story.tell(errored("platform_reset"))
    assert kinds(story) == {"retry.params_requested": "params"}
    story.tell(loaded())
    assert kinds(story) == {"instance.create_requested": "create"}


@pytest.mark.parametrize(
    ("facts", "opened", "closed"),
    [
        ([wait(until=10**13)], "timer", [signal()]),
        ([wait(until=10**13)], "timer", [completed()]),
        ([cancel()], "timer", [completed()]),
        ([cancel()], "terminate", [completed()]),
        ([cancel()], "terminate", [errored()]),
        ([cancel()], "terminate", [lost()]),
        ([cancel()], "terminate", [terminated()]),
        ([cancel()], "timer", [Later(10_000, fired("cancel_grace"))]),
        ([child()], "child_submit", [e.ChildSubmitFailed(
            child_key="k", child_run_id="c", code="X")]),
    ],
)  # fmt: skip
def test_what_has_ended_leaves_no_row(facts: list[Fact], opened: str, closed: list[Fact]) -> None:
    """Timers of ended waits, instances and runs; the request to end what has ended."""
    story = Story(*RUNNING, *facts)
    assert opened in kinds(story).values()
    for fact in closed:
        story.tell(fact)
    assert opened not in kinds(story).values()


def test_the_timeout_of_an_instance_ends_with_it() -> None:
    story = Story(submitted(timeout_ms=500), created())
    assert outbox(story)["instance.started"] == ("timer", story.at + 500)
    story.tell(errored("platform_reset"))
    assert "instance.started" not in kinds(story)


def test_the_end_of_a_child_is_to_be_told() -> None:
    story = Story(submitted(parent="p"), created(), completed())
    assert kinds(story) == {"run.completed": "child_terminal"}
    alone = Story(submitted(), created(), completed())
    assert kinds(alone) == {}


def test_a_paused_retry_is_due_when_its_pause_is_over() -> None:
    given: list[Fact] = [submitted(play_retries=1), created(), errored("play_retry", again_in=700)]
    story = Story(*given, loaded())
    assert outbox(story)["instance.create_requested"] == ("create", story.at + 700)


def test_a_recorded_event_names_its_stream() -> None:
    recorded: Recorded[Event] = Story(*RUNNING).events[-1]
    assert (recorded.stream, recorded.version, recorded.position) == ("run/" + RUN, 5, 5)
