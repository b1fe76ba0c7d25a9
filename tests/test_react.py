"""What follows from an event: launch, starts in both orders, results, signals, waits, timers."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from handlers import react as react_module
from handlers.retry import react_to_end
from ledger import events as e
from ledger.events import RunEvent
from tests.given import (
    DAY,
    HOST,
    T0,
    Fact,
    Later,
    Said,
    Story,
    cancel,
    check_reaction,
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
    sealed,
    signal,
    started,
    submitted,
    terminated,
    wait,
)

RUNNING: list[Fact] = [submitted(), created()]


def ended_wait(key: str = "go", ordinal: int = 0, signal_id: str = "s1") -> e.RunWaitEnded:
    return e.RunWaitEnded(wait_id=f"signal/{key}/{ordinal}", outcome="signal", signal_id=signal_id)


def timed_out(kind: str = "signal", key: str = "go", ordinal: int = 0) -> e.RunWaitEnded:
    return e.RunWaitEnded(wait_id=f"{kind}/{key}/{ordinal}", outcome="timeout")


def terminate(
    reason: e.TerminateReason, attempt: int = 0, host: str | None = HOST
) -> e.InstanceTerminateRequested:
    return e.InstanceTerminateRequested(
        instance_id=instance(attempt), attempt=attempt, reason=reason, host=host
    )


# --- launch ---------------------------------------------------------------------------------------


def test_INV_01_launch_state_stands_before_the_create_is_asked_for() -> None:
    """One append: no reader sees the intent without what it needs."""
    check_reaction(
        given=[],
        when=submitted(),
        then=[
            e.RunLaunchStatePut(params_bytes=6, externalized=False, expires_at=T0 + 1 + 7 * DAY),
            e.InstanceCreateRequested(instance_id=instance(), attempt=0, engine="local"),
        ],
    )


@pytest.mark.parametrize(("after", "externalized"), [(5, True), (6, False), (7, False)])
def test_INV_06_params_are_inline_up_to_the_threshold(after: int, externalized: bool) -> None:
    """Equal is inline; the size is that of the canonical JSON in bytes (INV-05)."""
    story = Story(submitted(externalize_after_bytes=after))
    put = story.all(e.RunLaunchStatePut)
    assert [(p.externalized, p.params_bytes) for p in put] == [(externalized, 6)]


# --- created and started, in both orders ----------------------------------------------------------


@pytest.mark.parametrize(
    "facts",
    [[created(host=None), started()], [started(), created(host=None)]],
    ids=["created first", "started first"],
)
def test_INV_08_running_is_shown_when_both_are_recorded(facts: list[Fact]) -> None:
    """An engine may report them in either order."""
    story = Story(submitted())
    seen = []
    for fact in facts:
        story.tell(fact)
        seen.append(story.status)
    assert seen == ["submitted", "running"]
    assert story.types[3:] == [
        r.type for r in story.events[3:] if not r.type.startswith("retry")
    ]  # nothing follows


def test_INV_08_a_local_instance_runs_with_its_create() -> None:
    story = Story(*RUNNING)
    assert story.types[3:] == ["instance.created", "instance.started"]
    assert story.status == "running"


@pytest.mark.parametrize(
    "facts",
    [[created(1, host=None), started(1)], [started(1), created(1, host=None)]],
    ids=["created first", "started first"],
)
def test_a_retry_has_started_when_both_are_recorded(facts: list[Fact]) -> None:
    story = Story(submitted(), created(host=None), started(), errored("platform_reset"), loaded())
    story.tell(facts[0])
    assert story.all(e.RetryStarted) == []
    story.tell(facts[1])
    assert story.all(e.RetryStarted) == [e.RetryStarted(attempt=1, instance_id=instance(1))]


def test_an_instance_that_appears_after_the_end_is_asked_to_end() -> None:
    """The engine had it in hand when the run was cancelled."""
    check_reaction(
        given=[submitted(), cancel()],
        when=created(host=None),
        then=[terminate("orphan", host=None)],
    )


def test_an_instance_that_appears_while_the_run_is_cancelling_is_asked_to_end() -> None:
    """It had started, but nobody knew yet that it was created; so the cancel ended the run."""
    story = Story(submitted(), started(), cancel(), created(host=None))
    assert story.status == "cancelled"
    assert story.all(e.InstanceTerminateRequested) == [terminate("orphan", host=None)]


def test_a_create_behind_its_instances_end_changes_nothing() -> None:
    story = Story(submitted(), started(), completed())
    assert story.status == "completed"
    check_reaction(given=[submitted(), started(), completed()], when=created(host=None), then=[])


def test_a_failed_create_behind_its_instances_end_changes_nothing() -> None:
    """The retry of what ended goes on; the create's failure is not a second reason."""
    given: list[Fact] = [submitted(), started(), errored("platform_reset")]
    for kind in ("permanent", "transient"):
        check_reaction(given=given, when=Later(3_600_000, create_failed(kind)), then=[])


# --- results --------------------------------------------------------------------------------------


def test_a_result_completes_the_run() -> None:
    check_reaction(
        given=RUNNING,
        when=completed(),
        then=[
            e.RunCompleted(attempt=0, instance_id=instance(), result=sealed("result"), parent=None)
        ],
    )


def test_the_end_of_a_child_says_where_it_has_to_be_told() -> None:
    """Parent and key ride in the terminal event, for completed, failed and cancelled."""
    parent = e.Parent(run_id="p", child_key="k")
    begun: list[Fact] = [submitted(parent="p"), created()]
    ends: list[list[Fact]] = [
        [*begun, completed()],
        [*begun, errored()],
        [*begun, cancel(), terminated()],
    ]
    for facts in ends:
        story = Story(*facts)
        (end,) = story.all(e.RunCompleted, e.RunFailed, e.RunCancelled)
        assert end.parent == parent


def test_a_user_error_fails_the_run_once() -> None:
    story = Story(*RUNNING, errored())
    assert story.types[5:] == ["instance.errored", "retry.decided", "run.failed"]
    assert story.all(e.RunFailed) == [
        e.RunFailed(
            attempt=0,
            instance_id=instance(),
            error_class="user_error",
            code="BOOM",
            error=sealed("boom"),
        )
    ]


def test_an_instance_that_was_ended_from_outside_fails_the_run() -> None:
    """Terminated for a timeout is `engine_timeout`; for no reason of ours it is unknown."""
    story = Story(submitted(timeout_ms=10), created(), Later(10, fired("timeout")), terminated())
    (failed,) = story.all(e.RunFailed)
    assert (failed.error_class, failed.code) == ("engine_timeout", "ENGINE_TIMEOUT")


# --- signals and waits (the rule of one wait, one signal) -----------------------------------------


def test_C002_a_signal_before_its_wait_is_taken_when_the_wait_comes() -> None:
    check_reaction(given=[*RUNNING, signal()], when=wait(), then=[ended_wait()])


def test_a_signal_ends_the_oldest_open_wait_of_its_key() -> None:
    """Others of the same key, and waits for another, stay open."""
    given = [*RUNNING, wait("stop"), wait("go", 0), wait("go", 1)]
    check_reaction(given=given, when=signal(), then=[ended_wait("go", 0)])


def test_signals_are_taken_in_the_order_they_came() -> None:
    story = Story(*RUNNING, signal(1), signal(2), signal(3), wait("go", 0), wait("go", 1))
    assert story.all(e.RunWaitEnded) == [ended_wait("go", 0, "s1"), ended_wait("go", 1, "s2")]


def test_a_wait_that_timed_out_took_no_signal() -> None:
    """A play that polls: waits 0 and 1 run out, the first signal is for wait 2."""
    story = Story(*RUNNING)
    for ordinal in (0, 1):
        story.tell(wait("go", ordinal, until=story.at + 10))
        story.tell(Later(20, fired("wait")))
    story.tell(wait("go", 2, until=story.at + 1000))
    story.tell(signal())
    assert story.all(e.RunWaitEnded) == [
        timed_out(ordinal=0),
        timed_out(ordinal=1),
        ended_wait("go", 2, "s1"),
    ]


def test_a_signal_between_two_polls_is_for_the_next() -> None:
    story = Story(*RUNNING, wait("go", 0, until=T0 + 10), Later(20, fired("wait")), signal())
    story.tell(wait("go", 1))
    assert story.all(e.RunWaitEnded) == [timed_out(ordinal=0), ended_wait("go", 1, "s1")]


def test_a_wait_whose_deadline_has_passed_ends_at_once() -> None:
    """A signal that is there goes first."""
    check_reaction(given=RUNNING, when=wait(until=T0), then=[timed_out()])
    check_reaction(given=[*RUNNING, signal()], when=wait(until=T0), then=[ended_wait()])
    check_reaction(given=RUNNING, when=wait(kind="sleep", until=T0), then=[timed_out("sleep")])


def test_a_sleep_takes_no_signal() -> None:
    check_reaction(given=[*RUNNING, signal()], when=wait(kind="sleep", until=T0 + DAY), then=[])
    story = Story(*RUNNING, wait(kind="sleep", until=T0 + DAY), signal())
    assert story.all(e.RunWaitEnded) == []


def test_INV_68_C010_a_signal_in_a_retry_pause_reaches_the_next_attempt() -> None:
    """With no instance alive it ends the wait of the dead one; the new one finds it ended."""
    story = Story(*RUNNING, wait(), errored("platform_reset"))
    story.tell(signal())
    assert story.all(e.RunWaitEnded) == [ended_wait()]
    story.tell(loaded())
    story.tell(created(1))
    assert story.types[-3:] == ["instance.created", "instance.started", "retry.started"]


def test_an_event_key_is_what_a_wait_names() -> None:
    check_reaction(
        given=[*RUNNING, wait("order-7")],
        when=signal(name="paid", key="order-7"),
        then=[ended_wait("order-7")],
    )


# --- children's terminals -------------------------------------------------------------------------


def test_INV_67_an_integration_event_sets_the_terminal_in_the_same_append() -> None:
    given = [*RUNNING, child()]
    came = signal(name="integration_event", key="k")
    terminal = e.ChildTerminalSet(event_key="k", data=sealed("s1"), source="signal")
    check_reaction(given=given, when=came, then=[terminal])
    story = Story(*given)
    assert [r.type for r in story.tell(came)] == ["signal.received", "child.terminal_set"]


def test_INV_62_a_second_integration_event_is_a_conflict() -> None:
    given = [*RUNNING, child(), signal(1, "integration_event", "k")]
    check_reaction(
        given=given,
        when=signal(2, "integration_event", "k"),
        then=[
            e.ChildTerminalConflict(event_key="k", child_run_id=child("k").child_run_id),
        ],
    )
    story = Story(*given, signal(2, "integration_event", "k"))
    assert story.state is not None
    assert story.state.children["k"].result == sealed("s1")


def test_an_integration_event_without_a_key_is_a_signal_like_any() -> None:
    check_reaction(given=RUNNING, when=signal(name="integration_event"), then=[])


@pytest.mark.parametrize("by", ["child", "signal"])
def test_C004_an_early_terminal_is_joined_by_its_request(by: str) -> None:
    """The end came before the parent asked; asking again finds it."""
    early: Fact = child_ended() if by == "child" else signal(name="integration_event", key="k")
    story = Story(*RUNNING, early)
    assert story.state is not None
    assert story.state.children["k"].play_name is None
    story.tell(child())
    joined = story.state.children["k"]
    assert (joined.status, joined.play_name) == ("completed", "shop:pack")
    assert story.state.run.children.total == 1


def test_one_signal_can_end_a_child_and_a_wait() -> None:
    story = Story(*RUNNING, child(), wait("k"))
    came = story.tell(signal(name="integration_event", key="k"))
    assert [r.type for r in came] == ["signal.received", "child.terminal_set", "run.wait_ended"]


# --- timeouts -------------------------------------------------------------------------------------


def test_a_slow_instance_is_asked_to_end_by_its_timeout_alone() -> None:
    given: list[Fact] = [submitted(timeout_ms=500), created()]
    check_reaction(given=given, when=Later(500, fired("timeout")), then=[terminate("timeout")])


def test_a_timeout_ends_an_instance_whose_create_is_not_recorded_yet() -> None:
    """It started, so it can be asked to end; the timer does not fire a second time."""
    given: list[Fact] = [submitted(timeout_ms=500), started()]
    check_reaction(
        given=given, when=Later(500, fired("timeout")), then=[terminate("timeout", host=None)]
    )


def test_an_instance_that_completes_after_its_timeout_has_completed() -> None:
    """The first terminal event wins; asking is not ending."""
    story = Story(submitted(timeout_ms=5), created(), Later(5, fired("timeout")), completed())
    assert story.status == "completed"


# --- effects --------------------------------------------------------------------------------------


def failed_try(n: int, error_class: e.CreateFailure = "transient") -> e.EffectFailed:
    return e.EffectFailed(
        intent_id="i" * 32, kind="child_cancel", try_number=n, code="X", error_class=error_class
    )


@pytest.mark.parametrize(
    ("fact", "parks"),
    [
        (failed_try(1), False),
        (failed_try(9), False),
        (failed_try(10), True),
        (failed_try(11), False),
        (failed_try(20), True),
        (failed_try(1, "permanent"), True),
    ],
)
def test_an_effect_is_parked_after_ten_tries_or_at_once(fact: e.EffectFailed, parks: bool) -> None:
    """Ten more after it was resumed."""
    parked = [e.EffectParked(intent_id="i" * 32, tries=fact.try_number)] if parks else []
    check_reaction(given=RUNNING, when=fact, then=parked)


# --- nothing follows ------------------------------------------------------------------------------


def test_nothing_follows_from_what_only_informs() -> None:
    lines = e.RunLog(instance_id=instance(), attempt=0, n=0, count=1, dropped=0, lines=sealed())
    done = e.RunProgress(instance_id=instance(), attempt=0, n=0, done=1)
    resumed = e.EffectResumed(intent_id="i" * 32)
    for fact in (lines, done, resumed, child(), child_ended()):
        check_reaction(given=RUNNING, when=fact, then=[])


def test_every_event_of_a_run_has_its_case() -> None:
    source = inspect.getsource(react_module.react)
    for kind in get_args(RunEvent):
        assert f"e.{kind.__name__}" in source, kind


def test_an_end_of_an_old_attempt_is_not_followed() -> None:
    """A lost one may be found lost again by another node; it is no longer current."""
    story = Story(*RUNNING, lost(), loaded(), created(1))
    assert story.state is not None
    recorded = story.events[5]
    assert recorded.data == lost()
    assert react_to_end(story.state, recorded) == ()


def test_said_facts_and_plain_facts_lead_to_the_same_choices() -> None:
    """Who says it decides whether it is taken, never what follows."""
    assert Story(*RUNNING, Said(completed())).types == Story(*RUNNING, completed()).types
