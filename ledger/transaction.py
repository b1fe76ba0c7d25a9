"""One group commit in the making: heads, numbers, leaves and rows, until it is written at once.

Owned by the writer thread, under the write lock.  A command is staged first and accepted whole or
not at all, so a refused one leaves no trace in state, head or rows (CONTRACTS A.8).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import orjson
from msgspec import Struct

from ledger.codec import Recorded, decode, encode, format_time, wire_name
from ledger.errors import LogDamaged, PlayledgerError
from ledger.events import SCHEMA_VERSIONS, Event
from ledger.merkle import CompactRange, leaf_hash
from ledger.rows import RowBuffer, RowChange, TableWrites, write_rows
from ledger.secrets import SecretRow, write_secrets

S = TypeVar("S")
_NONE: Final[Mapping[str, PlayledgerError]] = {}


class Head(Struct, frozen=True):
    """The one row of `log_head`: how far the log goes, when, and its Merkle compact range."""

    log_id: str
    position: int
    recorded_at: int
    range: bytes


class Disclosure(Struct, frozen=True, gc=False):
    """What the vault keeps of a sealed value, found again by its digest (CONTRACTS A.5).

    `blobs` are those the value refers to, which lie in the vault already.
    """

    digest: str
    subject: str
    text: str
    blobs: tuple[str, ...] = ()


class Names:
    """The integers that stand for stream and type names in the index columns; a cache, bounded."""

    STREAMS_MAX: Final = 100_000

    def __init__(self) -> None:
        self.streams: dict[str, int] = {}
        self.types: dict[str, int] = {}

    def trim(self) -> None:
        """Forgets the oldest half when there are too many; they are read again when met."""
        if len(self.streams) > self.STREAMS_MAX:
            for name in list(self.streams)[: self.STREAMS_MAX // 2]:
                del self.streams[name]


class Staged:
    """The events of one command, numbered behind what the transaction holds already."""

    def __init__(self, transaction: Transaction[Any]) -> None:
        self._transaction = transaction
        self.events: list[Recorded[Event]] = []
        self.leaves: list[bytes] = []

    def add(
        self,
        stream: str,
        version: int,
        event: Event,
        *,
        event_id: str,
        cause: str | None,
        correlation: str,
        actor: str,
    ) -> Recorded[Event]:
        """Numbers and encodes an event; raises TooLarge if its leaf is over 16 KiB."""
        transaction = self._transaction
        position = transaction.position + len(self.events) + 1
        recorded: Recorded[Event] = Recorded(
            actor=actor,
            causationid=cause,
            correlationid=correlation,
            data=event,
            id=event_id,
            schemaversion=SCHEMA_VERSIONS[type(event)],
            sequence=f"{position:016d}",
            source=transaction.source,
            specversion="1.0",
            streamversion=version,
            subject=stream,
            time=transaction.time,
            type=wire_name(event),
        )
        self.leaves.append(encode(recorded))
        self.events.append(recorded)
        return recorded


class Transaction(Generic[S]):
    """What a command sees: the log and the states as the batch has made them so far."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        head: Head,
        at: int,
        tables: dict[str, TableWrites],
        cache: dict[str, S],
        names: Names,
        unreadable: Mapping[str, PlayledgerError] = _NONE,
    ) -> None:
        self.connection = connection
        self.at = at
        self.time = format_time(at)
        self.log_id = head.log_id
        self.source = "//playledger/" + head.log_id
        self.position = head.position
        self.events: list[Recorded[Event]] = []
        self.leaves: list[bytes] = []
        self.rows = RowBuffer(tables)
        self.states: dict[str, S] = {}
        self.dropped: set[str] = set()
        self._range = CompactRange.load(head.range, head.position)
        self._cache = cache
        self._names = names
        self._unreadable = unreadable
        self._ids: dict[str, Recorded[Event]] = {}
        self._absent: set[str] = set()
        self._absent_streams: frozenset[str] = frozenset()
        self.first_ids: dict[int, str] = {}
        self._disclosures: dict[str, Disclosure] = {}
        self._keys: dict[str, bytes] = {}
        self._secrets: list[SecretRow] = []

    def find(self, event_id: str) -> Recorded[Event] | None:
        """Returns the recorded event of this id, this batch's included."""
        found = self._ids.get(event_id)
        if found is not None or event_id in self._absent:
            return found
        row = self.connection.execute(
            "select leaf from events where id = ?", (event_id,)
        ).fetchone()
        return None if row is None else decode(row[0])

    def look_ahead(self, event_ids: Sequence[str], streams: Sequence[str]) -> None:
        """Finds out for a whole batch which ids are recorded and which streams there are not."""
        if event_ids:
            rows = self.connection.execute(
                "select leaf from events where id in (select value from json_each(?))",
                (orjson.dumps(event_ids),),
            ).fetchall()
            self._ids.update((recorded.id, recorded) for recorded in (decode(r[0]) for r in rows))
            self._absent.update(event_ids)
        unknown = [s for s in streams if s not in self._cache]
        if unknown:
            rows = self.connection.execute(
                "select name from streams where name in (select value from json_each(?))",
                (orjson.dumps(unknown),),
            ).fetchall()
            self._absent_streams = frozenset(unknown).difference(row[0] for row in rows)

    def absent(self, stream: str) -> bool:
        """Says whether it is known already that a stream does not exist."""
        return stream in self._absent_streams and stream not in self.states

    def state(self, stream: str) -> S | None:
        """Returns the stream's state if the batch or the cache holds it.

        Raises for a stream that this release cannot read on: nothing is decided on what it means.
        """
        if stream in self._unreadable:
            error = self._unreadable[stream]
            raise type(error)(error.message, code=error.code, hint=error.hint)
        found = self.states.get(stream)
        return self._cache.get(stream) if found is None else found

    def remember(self, stream: str, state: S, *, keep: bool) -> None:
        """Holds a state that was loaded from the rows for the batch, and in the cache if `keep`."""
        self.states[stream] = state
        if not keep:
            self.dropped.add(stream)

    def run_key(self, subject: str) -> bytes | None:
        """Returns the key that a subject's values are sealed under."""
        found = self._keys.get(subject)
        if found is not None:
            return found
        row = self.connection.execute(
            "select key from vault_keys where subject = ?", (subject,)
        ).fetchone()
        return None if row is None else row[0]

    def stage(self) -> Staged:
        """Opens a place for the events of one command."""
        return Staged(self)

    def accept(
        self, staged: Staged, stream: str, state: S, changes: Iterable[RowChange], *, keep: bool
    ) -> None:
        """Takes a command's events, its stream's new state (cached if `keep`) and its rows."""
        for recorded, leaf in zip(staged.events, staged.leaves, strict=True):
            self._range.append(leaf_hash(leaf))
            self._ids[recorded.id] = recorded
        self.events += staged.events
        self.leaves += staged.leaves
        self.position += len(staged.events)
        self.states[stream] = state
        if keep:
            self.dropped.discard(stream)
        else:
            self.dropped.add(stream)
        self.rows.add(changes)

    def keep_values(self, disclosures: Iterable[Disclosure]) -> None:
        """Writes the values whose digests this batch's events carry."""
        for disclosure in disclosures:
            self._disclosures[disclosure.digest] = disclosure

    def keep_secrets(self, rows: Iterable[SecretRow]) -> None:
        """Writes the secrets that this batch's events refer to."""
        self._secrets += rows

    def keep_key(self, subject: str, key: bytes) -> None:
        """Writes the key of a new subject."""
        self._keys[subject] = key

    def flush(self) -> Head:
        """Writes all of it and returns the new head; the caller commits."""
        connection = self.connection
        self._insert_events()
        write_rows(
            connection,
            "insert into vault_keys (subject, key) values (?, ?)",
            list(self._keys.items()),
        )
        if self._disclosures:
            write_rows(
                connection,
                "insert into vault_values (digest, subject, disclosure) values (?, ?, ?)"
                " on conflict (digest) do nothing",
                [(d.digest, d.subject, d.text) for d in self._disclosures.values()],
            )
            blobs = [(key,) for d in self._disclosures.values() for key in d.blobs]
            if blobs:  # a blob that an event refers to no longer expires as an orphan
                connection.executemany("update blobs set expires_at = null where key = ?", blobs)
        write_secrets(connection, self._secrets)
        self.rows.flush(connection)
        head = Head(self.log_id, self.position, self.at, self._range.dump())
        connection.execute(
            "update log_head set position = ?, recorded_at = ?, range = ? where one = 1",
            (head.position, head.recorded_at, head.range),
        )
        return head

    def _insert_events(self) -> None:
        if not self.events:
            return
        connection, names = self.connection, self._names
        missing = [e.subject for e in self.events if e.subject not in names.streams]
        if missing:
            self._name_streams(dict.fromkeys(missing))
        for recorded in self.events:
            if recorded.type not in names.types:
                self._name_type(recorded.type)
        streams, types = names.streams, names.types
        first = self.position - len(self.events) + 1
        write_rows(
            connection,
            "insert into events (position, id, stream_id, version, type_id, leaf)"
            " values (?, ?, ?, ?, ?, ?)",
            [
                (position, e.id, streams[e.subject], e.streamversion, types[e.type], leaf)
                for position, (e, leaf) in enumerate(
                    zip(self.events, self.leaves, strict=True), first
                )
            ],
        )

    def _name_streams(self, missing: dict[str, None]) -> None:
        connection, streams = self.connection, self._names.streams
        started = {e.subject for e in self.events if e.streamversion == 1}
        new = []
        last = connection.execute("select coalesce(max(stream_id), 0) from streams").fetchone()[0]
        for name in missing:
            if name in started:
                last += 1
                streams[name] = last
                new.append((last, name))
                continue
            row = connection.execute(
                "select stream_id from streams where name = ?", (name,)
            ).fetchone()
            if row is None:
                raise LogDamaged(
                    f'stream "{name}" has events, but no row in streams',
                    hint="playledger projections rebuild",
                )
            streams[name] = row[0]
        write_rows(connection, "insert into streams (stream_id, name) values (?, ?)", new)

    def _name_type(self, name: str) -> None:
        types = self._names.types
        types.update(
            (row[1], row[0])
            for row in self.connection.execute("select type_id, name from event_types")
        )
        if name not in types:
            types[name] = max(types.values(), default=0) + 1
            self.connection.execute(
                "insert into event_types (type_id, name) values (?, ?)", (types[name], name)
            )


def read_head(connection: sqlite3.Connection) -> Head:
    """Returns the head of the log, or raises LogDamaged if there is none."""
    row = connection.execute("select log_id, position, recorded_at, range from log_head").fetchone()
    if row is None:
        raise LogDamaged("the log has no head row", hint="restore it from a backup")
    return Head(*row)
