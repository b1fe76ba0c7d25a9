"""The fold of a run's stream: `evolve(state, recorded) -> state`, pure and total.

A stored event that the state does not allow raises CorruptStream, which stops that stream only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never, cast

from msgspec.structs import replace

from ledger import events as e
from ledger.codec import Recorded
from ledger.errors import CorruptStream
from ledger.events import Event, RunEvent
from projections.state import (
    Cancel,
    Child,
    Counts,
    Instance,
    LaunchState,
    Progress,
    Retry,
    Run,
    RunState,
    Sessions,
    Signal,
    Status,
    Used,
    Wait,
)

AFTER_THE_END = (
    e.InstanceCreated,
    e.InstanceCreateFailed,
    e.InstanceStarted,
    e.InstanceLost,
    e.InstanceTerminateRequested,
    e.InstanceTerminated,
    e.InstanceOutputFenced,
    e.RetryParamsLoaded,
    e.RetryParamsFailed,
    e.ChildSubmitFailed,
    e.ChildTerminalSet,
    e.ChildTerminalConflict,
    e.ChildCancelRequested,
    e.ChildCancelDelivered,
    e.TimerFired,
    e.EffectFailed,
    e.EffectParked,
    e.EffectResumed,
    e.RunCancelRefused,
    e.SessionRevokeRequested,
    e.SessionRevoked,
)
"""What may follow a run's end (CONTRACTS A.12)."""


def fold(events: Iterable[Recorded[Event]], state: RunState | None = None) -> RunState | None:
    """Returns the state that these events of one stream lead to."""
    for recorded in events:
        state = evolve(state, recorded)
    return state


def evolve(state: RunState | None, recorded: Recorded[Event]) -> RunState:
    """Returns the state behind an event."""
    event = cast("RunEvent", recorded.data)
    if state is None:
        if not isinstance(event, e.RunSubmitted) or recorded.streamversion != 1:
            raise corrupt(recorded, "a run begins with run.submitted as version 1")
        return _submitted(event, recorded)
    run = state.run
    if recorded.streamversion != run.version + 1:
        raise corrupt(recorded, f"version {run.version + 1} was expected")
    if run.ended_at is not None and not isinstance(event, AFTER_THE_END):
        raise corrupt(recorded, f"the run is {run.status}")
    match event:  # the commonest first: a fold of a long log spends its time on finding its case
        case e.RunLog():
            return _next(state, recorded, log_lines=run.log_lines + event.count)
        case e.ChildRequested():
            return _child_requested(state, event, recorded)
        case e.ChildTerminalSet():
            return _child_terminal(state, event, recorded)
        case e.RunLaunchStatePut():
            if run.launch is not None:
                raise corrupt(recorded, "launch state was put before")
            launch = LaunchState(
                params_bytes=event.params_bytes,
                externalized=event.externalized,
                expires_at=event.expires_at,
            )
            return _next(state, recorded, launch=launch)
        case e.InstanceCreateRequested():
            return _create_requested(state, event, recorded)
        case e.InstanceCreated():
            return _created(state, event, recorded)
        case e.InstanceStarted():
            return _started(state, event, recorded)
        case e.InstanceCompleted():
            return _ended(state, recorded, event.attempt, phase="completed")
        case e.RunCompleted():
            if run.cancel is not None:
                raise corrupt(recorded, "a cancelling run cannot complete")
            return _end(
                state, "completed", recorded, result=event.result, output_rows=event.output_rows
            )
        case e.SignalReceived():
            return _signal(state, event, recorded)
        case e.RunProgress():
            progress = Progress(
                done=event.done,
                of=event.of,
                note=event.note,
                at=recorded.at,
                position=recorded.position,
            )
            return _next(state, recorded, progress=progress)
        case e.RunWaitStarted():
            return _wait_started(state, event, recorded)
        case e.RunWaitEnded():
            return _wait_ended(state, event, recorded)
        case e.RunSubmitted():
            raise corrupt(recorded, "the run was submitted before")
        case e.InstanceCreateFailed():
            instance = _instance(state, event.attempt, recorded)
            if event.kind == "transient" or instance.ended:
                return _next(state, recorded)
            failed = replace(instance, phase="failed", ended_at=recorded.at, code=event.code)
            return _put(state, failed, recorded)
        case e.InstanceErrored():
            return _ended(
                state,
                recorded,
                event.attempt,
                phase="errored",
                error_class=event.error_class,
                code=event.code,
                error=event.error,
                retry_after_ms=event.retry_after_ms,
            )
        case e.InstanceLost():
            return _ended(
                state,
                recorded,
                event.attempt,
                phase="lost",
                error_class=event.error_class,
                code=event.error_class.upper(),
            )
        case e.InstanceTerminateRequested():
            instance = _instance(state, event.attempt, recorded)
            asked = replace(instance, terminate=event.reason, terminate_intent=recorded.id)
            return _put(state, asked, recorded)
        case e.InstanceTerminated():
            instance = _instance(state, event.attempt, recorded)
            if instance.ended:
                return _put(state, replace(instance, terminate_intent=None), recorded)
            return _ended(state, recorded, event.attempt, phase="terminated")
        case e.InstanceMapped():
            return _mapped(state, event, recorded)
        case e.RetryClaimRequested():
            return _ended(
                state,
                recorded,
                event.failed_attempt,
                phase="errored",
                error_class="platform_reset",
                code="PLATFORM_RESET",
            )
        case e.SessionStored():
            sessions = Sessions(
                count=event.session_count, expires_at=event.expires_at, sessions=event.sessions
            )
            return _next(state, recorded, sessions=sessions)
        case e.SessionRevokeRequested():
            return _next(state, recorded)
        case e.SessionRevoked():
            return _next(state, recorded, sessions=None)
        case e.RetryDecided():
            used = charge(run.used, event.budget) if event.retry else run.used
            return _next(state, recorded, used=used)
        case e.RetryClaimed():
            retry = Retry(attempt=event.attempt, reason=event.reason)
            return _next(state, recorded, retry=retry)
        case e.ChildSubmitFailed():
            child = _child(state, event.child_key, recorded)
            if child.status != "requested":  # a signal ended it meanwhile; this settles the intent
                return _next(state, recorded)
            return _child_ended(state, child, run.children, "failed", recorded, code=event.code)
        case e.ChildCancelRequested():
            child = _child(state, event.child_key, recorded)
            counts = replace(run.children, cancels_open=run.children.cancels_open + 1)
            return _put_child(state, replace(child, cancel_asked=True), counts, recorded)
        case e.ChildCancelDelivered():
            counts = replace(run.children, cancels_open=run.children.cancels_open - 1)
            return _next(state, recorded, children=counts)
        case e.RunCancelRequested():
            if run.cancel is not None:
                raise corrupt(recorded, "cancel was asked for before")
            cancel = Cancel(
                request_id=event.request_id,
                at=recorded.at,
                position=recorded.position,
                intent_id=recorded.id,
                reason=event.reason,
            )
            return _next(state, recorded, status="cancelling", cancel=cancel)
        case e.RunCancelRefused():
            return _next(state, recorded, cancel_refused=True)
        case e.RunFailed():
            return _end(
                state,
                "failed",
                recorded,
                error_class=event.error_class,
                code=event.code,
                error=event.error,
            )
        case e.RunCancelled():
            return _end(state, "cancelled", recorded, refused=event.refused)
        case e.InstanceOutputFenced() | e.TimerFired() | e.RetryParamsRequested():
            return _next(state, recorded)
        case e.RetryParamsLoaded() | e.RetryParamsFailed() | e.RetryStarted():
            return _next(state, recorded)
        case e.RetryDenied() | e.RetryAbandoned() | e.ChildTerminalConflict():
            return _next(state, recorded)
        case e.EffectFailed() | e.EffectParked() | e.EffectResumed():
            return _next(state, recorded)
        case _:
            assert_never(event)


def charge(used: Used, budget: e.Budget) -> Used:
    """Returns the budgets after one retry on this one; `none` costs nothing."""
    match budget:
        case "retry":
            return replace(used, retry=used.retry + 1)
        case "lost":
            return replace(used, lost=used.lost + 1)
        case "restart":
            return replace(used, restart=used.restart + 1)
        case "play":
            return replace(used, play=used.play + 1)
        case "none":
            return used
        case _:
            assert_never(budget)


def corrupt(recorded: Recorded[Event], why: str) -> CorruptStream:
    """Returns the error for a stored event that no rule allows."""
    return CorruptStream(
        f"{recorded.subject} v{recorded.streamversion} (@{recorded.position}): "
        f"{recorded.type} is not allowed: {why}",
        hint="playledger replay verify names the first one; other runs go on",
    )


def _submitted(event: e.RunSubmitted, recorded: Recorded[Event]) -> RunState:
    return RunState(
        run=Run(
            run_id=event.run_id,
            version=1,
            position=recorded.position,
            status="submitted",
            play_name=event.play_name,
            play_digest=event.play_digest,
            engine=event.engine,
            isolation=event.isolation,
            scope=event.scope,
            org_id=event.org_id,
            lineage=event.lineage,
            params=event.params,
            request_digest=event.request_digest,
            policy=event.policy,
            submitted_at=recorded.at,
            submitted_position=recorded.position,
            executor_token=event.executor_token,
            internal_token=event.internal_token,
        )
    )


def _next(state: RunState, recorded: Recorded[Event], **changes: object) -> RunState:
    """Returns a state with changes of its run; every event moves version and position on."""
    run = replace(
        state.run, version=recorded.streamversion, position=int(recorded.sequence), **changes
    )
    return RunState(run, state.instances, state.children, state.signals, state.waits)


def _put(
    state: RunState, instance: Instance, recorded: Recorded[Event], **changes: object
) -> RunState:
    run = replace(
        state.run, version=recorded.streamversion, position=int(recorded.sequence), **changes
    )
    instances = state.instances.set(instance.attempt, instance)
    return RunState(run, instances, state.children, state.signals, state.waits)


def _instance(state: RunState, attempt: int, recorded: Recorded[Event]) -> Instance:
    instance = state.instances.get(attempt)
    if instance is None:
        raise corrupt(recorded, f"attempt {attempt} was never requested")
    return instance


def _create_requested(
    state: RunState, event: e.InstanceCreateRequested, recorded: Recorded[Event]
) -> RunState:
    if state.run.launch is None:
        raise corrupt(recorded, "no launch state stands before it")
    if event.attempt != state.run.attempt + 1:
        raise corrupt(recorded, f"attempt {state.run.attempt + 1} was expected")
    instance = Instance(
        instance_id=event.instance_id,
        attempt=event.attempt,
        phase="requested",
        requested_at=recorded.at,
        requested_position=recorded.position,
        not_before_at=event.not_before_at,
    )
    return _put(state, instance, recorded, attempt=event.attempt)


def _created(state: RunState, event: e.InstanceCreated, recorded: Recorded[Event]) -> RunState:
    instance = _instance(state, event.attempt, recorded)
    if instance.created:
        raise corrupt(recorded, "the instance was created before")
    phase = "started" if instance.started else "created"
    return _runs(
        state,
        replace(
            instance,
            created=True,
            host=event.host or instance.host,
            phase=instance.phase if instance.ended else phase,
        ),
        recorded,
    )


def _started(state: RunState, event: e.InstanceStarted, recorded: Recorded[Event]) -> RunState:
    instance = _instance(state, event.attempt, recorded)
    if instance.started or instance.ended:
        raise corrupt(recorded, "the instance was started or has ended before")
    timed = state.run.policy.timeout_ms is not None and not state.run.terminal
    return _runs(
        state,
        replace(
            instance,
            started=True,
            host=event.host or instance.host,
            started_at=recorded.at,
            phase="started" if instance.created else instance.phase,
            timer_intent=recorded.id if timed else None,
        ),
        recorded,
    )


def _mapped(state: RunState, event: e.InstanceMapped, recorded: Recorded[Event]) -> RunState:
    instance = _instance(state, event.attempt, recorded)
    if instance.mapped_id is not None:
        raise corrupt(recorded, f"the instance was mapped before, to {instance.mapped_id}")
    return _runs(
        state,
        replace(
            instance,
            created=True,
            started=True,
            started_at=recorded.at,
            mapped_id=event.mapped_id,
            phase=instance.phase if instance.ended else "started",
        ),
        recorded,
    )


def _runs(state: RunState, instance: Instance, recorded: Recorded[Event]) -> RunState:
    """`running` is shown when created and started are both recorded, in either order (INV-08)."""
    run = state.run
    if not (instance.created and instance.started) or run.terminal:
        return _put(state, instance, recorded)
    status: Status = "running" if run.status == "submitted" else run.status
    started_at = recorded.at if run.started_at is None else run.started_at
    return _put(state, instance, recorded, status=status, started_at=started_at)


def _ended(state: RunState, recorded: Recorded[Event], attempt: int, **changes: object) -> RunState:
    instance = _instance(state, attempt, recorded)
    if instance.ended:
        raise corrupt(recorded, f"the instance ended before, {instance.phase}")
    ended = replace(
        instance, ended_at=recorded.at, terminate_intent=None, timer_intent=None, **changes
    )
    return _put(state, ended, recorded)


def _child(state: RunState, child_key: str, recorded: Recorded[Event]) -> Child:
    child = state.children.get(child_key)
    if child is None:
        raise corrupt(recorded, f'child "{child_key}" was never requested')
    return child


def _put_child(
    state: RunState,
    child: Child,
    counts: Counts,
    recorded: Recorded[Event],
    **changes: object,
) -> RunState:
    run = replace(
        state.run,
        version=recorded.streamversion,
        position=int(recorded.sequence),
        children=counts,
        **changes,
    )
    children = state.children.set(child.child_key, child)
    return RunState(run, state.instances, children, state.signals, state.waits)


def _child_requested(
    state: RunState, event: e.ChildRequested, recorded: Recorded[Event]
) -> RunState:
    early = state.children.get(event.child_key)
    counts = state.run.children
    if early is None:
        child = Child(
            child_key=event.child_key,
            status="requested",
            position=recorded.position,
            child_run_id=event.child_run_id,
            play_name=event.play_name,
            input=event.input,
            on_parent_end=event.on_parent_end,
        )
        counts = replace(counts, total=counts.total + 1, running=counts.running + 1)
        return _put_child(state, child, counts, recorded)
    if early.play_name is not None:
        raise corrupt(recorded, f'child key "{event.child_key}" was requested before')
    joined = replace(
        early,
        child_run_id=event.child_run_id,
        play_name=event.play_name,
        input=event.input,
        on_parent_end=event.on_parent_end,
    )
    return _put_child(state, joined, counts, recorded)


def _child_terminal(
    state: RunState, event: e.ChildTerminalSet, recorded: Recorded[Event]
) -> RunState:
    child = state.children.get(event.event_key)
    counts = state.run.children
    if child is None:  # early: the terminal came before the request (SPEC 4.3)
        child = Child(
            child_key=event.event_key,
            status="requested",
            position=recorded.position,
            child_run_id=event.child_run_id,
        )
        counts = replace(counts, total=counts.total + 1, running=counts.running + 1)
    if child.status != "requested":
        raise corrupt(recorded, f'child "{event.event_key}" had ended before, {child.status}')
    return _child_ended(
        state,
        child,
        counts,
        event.status or "completed",
        recorded,
        used=_restarts_anew(state.run.used),
        result=event.result if event.source == "child" else event.data,
        error_class=event.error_class,
        code=event.code,
        error=event.error,
    )


def _child_ended(
    state: RunState,
    child: Child,
    counts: Counts,
    status: e.RunEnd,
    recorded: Recorded[Event],
    used: Used | None = None,
    **changes: object,
) -> RunState:
    match status:
        case "completed":
            counts = replace(counts, running=counts.running - 1, completed=counts.completed + 1)
        case "failed":
            counts = replace(counts, running=counts.running - 1, failed=counts.failed + 1)
        case "cancelled":
            counts = replace(counts, running=counts.running - 1, cancelled=counts.cancelled + 1)
        case _:
            assert_never(status)
    ended = replace(child, status=status, ended_position=recorded.position, **changes)
    return _put_child(state, ended, counts, recorded, used=used or state.run.used)


def _restarts_anew(used: Used) -> Used:
    """A run that got something is getting somewhere: its restarts are counted anew."""
    return replace(used, restart=0)


def _signal(state: RunState, event: e.SignalReceived, recorded: Recorded[Event]) -> RunState:
    n = state.run.signals + 1
    signal = Signal(
        n=n,
        signal_id=event.signal_id,
        key=event.event_key or event.signal,
        signal=event.signal,
        event_key=event.event_key,
        event_type=event.event_type,
        data=event.data,
        position=recorded.position,
    )
    state = _next(state, recorded, signals=n, used=_restarts_anew(state.run.used))
    return replace(state, signals=state.signals.set(n, signal))


def _wait_started(state: RunState, event: e.RunWaitStarted, recorded: Recorded[Event]) -> RunState:
    if event.wait_id in state.waits:
        raise corrupt(recorded, f'wait "{event.wait_id}" was started before')
    wait = Wait(
        wait_id=event.wait_id,
        kind=event.kind,
        key=event.key,
        ordinal=event.ordinal,
        since_at=recorded.at,
        position=recorded.position,
        intent_id=recorded.id,
        until_at=event.until_at,
    )
    state = _next(state, recorded)
    return replace(state, waits=state.waits.set(event.wait_id, wait))


def _wait_ended(state: RunState, event: e.RunWaitEnded, recorded: Recorded[Event]) -> RunState:
    if event.wait_id not in state.waits:
        raise corrupt(recorded, f'wait "{event.wait_id}" is not open')
    signals = state.signals
    if event.signal_id is not None:
        signals = signals.delete(taken_signal(state, event.signal_id, recorded).n)
    state = _next(state, recorded)
    return replace(state, waits=state.waits.delete(event.wait_id), signals=signals)


def taken_signal(state: RunState, signal_id: str, recorded: Recorded[Event]) -> Signal:
    """Returns the untaken signal of this id; a wait can take no other."""
    for signal in state.signals.values():
        if signal.signal_id == signal_id:
            return signal
    raise corrupt(recorded, f'signal "{signal_id}" is not there to take')


def _end(
    state: RunState, status: e.RunEnd, recorded: Recorded[Event], **changes: object
) -> RunState:
    return _next(
        state,
        recorded,
        status=status,
        ended_at=recorded.at,
        ended_position=recorded.position,
        **changes,
    )
