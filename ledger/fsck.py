"""Whether the stored bytes agree with themselves, from the bytes up.

Every leaf is canonical, numbered without a gap, of this log, not older than the one before; the
columns beside it repeat it; ids are used once and versions have no gap; the leaves hash to the
head; and the guards that keep history as it is are in place.  Read a page at a time: memory does
not grow with a database, and by some bytes an event with an exported file, which has no index.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ledger.checker import Checker, Columns, Finding
from ledger.codec import Recorded, decode, format_time, parse_time
from ledger.database import reading
from ledger.errors import LogDamaged, PlayledgerError
from ledger.events import Event
from ledger.export import PAGE, is_database, pages, read_export
from ledger.tables import GUARDS
from ledger.transaction import Head, read_head

COLUMNS: Final = "position, id, stream_id, version, type_id, leaf"


class Ids:
    """Finds what is used twice in a file: the first 8 bytes of each id, and versions per stream."""

    def __init__(self) -> None:
        self._ids = [array("Q") for _ in range(256)]
        self._versions: dict[str, int] = {}

    def take(self, recorded: Recorded[Event]) -> Finding | None:
        """Returns a gap in the versions of a stream."""
        try:
            start = int(recorded.id[:16], 16)
        except ValueError:
            return Finding("id", f'"{recorded.id}" is no event id', recorded.position)
        self._ids[start & 255].append(start)
        stream = recorded.subject
        before = self._versions.get(stream, 0)
        self._versions[stream] = recorded.streamversion
        if recorded.streamversion == before + 1:
            return None
        return Finding(
            "version",
            f"@{recorded.position} is v{recorded.streamversion} of {stream}, v{before + 1} is next",
            recorded.position,
        )

    def repeated(self, path: Path) -> Iterator[Finding]:
        """Yields the ids that the file has more than once; only then it is read again."""
        twice = self._twice()
        if twice:
            yield from _repeated(path, twice)

    def _twice(self) -> set[int]:
        twice: set[int] = set()
        for bucket in self._ids:
            seen = set(bucket)
            if len(seen) < len(bucket):
                before: int | None = None
                for start in sorted(bucket):
                    if start == before:
                        twice.add(start)
                    before = start
        return twice


def fsck(path: Path, *, database_pages: bool = True) -> Iterator[Finding]:
    """Yields everything that is wrong with a database or an exported file, first things first.

    Raises LogMissing or LogLocked if it cannot be read.  With `database_pages` SQLite checks its
    own pages and indexes too.
    """
    if not is_database(path):
        yield from _fsck_file(path)
        return
    with reading(path) as connection:
        try:
            yield from guards(connection)
            if database_pages:
                yield from _pages(connection)
            yield from _fsck_events(connection)
        except sqlite3.DatabaseError as error:
            if not str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_CORRUPT"):
                raise
            yield Finding("pages", str(error))


def guards(connection: sqlite3.Connection) -> Iterator[Finding]:
    """Yields what is missing of the triggers and indexes that keep history as it is."""
    wanted = {statement.split()[2]: _squeezed(statement) for statement in GUARDS}
    found = connection.execute(
        "select name, sql from sqlite_master where type = 'trigger'"
        " and tbl_name in ('events', 'log_head')"
    )
    present = {name: _squeezed(sql) for name, sql in found}
    for name, sql in wanted.items():
        if name not in present:
            yield Finding("guard", f"the guard {name} is missing")
        elif present[name] != sql:
            yield Finding("guard", f"the guard {name} was changed")
    for name in sorted(present.keys() - wanted.keys()):
        yield Finding("guard", f"there is a trigger on the log that is not ours: {name}")
    unique = {
        tuple(column for (column,) in connection.execute(
            "select name from pragma_index_info(?) order by seqno", (name,)
        ))
        for (name,) in connection.execute(
            'select name from pragma_index_list(?) where "unique"', ("events",)
        )
    }  # fmt: skip
    for columns in (("id",), ("stream_id", "version")):
        if columns not in unique:
            yield Finding("guard", f"nothing keeps {', '.join(columns)} of events unique")


def head_findings(checker: Checker, head: Head) -> Iterator[Finding]:
    """Yields how what was read differs from the head it should lead to."""
    if checker.position != head.position:
        yield Finding(
            "head", f"the log ends @{checker.position}, the head is @{head.position}", head.position
        )
        return
    if checker.time and parse_time(checker.time) > head.recorded_at:
        yield Finding("head", f"the head is of {format_time(head.recorded_at)}, older than its end")
    was, now = head.range, checker.range.dump()
    if was == now:
        return
    first, place = 1, 0
    for bit in reversed(range(head.position.bit_length())):
        size = 1 << bit
        if not head.position & size:
            continue
        needs, given = was[place : place + 32], now[place : place + 32]
        if needs != given:
            last = first + size - 1
            which = f"leaf @{last} hashes" if size == 1 else f"leaves @{first} to @{last} hash"
            yield Finding(
                "hash", f"{which} to {given.hex()[:8]}, the head needs {needs.hex()[:8]}", first
            )
        first, place = first + size, place + 32
    if len(was) != len(now):
        yield Finding("hash", f"the head holds {len(was)} bytes of hashes, {len(now)} are needed")


def versions(connection: sqlite3.Connection, upto: int) -> Iterator[Finding]:
    """Yields streams whose versions have a gap or do not follow the log's order."""
    stream, version, before = -1, 0, 0
    sql = (
        "select stream_id, version, position from events"
        " where (stream_id, version) > (?, ?) order by stream_id, version limit ?"
    )
    while True:
        page = connection.execute(sql, (stream, version, PAGE)).fetchall()
        if not page:
            return
        for found in page:
            if found[0] != stream:
                stream, version, before = found[0], 0, 0
            if found[2] <= upto and (found[1] != version + 1 or found[2] <= before):
                yield Finding(
                    "version", f"@{found[2]} is v{found[1]} of its stream, v{version + 1} is next",
                    found[2],
                )  # fmt: skip
            version, before = found[1], found[2]


def _fsck_events(connection: sqlite3.Connection) -> Iterator[Finding]:
    connection.execute("begin")
    head = read_head(connection)
    last = connection.execute("select max(position) from events").fetchone()[0] or 0
    connection.execute("commit")
    checker, columns = Checker(head.log_id), Columns(connection)
    for page in pages(connection, 0, max(head.position, last), COLUMNS):
        for row in page:
            recorded = checker.check(row[5], row[0])
            if recorded is not None:
                finding = columns.compare(row, recorded)
                if finding is not None:
                    checker.findings.append(finding)
        yield from checker.findings
        checker.findings.clear()
    yield from head_findings(checker, head)
    yield from versions(connection, head.position)


def _fsck_file(path: Path) -> Iterator[Finding]:
    lines = read_export(path)
    checker: Checker | None = None
    ids = Ids()
    try:
        for leaf in lines:
            if checker is None:
                checker = Checker(whole=starts_the_log(leaf))
            recorded = checker.check(leaf)
            if recorded is not None:
                finding = ids.take(recorded)
                if finding is not None:
                    checker.findings.append(finding)
            yield from checker.findings
            checker.findings.clear()
    except LogDamaged as error:
        yield Finding("line", error.message.removeprefix(f"{path} is damaged: "))
    yield from ids.repeated(path)


def starts_the_log(leaf: bytes) -> bool:
    """Says whether a file that begins with this leaf is meant to be a whole log."""
    return b'"sequence":"0000000000000001"' in leaf


def _repeated(path: Path, starts: set[int]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for leaf in read_export(path):
        try:
            recorded = decode(leaf)
            if int(recorded.id[:16], 16) not in starts:
                continue
        except (PlayledgerError, ValueError):
            continue
        if recorded.id in first:
            yield Finding(
                "id",
                f"@{recorded.position} has the id of @{first[recorded.id]}, {recorded.id}",
                recorded.position,
            )
        first.setdefault(recorded.id, recorded.position)


def _pages(connection: sqlite3.Connection) -> Iterator[Finding]:
    for (text,) in connection.execute("pragma integrity_check(10)"):
        if text != "ok":
            yield Finding("pages", text)


def _squeezed(sql: str) -> str:
    """Returns a statement without line breaks; SQLite writes its first two words in capitals."""
    first, second, *rest = sql.split()
    return " ".join((first.lower(), second.lower(), *rest))
