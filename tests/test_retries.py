"""Retries: one decision for each failed instance, budgets per cause, pauses, launch state."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from handlers.retry import BUDGETS, allowance
from ledger import events as e
from projections.rows import backoff_ms, spread
from projections.state import Used
from tests.given import (
    DAY,
    T0,
    Fact,
    Later,
    Story,
    cancel,
    check_decision,
    check_reaction,
    child,
    child_ended,
    completed,
    create_failed,
    created,
    errored,
    instance,
    loaded,
    lost,
    signal,
    submitted,
    terminated,
    unreadable,
)

RUNNING: list[Fact] = [submitted(), created()]
RETRIED_CLASSES = sorted([*BUDGETS, "coordinator_shutdown"])
OTHER_CLASSES: list[e.ErrorClass] = [
    "engine_timeout",
    "user_error",
    "artifact_missing",
    "credentials",
    "cancelled",
    "quota",
    "unknown",
]


def decided(
    error_class: e.ErrorClass,
    retry: bool,
    reason: str,
    budget: e.Budget,
    used: int = 0,
    limit: int = 0,
    attempt: int = 0,
) -> e.RetryDecided:
    return e.RetryDecided(
        failed_instance_id=instance(attempt),
        failed_attempt=attempt,
        error_class=error_class,
        retry=retry,
        reason=reason,
        budget=budget,
        used=used,
        limit=limit,
    )


def fail_again(story: Story, fact: Fact) -> None:
    """Ends the current attempt by `fact`, and starts the next one if the rules give one."""
    story.tell(fact)
    assert story.state is not None
    if story.state.run.terminal:
        return
    attempt = story.state.run.attempt
    story.tell(loaded(attempt))
    story.tell(Later(DAY // 24, created(attempt + 1)))


def attempts_of(story: Story) -> int:
    return len(story.all(e.InstanceCreateRequested))


# --- which causes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fact", "want"),
    [
        (errored("platform_reset"), ("retry", 2)),
        (errored("platform_internal"), ("retry", 2)),
        (lost("instance_lost"), ("lost", 2)),
        (lost("coordinator_restart"), ("restart", 20)),
        (lost("coordinator_shutdown"), ("none", 0)),
    ],
    ids=lambda value: getattr(value, "error_class", ""),
)
def test_a_cause_that_is_retried_is_decided_with_its_budget(
    fact: e.InstanceErrored | e.InstanceLost, want: tuple[e.Budget, int]
) -> None:
    budget, limit = want
    yes = decided(fact.error_class, True, fact.error_class, budget, limit=limit)
    check_reaction(given=RUNNING, when=fact, then=[yes])


@pytest.mark.parametrize("error_class", OTHER_CLASSES)
def test_INV_37_other_causes_are_never_retried(error_class: e.ErrorClass) -> None:
    """A user error is no platform reset, and what is unknown must not loop."""
    check_reaction(
        given=RUNNING,
        when=errored(error_class),
        then=[decided(error_class, False, "not_retriable", "none")],
    )
    story = Story(*RUNNING, errored(error_class))
    assert story.types[-2:] == ["retry.decided", "run.failed"]
    assert story.all(e.RunFailed)[0].error_class == error_class


def test_every_error_class_has_been_thought_of() -> None:
    """A new class is retried or not, and here it says which."""
    assert {*RETRIED_CLASSES, *OTHER_CLASSES} == set(e.ErrorClass.__args__)  # type: ignore[attr-defined]


def test_a_play_asks_for_another_attempt_within_its_own_budget() -> None:
    story = Story(submitted(play_retries=1), created())
    fail_again(story, errored("play_retry"))
    fail_again(story, errored("play_retry", 1))
    assert attempts_of(story) == 2
    assert story.status == "failed"
    assert [d.reason for d in story.all(e.RetryDecided)] == ["play_retry", "limit_reached"]


def test_a_play_that_froze_no_retries_gets_none() -> None:
    story = Story(*RUNNING, errored("play_retry"))
    assert story.status == "failed"
    (no,) = story.all(e.RetryDecided)
    assert no == decided("play_retry", False, "limit_reached", "play")


# --- the way from a failure to the next instance --------------------------------------------------


def test_INV_29_INV_30_params_are_loaded_before_anything_is_claimed() -> None:
    """Claim and create request are one append, so a claim is never left alone."""
    story = Story(*RUNNING, errored("platform_reset"))
    assert story.types[5:] == ["instance.errored", "retry.decided", "retry.params_requested"]
    assert [r.type for r in story.tell(loaded())] == [
        "retry.params_loaded",
        "retry.claimed",
        "instance.create_requested",
    ]
    assert [r.type for r in story.tell(created(1))] == [
        "instance.created",
        "instance.started",
        "retry.started",
    ]


def test_INV_27_one_failed_instance_yields_one_claim() -> None:
    """Params that are loaded twice (two nodes) claim once: the outcome of an intent is one."""
    story = Story(*RUNNING, errored("platform_reset"), loaded())
    check_reaction(given=[*RUNNING, errored("platform_reset"), loaded()], when=loaded(), then=[])
    assert len(story.all(e.RetryClaimed)) == 1


def test_INV_28_a_claim_names_the_current_instance_or_nothing() -> None:
    given = [*RUNNING, errored("platform_reset"), loaded(), created(1)]
    check_reaction(given=given, when=loaded(0), then=[])


def test_INV_15_INV_16_attempts_are_contiguous_and_the_highest_is_current() -> None:
    story = Story(*RUNNING)
    seen = []
    for attempt in range(3):
        assert story.state is not None
        seen.append((story.state.run.attempt, story.state.current))
        fail_again(story, errored("platform_reset", attempt))
    requested = [r.attempt for r in story.all(e.InstanceCreateRequested)]
    assert requested == [0, 1, 2]
    assert [attempt for attempt, _ in seen] == [0, 1, 2]
    assert [c.instance_id for _, c in seen if c is not None] == [instance(n) for n in range(3)]


def test_INV_17_a_late_report_of_a_lower_attempt_moves_nothing_back() -> None:
    """Another engine may record an old create when its retry runs already."""
    story = Story(
        submitted(), created(host=None), errored("platform_reset"), loaded(), created(1, host=None)
    )
    before = story.state
    assert before is not None
    check_decision(
        given=[submitted(), created(host=None), errored("platform_reset"), loaded()],
        when=lost(attempt=0),
        then=[],
    )
    assert before.run.attempt == 1
    assert before.current == before.instances[1]


def test_INV_31_C011_nothing_is_retried_after_the_end() -> None:
    """The params that come too late claim nothing, and what ends late is not decided on."""
    story = Story(*RUNNING, errored("platform_reset"), cancel())
    assert story.status == "cancelled"
    assert [r.type for r in story.tell(loaded())] == ["retry.params_loaded"]
    for end in ([completed()], [errored()], [cancel(), terminated()]):
        check_decision(given=[*RUNNING, *end], when=lost(), then=[])


def test_INV_33_a_retry_needs_no_reader() -> None:
    """Every step follows from the one before it or is an intent for a node; nobody has to ask."""
    story = Story(*RUNNING, errored("platform_reset"))
    assert story.last(e.RetryParamsRequested) is not None
    story.tell(loaded())
    assert story.last(e.InstanceCreateRequested, attempt=1) is not None


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 2, 10])
@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("retry_limit", "platform_reset"),
        ("lost_limit", "instance_lost"),
        ("restart_limit", "coordinator_restart"),
        ("play_retries", "play_retry"),
    ],
)
def test_INV_26_C007_attempts_never_exceed_the_limit_of_their_budget(
    name: str, fact: e.ErrorClass, limit: int
) -> None:
    """Exactly limit + 1 attempts, then one failure that names its cause."""
    limits: dict[str, Any] = {name: limit}
    story = Story(submitted(**limits), created())
    for attempt in range(limit + 1):
        ends = errored(fact, attempt) if fact in _REPORTED else lost(fact, attempt)
        fail_again(story, ends)
    assert story.status == "failed"
    assert attempts_of(story) == limit + 1
    assert [d.reason for d in story.all(e.RetryDecided)] == [fact] * limit + ["limit_reached"]
    (failed,) = story.all(e.RunFailed)
    assert failed.error_class == fact


_REPORTED = ("platform_reset", "play_retry")


def test_budgets_are_counted_apart() -> None:
    """Two resets, two losses and a restart are five retries."""
    story = Story(*RUNNING)
    ends: list[Fact] = [
        errored("platform_reset", 0),
        lost("instance_lost", 1),
        errored("platform_internal", 2),
        lost("instance_lost", 3),
        lost("coordinator_restart", 4),
    ]
    for fact in ends:
        fail_again(story, fact)
    assert story.state is not None
    assert story.status == "running"
    assert story.state.run.used == Used(retry=2, lost=2, restart=1)
    assert [(d.budget, d.used, d.limit) for d in story.all(e.RetryDecided)] == [
        ("retry", 0, 2),
        ("lost", 0, 2),
        ("retry", 1, 2),
        ("lost", 1, 2),
        ("restart", 0, 20),
    ]


def test_C008_a_shutdown_of_the_coordinator_costs_nothing() -> None:
    story = Story(submitted(restart_limit=0, lost_limit=0, retry_limit=0), created())
    for attempt in range(5):
        fail_again(story, lost("coordinator_shutdown", attempt))
    assert story.status == "running"
    assert attempts_of(story) == 6
    assert story.state is not None
    assert story.state.run.used == Used()
    assert all(r.not_before_at is None for r in story.all(e.InstanceCreateRequested))


@pytest.mark.parametrize("by", ["signal", "child"])
def test_restarts_are_counted_anew_when_the_run_got_something(by: str) -> None:
    """Only a run that gets nowhere is stopped; the other budgets stay as they are."""
    story = Story(submitted(restart_limit=1, lost_limit=1), created(), child())
    fail_again(story, lost("instance_lost", 0))
    fail_again(story, lost("coordinator_restart", 1))
    story.tell(signal() if by == "signal" else child_ended())
    assert story.state is not None
    assert story.state.run.used == Used(lost=1)
    fail_again(story, lost("coordinator_restart", 2))
    assert story.status == "running"
    fail_again(story, lost("coordinator_restart", 3))
    assert story.status == "failed"


def test_a_child_that_could_not_be_submitted_is_no_progress() -> None:
    story = Story(submitted(restart_limit=1), created(), child())
    fail_again(story, lost("coordinator_restart"))
    story.tell(
        e.ChildSubmitFailed(child_key="k", child_run_id=child().child_run_id, code="PLAY_NOT_FOUND")
    )
    assert story.state is not None
    assert story.state.run.used.restart == 1


def test_INV_38_the_limit_is_the_one_that_the_submit_froze() -> None:
    """The rules take no settings: their only numbers are in the state."""
    one, three = Story(submitted(retry_limit=1)), Story(submitted(retry_limit=3))
    assert one.state is not None
    assert three.state is not None
    assert allowance(one.state, "platform_reset").limit == 1
    assert allowance(three.state, "platform_reset").limit == 3


# --- pauses ---------------------------------------------------------------------------------------


def test_the_first_retry_of_a_budget_starts_at_once_and_later_ones_wait() -> None:
    """backoffMs, moved by up to 20 % by the id of the claim; another budget begins anew."""
    story = Story(submitted(retry_limit=3), created())
    fail_again(story, errored("platform_reset", 0))
    fail_again(story, errored("platform_reset", 1))
    fail_again(story, lost("instance_lost", 2))
    fail_again(story, errored("platform_reset", 3))
    pauses = []
    for n in range(1, 5):
        asked = story.last(e.InstanceCreateRequested, attempt=n)
        claim = story.last(e.RetryClaimed, attempt=n)
        assert asked is not None
        assert claim is not None
        due = asked.data.not_before_at  # type: ignore[union-attr]
        pauses.append(None if due is None else due - asked.at)
        if due is not None:
            assert due == claim.at + spread(claim.id, 5000)
    assert [pause is None for pause in pauses] == [True, False, True, False]
    assert all(4000 <= pause <= 6000 for pause in pauses if pause is not None)


def test_a_pause_is_a_function_of_the_event_id() -> None:
    """Drawn nowhere, so a replay gives the same; spread over the whole of ±20 %."""
    pauses = [spread(f"{n:032x}", 5000) for n in range(500)]
    assert pauses == [spread(f"{n:032x}", 5000) for n in range(500)]
    assert 4000 <= min(pauses) < 4100
    assert 5900 < max(pauses) <= 6000


@pytest.mark.parametrize(
    ("tries", "base"), [(1, 200), (2, 400), (3, 800), (10, 102_400), (12, 300_000), (60, 300_000)]
)
def test_tries_of_an_effect_pause_longer_each_time_up_to_five_minutes(
    tries: int, base: int
) -> None:
    assert base * 0.8 <= backoff_ms("e" * 32, tries) <= base * 1.2


def test_a_play_may_ask_for_a_pause() -> None:
    """From the first retry on, and exactly as long as it asked."""
    given: list[Fact] = [submitted(play_retries=3), created(), errored("play_retry", again_in=1500)]
    story = Story(*given, loaded())
    asked = story.last(e.InstanceCreateRequested, attempt=1)
    assert asked is not None
    assert asked.data.not_before_at == asked.at + 1500  # type: ignore[union-attr]


# --- launch state ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("ms", "retried"), [(7 * DAY - 2, True), (7 * DAY - 1, False)])
def test_INV_35_expired_launch_state_denies_by_the_logs_time(ms: int, retried: bool) -> None:
    """Equal is not expired.  `time` decides, never the clock of whoever replays."""
    story = Story(submitted(), created())
    (put,) = story.all(e.RunLaunchStatePut)
    assert put.expires_at == T0 + 1 + 7 * DAY
    story.tell(Later(ms + 1, errored("platform_reset")))
    (said,) = story.all(e.RetryDecided)
    assert (said.retry, said.reason) == (
        (True, "platform_reset") if retried else (False, "state_expired")
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("EXPIRED", "state_expired"),
        ("MISSING", "params_unreadable"),
        ("BYTES_MISMATCH", "params_unreadable"),
        ("HASH_MISMATCH", "params_unreadable"),
        ("REF_INVALID", "params_unreadable"),
        ("NOT_OBJECT", "params_unreadable"),
        ("WRONG_RUN", "params_unreadable"),
    ],
)
def test_INV_34_a_denied_retry_says_why_and_the_run_fails(code: str, reason: str) -> None:
    """After a yes it is `retry.denied`; no attempt is claimed (R4, R5)."""
    story = Story(*RUNNING, errored("platform_reset"), unreadable(code))
    assert story.types[-3:] == ["retry.params_failed", "retry.denied", "run.failed"]
    assert story.all(e.RetryDenied) == [e.RetryDenied(failed_instance_id=instance(), reason=reason)]
    (failed,) = story.all(e.RunFailed)
    assert failed.code == reason.upper()
    assert attempts_of(story) == 1


# --- creates that fail ----------------------------------------------------------------------------


def test_R7_a_transient_failure_of_a_create_is_tried_again_within_its_window() -> None:
    for given in ([submitted()], [*RUNNING, errored("platform_reset"), loaded()]):
        attempt = len(given) > 1
        fact = create_failed(attempt=int(attempt))
        check_reaction(given=given, when=Later(599_999, fact), then=[])


def test_a_first_create_that_fails_for_too_long_fails_the_run() -> None:
    story = Story(submitted(), Later(600_000, create_failed(code="ENGINE_DOWN")))
    (failed,) = story.all(e.RunFailed)
    assert (failed.error_class, failed.code) == ("unknown", "ENGINE_DOWN")


@pytest.mark.parametrize("kind", ["permanent", "conflict"])
def test_a_create_that_cannot_succeed_fails_the_run_at_once(kind: e.CreateFailure) -> None:
    story = Story(submitted(), create_failed(kind, code="PLAY_NOT_FOUND"))
    assert story.types[-2:] == ["instance.create_failed", "run.failed"]
    assert story.all(e.RunFailed)[0].code == "PLAY_NOT_FOUND"


@pytest.mark.parametrize(
    "fact",
    [create_failed("permanent", attempt=1), Later(600_000, create_failed(attempt=1))],
    ids=["permanent", "for too long"],
)
def test_INV_30_a_claim_whose_instance_cannot_be_created_is_abandoned(fact: Fact) -> None:
    story = Story(*RUNNING, errored("platform_reset"), loaded(), fact)
    assert story.types[-3:] == ["instance.create_failed", "retry.abandoned", "run.failed"]
    assert story.all(e.RetryAbandoned) == [e.RetryAbandoned(attempt=1, reason="ENGINE_DOWN")]


# --- superseded instances -------------------------------------------------------------------------


def test_INV_23_a_superseded_instance_is_asked_to_end_when_its_successor_runs() -> None:
    """Only one that may still be there: nothing is left of an errored one, nor of a dead host."""
    asked = {}
    for fact in (
        lost("instance_lost"),
        lost("coordinator_restart"),
        errored("platform_reset"),
    ):
        story = Story(*RUNNING, fact, loaded())
        assert story.all(e.InstanceTerminateRequested) == []
        story.tell(created(1))
        asked[fact.error_class] = [
            (t.attempt, t.reason, t.host) for t in story.all(e.InstanceTerminateRequested)
        ]
    assert asked == {
        "instance_lost": [(0, "superseded", "n-1")],
        "coordinator_restart": [],
        "platform_reset": [],
    }


def test_the_end_of_a_superseded_instance_moves_nothing() -> None:
    story = Story(*RUNNING, lost(), loaded(), created(1))
    before = story.state
    assert before is not None
    story.tell(terminated(0))
    assert story.types[-1] == "instance.terminated"
    assert story.state is not None
    assert replace(story.state.run, version=0, position=0) == replace(
        before.run, version=0, position=0
    )
    assert story.status == "running"
