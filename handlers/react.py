"""What follows from an event: `react(state, recorded) -> choices`, pure.

`state` already includes the event.  The writer appends a fact together with the closure of these
reactions, so that a run never rests between two of them; `verify` makes every one of them again.
"""

from __future__ import annotations

from typing import Final, assert_never, cast

from handlers.ends import cancelled, failed, parent_of
from handlers.retry import react_to_claim, react_to_end, react_to_retry
from ledger import events as e
from ledger.codec import Recorded
from ledger.events import Event, RunEvent
from ledger.ids import instance_id
from projections.state import Instance, RunState

CANCEL_WINDOW: Final = 32
"""How many children are asked to end at a time; their answers bring the next ones."""

TRIES_MAX: Final = 10
"""How many failed tries of an effect park it, and how many more once it was resumed."""

INTEGRATION_EVENT: Final = "integration_event"
Choices = tuple[RunEvent, ...]


def react(state: RunState, recorded: Recorded[Event]) -> Choices:
    """Returns the choices that follow from an event, in order."""
    event = cast("RunEvent", recorded.data)
    match event:
        case e.RunLog() | e.RunLaunchStatePut() | e.InstanceCreateRequested():
            return ()  # the commonest first: looking for its case is most of what a replay costs
        case e.ChildRequested() | e.ChildTerminalSet():
            return ()
        case e.InstanceCreated() | e.InstanceStarted():
            return _react_to_start(state, state.instances[event.attempt])
        case e.InstanceCompleted():
            return _react_to_result(state, event)
        case e.RunCompleted():
            return (*_revoke(state), *cancel_children(state, "parent_completed"))
        case e.RunSubmitted():
            return _launch(event, recorded)
        case e.SignalReceived():
            return _react_to_signal(state, event)
        case e.RunWaitStarted():
            return _react_to_wait(state, event, recorded.at)
        case e.InstanceCreateFailed() | e.InstanceErrored() | e.InstanceLost():
            return react_to_end(state, recorded)
        case e.InstanceTerminated():
            return _react_to_terminated(state, event)
        case e.InstanceMapped():
            instance = state.instances[event.attempt]
            return retry_started(instance) if event.attempt == state.run.attempt else ()
        case e.RetryClaimRequested():
            return react_to_claim(state, event, recorded.at)
        case e.RetryDecided() | e.RetryParamsLoaded() | e.RetryParamsFailed():
            return react_to_retry(state, recorded)
        case e.RetryClaimed() | e.RetryDenied() | e.RetryAbandoned():
            return react_to_retry(state, recorded)
        case e.TimerFired():
            return _react_to_timer(state, event)
        case e.RunCancelRequested():
            return _react_to_cancel(state)
        case e.RunFailed():
            return (*_revoke(state), *cancel_children(state, "parent_failed"))
        case e.RunCancelled():
            return (
                *_revoke(state),
                *_end_what_runs(state),
                *cancel_children(state, "parent_cancelled"),
            )
        case e.ChildCancelDelivered():
            return cancel_children(state, "parent_" + state.run.status)
        case e.EffectFailed():
            if event.error_class == "transient" and event.try_number % TRIES_MAX:
                return ()
            return (e.EffectParked(intent_id=event.intent_id, tries=event.try_number),)
        case (
            e.RunWaitEnded()
            | e.RunProgress()
            | e.RunCancelRefused()
            | e.InstanceTerminateRequested()
            | e.InstanceOutputFenced()
            | e.RetryParamsRequested()
            | e.RetryStarted()
            | e.ChildSubmitFailed()
            | e.ChildTerminalConflict()
            | e.ChildCancelRequested()
            | e.EffectParked()
            | e.EffectResumed()
            | e.SessionStored()
            | e.SessionRevokeRequested()
            | e.SessionRevoked()
        ):
            return ()
        case _:
            assert_never(event)


def cancel_children(state: RunState, reason: str) -> Choices:
    """Asks the next window of live children to end, unless answers to the last are outstanding."""
    run = state.run
    if run.children.running == 0 or run.children.cancels_open > 0:
        return ()
    if not run.terminal and run.cancel is None:
        return ()
    live = sorted(
        child.child_key
        for child in state.children.values()
        if child.status == "requested"
        and child.on_parent_end == "cancel"
        and child.child_run_id is not None
        and not child.cancel_asked
    )
    return tuple(
        e.ChildCancelRequested(
            child_key=key,
            child_run_id=state.children[key].child_run_id or "",
            reason=reason,
        )
        for key in live[:CANCEL_WINDOW]
    )


def _revoke(state: RunState) -> Choices:
    """Nothing outlives a run that could still open a database (INV-48)."""
    held = state.run.sessions
    return () if held is None else (e.SessionRevokeRequested(session_count=held.count),)


def _launch(event: e.RunSubmitted, recorded: Recorded[Event]) -> Choices:
    policy = event.policy
    launch = (
        e.RunLaunchStatePut(
            params_bytes=event.params.bytes,
            externalized=event.params.bytes > policy.externalize_after_bytes,
            expires_at=recorded.at + policy.retry_ttl_ms,
        ),
        e.InstanceCreateRequested(
            instance_id=instance_id(event.scope, event.run_id, 0),
            attempt=0,
            engine=event.engine,
        ),
    )
    offer = event.sessions
    if offer is None:
        return launch
    stored = e.SessionStored(
        session_count=offer.count, expires_at=recorded.at + offer.ttl_ms, sessions=offer.sessions
    )
    return (stored, *launch)


def _react_to_start(state: RunState, instance: Instance) -> Choices:
    if not (instance.created and (instance.started or instance.ended)):
        if instance.created and (state.run.terminal or state.run.cancel is not None):
            return _terminate(instance, "orphan")
        return ()
    choices: Choices = ()
    if state.run.terminal:
        return _terminate(instance, "orphan")
    if state.run.cancel is not None:
        return _terminate(instance, "cancelled")
    if instance.attempt > 0 and instance.attempt == state.run.attempt:
        choices = retry_started(instance)
        superseded = state.instances[instance.attempt - 1]
        if superseded.phase == "lost" and superseded.error_class == "instance_lost":
            # A node that died took its instances with it; any other lost one may still be there.
            choices += _terminate(superseded, "superseded")
    return choices


def retry_started(instance: Instance) -> Choices:
    """Says that a retry runs, if this instance is one."""
    if instance.attempt == 0:
        return ()
    return (e.RetryStarted(attempt=instance.attempt, instance_id=instance.instance_id),)


def _terminate(instance: Instance, reason: e.TerminateReason) -> Choices:
    if instance.terminate is not None or instance.phase in ("completed", "errored", "terminated"):
        return ()
    return (
        e.InstanceTerminateRequested(
            instance_id=instance.instance_id,
            attempt=instance.attempt,
            reason=reason,
            host=instance.host,
        ),
    )


def _react_to_result(state: RunState, event: e.InstanceCompleted) -> Choices:
    if state.run.cancel is not None:
        return (cancelled(state, "completed"),)
    return (
        e.RunCompleted(
            attempt=event.attempt,
            instance_id=event.instance_id,
            result=event.result,
            output_rows=event.output_rows,
            parent=parent_of(state),
        ),
    )


def _react_to_terminated(state: RunState, event: e.InstanceTerminated) -> Choices:
    instance = state.instances[event.attempt]
    if state.run.terminal or event.attempt != state.run.attempt or instance.phase != "terminated":
        return ()
    if state.run.cancel is not None:
        return (cancelled(state, None),)
    if instance.terminate == "timeout":
        return (failed(state, "engine_timeout", "ENGINE_TIMEOUT", None),)
    return (failed(state, "unknown", "INSTANCE_TERMINATED", None),)


def _react_to_signal(state: RunState, event: e.SignalReceived) -> Choices:
    choices: Choices = ()
    if event.signal == INTEGRATION_EVENT and event.event_key is not None:
        child = state.children.get(event.event_key)
        if child is None or child.status == "requested":
            choices = (
                e.ChildTerminalSet(event_key=event.event_key, data=event.data, source="signal"),
            )
        else:
            choices = (
                e.ChildTerminalConflict(event_key=event.event_key, child_run_id=child.child_run_id),
            )
    wait = state.open_wait(event.event_key or event.signal)
    if wait is not None:
        signal = state.oldest_signal(wait.key)
        if signal is not None:
            choices += (
                e.RunWaitEnded(wait_id=wait.wait_id, outcome="signal", signal_id=signal.signal_id),
            )
    return choices


def _react_to_wait(state: RunState, event: e.RunWaitStarted, at: int) -> Choices:
    if event.kind == "signal":
        signal = state.oldest_signal(event.key)
        if signal is not None:
            return (
                e.RunWaitEnded(wait_id=event.wait_id, outcome="signal", signal_id=signal.signal_id),
            )
    if event.until_at is not None and event.until_at <= at:
        return (e.RunWaitEnded(wait_id=event.wait_id, outcome="timeout"),)
    return ()


def _react_to_timer(state: RunState, event: e.TimerFired) -> Choices:
    match event.purpose:
        case "wait":
            for wait in state.waits.values():
                if wait.intent_id == event.armed_by:
                    return (e.RunWaitEnded(wait_id=wait.wait_id, outcome="timeout"),)
            return ()
        case "cancel_grace":
            return () if state.run.terminal else (cancelled(state, None),)
        case "timeout":
            for instance in state.instances.values():
                if instance.timer_intent == event.armed_by and not instance.ended:
                    return _terminate(instance, "timeout")
            return ()
        case _:
            assert_never(event.purpose)


def _react_to_cancel(state: RunState) -> Choices:
    current = state.current
    if current is None or not current.live:
        return (cancelled(state, None),)
    return (*_terminate(current, "cancelled"), *cancel_children(state, "parent_cancelling"))


def _end_what_runs(state: RunState) -> Choices:
    """An instance that outlived the grace is asked on until it has ended (INV-23)."""
    current = state.current
    return _terminate(current, "cancelled") if current is not None and current.live else ()
