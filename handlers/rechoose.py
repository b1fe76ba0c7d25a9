"""Making every choice of a log again, without commands, vault, clock or engine (CONTRACTS A.13).

Facts are taken as given and checked for being allowed.  At each event e, `react(state up to e, e)`
must equal the choices whose causationid is e: same ids, types, data.  One command's events stand
together in the log, so what a fact sets off has to follow before anything else does, and no more is
held than the choices of one closure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import Struct

from handlers.commands import Command, fact_id
from handlers.decide import Rejected, decide
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
        found: list[Divergence] = []
        pending = self._pending
        if pending and pending[0][2].subject != recorded.subject:
            found += self.end()
        if pending and pending[0][0] == recorded.id:
            _, event, given = pending.popleft()
            _compare(self, recorded, event, given, after, found)
        elif not self._moved(recorded, after, found):
            self._unexpected(recorded, before, found)
        if after is not None:
            identity = recorded.id
            for index, choice in enumerate(react(after, recorded)):
                pending.append((event_id(identity, str(index)), choice, recorded))
        return found or NOTHING

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

    def _moved(
        self, recorded: Recorded[Event], after: RunState | None, found: list[Divergence]
    ) -> bool:
        for item in self._pending:
            if item[0] == recorded.id:
                self._pending.remove(item)
                self.moved += 1
                _compare(self, recorded, item[1], item[2], after, found)
                return True
        return False

    def _unexpected(
        self, recorded: Recorded[Event], before: RunState | None, found: list[Divergence]
    ) -> None:
        """Takes a fact, or a choice that today is not made."""
        why = _fact_is_wrong(recorded)
        if why == "":
            found += self.end()
            refused = self._refused(recorded, before)
            if refused is None:
                self.facts += 1
            else:
                found.append(_not_allowed(recorded, refused))
        elif _is_choice(recorded):
            found.append(
                Divergence(
                    kind="not_made",
                    stream=recorded.subject,
                    version=recorded.streamversion,
                    position=recorded.position,
                    type=recorded.type,
                    recorded=recorded.data,
                    why="today nothing follows here from what it names as its cause",
                )
            )
        else:
            found.append(_not_allowed(recorded, why))

    def _refused(self, recorded: Recorded[Event], before: RunState | None) -> str | None:
        """Says why today's rules would not record a fact; None if they would."""
        fact = recorded.data
        if isinstance(fact, SystemEvent):
            return None
        if isinstance(fact, e.InstanceOutputFenced | e.RunCancelRefused):
            return _refusal_is_wrong(fact, before)
        asked: RunEvent = fact
        if isinstance(fact, e.ChildTerminalConflict):
            asked = e.ChildTerminalSet(
                event_key=fact.event_key, child_run_id=fact.child_run_id, source="child"
            )
        command = Command(
            stream=recorded.subject,
            fact=asked,
            actor=recorded.actor,
            cause=recorded.causationid,
        )
        try:
            decision = decide(command, before, recorded.at)
        except AssertionError:
            return "it is a choice, and only react makes it"
        if isinstance(decision, Rejected):
            return decision.error.message
        if not decision or decision[0] != fact:
            return "the state leaves nothing to record"
        for beside in decision[1:]:  # a local create is its start: both facts stand together
            self._pending.append((fact_id(command, beside), beside, recorded))
        return None


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


def _compare(
    rechooser: Rechooser,
    recorded: Recorded[Event],
    today: RunEvent,
    given: Recorded[Event],
    after: RunState | None,
    found: list[Divergence],
) -> None:
    if (
        recorded.data == today
        and recorded.time == given.time
        and recorded.actor == given.actor
        and recorded.correlationid == given.correlationid
    ):
        rechooser.choices += 1
        return
    why = f"decided by {decided_by(given)}"
    if isinstance(today, e.RetryDecided) and after is not None and today.error_class:
        allowed = allowance(after, today.error_class)
        if allowed.budget != "none":
            why += f"; the run froze {_LIMITS[allowed.budget]} {allowed.limit}"
    if recorded.data == today:
        why = "the envelope differs: a choice repeats actor, time and family of what it follows"
    found.append(
        Divergence(
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
    )


def _fact_is_wrong(recorded: Recorded[Event]) -> str:
    """Says why an event does not stand under the id of a fact; empty if it does."""
    fact = recorded.data
    if isinstance(fact, e.EffectResumed) and recorded.causationid is None:
        return ""  # its label holds a request id that is not stored
    command = Command(
        stream=recorded.subject, fact=fact, actor=recorded.actor, cause=recorded.causationid
    )
    try:
        wanted = fact_id(command, fact)
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


_LIMITS: Final = {
    "retry": "retryLimit",
    "lost": "lostLimit",
    "restart": "restartLimit",
    "play": "playRetries",
}
