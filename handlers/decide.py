"""Whether a fact may be recorded: `decide(command, state, at)`, pure.

It validates and nothing else: every choice that follows is made by `react`.  A refusal changes
nothing, but for the two that are recorded once each (CONTRACTS A.12): the output of an instance
that is no longer the current one, and the first cancel after the end.
"""

from __future__ import annotations

from typing import assert_never, cast

from handlers import edge
from handlers.commands import CHILDREN_MAX, EVENTS_MAX, Command
from handlers.decision import NOTHING, Decision, Rejected, run_not_found, run_terminal
from ledger import events as e
from ledger.errors import (
    Conflict,
    IntentNotFound,
    NotFound,
    RunConflict,
    RunTerminal,
    RunTooLarge,
    StaleAttempt,
)
from ledger.events import RunEvent
from ledger.ids import quote
from projections.state import EDGE, Instance, RunState


def decide(command: Command, state: RunState | None, at: int) -> Decision:
    """Returns the facts to record, none if there is nothing to do, or why it is refused."""
    fact = cast("RunEvent", command.fact)
    if isinstance(fact, e.RunSubmitted):
        if state is not None:
            return Rejected(RunConflict(f"run {quote(fact.run_id)} exists"))
        return (fact,)
    if state is None:
        return Rejected(run_not_found(command.stream.removeprefix("run/")))
    match fact:
        case e.RunLog(instance_id=instance_id):
            return _fenced(command, state, instance_id, "log") or _bounded(fact, state)
        case e.ChildRequested():
            return _child(command, fact, state)
        case e.ChildTerminalSet():
            child = state.children.get(fact.event_key)
            if child is None or child.status == "requested":
                return (fact,)
            return (
                e.ChildTerminalConflict(event_key=fact.event_key, child_run_id=fact.child_run_id),
            )
        case e.InstanceCreated():
            return _created(fact, state, at)
        case e.InstanceStarted():
            instance = state.instances.get(fact.attempt)
            if instance is None or instance.started or instance.ended:
                return _unknown(command, fact.instance_id)
            return (fact,)
        case e.InstanceCompleted(instance_id=instance_id):
            return _fenced(command, state, instance_id, "completed") or (fact,)
        case e.SignalReceived():
            if state.run.terminal:
                return Rejected(run_terminal(state, f"takes no signal {quote(fact.signal)}"))
            return _bounded(fact, state)
        case e.RunWaitStarted():
            return _fenced(command, state, None, "wait") or _bounded(fact, state)
        case e.RunCancelRequested():
            return _cancel(fact, state)
        case e.RunProgress(instance_id=instance_id):
            return _fenced(command, state, instance_id, "progress") or _bounded(fact, state)
        case e.InstanceCreateFailed():
            instance = state.instances.get(fact.attempt)
            if instance is None or instance.created:
                return _unknown(command, fact.instance_id)
            return (fact,)  # of an instance that has ended too: it settles the intent
        case e.InstanceErrored(instance_id=instance_id):
            return _fenced(command, state, instance_id, "errored") or (fact,)
        case e.InstanceLost():
            instance = state.instances.get(fact.attempt)
            if instance is None or not instance.live:
                return NOTHING  # it reported its own end before the finder came
            return (fact,)
        case e.InstanceTerminated():
            instance = state.instances.get(fact.attempt)
            if instance is None or instance.terminate_intent is None:
                return NOTHING  # its own end has closed the request
            return (fact,)
        case e.ChildSubmitFailed():
            # Recorded even if a signal has ended the child meanwhile: it settles the intent.
            return (fact,) if fact.child_key in state.children else NOTHING
        case e.TimerFired():
            return _timer(command, fact, state, at)
        case e.InstanceMapped():
            return edge.mapped(fact, state)
        case e.RetryClaimRequested():
            return edge.claim_requested(fact, state)
        case e.SessionStored():
            return edge.sessions_put(fact, state)
        case (
            e.RetryParamsLoaded()
            | e.RetryParamsFailed()
            | e.ChildCancelDelivered()
            | e.SessionRevoked()
            | e.EffectFailed()
            | e.EffectResumed()
        ):
            return (fact,)
        case (
            e.RunLaunchStatePut()
            | e.RunCompleted()
            | e.RunFailed()
            | e.RunCancelled()
            | e.RunCancelRefused()
            | e.RunWaitEnded()
            | e.InstanceCreateRequested()
            | e.InstanceTerminateRequested()
            | e.InstanceOutputFenced()
            | e.RetryDecided()
            | e.RetryParamsRequested()
            | e.RetryClaimed()
            | e.RetryStarted()
            | e.RetryDenied()
            | e.RetryAbandoned()
            | e.ChildTerminalConflict()
            | e.ChildCancelRequested()
            | e.EffectParked()
            | e.SessionRevokeRequested()
        ):
            raise AssertionError(f"{type(fact).__name__} is a choice: only react makes it")
        case _:
            assert_never(fact)


def _cancel(fact: e.RunCancelRequested, state: RunState) -> Decision:
    run = state.run
    if run.engine == EDGE:
        return edge.refused(state, "is cancelled there")
    if run.status in ("cancelling", "cancelled"):
        return NOTHING
    if run.terminal:
        status = cast("e.RunEnd", run.status)
        return Rejected(
            run_terminal(state, "cannot be cancelled"),
            None if run.cancel_refused else e.RunCancelRefused(status=status),
        )
    return (fact,)


def _child(command: Command, fact: e.ChildRequested, state: RunState) -> Decision:
    refused = _fenced(command, state, None, "child")
    if refused:
        return refused
    run = state.run
    if run.engine == EDGE:
        return edge.refused(state, "starts its children there")
    if run.terminal or run.cancel is not None:
        return Rejected(
            RunTerminal(
                f"{run.run_id} is {run.status} and starts no child {quote(fact.child_key)}",
                code="PARENT_TERMINAL",
                hint="nothing more can be started under it",
            )
        )
    if run.children.total >= CHILDREN_MAX:
        return Rejected(
            RunTooLarge(
                f"{run.run_id} has {run.children.total} children, the limit is {CHILDREN_MAX}",
                hint="start the others as children of a child",
            )
        )
    return _bounded(fact, state)


def _bounded(fact: RunEvent, state: RunState) -> Decision:
    if state.run.version >= EVENTS_MAX:
        return Rejected(
            RunTooLarge(
                f"{state.run.run_id} has {state.run.version} events, the limit is {EVENTS_MAX}",
                hint="split the work into child runs",
            )
        )
    return (fact,)


def _fenced(
    command: Command, state: RunState, instance_id: str | None, what: str
) -> Rejected | None:
    """Refuses what does not come from the current, live instance on its own host (INV-22)."""
    reporter = command.reporter
    if reporter is not None:
        instance_id = reporter.instance_id
    if instance_id is None:
        return None  # a replay asks without a reporter
    instance = state.instance(instance_id)
    if instance is None:
        return Rejected(NotFound(f"instance {quote(instance_id)} is not of run {state.run.run_id}"))
    if (
        instance.attempt == state.run.attempt
        and not instance.ended
        and not state.run.terminal
        and (reporter is None or reporter.host == instance.host)
    ):
        return None
    return Rejected(
        StaleAttempt(
            f"attempt {instance.attempt} of {state.run.run_id} is no longer current: "
            f"attempt {state.run.attempt} is, and the run is {state.run.status}",
            hint="stop; nothing this instance says is taken any more",
            attempt=instance.attempt,
            currentAttempt=state.run.attempt,
        ),
        e.InstanceOutputFenced(
            instance_id=instance_id,
            attempt=instance.attempt,
            current_attempt=state.run.attempt,
            what=what,
        ),
    )


def _created(fact: e.InstanceCreated, state: RunState, at: int) -> Decision:
    instance = state.instances.get(fact.attempt)
    if (
        instance is None
        or instance.created
        or instance.phase == "failed"
        or (instance.ended and fact.host is not None)
    ):
        return Rejected(
            Conflict(f"instance {quote(fact.instance_id)} is not waiting to be created")
        )
    if fact.host is None:
        return (fact,)  # even behind its end: an engine elsewhere may tell it in any order
    if state.run.terminal:
        return Rejected(run_terminal(state, "starts no instance"))
    return (fact, _started_with(fact, instance, at))


def _started_with(fact: e.InstanceCreated, instance: Instance, at: int) -> e.InstanceStarted:
    """A local create is its start: whoever gets both in runs the play (CONTRACTS A.10)."""
    since = max(instance.requested_at, instance.not_before_at or 0)
    return e.InstanceStarted(
        instance_id=fact.instance_id,
        attempt=fact.attempt,
        host=fact.host,
        start_gap_ms=max(0, at - since),
    )


def _timer(command: Command, fact: e.TimerFired, state: RunState, at: int) -> Decision:
    run = state.run
    match fact.purpose:
        case "wait":
            armed = [w.until_at for w in state.waits.values() if w.intent_id == fact.armed_by]
        case "cancel_grace":
            cancel = run.cancel
            armed = (
                [cancel.at + run.policy.cancel_grace_ms]
                if cancel is not None and cancel.intent_id == fact.armed_by
                else []
            )
        case "timeout":
            armed = [
                i.started_at + run.policy.timeout_ms
                for i in state.instances.values()
                if i.timer_intent == fact.armed_by
                and i.started_at is not None
                and run.policy.timeout_ms is not None
            ]
        case _:
            assert_never(fact.purpose)
    if run.terminal or not armed:
        return NOTHING
    due = armed[0]
    if due is None or at < due:
        return Rejected(
            IntentNotFound(f"timer {command.cause} is due at {due}, and it is {at}", code="NOT_DUE")
        )
    return (fact,)


def _unknown(command: Command, instance_id: str) -> Rejected:
    return Rejected(
        Conflict(f"{command.stream}: instance {quote(instance_id)} does not wait for this")
    )
