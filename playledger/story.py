"""A run's story up to a position: its events and the state they fold to, as `why` reads them.

Only two things here are not in the run's own stream: the words of sealed values, where the vault
still has them, and which process holds an intent, which leases and node files tell for now.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

from msgspec import Struct

from handlers.node import Watch, nodes_dir
from ledger import events as e
from ledger.codec import Recorded
from ledger.errors import NotFound
from ledger.events import Event, Seal
from ledger.ids import run_stream
from ledger.log import PAGE, system_clock
from ledger.query import Query, first_value
from playledger.render import visible
from projections.run import evolve
from projections.state import Instance, RunState

if TYPE_CHECKING:
    from playledger.embed import Ledger

D = TypeVar("D", bound=Event)
WORDS_MAX: Final = 200


class Story(Struct, frozen=True):
    """A run's state at a position, the events that led there, and the time of that moment.

    `events` leaves out log lines and progress, of which there may be very many.  `live` says that
    the moment is now, so what processes do may be asked.
    """

    ledger: Ledger
    state: RunState
    events: tuple[Recorded[Event], ...]
    at: int
    as_of: int
    live: bool

    @property
    def run_id(self) -> str:
        return self.state.run.run_id

    def all(self, kind: type[D]) -> list[Recorded[D]]:
        """Returns every event of a type, in order."""
        return [
            cast("Recorded[D]", recorded)
            for recorded in self.events
            if isinstance(recorded.data, kind)
        ]

    def last(self, kind: type[D]) -> Recorded[D] | None:
        """Returns the last event of a type."""
        found = self.all(kind)
        return found[-1] if found else None

    def end_of(self, instance: Instance) -> Recorded[Event] | None:
        """Returns the event by which an instance ended."""
        for recorded in reversed(self.events):
            match recorded.data:
                case (
                    e.InstanceErrored(attempt=attempt)
                    | e.InstanceLost(attempt=attempt)
                    | e.InstanceCompleted(attempt=attempt)
                    | e.InstanceTerminated(attempt=attempt)
                    | e.InstanceCreateFailed(attempt=attempt)
                ) if attempt == instance.attempt:
                    return recorded
                case _:
                    continue
        return None

    def parked(self) -> list[tuple[Recorded[e.EffectParked], Recorded[e.EffectFailed] | None]]:
        """Returns what was given up on and not resumed since, each with its last failed try."""
        stands: dict[str, Recorded[Event]] = {}
        for recorded in self.events:
            if isinstance(recorded.data, e.EffectParked | e.EffectResumed):
                stands[recorded.data.intent_id] = recorded
        tries = {recorded.data.intent_id: recorded for recorded in self.all(e.EffectFailed)}
        return [
            (cast("Recorded[e.EffectParked]", recorded), tries.get(intent_id))
            for intent_id, recorded in stands.items()
            if isinstance(recorded.data, e.EffectParked)
        ]


class Sentence(Struct, frozen=True):
    """One sentence, and the positions of the events it rests on."""

    text: str
    positions: tuple[int, ...] = ()


class MovedBy(Struct, frozen=True):
    """An event that would move the run."""

    type: str
    key: str | None = None


class Said(Struct):
    """An explanation while it is put together."""

    sentences: list[Sentence] = []
    moved_by: list[MovedBy] = []
    commands: list[str] = []

    def say(self, text: str, *positions: int) -> None:
        """Adds a sentence and the positions it rests on."""
        self.sentences.append(Sentence(text, tuple(dict.fromkeys(positions))))

    def moves(self, kind: str, key: str | None = None) -> None:
        """Adds an event that would move the run."""
        self.moved_by.append(MovedBy(kind, key))

    def type(self, *arguments: str) -> None:
        """Adds a command to type."""
        self.commands.append(command(*arguments))


async def tell(ledger: Ledger, run_id: str, *, at: int | None = None) -> Story | None:
    """Reads a run's story up to a position; None if the run is not there yet."""
    head = await ledger.log.position()
    as_of = head if at is None else min(at, head)
    state: RunState | None = None
    kept: list[Recorded[Event]] = []
    after = 0
    while after < as_of:
        page = await ledger.log.read(after, stream=run_stream(run_id))
        for recorded in page:
            if recorded.position > as_of:
                break
            state = evolve(state, recorded)
            if not isinstance(recorded.data, e.RunLog | e.RunProgress):
                kept.append(recorded)
        if len(page) < PAGE or page[-1].position >= as_of:
            break
        after = page[-1].position
    if state is None:
        return None
    now = system_clock()
    if at is not None:
        moment = await ledger.log.read(as_of - 1, limit=1)
        now = moment[0].at
    return Story(
        ledger=ledger, state=state, events=tuple(kept), at=now, as_of=as_of, live=at is None
    )


# --- what is not in the run's stream --------------------------------------------------------------


async def words(ledger: Ledger, seal: Seal | None, field: str = "message") -> str | None:
    """Returns the text of a sealed value on one line, or None if it is not there any more."""
    if seal is None:
        return None
    try:
        value = await ledger.reveal(seal)
    except NotFound:
        return None
    if isinstance(value, dict):
        value = value.get(field)
    if not isinstance(value, str) or not value:
        return None
    line = visible(value)
    return line if len(line) <= WORDS_MAX else line[:WORDS_MAX] + "..."


async def holder(ledger: Ledger, intent_id: str) -> str | None:
    """Returns the live node that has taken an intent, or None."""
    query: Query[str | None] = Query(
        "select node_id from leases where intent_id = ?", (intent_id,), first_value
    )
    node = await ledger.log.reader.ask(query)
    return None if node is None or gone(ledger, node) else node


def gone(ledger: Ledger, host: str) -> bool:
    """Says whether a node of this machine has died; in doubt it lives."""
    try:
        return Watch(ledger.log.path, by_touch=False).dead(host)
    except OSError:
        return False


def live_nodes(ledger: Ledger) -> int:
    """Counts the processes of this machine that drive runs of this log now."""
    try:
        hosts = [path.name for path in nodes_dir(ledger.log.path).iterdir()]
    except OSError:
        return 0
    return sum(not gone(ledger, host) for host in hosts)


# --- small words ----------------------------------------------------------------------------------


def listed(items: Sequence[str], word: str = "and", limit: int = 6) -> str:
    """Returns `a`, `a and b`, `a, b and c`, `a, b and 7 more`."""
    shown = list(items)
    if len(shown) > limit:
        shown = [*shown[: limit - 1], f"{len(shown) - limit + 1} more"]
    if len(shown) <= 1:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} {word} {shown[-1]}"


def places(*events: Recorded[Event] | None) -> tuple[int, ...]:
    """Returns the positions of events that are there."""
    return tuple(recorded.position for recorded in events if recorded is not None)


def command(*arguments: str) -> str:
    """Returns a command as it is typed."""
    return "playledger " + shlex.join(arguments)


def unique(items: Iterable[str]) -> list[str]:
    """Returns items once each, in their order."""
    return list(dict.fromkeys(items))
