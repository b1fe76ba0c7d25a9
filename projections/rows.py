"""The rows an event changes: `project(recorded, before, after)`, pure, used live and by a rebuild.

The outbox is one of them: an intent opens a row, its outcome closes it from whatever stream it
stands in, and what an end makes pointless is dropped here.  Nothing else writes to it.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final, Literal, assert_never, cast

from ledger import events as e
from ledger.codec import Recorded, encode_value
from ledger.events import Event, RunEvent
from ledger.rows import Patch, RowChange
from projections.run import corrupt, taken_signal
from projections.state import EDGE, Child, Instance, Run, RunState, Signal, Wait

IntentKind = Literal[
    "create",
    "terminate",
    "params",
    "child_submit",
    "child_cancel",
    "child_terminal",
    "session_revoke",
    "timer",
]

BACKOFF_FIRST_MS: Final = 200
BACKOFF_MAX_MS: Final = 300_000


def project(recorded: Recorded[Event], before: RunState | None, after: RunState) -> list[RowChange]:
    """Returns the rows of every read model that an event of a run's stream changes."""
    return [run_row(after.run), *project_parts(recorded, before, after)]


def project_parts(
    recorded: Recorded[Event], before: RunState | None, after: RunState
) -> list[RowChange]:
    """Returns those rows without the run's own, which every event changes.

    Whoever projects several events of a run at once adds `run_row` of the last state alone.
    """
    event = cast("RunEvent", recorded.data)
    run = after.run
    run_id = run.run_id
    changes: list[RowChange] = []
    match event:
        case e.RunLog() | e.RunLaunchStatePut():  # the commonest first
            pass
        case e.ChildRequested():
            changes.append(_child_row(run_id, after, event.child_key))
            changes.append(_opened(recorded, "child_submit", event.child_run_id, None, recorded.at))
        case e.ChildTerminalSet():
            changes.append(_child_row(run_id, after, event.event_key))
            if event.source == "child":
                changes.append(_closed(_cause(recorded)))
        case e.InstanceCreateRequested():
            changes.append(_instance_row(run_id, after, event.attempt))
            due = event.not_before_at or recorded.at
            if event.engine != EDGE:  # what another coordinator does is no intent of ours
                changes.append(_opened(recorded, "create", event.instance_id, None, due))
        case e.InstanceCreated() | e.InstanceTerminated():
            changes.append(_instance_row(run_id, after, event.attempt))
            changes.append(_closed(_cause(recorded)))
            changes += _instance_timers(before, after, event.attempt)
        case e.InstanceStarted():
            changes.append(_instance_row(run_id, after, event.attempt))
            timer = after.instances[event.attempt].timer_intent
            if timer is not None and run.policy.timeout_ms is not None:
                due = recorded.at + run.policy.timeout_ms
                changes.append(_opened(recorded, "timer", None, None, due))
        case e.InstanceCompleted() | e.InstanceErrored() | e.InstanceLost():
            changes.append(_instance_row(run_id, after, event.attempt))
            changes += _instance_timers(before, after, event.attempt)
        case e.InstanceMapped():
            changes.append(_instance_row(run_id, after, event.attempt))
        case e.RetryClaimRequested():
            changes.append(_instance_row(run_id, after, event.failed_attempt))
        case e.RunCompleted() | e.RunFailed() | e.RunCancelled():
            changes += _run_ended(recorded, after, event.parent)
        case e.RunSubmitted():
            if recorded.causationid is not None:  # it settles the parent's child.requested
                changes.append(_closed(recorded.causationid))
        case e.SignalReceived():
            changes.append(_signal_row(run_id, after.signals[run.signals]))
        case e.RunWaitStarted():
            changes.append(_wait_row(run_id, after.waits[event.wait_id]))
            if event.until_at is not None:
                changes.append(_opened(recorded, "timer", None, None, event.until_at))
        case e.RunWaitEnded():
            changes += _wait_ended(recorded, event, before, run_id)
        case e.InstanceCreateFailed():
            if event.kind == "transient":
                changes.append(_retried(_cause(recorded), recorded, event.try_number))
            else:
                changes.append(_instance_row(run_id, after, event.attempt))
                changes.append(_closed(_cause(recorded)))
        case e.InstanceTerminateRequested():
            changes.append(_instance_row(run_id, after, event.attempt))
            changes.append(
                _opened(recorded, "terminate", event.instance_id, event.host, recorded.at)
            )
        case e.RetryParamsRequested():
            changes.append(_opened(recorded, "params", event.failed_instance_id, None, recorded.at))
        case e.RetryParamsLoaded() | e.RetryParamsFailed() | e.TimerFired():
            changes.append(_closed(_cause(recorded)))
        case e.ChildSubmitFailed():
            changes.append(_child_row(run_id, after, event.child_key))
            changes.append(_closed(_cause(recorded)))
        case e.ChildTerminalConflict():
            changes.append(_closed(_cause(recorded)))  # of a signal: there is no such row
        case e.ChildCancelRequested():
            changes.append(_child_row(run_id, after, event.child_key))
            changes.append(_opened(recorded, "child_cancel", event.child_run_id, None, recorded.at))
        case e.ChildCancelDelivered():
            changes.append(_closed(_cause(recorded)))
        case e.RunCancelRequested():
            due = recorded.at + run.policy.cancel_grace_ms
            changes.append(_opened(recorded, "timer", None, None, due))
        case e.EffectFailed():
            changes.append(_retried(event.intent_id, recorded, event.try_number))
        case e.EffectParked():
            changes.append(
                RowChange("outbox", (event.intent_id,), Patch((recorded.at, event.tries, 1)))
            )
        case e.EffectResumed():
            # The tries stay: their number is the key of the next failed one (CONTRACTS A.4).
            changes.append(RowChange("outbox", (event.intent_id,), Patch((recorded.at, None, 0))))
        case e.InstanceOutputFenced() | e.RetryDecided() | e.RetryClaimed() | e.RetryStarted():
            pass
        case e.RetryDenied() | e.RetryAbandoned() | e.RunCancelRefused() | e.RunProgress():
            pass
        case e.SessionStored():
            pass
        case e.SessionRevokeRequested():
            changes.append(_opened(recorded, "session_revoke", None, None, recorded.at))
        case e.SessionRevoked():
            changes.append(_closed(_cause(recorded)))
        case _:
            assert_never(event)
    return changes


def backoff_ms(event_id: str, tries: int) -> int:
    """Returns the pause behind the n-th failed try: doubled each time, spread by the event's id."""
    pause = min(BACKOFF_FIRST_MS << (tries - 1), BACKOFF_MAX_MS)
    return spread(event_id, pause)


def spread(event_id: str, pause_ms: int) -> int:
    """Returns a pause moved by up to 20 %, drawn from an event's id and so the same in a replay."""
    share = int.from_bytes(sha256(event_id.encode()).digest()[:4], "big") / 0xFFFF_FFFF
    return round(pause_ms * (0.8 + 0.4 * share))


def run_row(run: Run) -> RowChange:
    """Returns the row of a run."""
    lineage = run.lineage
    row = (
        run.run_id,
        run.version,
        run.submitted_position,
        run.status,
        run.play_name,
        lineage.family_key,
        lineage.parent_run_id,
        run.attempt,
        run.submitted_at,
        run.ended_at,
        encode_value(run),
    )
    return RowChange("runs", (run.run_id,), row)


def _instance_row(run_id: str, state: RunState, attempt: int) -> RowChange:
    i: Instance = state.instances[attempt]
    row = (run_id, attempt, i.instance_id, i.host, i.phase, encode_value(i))
    return RowChange("instances", (run_id, attempt), row)


def _child_row(run_id: str, state: RunState, child_key: str) -> RowChange:
    c: Child = state.children[child_key]
    row = (run_id, child_key, c.child_run_id, c.status, encode_value(c))
    return RowChange("children", (run_id, child_key), row)


def _signal_row(run_id: str, s: Signal) -> RowChange:
    row = (run_id, s.n, s.signal_id, s.key, s.taken_by, encode_value(s))
    return RowChange("signals", (run_id, s.n), row)


def _wait_row(run_id: str, w: Wait) -> RowChange:
    row = (run_id, w.wait_id, w.kind, w.key, w.until_at, w.outcome, encode_value(w))
    return RowChange("waits", (run_id, w.wait_id), row)


def _wait_ended(
    recorded: Recorded[Event], event: e.RunWaitEnded, before: RunState | None, run_id: str
) -> list[RowChange]:
    if before is None:
        raise corrupt(recorded, "no run stands before it")
    wait = before.waits[event.wait_id]
    signal = None
    if event.signal_id is not None:
        signal = taken_signal(before, event.signal_id, recorded)
    ended = Wait(
        wait_id=wait.wait_id,
        kind=wait.kind,
        key=wait.key,
        ordinal=wait.ordinal,
        since_at=wait.since_at,
        position=wait.position,
        intent_id=wait.intent_id,
        until_at=wait.until_at,
        outcome=event.outcome,
        signal_id=event.signal_id,
        data=signal.data if signal else None,
    )
    changes = [_wait_row(run_id, ended)]
    if wait.until_at is not None:
        changes.append(_closed(wait.intent_id))
    if signal is not None:
        taken = Signal(
            n=signal.n,
            signal_id=signal.signal_id,
            key=signal.key,
            signal=signal.signal,
            event_key=signal.event_key,
            event_type=signal.event_type,
            data=signal.data,
            position=signal.position,
            taken_by=wait.wait_id,
        )
        changes.append(_signal_row(run_id, taken))
    return changes


def _instance_timers(before: RunState | None, after: RunState, attempt: int) -> list[RowChange]:
    """What an instance's end closes: the row that asks it to end, and its timeout."""
    if before is None or not after.instances[attempt].ended:
        return []
    instance = before.instances[attempt]
    intents = (instance.timer_intent, instance.terminate_intent)
    return [_closed(intent) for intent in intents if intent is not None]


def _run_ended(
    recorded: Recorded[Event], after: RunState, parent: e.Parent | None
) -> list[RowChange]:
    """What a run's end opens and closes: the way to its parent, and every timer it had."""
    changes: list[RowChange] = []
    if parent is not None:
        changes.append(_opened(recorded, "child_terminal", None, None, recorded.at))
    if after.run.cancel is not None:
        changes.append(_closed(after.run.cancel.intent_id))
    timers = [wait.intent_id for wait in after.waits.values() if wait.until_at is not None]
    timers += [i.timer_intent for i in after.instances.values() if i.timer_intent is not None]
    return changes + [_closed(intent_id) for intent_id in sorted(timers)]


def _opened(
    recorded: Recorded[Event], kind: IntentKind, lane: str | None, host: str | None, due_at: int
) -> RowChange:
    row = (recorded.id, recorded.position, recorded.subject, kind, lane, host, due_at, 0, 0)
    return RowChange("outbox", (recorded.id,), row)


def _closed(intent_id: str) -> RowChange:
    return RowChange("outbox", (intent_id,), None)


def _retried(intent_id: str, recorded: Recorded[Event], tries: int) -> RowChange:
    due = recorded.at + backoff_ms(recorded.id, tries)
    return RowChange("outbox", (intent_id,), Patch((due, tries, 0)))


def _cause(recorded: Recorded[Event]) -> str:
    if recorded.causationid is None:
        raise corrupt(recorded, "an outcome names its intent in causationid")
    return recorded.causationid
