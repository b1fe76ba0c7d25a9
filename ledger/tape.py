"""A log as something to play back: a database or an exported file, read the same way.

Reading causes nothing, needs no engine and no writer, and holds one page at a time.  A file has no
vault, so its values stay sealed, and no index, so what is not in order is found by reading on.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path

import orjson

from ledger.canonical import Json
from ledger.codec import Recorded, decode, format_time
from ledger.database import database_path, reading
from ledger.errors import NotFound, Refused, RunNotFound
from ledger.events import Event, Seal
from ledger.export import is_database, leaves, read_export, run_leaves
from ledger.ids import quote, run_stream
from ledger.query import ask
from ledger.seal import BlobRef
from ledger.transaction import read_head
from ledger.vault import ValueGone, blob_query, check_blob, check_disclosure, disclosure_query

_ID: bytes = b',"id":"'
_SEQUENCE: bytes = b',"sequence":"'
_TIME: bytes = b',"time":"'
_CHUNK = 500


class Tape:
    """One log, open for reading; `connection` is None for a file."""

    def __init__(self, path: Path, connection: sqlite3.Connection | None) -> None:
        self.path = path
        self.connection = connection

    def head(self) -> int:
        """Returns the last position."""
        if self.connection is not None:
            return read_head(self.connection).position
        end = deque(read_export(self.path), maxlen=1)
        return _position(end[0]) if end else 0

    def leaves(self, after: int = 0, upto: int | None = None) -> Iterator[bytes]:
        """Yields the stored bytes of the whole log behind a position, up to another."""
        if self.connection is not None:
            return leaves(self.connection, after, self.head() if upto is None else upto)
        found = read_export(self.path)
        if not after and upto is None:
            return found
        return (leaf for leaf in found if after < _position(leaf) <= (upto or 1 << 62))

    def run_leaves(self, run_id: str, upto: int | None = None) -> Iterator[bytes]:
        """Yields the stored bytes of one run up to a position; raises RunNotFound."""
        if self.connection is not None:
            try:
                return run_leaves(self.connection, run_id, self.head() if upto is None else upto)
            except RunNotFound:
                raise self.run_not_found(run_id) from None
        mark = b'"subject":"' + run_stream(run_id).encode() + b'",' + _TIME[1:]
        found = (leaf for leaf in read_export(self.path) if mark in leaf)
        first = next(found, None)
        if first is None:
            raise self.run_not_found(run_id)
        return (leaf for leaf in _chain(first, found) if upto is None or _position(leaf) <= upto)

    def run(self, run_id: str, upto: int | None = None) -> Iterator[Recorded[Event]]:
        """Yields the events of one run up to a position; raises RunNotFound."""
        return map(decode, self.run_leaves(run_id, upto))

    def events(self, after: int = 0, upto: int | None = None) -> Iterator[Recorded[Event]]:
        """Yields the events of the whole log behind a position, up to another."""
        return map(decode, self.leaves(after, upto))

    def positions_of(self, event_ids: Iterable[str]) -> dict[str, int]:
        """Returns where events stand, by their ids; those that are not in the log are left out."""
        wanted = set(event_ids)
        if self.connection is None:
            return {
                found: _position(leaf)
                for leaf in (read_export(self.path) if wanted else ())
                if (found := _id(leaf)) in wanted
            }
        positions: dict[str, int] = {}
        ids = iter(wanted)
        while part := tuple(islice(ids, _CHUNK)):
            marks = ",".join("?" * len(part))
            positions.update(
                self.connection.execute(
                    f"select id, position from events where id in ({marks})", part
                )
            )
        return positions

    def position_at(self, at: int) -> int:
        """Returns the last position recorded at or before a time in ms since 1970."""
        until = format_time(at).encode()
        if self.connection is None:
            before = 0
            for leaf in read_export(self.path):
                if _time(leaf) > until:
                    break
                before = _position(leaf)
            return before
        low, high = 0, self.head()
        while low < high:  # times never decrease along positions
            middle = (low + high + 1) // 2
            row = self.connection.execute(
                "select leaf from events where position = ?", (middle,)
            ).fetchone()
            if row is not None and _time(row[0]) <= until:
                low = middle
            else:
                high = middle - 1
        return low

    def reveal(self, seal: Seal) -> Json:
        """Returns a sealed value; raises NotFound where there is no vault, or it has it no more."""
        if self.connection is None:
            raise ValueGone("an exported file holds no values", code="SEALED")
        found = ask(self.connection, disclosure_query(seal.digest))
        if found is None:
            raise ValueGone(f"value {seal.digest[:8]} is no longer in the vault")
        held = check_disclosure(seal.digest, found[1])
        if isinstance(held, BlobRef):
            value: Json = orjson.loads(
                check_blob(held, ask(self.connection, blob_query(held.blob)))
            )
            return value
        return held

    def run_not_found(self, run_id: str) -> NotFound:
        """Returns the error for a run that is not there, with the nearest that is."""
        import difflib  # noqa: PLC0415 - only a mistyped id needs it

        known: list[str] = []
        hint = "a file holds the runs it was exported with"
        if self.connection is not None:
            rows = self.connection.execute(
                "select name from streams order by stream_id desc limit 500"
            )
            known = [name.removeprefix("run/") for (name,) in rows if name.startswith("run/")]
            hint = f"all: playledger runs --db {self.path}"
        near = difflib.get_close_matches(run_id, known, 1)
        return RunNotFound(
            f"run {quote(run_id)} is not in {self.path}",
            hint=(f"did you mean {quote(near[0])}? " if near else "") + hint,
            runId=run_id,
            head=self.head(),
        )


@contextmanager
def open_tape(path_or_url: str | Path) -> Iterator[Tape]:
    """Opens a database or an exported file; raises LogMissing, LogDamaged or LogLocked."""
    path = database_path(path_or_url)
    if is_database(path):
        with reading(path) as connection:
            yield Tape(path, connection)
    else:
        yield Tape(path, None)


def parse_place(text: str, tape: Tape, run_id: str) -> int:
    """Returns the position that `58`, `@58`, `v12` or an RFC 3339 time names.

    Raises Refused if it names none, or one that the log or the run does not have.
    """
    word = text.strip()
    digits = word.removeprefix("@")
    if digits.isascii() and digits.isdigit():
        position, head = int(digits), tape.head()
        if position > head:
            raise Refused(
                f"@{position} is beyond the end of {tape.path}, @{head}",
                code="POSITION_INVALID",
                hint=f"at most @{head}",
            )
        return position
    if word[:1] == "v" and word[1:].isascii() and word[1:].isdigit():
        return _position_of_version(int(word[1:]), tape, run_id)
    try:
        moment = datetime.fromisoformat(word)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise Refused(
            f"{quote(text)} is no place in a log",
            code="POSITION_INVALID",
            hint="58, @58, v12, or a time with its zone: 2026-12-01T08:00:00Z",
        )
    return tape.position_at(int(moment.timestamp() * 1000))


def _position_of_version(version: int, tape: Tape, run_id: str) -> int:
    last = 0
    for leaf in islice(tape.run_leaves(run_id), max(version, 0)):
        last += 1
        position = _position(leaf)
    if version < 1 or last < version:
        raise Refused(
            f"v{version} is not in {run_id}, it goes from v1 to v{last}",
            code="POSITION_INVALID",
            hint=f"at most v{last}",
        )
    return position


def leaf_position(leaf: bytes) -> int:
    """Returns the position that a leaf says it has, without decoding it."""
    return _position(leaf)


def _position(leaf: bytes) -> int:
    start = leaf.rfind(_SEQUENCE) + len(_SEQUENCE)
    try:
        return int(leaf[start : start + 16])
    except ValueError:
        return decode(leaf).position  # which says what is wrong with it


def _id(leaf: bytes) -> str:
    start = leaf.rfind(_ID) + len(_ID)
    return leaf[start : start + 32].decode("ascii", "replace")


def _time(leaf: bytes) -> bytes:
    start = leaf.rfind(_TIME) + len(_TIME)
    return leaf[start : start + 24]


def _chain(first: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
