"""What happened to one run: its timeline, its state at any position, what changed between two.

Pure over the run's events in order.  Two passes make a timeline, so that a wait can be told where
it begins with how long it took; only the places of waits and causes are held between them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from ledger import events as e
from ledger.codec import Recorded, format_time
from ledger.events import Event, Seal
from ledger.ids import event_id
from ledger.rows import Patch
from projections.describe import Reveal, describe, describe_seal, plain, sealed, span
from projections.load import OutboxRow
from projections.rows import project
from projections.run import evolve
from projections.state import RunState
from projections.waiting import waiting_text

GROUPED: Final = (
    e.ChildRequested,
    e.ChildTerminalSet,
    e.ChildCancelRequested,
    e.ChildCancelDelivered,
    e.RunLog,
    e.RunProgress,
)
"""What comes in crowds, and is told once with a count."""


class Line(Struct, frozen=True):
    """One line of a timeline; a wait has no position, and `last` is where a group ends."""

    position: int | None
    since_ms: int
    at: int
    type: str
    text: str
    cause: int | None = None
    last: int | None = None


class Change(Struct, frozen=True):
    """One thing that differs between two positions, and the events that changed it."""

    path: str
    before: Any
    after: Any
    positions: tuple[int, ...]


class Snapshot(Struct, frozen=True):
    """A run as of a position, with the intents of it that were open then."""

    state: RunState
    outbox: tuple[OutboxRow, ...]
    position: int
    at: int


class _Ends(Struct):
    """What the first pass finds: where children and waits end, and which causes are outside."""

    children: dict[str, int]
    waits: dict[str, tuple[int, str]]
    own: dict[str, int]
    foreign: set[str]


class _Group(Struct):
    """Events of one type that follow one another, told as one."""

    first: Recorded[Event]
    last: Recorded[Event]
    count: int
    keys: list[str]


def timeline(
    events: Callable[[], Iterable[Recorded[Event]]],
    positions_of: Callable[[Iterable[str]], dict[str, int]],
    reveal: Reveal = sealed,
    *,
    group: bool = True,
) -> Iterator[Line]:
    """Yields the lines of one run; `events` reads them from the start, twice."""
    ends = _look_ahead(events())
    causes = Causes({**ends.own, **positions_of(ends.foreign)})
    first_at: int | None = None
    held: _Group | None = None
    for recorded in events():
        if first_at is None:
            first_at = recorded.at
        if held is not None and not (group and _alike(held.last, recorded)):
            yield from _lines(held, first_at, ends, causes, reveal)
            held = None
        if held is None:
            held = _Group(recorded, recorded, 0, [])
        held.last = recorded
        held.count += 1
        if isinstance(recorded.data, e.ChildRequested):
            held.keys.append(recorded.data.child_key)
        causes.learn(recorded)
    if held is not None and first_at is not None:
        yield from _lines(held, first_at, ends, causes, reveal)


def log_lines(
    events: Iterable[Recorded[Event]],
    positions_of: Callable[[Iterable[str]], dict[str, int]],
    reveal: Reveal = sealed,
) -> Iterator[Line]:
    """Yields every event of a log, one by one; causes are recent, or looked up."""
    recent: OrderedDict[str, int] = OrderedDict()
    first_at: int | None = None
    for recorded in events:
        if first_at is None:
            first_at = recorded.at
        recent[recorded.id] = recorded.position
        if len(recent) > _RECENT:
            recent.popitem(last=False)
        cause = None
        if recorded.causationid is not None:
            cause = recent.get(recorded.causationid)
            if cause is None:
                cause = positions_of([recorded.causationid]).get(recorded.causationid)
        yield Line(
            position=recorded.position,
            since_ms=recorded.at - first_at,
            at=recorded.at,
            type=recorded.type,
            text=f"{plain(recorded.subject.removeprefix('run/'))}: {describe(recorded, reveal)}",
            cause=cause,
        )


class Causes:
    """Where causes stand: an event's causationid, or the start of the instance that reports it."""

    def __init__(self, positions: dict[str, int]) -> None:
        self.positions = positions
        self._started: dict[str, int] = {}
        self._created: dict[str, int] = {}

    def learn(self, recorded: Recorded[Event]) -> None:
        """Remembers where instances were created and started."""
        match recorded.data:
            case e.InstanceCreateRequested() | e.InstanceCreated():
                self._created[recorded.data.instance_id] = recorded.position
            case e.InstanceStarted():
                self._started[recorded.data.instance_id] = recorded.position

    def of(self, recorded: Recorded[Event]) -> int | None:
        """Returns the position of an event's cause; None if it came from outside."""
        if recorded.causationid is not None:
            return self.positions.get(recorded.causationid)
        match recorded.data:
            case e.InstanceStarted(instance_id=instance_id):
                return self._created.get(instance_id)
            case (
                e.InstanceCompleted(instance_id=instance_id)
                | e.InstanceErrored(instance_id=instance_id)
                | e.InstanceLost(instance_id=instance_id)
                | e.RunLog(instance_id=instance_id)
                | e.RunProgress(instance_id=instance_id)
            ):
                return self._started.get(instance_id)
            case _:
                return self._started.get(recorded.actor.removeprefix("instance/"))


def snapshot(
    events: Iterable[Recorded[Event]],
    positions_of: Callable[[Iterable[str]], dict[str, int]],
    upto: int,
) -> Snapshot | None:
    """Returns a run as its events up to a position leave it, with the intents open then.

    An intent may be settled from another stream: then its outcome is found by its derived id.
    """
    state: RunState | None = None
    rows: dict[str, OutboxRow] = {}
    last: Recorded[Event] | None = None
    for last in events:
        before, state = state, evolve(state, last)
        for change in project(last, before, state):
            if change.table == "outbox":
                _outbox(rows, change.key[0], change.row)
    if state is None or last is None:
        return None
    outcomes = {event_id(intent, "done"): intent for intent in rows}
    for outcome, position in positions_of(outcomes).items():
        if position <= upto:
            del rows[outcomes[outcome]]
    ordered = tuple(sorted(rows.values(), key=lambda row: row.position))
    return Snapshot(state, ordered, upto, last.at)


def changes(events: Iterable[Recorded[Event]], start: int, reveal: Reveal = sealed) -> list[Change]:
    """Returns what the events behind `start` changed, path by path, and which of them did."""
    state: RunState | None = None
    before: dict[str, Any] = {}
    now: dict[str, Any] = {}
    waited, moved = "none", []
    where: dict[str, list[int]] = {}
    for recorded in events:
        if recorded.position > start and not where and state is not None and not now:
            now = before = view(state)
            waited = waiting_text(state)
        state = evolve(state, recorded)
        if recorded.position <= start:
            continue
        was, now = now, view(state)
        for path in now.keys() | was.keys():
            if was.get(path) != now.get(path):
                where.setdefault(path, []).append(recorded.position)
        if isinstance(recorded.data, _MOVES_WAITS):
            moved.append(recorded.position)
    found = [
        Change(path, _told(before.get(path), reveal), _told(now.get(path), reveal), tuple(places))
        for path, places in sorted(where.items(), key=lambda item: item[1][0])
        if before.get(path) != now.get(path)
    ]
    waits = "none" if state is None else waiting_text(state)
    if moved and waits != waited:
        found.append(Change("waitingOn", waited, waits, tuple(moved)))
    return found


def view(state: RunState) -> dict[str, Any]:
    """Returns what a run shows of itself, by paths; seals stay seals."""
    run = state.run
    shown: dict[str, Any] = {"attempt": run.attempt, "status": run.status}
    for name in _FIELDS:
        value = getattr(run, name)
        if value is None:
            continue
        if isinstance(value, Struct) and not isinstance(value, Seal):
            for inner in value.__struct_fields__:
                shown[f"{_camel(name)}.{_camel(inner)}"] = getattr(value, inner)
        else:
            shown[_camel(name)] = value
    for attempt, instance in state.instances.items():
        shown[f"instances.{attempt}.phase"] = instance.phase
        if instance.host is not None:
            shown[f"instances.{attempt}.host"] = instance.host
    return {path: value for path, value in shown.items() if value is not None}


def _look_ahead(events: Iterable[Recorded[Event]]) -> _Ends:
    ends = _Ends({}, {}, {}, set())
    for recorded in events:
        ends.own[recorded.id] = recorded.position
        if recorded.causationid is not None:
            ends.foreign.add(recorded.causationid)
        match recorded.data:
            case e.ChildTerminalSet(event_key=key) | e.ChildSubmitFailed(child_key=key):
                ends.children.setdefault(key, recorded.at)
            case e.RunWaitEnded(wait_id=wait_id, outcome=outcome):
                ends.waits[wait_id] = (recorded.at, outcome)
    causes = ends.foreign
    ends.foreign = causes - ends.own.keys()
    ends.own = {cause: ends.own[cause] for cause in causes & ends.own.keys()}
    return ends


def _alike(last: Recorded[Event], recorded: Recorded[Event]) -> bool:
    return isinstance(recorded.data, GROUPED) and last.type == recorded.type


def _lines(
    group: _Group, first_at: int, ends: _Ends, causes: Causes, reveal: Reveal
) -> Iterator[Line]:
    first, last = group.first, group.last
    text = describe(first, reveal)
    if group.count > 1:
        if isinstance(first.data, e.ChildRequested):
            text = f"key {plain(first.data.child_key)}"
        text += f", and {group.count - 1} more to @{last.position}"
    if isinstance(first.data, e.RunCompleted | e.RunFailed | e.RunCancelled):
        text = ", ".join(part for part in (span(first.at - first_at), text) if part)
    yield Line(
        position=first.position,
        since_ms=first.at - first_at,
        at=first.at,
        type=first.type,
        text=text,
        cause=causes.of(first),
        last=last.position if group.count > 1 else None,
    )
    waited = _waited(group, ends)
    if waited:
        yield Line(position=None, since_ms=last.at - first_at, at=last.at, type="", text=waited)


def _waited(group: _Group, ends: _Ends) -> str:
    event, at = group.first.data, group.last.at
    if isinstance(event, e.RunWaitStarted):
        what = "" if event.kind == "sleep" else f" for {event.kind} {plain(event.key)}"
        ended = ends.waits.get(event.wait_id)
        if ended is None:
            until = "" if event.until_at is None else f" until {format_time(event.until_at)}"
            return f"waits{what}{until}"
        if ended[0] == at:
            return ""
        late = ", timed out" if ended[1] == "timeout" and event.kind == "signal" else ""
        return f"waited {span(ended[0] - at)}{what}{late}"
    if not group.keys:
        return ""
    done = {key: ends.children[key] for key in group.keys if key in ends.children}
    count = len(group.keys)
    which = f"child {plain(group.keys[0])}" if count == 1 else f"{count} children"
    if len(done) < count:
        return f"waits for {which}" if not done else f"waits for {count - len(done)} of {which}"
    longest = max(done, key=lambda key: done[key])
    tail = "" if count == 1 else f", longest {plain(longest)}"
    return f"waited {span(done[longest] - at)} for {which}{tail}"


def _outbox(rows: dict[str, OutboxRow], intent_id: Any, row: Any) -> None:
    if row is None:
        rows.pop(intent_id, None)
    elif isinstance(row, Patch):
        found = rows.get(intent_id)
        if found is not None:
            due_at, tries, parked = row.over((found.due_at, found.tries, found.parked))
            rows[intent_id] = msgspec.structs.replace(
                found, due_at=due_at, tries=tries, parked=parked
            )
    else:
        rows[intent_id] = OutboxRow(*row)


def _told(value: Any, reveal: Reveal) -> Any:
    if isinstance(value, Seal):
        return describe_seal(value, reveal)
    return value


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


_RECENT: Final = 50_000
_FIELDS: Final = (
    "started_at",
    "ended_at",
    "retry",
    "used",
    "cancel",
    "result",
    "output_rows",
    "error_class",
    "code",
    "error",
    "refused",
    "children",
    "signals",
    "log_lines",
    "progress",
)
_MOVES_WAITS: Final = (
    e.RunSubmitted,
    e.InstanceCreateRequested,
    e.InstanceCreated,
    e.InstanceStarted,
    e.InstanceCreateFailed,
    e.InstanceCompleted,
    e.InstanceErrored,
    e.InstanceLost,
    e.ChildRequested,
    e.ChildTerminalSet,
    e.ChildSubmitFailed,
    e.RunWaitStarted,
    e.RunWaitEnded,
    e.RunCompleted,
    e.RunFailed,
    e.RunCancelled,
)
