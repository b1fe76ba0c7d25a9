"""Cancel at every place a run can stand, and what becomes of its children."""

from __future__ import annotations

import pytest

from handlers.execute import CLOSURE_MAX
from handlers.react import CANCEL_WINDOW
from ledger import events as e
from tests.given import (
    HOST,
    Fact,
    Later,
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
    unreadable,
    wait,
)

RUNNING: list[Fact] = [submitted(), created()]


def cancelled(attempt: int = 0, refused: str | None = None) -> e.RunCancelled:
    return e.RunCancelled(attempt=attempt, instance_id=instance(attempt), refused=refused)


def terminate(attempt: int = 0, host: str | None = HOST) -> e.InstanceTerminateRequested:
    return e.InstanceTerminateRequested(
        instance_id=instance(attempt), attempt=attempt, reason="cancelled", host=host
    )


def delivered(key: str, answer: str = "cancelled") -> e.ChildCancelDelivered:
    return e.ChildCancelDelivered(child_key=key, answer=answer)


# --- at once, where nothing runs ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "attempt"),
    [
        ([submitted()], 0),
        ([submitted(), create_failed()], 0),
        ([*RUNNING, errored("platform_reset")], 0),
        ([*RUNNING, wait(), errored("platform_reset")], 0),
        ([*RUNNING, errored("platform_reset"), loaded()], 1),
        ([submitted(), started()], 0),
    ],
    ids=[
        "its first instance is asked for",
        "its create failed for now",
        "its params are being loaded",
        "it waits without an instance",
        "it pauses before a retry",
        "its instance is not known to exist",
    ],
)
def test_C056_a_run_without_a_live_instance_is_cancelled_at_once(
    given: list[Fact], attempt: int
) -> None:
    check_reaction(given=given, when=cancel(), then=[cancelled(attempt)])


def test_C010_a_run_whose_host_died_is_cancelled_at_once() -> None:
    story = Story(*RUNNING, lost("coordinator_restart"), cancel())
    assert story.status == "cancelled"


# --- with a live instance -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [RUNNING, [*RUNNING, wait()], [submitted(), created(host=None)]],
    ids=["running", "waiting", "created"],
)
def test_C056_a_live_instance_is_asked_to_end_first(given: list[Fact]) -> None:
    """By its own host, which alone can do it."""
    host = HOST if given[1] == created() else None
    check_reaction(given=given, when=cancel(), then=[terminate(host=host)])
    assert Story(*given, cancel()).status == "cancelling"


@pytest.mark.parametrize(
    ("end", "refused"),
    [
        (completed(), "completed"),
        (errored(), "errored"),
        (errored("platform_reset"), "errored"),
        (lost("coordinator_restart"), "lost"),
        (terminated(), None),
    ],
    ids=["completed", "errored", "reset", "lost", "terminated"],
)
def test_C056_a_cancelling_run_ends_cancelled_whatever_its_instance_says(
    end: Fact, refused: str | None
) -> None:
    """No retry and no completion after it; the other side is kept as a refused wish."""
    check_reaction(given=[*RUNNING, cancel()], when=end, then=[cancelled(0, refused)])
    story = Story(*RUNNING, cancel(), end)
    assert story.status == "cancelled"
    assert story.all(e.RetryDecided) == []
    assert story.state is not None
    assert story.state.run.refused == refused
    assert story.state.run.result is None


def test_a_cancelling_run_ends_when_its_grace_is_over() -> None:
    """The instance is then fenced, and asked on until it has ended (INV-23)."""
    story = Story(*RUNNING, cancel(), Later(10_000, fired("cancel_grace")))
    assert story.types[-2:] == ["timer.fired", "run.cancelled"]
    assert story.status == "cancelled"
    assert story.state is not None
    assert story.state.instances[0].terminate_intent is not None
    story.tell(terminated())
    assert story.types[-1] == "instance.terminated"
    assert story.status == "cancelled"


def test_the_grace_is_the_one_that_the_run_froze() -> None:
    story = Story(submitted(cancel_grace_ms=50), created(), cancel())
    story.tell(Later(50, fired("cancel_grace")))
    assert story.status == "cancelled"


def test_cancelling_twice_is_cancelling_once() -> None:
    story = Story(*RUNNING, cancel())
    assert story.tell(cancel("c2")) == []
    story.tell(terminated())
    assert story.tell(cancel("c3")) == []
    assert len(story.all(e.RunCancelRequested)) == 1


def test_params_that_fail_behind_a_cancel_change_nothing() -> None:
    story = Story(*RUNNING, errored("platform_reset"), cancel(), unreadable("MISSING"))
    assert story.types[-1] == "retry.params_failed"
    assert story.status == "cancelled"


def test_a_signal_to_a_cancelling_run_is_kept() -> None:
    story = Story(*RUNNING, wait(), cancel(), signal())
    assert story.types[-2:] == ["signal.received", "run.wait_ended"]


# --- children -------------------------------------------------------------------------------------


def family(count: int, **options: e.OnParentEnd) -> Story:
    """A parent with this many live children."""
    story = Story(*RUNNING)
    for n in range(count):
        story.tell(child(f"k{n:03}", **options))
    return story


ENDS: list[tuple[list[Fact], str]] = [
    ([cancel()], "parent_cancelling"),
    ([errored()], "parent_failed"),
    ([completed()], "parent_completed"),
    ([errored("platform_reset"), cancel()], "parent_cancelled"),
]


@pytest.mark.parametrize(("facts", "reason"), ENDS, ids=[reason for _, reason in ENDS])
def test_INV_64_C005_live_children_are_asked_to_end_with_their_parent(
    facts: list[Fact], reason: str
) -> None:
    story = family(2)
    for fact in facts:
        story.tell(fact)
    asked = story.all(e.ChildCancelRequested)
    assert [(a.child_key, a.reason) for a in asked] == [("k000", reason), ("k001", reason)]


def test_C005_only_live_children_that_are_not_abandoned_are_asked() -> None:
    story = Story(
        *RUNNING,
        child("ended"),
        child("kept", on_parent_end="abandon"),
        child("live"),
        signal(name="integration_event", key="early"),
        child_ended("ended"),
        errored(),
    )
    assert [a.child_key for a in story.all(e.ChildCancelRequested)] == ["live"]


@pytest.mark.parametrize(("facts", "reason"), ENDS, ids=[reason for _, reason in ENDS])
def test_a_hundred_children_are_asked_window_by_window(facts: list[Fact], reason: str) -> None:
    """No command ever appends more than 64 events, and nobody is asked twice or forgotten."""
    del reason
    story = family(130)
    for fact in facts:
        assert len(story.tell(fact)) <= CLOSURE_MAX
    answered: set[str] = set()
    rounds = 0
    while open_ := [
        a.child_key for a in story.all(e.ChildCancelRequested) if a.child_key not in answered
    ]:
        rounds += 1
        assert len(open_) <= CANCEL_WINDOW
        for key in open_:
            assert len(story.tell(delivered(key))) <= CLOSURE_MAX
            answered.add(key)
    assert len(answered) == len(story.all(e.ChildCancelRequested)) == 130
    assert rounds == 5
    assert story.state is not None
    assert story.state.run.children.cancels_open == 0


def test_the_parents_end_between_two_windows_asks_nobody_twice() -> None:
    story = family(40)
    story.tell(cancel())
    for n in range(20):
        story.tell(delivered(f"k{n:03}"))
    story.tell(terminated())
    assert story.status == "cancelled"
    for n in range(20, 40):
        if story.last(e.ChildCancelRequested, child_key=f"k{n:03}"):
            story.tell(delivered(f"k{n:03}"))
    keys = [a.child_key for a in story.all(e.ChildCancelRequested)]
    assert sorted(keys) == sorted(set(keys)) == [f"k{n:03}" for n in range(40)]


def test_a_child_that_ends_while_it_is_asked_is_not_asked_again() -> None:
    story = family(33)
    story.tell(cancel())
    story.tell(child_ended("k000"))
    story.tell(child_ended("k032"))
    for n in range(32):
        story.tell(delivered(f"k{n:03}", "completed"))
    assert len(story.all(e.ChildCancelRequested)) == 32


def test_the_child_of_a_cancelled_parent_that_was_never_submitted_is_failed() -> None:
    """Its submit is settled without acting; the terminal needs no child."""
    story = family(1)
    story.tell(errored("platform_reset"))
    story.tell(cancel())
    failed = e.ChildSubmitFailed(
        child_key="k000", child_run_id=child("k000").child_run_id, code="PARENT_TERMINAL"
    )
    story.tell(failed)
    story.tell(delivered("k000", "not_found"))
    assert story.state is not None
    kid = story.state.children["k000"]
    assert (kid.status, kid.code) == ("failed", "PARENT_TERMINAL")
    assert story.state.run.children.running == 0


def test_a_terminal_after_the_parents_end_is_recorded_and_wakes_nobody() -> None:
    story = family(1)
    story.tell(completed())
    assert [r.type for r in story.tell(child_ended("k000"))] == ["child.terminal_set"]
    assert story.status == "completed"
    assert story.state is not None
    assert story.state.run.result == sealed("result")
