"""Whether an instance that ended gets a successor (SPEC 7.1, DESIGN section 5).

One instance that ended without completing gives one `retry.decided`; a claim names it, so it gives
at most one successor.  Budgets are per cause, frozen in the policy, and counted by the fold.
"""

from __future__ import annotations

from typing import Final, assert_never, cast

from msgspec import Struct

from handlers.ends import cancelled, failed
from ledger import events as e
from ledger.codec import Recorded
from ledger.events import Event, RunEvent
from ledger.ids import instance_id
from projections.rows import spread
from projections.state import EDGE, Instance, RunState

Choices = tuple[RunEvent, ...]


class Allowance(Struct, frozen=True):
    """How often a cause may still be retried."""

    budget: e.Budget
    used: int
    limit: int


BUDGETS: Final[dict[e.ErrorClass, e.Budget]] = {
    "platform_reset": "retry",
    "platform_internal": "retry",
    "instance_lost": "lost",
    "coordinator_restart": "restart",
    "play_retry": "play",
}
"""The causes that are retried and cost something; `coordinator_shutdown` is retried for nothing."""


def react_to_end(state: RunState, recorded: Recorded[Event]) -> Choices:
    """Follows an instance that errored, was lost, or could not be created."""
    event = recorded.data
    if state.run.terminal:
        return ()
    match event:
        case e.InstanceCreateFailed():
            if event.attempt != state.run.attempt:
                return ()
            if state.instances[event.attempt].phase not in ("requested", "failed"):
                return ()  # it ran and ended all the same, and that was followed
            if event.kind == "transient" and _in_window(state, event.attempt, recorded.at):
                return ()
            if state.run.cancel is not None:
                return (cancelled(state, None),)
            if event.attempt > 0:
                return (e.RetryAbandoned(attempt=event.attempt, reason=event.code),)
            return (failed(state, "unknown", event.code, event.error),)
        case e.InstanceErrored() | e.InstanceLost():
            if event.attempt != state.run.attempt:
                return ()
            if state.run.cancel is not None:
                what = "errored" if isinstance(event, e.InstanceErrored) else "lost"
                return (cancelled(state, what),)
            return (_decided(state, state.instances[event.attempt], recorded.at),)
        case _:
            raise AssertionError(type(event).__name__)


def react_to_claim(state: RunState, event: e.RetryClaimRequested, at: int) -> Choices:
    """Decides on an instance that another coordinator saw die; what it asks for can only lower."""
    ended = state.instances[event.failed_attempt]
    return (_decided(state, ended, at, event.max_attempts),)


def react_to_retry(state: RunState, recorded: Recorded[Event]) -> Choices:
    """Takes the next step from a decision to a new instance, or to the run's failure."""
    event = recorded.data
    run = state.run
    if run.terminal or run.cancel is not None:
        return ()
    match event:
        case e.RetryDecided():
            if run.engine == EDGE:
                return _answer_claim(state, event)
            if event.retry:
                return (e.RetryParamsRequested(failed_instance_id=event.failed_instance_id),)
            return (_failed_as(state, state.instances[event.failed_attempt]),)
        case e.RetryParamsLoaded():
            return _claim(state, event.failed_instance_id)
        case e.RetryParamsFailed():
            reason = "state_expired" if event.code == "EXPIRED" else "params_unreadable"
            return (e.RetryDenied(failed_instance_id=event.failed_instance_id, reason=reason),)
        case e.RetryDenied():
            return (failed(state, "unknown", event.reason.upper(), None),)
        case e.RetryClaimed():
            return (
                e.InstanceCreateRequested(
                    instance_id=event.instance_id,
                    attempt=event.attempt,
                    engine=run.engine,
                    not_before_at=_not_before(state, event, recorded),
                ),
            )
        case e.RetryAbandoned():
            return (failed(state, "unknown", event.reason, None),)
        case _:
            raise AssertionError(type(event).__name__)


def allowance(state: RunState, error_class: e.ErrorClass) -> Allowance:
    """Returns what the frozen policy allows for a cause, and how much of it is used."""
    policy, used = state.run.policy, state.run.used
    budget = BUDGETS.get(error_class, "none")
    match budget:
        case "retry":
            return Allowance(budget, used.retry, policy.retry_limit)
        case "lost":
            return Allowance(budget, used.lost, policy.lost_limit)
        case "restart":
            return Allowance(budget, used.restart, policy.restart_limit)
        case "play":
            return Allowance(budget, used.play, policy.play_retries)
        case "none":
            return Allowance(budget, 0, 0)
        case _:
            assert_never(budget)


def _answer_claim(state: RunState, event: e.RetryDecided) -> Choices:
    """The claimant has loaded the params: a yes is its claim, a no the run's end (INV-29, 34)."""
    if event.retry:
        return _claim(state, event.failed_instance_id)
    if event.reason == "not_retriable":
        return (_failed_as(state, state.instances[event.failed_attempt]),)
    return (e.RetryDenied(failed_instance_id=event.failed_instance_id, reason=event.reason),)


def _decided(
    state: RunState, ended: Instance, at: int, limit_asked: int | None = None
) -> e.RetryDecided:
    error_class = ended.error_class or "unknown"
    allowed = allowance(state, error_class)
    if limit_asked is not None:
        allowed = Allowance(allowed.budget, allowed.used, min(allowed.limit, limit_asked))
    launch = state.run.launch
    if allowed.budget == "none" and error_class != "coordinator_shutdown":
        retry, reason = False, "not_retriable"
    elif launch is None or at > launch.expires_at:
        retry, reason = False, "state_expired"
    elif allowed.budget != "none" and allowed.used >= allowed.limit:
        retry, reason = False, "limit_reached"
    else:
        retry, reason = True, error_class
    return e.RetryDecided(
        failed_instance_id=ended.instance_id,
        failed_attempt=ended.attempt,
        error_class=error_class,
        retry=retry,
        reason=reason,
        budget=allowed.budget,
        used=allowed.used,
        limit=allowed.limit,
    )


def _failed_as(state: RunState, ended: Instance) -> e.RunFailed:
    error_class = ended.error_class or "unknown"
    return failed(state, error_class, ended.code or error_class.upper(), ended.error)


def _claim(state: RunState, failed_instance_id: str) -> Choices:
    run = state.run
    ended = state.instance(failed_instance_id)
    if ended is None or ended.attempt != run.attempt:
        return ()  # another attempt runs: the claim would name an instance that is not current
    attempt = ended.attempt + 1
    error_class = ended.error_class or "unknown"
    return (
        e.RetryClaimed(
            failed_instance_id=failed_instance_id,
            failed_attempt=ended.attempt,
            attempt=attempt,
            instance_id=instance_id(run.scope, run.run_id, attempt),
            budget=BUDGETS.get(error_class, "none"),
            reason=error_class,
        ),
    )


def _not_before(state: RunState, event: e.RetryClaimed, recorded: Recorded[Event]) -> int | None:
    """The first retry of a budget starts at once, later ones wait; a play may ask for a pause."""
    asked = state.instances[event.failed_attempt].retry_after_ms
    if asked is not None:
        return recorded.at + asked
    used = allowance(state, cast("e.ErrorClass", event.reason)).used
    if event.budget == "none" or used <= 1:
        return None
    return recorded.at + spread(recorded.id, state.run.policy.backoff_ms)


def _in_window(state: RunState, attempt: int, at: int) -> bool:
    requested = state.instances[attempt].requested_at
    return at - requested < state.run.policy.create_window_ms
