"""What one leaf must be, and what the columns beside it must repeat."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final, get_args

import orjson
from msgspec import Struct

from ledger.codec import Recorded, decode, encode, format_time, parse_time
from ledger.errors import LogDamaged, PlayledgerError, SchemaNewer
from ledger.events import SCHEMA_VERSIONS, Event, LogCreated, SystemEvent
from ledger.merkle import CompactRange, leaf_hash

_SORTED: Final = orjson.OPT_SORT_KEYS
_SYSTEM_TYPES: Final = frozenset(get_args(SystemEvent))
_NAMES_MAX: Final = 100_000
_SYSTEM: Final = "system"

Row = tuple[int, str, int, int, int, bytes]


class Finding(Struct, frozen=True):
    """One contradiction and where it stands; `position` is None if it is not of one event."""

    what: str
    message: str
    position: int | None = None

    def error(self, path: Path | str) -> LogDamaged:
        """Returns what a caller is told who needs the log whole."""
        return LogDamaged(
            f"{path} is damaged: {self.message}",
            hint="no writes before docs/how-to/restore.md; reads still work",
            position=self.position,
        )


class Checker:
    """Checks leaves one after another; `findings` is emptied by whoever reads it.

    With `whole` the log starts at position 1 and has no gap; a part of one only goes forward.
    """

    def __init__(self, log_id: str | None = None, *, whole: bool = True) -> None:
        self.findings: list[Finding] = []
        self.count = 0
        self.position = 0
        self.time = ""
        self.range = CompactRange()
        self._source = None if log_id is None else "//playledger/" + log_id
        self._whole = whole

    def check(self, leaf: bytes, position: int | None = None) -> Recorded[Event] | None:
        """Checks one leaf, and returns its event if it can be read at all."""
        expected = self.position + 1
        place = expected if position is None else position
        if type(leaf) is not bytes:  # SQLite keeps whatever type somebody stored
            self._found("leaf", f"leaf @{place} is {type(leaf).__name__}, not bytes", place)
            self.position = place
            return None
        if self._whole:
            self.range.append(leaf_hash(leaf))
        self.count += 1
        try:
            recorded = decode(leaf)
        except SchemaNewer as error:
            self._found("schema", f"leaf @{place}: {error.message}", place)
            self.position = place
            return None
        except PlayledgerError:
            self._found("leaf", f"leaf @{place} is no event: {_shown(leaf)}", place)
            self.position = place
            return None
        if (
            place == expected
            and recorded.sequence == f"{expected:016d}"
            and recorded.source == self._source
        ):
            self.position = expected
        else:
            self._numbers(recorded, position, expected)
        self._form(recorded, leaf)
        if recorded.time != self.time:
            self._clock(recorded)
        return recorded

    def _numbers(self, recorded: Recorded[Event], position: int | None, expected: int) -> None:
        stored = recorded.sequence
        if position is None:  # a file: a leaf is where it says, if that is behind the one before
            position = int(stored) if stored.isascii() and stored.isdigit() else 0
        if position < expected:
            self._found("sequence", f'sequence "{stored}" follows @{self.position}', expected)
            position = expected
        elif stored != f"{position:016d}":
            self._found("sequence", f'leaf @{position} has sequence "{stored}"', position)
        if self._whole and position != expected:
            last = position - 1
            which = f"@{expected} is" if last == expected else f"@{expected} to @{last} are"
            self._found("gap", f"{which} missing", expected)
        self.position = position
        if recorded.source != self._source:
            if self._source is None:
                self._source = recorded.source  # of a file the first leaf says which log it is of
            else:
                self._found(
                    "source",
                    f'leaf @{position} is of "{recorded.source}", this log is "{self._source}"',
                    position,
                )

    def _form(self, recorded: Recorded[Event], leaf: bytes) -> None:
        event = recorded.data
        position = self.position
        if _canonical(recorded) != leaf or recorded.specversion != "1.0":
            older = recorded.schemaversion < SCHEMA_VERSIONS[type(event)]
            if not older or orjson.dumps(orjson.loads(leaf), option=_SORTED) != leaf:
                self._found("form", f"leaf @{position} is not in canonical form", position)
        stream = recorded.subject
        if not (
            stream.startswith("run/") if type(event) not in _SYSTEM_TYPES else stream == _SYSTEM
        ):
            self._found("stream", f'leaf @{position}: {recorded.type} on "{stream}"', position)
        if position == 1 and not (
            isinstance(event, LogCreated) and recorded.source == "//playledger/" + event.log_id
        ):
            self._found("source", "leaf @1 does not create the log it is of", 1)

    def _clock(self, recorded: Recorded[Event]) -> None:
        try:
            well_formed = format_time(parse_time(recorded.time)) == recorded.time
        except ValueError:
            well_formed = False
        if not well_formed:
            self._found("time", f'leaf @{self.position} has time "{recorded.time}"', self.position)
        elif recorded.time < self.time:
            self._found(
                "time",
                f"leaf @{self.position} is of {recorded.time}, the one before of {self.time}",
                self.position,
            )
        self.time = recorded.time

    def _found(self, what: str, message: str, position: int | None) -> None:
        self.findings.append(Finding(what, message, position))


class Columns:
    """Compares the index columns beside a leaf with the leaf; names are cached, bounded."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._streams: dict[int, str | None] = {}
        self._types: dict[int, str | None] = {}

    def compare(self, row: Row, recorded: Recorded[Event]) -> Finding | None:
        """Returns the first column that does not repeat the leaf."""
        position, event_id, stream_id, version, type_id, _leaf = row
        stream = self._streams.get(stream_id) or self._stream(stream_id)
        type_name = self._types.get(type_id) or self._type(type_id)
        if (
            event_id == recorded.id
            and stream == recorded.subject
            and version == recorded.streamversion
            and type_name == recorded.type
        ):
            return None
        columns = (
            ("id", event_id, recorded.id),
            ("stream", stream, recorded.subject),
            ("version", version, recorded.streamversion),
            ("type", type_name, recorded.type),
        )
        name, beside, inside = next(item for item in columns if item[1] != item[2])
        if beside is None:
            message = f'the {name} of @{position}, "{inside}", has no row in its table of names'
        else:
            message = f'column {name} of @{position} is "{beside}", its leaf says "{inside}"'
        return Finding("column", message, position)

    def _stream(self, stream_id: int) -> str | None:
        if len(self._streams) >= _NAMES_MAX:
            self._streams.clear()
        sql = "select name from streams where stream_id = ?"
        return self._streams.setdefault(stream_id, self._name(sql, stream_id))

    def _type(self, type_id: int) -> str | None:
        sql = "select name from event_types where type_id = ?"
        return self._types.setdefault(type_id, self._name(sql, type_id))

    def _name(self, sql: str, key: int) -> str | None:
        row = self._connection.execute(sql, (key,)).fetchone()
        return None if row is None else str(row[0])


def _canonical(recorded: Recorded[Event]) -> bytes:
    """Returns how the event is written today; nothing if it cannot be."""
    try:
        return encode(recorded)
    except PlayledgerError:
        return b""


def _shown(leaf: bytes) -> str:
    return repr(leaf[:40])[1:]
