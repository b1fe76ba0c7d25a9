"""Folding a log again beside the stored read models, and comparing value by value.

The same `evolve` and `project` that the writer runs fill a temporary database, which disappears
with its connection however that ends.  Memory is bounded by the runs that are alive: the state of
an ended one is dropped, and read back from its rows if something follows its end.
"""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from sqlalchemy import Table
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateTable

from ledger.codec import Recorded, decode
from ledger.database import reading
from ledger.errors import CorruptStream
from ledger.events import Event
from ledger.export import leaves
from ledger.rows import Key, Row, RowBuffer, Value
from ledger.transaction import read_head
from projections.load import load
from projections.rows import project_parts, run_row
from projections.run import evolve
from projections.state import RunState
from projections.tables import READ_MODELS, TABLES

FLUSH_EVENTS: Final = 20_000
ENDED_KEPT: Final = 1_000
_CACHE_KIB: Final = 65_536
_DIALECT: Final = sqlite.dialect()

_ORDER: Final = {type(None): 0, int: 1, float: 1, str: 2, bytes: 3}
Progress = Callable[[int, int], None]
Step = tuple[RunState | None, RunState | None]


class Difference(Struct, frozen=True):
    """A row of a read model that a refold does not give; `column` is None if there is only one."""

    table: str
    key: Key
    column: str | None
    stored: Value
    refolded: Value

    @property
    def text(self) -> str:
        """Says what differs, with both values."""
        key = ", ".join(str(part) for part in self.key)
        if self.column is None:
            which = "is missing" if self.stored is None else "should not be there"
            return f'row "{key}" of {self.table} {which}'
        return (
            f'{self.column} of "{key}" in {self.table} is {_shown(self.stored)}, '
            f"a refold gives {_shown(self.refolded)}"
        )


class Verified(Struct, frozen=True):
    """What a comparison found; `differences` stops at the limit that was asked for."""

    position: int
    tables: int
    rows: int
    differences: tuple[Difference, ...]
    corrupt: tuple[str, ...]


class Refold:
    """A fold of a whole log into rows of its own.

    A stream that the fold refuses is left as it was, and named in `corrupt`; the others go on.
    With `keep_rows=False`, where there are no rows to compare with, it holds every state instead.
    """

    def __init__(self, *, keep_rows: bool = True) -> None:
        self._keep_rows = keep_rows
        self.shadow = sqlite3.connect("", isolation_level=None)
        self.shadow.execute("pragma journal_mode=off")
        self.shadow.execute("pragma synchronous=off")
        self.shadow.execute(f"pragma cache_size=-{_CACHE_KIB}")
        for table in READ_MODELS if keep_rows else ():
            self.shadow.execute(str(CreateTable(table).compile(dialect=_DIALECT)))
        self.corrupt: dict[str, str] = {}
        self.position = 0
        self.types: set[str] = set()
        self._states: dict[str, RunState] = {}
        self._ended: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        self._buffer = RowBuffer({table.name: TABLES[table.name] for table in READ_MODELS})
        self._buffered = 0

    def take(self, recorded: Recorded[Event]) -> Step:
        """Folds one event and returns its run's states before and after; raises CorruptStream.

        Events of `system` and of a stream that was refused change nothing: both states are None.
        """
        stream = recorded.subject
        self.position = recorded.position
        if not stream.startswith("run/") or stream in self.corrupt:
            return None, None
        before = self._states.get(stream)
        if before is None and recorded.streamversion > 1 and self._keep_rows:
            before = self._reload(stream)
        try:
            after = evolve(before, recorded)
            changes = project_parts(recorded, before, after) if self._keep_rows else ()
        except CorruptStream as error:
            self.corrupt[stream] = error.message
            raise
        self._states[stream] = after
        if not self._keep_rows:
            return before, after
        if changes:
            self._buffer.add(changes)
        self._changed[stream] = None
        if after.run.ended_at is not None:
            self._ended[stream] = None
        self._buffered += 1
        if self._buffered >= FLUSH_EVENTS:
            self.flush()
        return before, after

    def take_all(self, found: Iterable[bytes]) -> None:
        """Folds leaves; what a stream's fold refuses is kept in `corrupt`, other streams go on."""
        take = self.take
        for leaf in found:
            try:
                take(decode(leaf))
            except CorruptStream:
                continue

    def flush(self) -> dict[str, set[Key]]:
        """Writes what was folded since the last time, and returns the keys that changed."""
        buffer, self._buffer = (
            self._buffer,
            RowBuffer({table.name: TABLES[table.name] for table in READ_MODELS}),
        )
        states = self._states  # a run's own row changes with each event: only its last is written
        buffer.add(run_row(states[stream].run) for stream in self._changed)
        self._changed.clear()
        self._buffered = 0
        self.shadow.execute("begin")
        buffer.flush(self.shadow)
        self.shadow.execute("commit")
        for stream in list(self._ended)[: max(0, len(self._ended) - ENDED_KEPT)]:
            del self._ended[stream], self._states[stream]
        return {name: set(rows) for name, rows in buffer.rows.items()}

    def forget(self) -> None:
        """Drops every state: what is folded from here on starts from the rows (INV-89)."""
        self.flush()
        self._states.clear()
        self._ended.clear()

    def row(self, table: Table, key: Key) -> Row | None:
        """Returns one refolded row."""
        where = " and ".join(f"{column.name} = ?" for column in table.primary_key)
        found: Row | None = self.shadow.execute(
            f"select * from {table.name} where {where}", key
        ).fetchone()
        return found

    def rows(self, table: Table) -> Iterator[Row]:
        """Yields every refolded row in key order."""
        return _in_order(self.shadow, table)

    def differences(self, connection: sqlite3.Connection) -> Iterator[Difference]:
        """Yields how the stored rows differ, table by table, in key order."""
        self.flush()
        for table in READ_MODELS:
            yield from _compare(table, _in_order(connection, table), self.rows(table))

    def close(self) -> None:
        """Drops the rows."""
        self.shadow.close()

    def _reload(self, stream: str) -> RunState | None:
        self.flush()
        return load(self.shadow, stream.removeprefix("run/"))


def verify(path: Path, progress: Progress | None = None, *, limit: int = 10) -> Verified:
    """Refolds a log and compares every value of every read model; it changes nothing."""
    refold = Refold()
    try:
        with reading(path) as connection, quiet_gc():
            catch_up(refold, connection, read_head(connection).position, progress)
            connection.execute("begin")  # one snapshot: the rows and the log that they come from
            head = read_head(connection).position
            catch_up(refold, connection, head, progress)
            found = []
            for difference in refold.differences(connection):
                found.append(difference)
                if len(found) >= limit:
                    break
            connection.execute("commit")
        return Verified(
            position=head,
            tables=len(READ_MODELS),
            rows=count_rows(refold.shadow),
            differences=tuple(found),
            corrupt=tuple(refold.corrupt.values()),
        )
    finally:
        refold.close()


def catch_up(
    refold: Refold, connection: sqlite3.Connection, upto: int, progress: Progress | None = None
) -> None:
    """Folds what the log holds behind the refold, up to a position."""
    step = 10_000
    while refold.position < upto:
        edge = min(refold.position + step, upto)
        refold.take_all(leaves(connection, refold.position, edge))
        refold.position = edge
        if progress is not None:
            progress(edge, upto)


def count_rows(connection: sqlite3.Connection) -> int:
    """Returns how many rows the read models have."""
    return sum(
        connection.execute(f"select count(*) from {table.name}").fetchone()[0]
        for table in READ_MODELS
    )


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Keeps the collector from walking the live states of a long fold, which has no cycles."""
    was = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


def _in_order(connection: sqlite3.Connection, table: Table) -> Iterator[Row]:
    keys = ", ".join(column.name for column in table.primary_key)
    columns = ", ".join(column.name for column in table.columns)
    rows: Iterator[Row] = connection.execute(f"select {columns} from {table.name} order by {keys}")
    return rows


def _compare(table: Table, stored: Iterator[Row], refolded: Iterator[Row]) -> Iterator[Difference]:
    keys = len(table.primary_key)
    was, now = next(stored, None), next(refolded, None)
    while was is not None or now is not None:
        if was == now:
            was, now = next(stored, None), next(refolded, None)
            continue
        if now is not None and (was is None or _rank(now[:keys]) < _rank(was[:keys])):
            yield Difference(table.name, now[:keys], None, None, now[-1])
            now = next(refolded, None)
        elif was is not None and (now is None or _rank(was[:keys]) < _rank(now[:keys])):
            yield Difference(table.name, was[:keys], None, was[-1], None)
            was = next(stored, None)
        elif was is not None and now is not None:
            for column, before, after in zip(table.columns, was, now, strict=True):
                if before != after:
                    yield Difference(table.name, was[:keys], column.name, before, after)
                    break
            was, now = next(stored, None), next(refolded, None)


def _rank(key: Row) -> list[tuple[int, Any]]:
    """Orders keys as SQLite does, damaged ones too: null, numbers, text, bytes."""
    return [(_ORDER[type(part)], 0 if part is None else part) for part in key]


def _shown(value: Value) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 200 else text[:200] + "..."
