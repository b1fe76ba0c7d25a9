"""Making every choice of a log again, without commands, vault, clock or engine (CONTRACTS A.13).

Facts are taken as given and checked for being allowed.  At each event e, `react(state up to e, e)`
must equal the choices whose causationid is e: same ids, types, data.  One command's events stand
together in the log, so what a fact sets off has to follow before anything else does, and no more is
held than the choices of one closure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal, cast, get_args

import msgspec
from msgspec import Struct

from handlers.commands import Command, fact_id
from handlers.decide import decide
from handlers.decision import Rejected
from handlers.react import react
from handlers.retry import allowance
from ledger import events as e
from ledger.codec import Recorded, wire_name
from ledger.errors import CorruptStream
from ledger.events import Event, RunEvent, SystemEvent
from ledger.ids import event_id
from projections.state import RunState

CLOSURE_MAX: Final = 64
NOTHING: Final[tuple[Divergence, ...]] = ()

Kind = Literal["changed", "not_made", "not_recorded", "not_allowed"]


class Field(Struct, frozen=True):
    """One place in `data` where what was recorded and what is chosen today differ."""

    path: str
    recorded: Any
    today: Any


class Divergence(Struct, frozen=True):
    """One event that today's code would not have brought about, or would have and is not there.

    `given` is the event that was reacted to; `recorded` and `today` are the two values, one of them
    absent where there is only the other.
    """

    kind: Kind
    stream: str
    version: int
    position: int
    type: str
    given: Recorded[Event] | None = None
    recorded: Event | None = None
    today: Event | None = None
    why: str = ""

    @property
    def fields(self) -> list[Field]:
        """The places that differ, by their paths."""
        was = {} if self.recorded is None else _flat(self.recorded)
        now = {} if self.today is None else _flat(self.today)
        if self.recorded is not None and self.today is not None:
            was = {"type": wire_name(self.recorded), **was}
            now = {"type": wire_name(self.today), **now}
        paths = [*was, *(path for path in now if path not in was)]
        return [
            Field(path, was.get(path), now.get(path))
            for path in paths
            if was.get(path) != now.get(path)
        ]


class Rechooser:
    """Takes events in the log's order with the states around them, and says what differs.

    `facts` and `choices` count what was found as it should be, `moved` the choices among them that
    stand in another order than today's closure has.
    """

    def __init__(self) -> None:
        self.facts = 0
        self.choices = 0
        self.moved = 0
        self._pending: deque[tuple[str, RunEvent, Recorded[Event]]] = deque()

    @property
    def waits(self) -> bool:
        """Says whether choices of what was taken last are still to come."""
        return bool(self._pending)

    def take(
        self, recorded: Recorded[Event], before: RunState | None, after: RunState | None
    ) -> Sequence[Divergence]:
        """Takes one event; `before` and `after` are its run's states, None on `system`."""
        pending = self._pending
        identity = recorded.id
        found: Sequence[Divergence] = NOTHING
        if not pending:
            found = self._unexpected(recorded, before)
        elif pending[0][0] == identity:
            _, event, given = pending.popleft()
            found = self._compare(recorded, event, given, after)
        else:
            found = self._out_of_order(recorded, before, after)
        if after is not None:
            try:
                choices = react(after, recorded)
            except _UNFORESEEN as error:
                return [
                    *found,
                    _not_allowed(recorded, f"today's react cannot follow it: {error!r}"),
                ]
            if choices:
                pending.extend(
                    (event_id(identity, str(index)), choice, recorded)
                    for index, choice in enumerate(choices)
                )
        return found

    def end(self) -> list[Divergence]:
        """Returns the choices that today follow from what was taken last and are not recorded."""
        missing = [
            Divergence(
                kind="not_recorded",
                stream=given.subject,
                version=given.streamversion,
                position=given.position,
                type=wire_name(event),
                given=given,
                today=event,
                why=f"decided by {decided_by(given)}",
            )
            for _, event, given in self._pending
        ]
        self._pending.clear()
        return missing

    def _out_of_order(
        self, recorded: Recorded[Event], before: RunState | None, after: RunState | None
    ) -> list[Divergence]:
        """Takes what is not the next choice: a later one, or what should not be there yet."""
        found: list[Divergence] = []
        if self._pending[0][2].subject != recorded.subject:
            found += self.end()
        for item in self._pending:
            if item[0] == recorded.id:
                self._pending.remove(item)
                self.moved += 1
                found += self._compare(recorded, item[1], item[2], after)
                return found
        if not _is_choice(recorded):
            found += self.end()
        found += self._unexpected(recorded, before)
        return found

    def _unexpected(
        self, recorded: Recorded[Event], before: RunState | None
    ) -> Sequence[Divergence]:
        """Takes a fact, or a choice that today is not made."""
        command = _command(recorded)
        why = _fact_is_wrong(recorded, command)
        if why == "":
            refused = self._refused(recorded, command, before)
            if refused is None:
                self.facts += 1
                return NOTHING
            return [_not_allowed(recorded, refused)]
        if not _is_choice(recorded):
            return [_not_allowed(recorded, why)]
        return [
            Divergence(
                kind="not_made",
                stream=recorded.subject,
                version=recorded.streamversion,
                position=recorded.position,
                type=recorded.type,
                recorded=recorded.data,
                why="today nothing follows here from what it names as its cause",
            )
        ]

    def _refused(
        self, recorded: Recorded[Event], command: Command, before: RunState | None
    ) -> str | None:
        """Says why today's rules would not record a fact; None if they would."""
        fact = recorded.data
        if type(fact) in _NEVER_DECIDED:
            if isinstance(fact, e.InstanceOutputFenced | e.RunCancelRefused):
                return _refusal_is_wrong(fact, before)
            return None
        try:
            decision = decide(command, before, recorded.at)
        except AssertionError:
            return "it is a choice, and only react makes it"
        except _UNFORESEEN as error:
            return f"today's decide cannot follow it: {error!r}"
        if isinstance(decision, Rejected):
            return decision.error.message
        if not decision or decision[0] != fact:
            return "the state leaves nothing to record"
        for beside in decision[1:]:  # a local create is its start: both facts stand together
            self._pending.append((fact_id(command, beside), beside, recorded))
        return None

    def _compare(
        self,
        recorded: Recorded[Event],
        today: RunEvent,
        given: Recorded[Event],
        after: RunState | None,
    ) -> Sequence[Divergence]:
        if (
            recorded.data == today
            and recorded.time == given.time
            and recorded.actor == given.actor
            and recorded.correlationid == given.correlationid
        ):
            self.choices += 1
            return NOTHING
        return [_changed(recorded, today, given, after)]


def corrupt(recorded: Recorded[Event], error: CorruptStream) -> Divergence:
    """Returns the divergence of an event that the fold itself refuses."""
    return _not_allowed(recorded, error.message)


def decided_by(given: Recorded[Event]) -> str:
    """Returns where the choice on an event is made."""
    match given.data:
        case e.InstanceCreateFailed() | e.InstanceErrored() | e.InstanceLost():
            return "react_to_end (handlers/retry.py)"
        case (
            e.RetryDecided()
            | e.RetryParamsLoaded()
            | e.RetryParamsFailed()
            | e.RetryClaimed()
            | e.RetryDenied()
            | e.RetryAbandoned()
        ):
            return "react_to_retry (handlers/retry.py)"
        case _:
            return "react (handlers/react.py)"


def _changed(
    recorded: Recorded[Event], today: RunEvent, given: Recorded[Event], after: RunState | None
) -> Divergence:
    why = f"decided by {decided_by(given)}"
    if isinstance(today, e.RetryDecided) and after is not None:
        allowed = allowance(after, today.error_class)
        if allowed.budget != "none":
            why += f"; the run froze {_LIMITS[allowed.budget]} {allowed.limit}"
    if recorded.data == today:
        why = "the envelope differs: a choice repeats actor, time and family of what it follows"
    return Divergence(
        kind="changed",
        stream=recorded.subject,
        version=recorded.streamversion,
        position=recorded.position,
        type=recorded.type,
        given=given,
        recorded=recorded.data,
        today=today,
        why=why,
    )


def _command(recorded: Recorded[Event]) -> Command:
    """Returns the command that would record this fact today, said by nobody in particular."""
    fact = recorded.data
    if type(fact) is e.ChildTerminalConflict:
        fact = e.ChildTerminalSet(
            event_key=fact.event_key, child_run_id=fact.child_run_id, source="child"
        )
    return Command(
        stream=recorded.subject, fact=fact, actor=recorded.actor, cause=recorded.causationid
    )


def _fact_is_wrong(recorded: Recorded[Event], command: Command) -> str:
    """Says why an event does not stand under the id of a fact; empty if it does."""
    cause = recorded.causationid
    kind = type(recorded.data)
    if cause is not None and kind not in _OWN_IDS and recorded.id == event_id(cause, "done"):
        return ""
    if kind is e.EffectResumed and cause is None:
        return ""  # its label holds a request id that is not stored
    try:
        wanted = fact_id(command, command.fact)
    except AssertionError:
        return "it is a choice, and names no cause"
    return "" if wanted == recorded.id else f"its id is {recorded.id}, derived is {wanted}"


def _is_choice(recorded: Recorded[Event]) -> bool:
    cause = recorded.causationid
    return cause is not None and any(
        event_id(cause, str(index)) == recorded.id for index in range(CLOSURE_MAX)
    )


def _refusal_is_wrong(
    fact: e.InstanceOutputFenced | e.RunCancelRefused, before: RunState | None
) -> str | None:
    if before is None:
        return "no run stands before it"
    if isinstance(fact, e.RunCancelRefused):
        if before.run.status != fact.status or before.run.cancel_refused:
            return f"the run is {before.run.status}"
        return None
    if before.instance(fact.instance_id) is None:
        return "the instance is not of this run"
    if before.run.attempt != fact.current_attempt:
        return f"the current attempt is {before.run.attempt}"
    return None


def _not_allowed(recorded: Recorded[Event], why: str) -> Divergence:
    return Divergence(
        kind="not_allowed",
        stream=recorded.subject,
        version=recorded.streamversion,
        position=recorded.position,
        type=recorded.type,
        recorded=recorded.data,
        why=why,
    )


def _flat(event: Event) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", msgspec.to_builtins(event)).items():
        if isinstance(value, dict):
            out.update({f"{name}.{inner}": held for inner, held in value.items()})
        else:
            out[name] = value
    return out


_UNFORESEEN: Final = (LookupError, ValueError, TypeError, AssertionError)
"""What rules raise that were never given such an event; a log from elsewhere may hold anything."""
_NEVER_DECIDED: Final = frozenset(
    (*get_args(SystemEvent), e.InstanceOutputFenced, e.RunCancelRefused)
)
_OWN_IDS: Final = frozenset(
    (
        e.InstanceStarted,
        e.InstanceOutputFenced,
        e.RunCancelRefused,
        e.EffectFailed,
        e.InstanceCreateFailed,
    )
)
_LIMITS: Final = {
    "retry": "retryLimit",
    "lost": "lostLimit",
    "restart": "restartLimit",
    "play": "playRetries",
}
