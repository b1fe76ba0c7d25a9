"""What a command does inside the writer's transaction (CONTRACTS A.7).

    first id recorded already? -> the recorded answer, or a conflict
    state (cache, or the rows of this run) -> decide -> facts, nothing, or a refusal
    closure, breadth-first: take an event, evolve, project, put what react says at the end

The log's order is the queue's order, so `verify` can make the same choices again, event by event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from msgspec import Struct

from handlers.commands import Command, fact_id
from handlers.decide import decide
from handlers.decision import Rejected
from handlers.react import react
from ledger import events as e
from ledger.codec import Recorded
from ledger.errors import (
    ChildKeyConflict,
    Conflict,
    LogDamaged,
    Reseal,
    RunConflict,
    WrongExpectedVersion,
)
from ledger.events import Event, RunEvent, Seal, SystemEvent
from ledger.ids import event_id, quote
from ledger.rows import RowChange
from ledger.transaction import Transaction
from projections.load import load
from projections.rows import project_parts, run_row
from projections.run import evolve
from projections.state import RunState

CLOSURE_MAX: Final = 64
SYSTEM: Final = "system"


class SystemState(Struct, frozen=True, gc=False):
    """How far the `system` stream goes; no rule looks at more."""

    version: int


State = RunState | SystemState


class Answer(Struct, frozen=True):
    """What a command led to: the fact that stands in the log, and all that was appended with it.

    `replayed` says that nothing was appended, because it was recorded before or there was nothing
    to do.  `state` is None on the `system` stream.
    """

    recorded: Recorded[Event] | None
    state: RunState | None
    events: tuple[Recorded[Event], ...]
    position: int
    replayed: bool


def look_ahead(transaction: Transaction[State], commands: Sequence[Command]) -> None:
    """Asks once for a whole batch what each of its commands would ask for itself."""
    ids = transaction.first_ids
    for command in commands:
        if not isinstance(command.fact, e.RunSubmitted):
            ids[id(command)] = fact_id(command, command.fact)
    streams = dict.fromkeys(command.stream for command in commands)
    transaction.look_ahead(list(ids.values()), list(streams))


def execute(transaction: Transaction[State], command: Command) -> Answer:
    """Performs a command inside a group commit; raises what it is refused with."""
    if command.stream == SYSTEM:
        return _record_system(transaction, command)
    state = _state(transaction, command.stream)
    if isinstance(command.fact, e.RunSubmitted):
        if state is not None:
            return _resubmitted(transaction, command, command.fact, state)
        recorded = transaction.find(fact_id(command, command.fact)) if command.cause else None
        if recorded is not None:  # the parent's intent has its one outcome: it was given up
            return Answer(recorded, None, (), recorded.position, replayed=True)
    else:
        recorded = transaction.find(_first_id(transaction, command))
        if recorded is not None and _stands(command, recorded):
            return Answer(recorded, state, (), recorded.position, replayed=True)
    version = 0 if state is None else state.run.version
    if command.expected_version is not None and command.expected_version != version:
        raise WrongExpectedVersion(
            f"stream {command.stream}: expected version {command.expected_version}, "
            f"log is at {version}",
            hint="read it again and decide again",
            expected=command.expected_version,
            actual=version,
        )
    decision = decide(command, state, transaction.at)
    if isinstance(decision, Rejected):
        if decision.record is not None and state is not None:
            _record_refusal(transaction, command, state, decision.record)
        raise decision.error
    if not decision:
        position = state.run.position if state is not None else transaction.position
        return Answer(None, state, (), position, replayed=True)
    return _append(transaction, command, state, decision, keep_values=True)


def _append(
    transaction: Transaction[State],
    command: Command,
    state: RunState | None,
    facts: tuple[RunEvent, ...],
    *,
    keep_values: bool,
) -> Answer:
    """Appends facts with the closure of their reactions, all or nothing."""
    staged = transaction.stage()
    changes: list[RowChange] = []
    queue: deque[tuple[RunEvent, str, str | None]] = deque(
        (fact, _fact_id(transaction, command, fact), _cause(command, fact)) for fact in facts
    )
    while queue:
        event, identity, cause = queue.popleft()
        before = state
        recorded = staged.add(
            command.stream,
            1 if before is None else before.run.version + 1,
            event,
            event_id=identity,
            cause=cause,
            correlation=_family(before, event),
            actor=command.actor,
        )
        state = evolve(before, recorded)
        changes += project_parts(recorded, before, state)
        for index, choice in enumerate(react(state, recorded)):
            queue.append((choice, event_id(recorded.id, str(index)), recorded.id))
        if len(staged.events) + len(queue) > CLOSURE_MAX:
            raise AssertionError(f"{command.stream}: over {CLOSURE_MAX} events from one command")
    if state is None:
        raise AssertionError(f"{command.stream}: no facts to append")
    changes.append(run_row(state.run))
    transaction.accept(staged, command.stream, state, changes, keep=not state.run.terminal)
    if keep_values:
        transaction.keep_values(command.values)
        transaction.keep_secrets(command.secrets)
        if command.run_key is not None:
            transaction.keep_key(command.stream, command.run_key)
    return Answer(
        staged.events[0], state, tuple(staged.events), transaction.position, replayed=False
    )


def _record_refusal(
    transaction: Transaction[State], command: Command, state: RunState, record: RunEvent
) -> None:
    """Keeps the one trace a refusal may leave, once."""
    if transaction.find(fact_id(command, record)) is None:
        _append(transaction, command, state, (record,), keep_values=False)


def _resubmitted(
    transaction: Transaction[State], command: Command, fact: e.RunSubmitted, state: RunState
) -> Answer:
    """Answers a submit of a run that exists: the same request, or a conflict (INV-09)."""
    key = transaction.run_key(command.stream)
    if key is None:
        raise RunConflict(
            f"run {quote(fact.run_id)} exists, and what it was asked was erased",
            code="REQUEST_ERASED",
            hint="another run id",
            runId=fact.run_id,
        )
    if key != command.run_key:
        raise Reseal(f"run {quote(fact.run_id)} exists under another key", runId=fact.run_id)
    if fact.request_digest != state.run.request_digest:
        stored, given = state.run.request_digest[:8], fact.request_digest[:8]
        raise RunConflict(
            f"run {quote(fact.run_id)} exists with another request: stored {stored}, this {given}",
            hint=f"another --run-id, or playledger rerun {fact.run_id} --input ...",
            runId=fact.run_id,
            stored=stored,
            given=given,
        )
    recorded = _first(transaction, command.stream)
    return Answer(recorded, state, (), recorded.position, replayed=True)


def _stands(command: Command, recorded: Recorded[Event]) -> bool:
    """Says whether what is recorded answers the command; raises if it contradicts a caller's fact.

    An outcome or a wait stands whatever this one says.  A caller's fact must have the same content.
    Any other report that says something else goes on to `decide`, which refuses or fences it.
    """
    fact, stored = command.fact, recorded.data
    if command.cause is not None or isinstance(fact, e.RunWaitStarted) or fact == stored:
        return True
    if isinstance(fact, e.ChildRequested) and isinstance(stored, e.ChildRequested):
        was, now = stored.input.digest[:8], fact.input.digest[:8]
        raise ChildKeyConflict(
            f"child key {quote(fact.child_key)} is taken by {stored.play_name} with input {was} "
            f"(@{recorded.position}), this is {fact.play_name} with {now}",
            hint="give the new child another key",
            stored=was,
            given=now,
        )
    if isinstance(fact, e.SignalReceived) and isinstance(stored, e.SignalReceived):
        raise _conflict("signal id", fact.signal_id, stored.data, fact.data, recorded)
    if isinstance(fact, e.RunCancelRequested) and isinstance(stored, e.RunCancelRequested):
        raise _conflict("request id", fact.request_id, stored.reason, fact.reason, recorded)
    return False


def _conflict(
    what: str, key: str, stored: Seal | None, given: Seal | None, recorded: Recorded[Event]
) -> Conflict:
    was = stored.digest[:8] if stored else "nothing"
    now = given.digest[:8] if given else "nothing"
    return Conflict(
        f"{what} {quote(key)} was used with another body: stored {was}, this {now}",
        code="IDEMPOTENCY_CONFLICT",
        hint="a new request needs a new id",
        stored=was,
        given=now,
        position=recorded.position,
    )


def _record_system(transaction: Transaction[State], command: Command) -> Answer:
    """Appends an event of the `system` stream, which no rule reacts to."""
    fact = cast("SystemEvent", command.fact)
    identity = fact_id(command, fact)
    recorded = transaction.find(identity)
    if recorded is not None:
        return Answer(recorded, None, (), recorded.position, replayed=True)
    found = transaction.state(SYSTEM)
    version = found.version if isinstance(found, SystemState) else _last_version(transaction)
    staged = transaction.stage()
    recorded = staged.add(
        SYSTEM,
        version + 1,
        fact,
        event_id=identity,
        cause=None,
        correlation=SYSTEM,
        actor=command.actor,
    )
    transaction.accept(staged, SYSTEM, SystemState(version + 1), (), keep=True)
    return Answer(recorded, None, (recorded,), recorded.position, replayed=False)


def _state(transaction: Transaction[State], stream: str) -> RunState | None:
    found = transaction.state(stream)
    if isinstance(found, RunState):
        return found
    if transaction.absent(stream):
        return None
    loaded = load(transaction.connection, stream.removeprefix("run/"))
    if loaded is not None:
        transaction.remember(stream, loaded, keep=not loaded.run.terminal)
    return loaded


def _fact_id(transaction: Transaction[State], command: Command, fact: RunEvent) -> str:
    return _first_id(transaction, command) if fact is command.fact else fact_id(command, fact)


def _first_id(transaction: Transaction[State], command: Command) -> str:
    known = transaction.first_ids.get(id(command))
    return fact_id(command, command.fact) if known is None else known


def _first(transaction: Transaction[State], stream: str) -> Recorded[Event]:
    for recorded in transaction.events:
        if recorded.subject == stream:
            return recorded
    row = transaction.connection.execute(
        "select id from events where version = 1"
        " and stream_id = (select stream_id from streams where name = ?)",
        (stream,),
    ).fetchone()
    recorded_first = None if row is None else transaction.find(row[0])
    if recorded_first is None:
        raise LogDamaged(f"{stream} has a row, but no first event", hint="playledger db fsck")
    return recorded_first


def _last_version(transaction: Transaction[State]) -> int:
    row = transaction.connection.execute(
        "select max(version) from events"
        " where stream_id = (select stream_id from streams where name = ?)",
        (SYSTEM,),
    ).fetchone()
    return int(row[0] or 0)


def _cause(command: Command, fact: RunEvent) -> str | None:
    """Only an outcome names its intent; what is recorded beside it stands for itself."""
    if isinstance(fact, e.InstanceStarted | e.InstanceOutputFenced | e.RunCancelRefused):
        return None
    return command.cause


def _family(state: RunState | None, event: RunEvent) -> str:
    if state is not None:
        return state.run.lineage.family_key
    if isinstance(event, e.RunSubmitted):
        return event.lineage.family_key
    raise AssertionError(f"{type(event).__name__} cannot begin a stream")
