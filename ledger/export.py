"""The log as JSON lines: the stored leaf bytes and nothing else, out and in again.

An export is read in pages of short transactions up to the head it found at the start, so it is the
log up to one position, holds up no checkpoint, and takes the same memory whatever its size (C053).
It has no header and no trailer: the bytes are the leaves, each with one line feed, and no leaf
holds a character that any reader takes for the end of a line (C050).
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

from ledger.codec import LEAF_BYTES_MAX
from ledger.database import check_file, first_bytes, reading
from ledger.errors import LogDamaged, RunNotFound
from ledger.ids import quote, run_stream
from ledger.transaction import read_head

PAGE: Final = 2000
_IN_MAX: Final = 500


def is_database(path: Path) -> bool:
    """Says whether a log is a database or an export; raises LogMissing if it is neither."""
    if first_bytes(path).startswith(b"{"):
        return False
    check_file(path)
    return True


def pages(
    connection: sqlite3.Connection, after: int, upto: int, columns: str = "leaf"
) -> Iterator[list[Any]]:
    """Yields rows of `events` behind a position, a page and a short read transaction at a time."""
    sql = f"select {columns} from events where position > ? and position <= ? order by position"
    while after < upto:
        edge = min(after + PAGE, upto)
        yield connection.execute(sql, (after, edge)).fetchall()
        after = edge


def leaves(connection: sqlite3.Connection, after: int, upto: int) -> Iterator[bytes]:
    """Yields the leaves of the whole log from behind one position up to another."""
    return (leaf for page in pages(connection, after, upto) for (leaf,) in page)


def run_leaves(connection: sqlite3.Connection, run_id: str, upto: int) -> Iterator[bytes]:
    """Yields the leaves of one run up to a position; raises RunNotFound if there are none."""
    row = connection.execute(
        "select stream_id from streams where name = ?", (run_stream(run_id),)
    ).fetchone()
    if row is None:
        raise RunNotFound(
            f"run {quote(run_id)} is not in the log", hint="all: playledger runs", runId=run_id
        )
    return _stream_leaves(connection, row[0], upto)


def family_leaves(connection: sqlite3.Connection, family: str, upto: int) -> Iterator[bytes]:
    """Yields the leaves of a family in the log's order; raises RunNotFound if there is none.

    Their positions are held, 8 bytes each, because a family may be spread over the whole log.
    """
    rows = connection.execute(
        "select e.position from runs r join streams s on s.name = 'run/' || r.run_id"
        " join events e on e.stream_id = s.stream_id where r.family = ? and e.position <= ?",
        (family, upto),
    )
    positions = array("q", sorted(position for (position,) in rows))
    if not positions:
        raise RunNotFound(
            f"run {quote(family)} is not in the log", hint="all: playledger runs", runId=family
        )
    return _leaves_at(connection, positions)


def export(path: Path, *, run: str | None = None, family: str | None = None) -> Iterator[bytes]:
    """Yields the leaves of a log, of one run, or of a run and all that it started.

    Raises LogMissing, LogDamaged, LogLocked or RunNotFound.
    """
    with reading(path) as connection:
        upto = read_head(connection).position
        if run is not None:
            yield from run_leaves(connection, run, upto)
        elif family is not None:
            yield from family_leaves(connection, family, upto)
        else:
            yield from leaves(connection, 0, upto)


def write_export(
    found: Iterable[bytes], out: BinaryIO, progress: Callable[[int], None] | None = None
) -> int:
    """Writes leaves as lines and returns how many; `progress` hears how many are out."""
    count = 0
    batch: list[bytes] = []
    for leaf in found:
        batch.append(leaf)
        if len(batch) == _IN_MAX:
            count += _flush(batch, out)
            if progress is not None:
                progress(count)
    count += _flush(batch, out)
    out.flush()
    return count


def read_export(path: Path) -> Iterator[bytes]:
    """Yields the lines of an export; raises LogDamaged where one was cut or is no event.

    A line is at most one byte longer than the largest leaf, so a file without lines costs nothing.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LEAF_BYTES_MAX + 1):
            number += 1
            if not line.endswith(b"\n"):
                over = len(line) > LEAF_BYTES_MAX
                what = f"is over {LEAF_BYTES_MAX} bytes" if over else "is cut"
                raise LogDamaged(
                    f"{path} is damaged: line {number} {what}", hint="export it again", line=number
                )
            yield line[:-1]


def _flush(batch: list[bytes], out: BinaryIO) -> int:
    count = len(batch)
    if count:
        out.write(b"\n".join(chain(batch, (b"",))))
        batch.clear()
    return count


def _stream_leaves(connection: sqlite3.Connection, stream_id: int, upto: int) -> Iterator[bytes]:
    version = 0
    while True:
        page = connection.execute(
            "select leaf, position from events where stream_id = ? and version > ?"
            " and version <= ? order by version",
            (stream_id, version, version + PAGE),
        ).fetchall()
        for leaf, position in page:
            if position > upto:
                return
            yield leaf
        if not page:
            return
        version += PAGE


def _leaves_at(connection: sqlite3.Connection, positions: array[int]) -> Iterator[bytes]:
    for start in range(0, len(positions), _IN_MAX):
        wanted = positions[start : start + _IN_MAX]
        marks = ",".join("?" * len(wanted))
        sql = f"select leaf from events where position in ({marks}) order by position"
        for (leaf,) in connection.execute(sql, tuple(wanted)).fetchall():
            yield leaf
