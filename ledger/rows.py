"""How rows are written: one compiled statement per table and kind, from the Core tables.

The writer, the rebuild and the check of the read models write the same rows by these.  Several rows
go into one statement: the driver lets go of the interpreter at every step, and beside busy threads
getting it back costs more than the row (`executemany` steps once a row).
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Final

import orjson
from msgspec import Struct
from sqlalchemy import BindParameter, Table, bindparam, delete, func, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.sql import ClauseElement

Value = str | int | bytes | None
Key = tuple[Value, ...]
Row = tuple[Value, ...]


class Patch(Struct, frozen=True, gc=False):
    """Changes some columns of a row that may be gone already; then it does nothing.

    None leaves a column as it is.
    """

    values: Row

    def over(self, before: Sequence[Value]) -> Row:
        """Returns the columns it changes as they are behind it."""
        return tuple(
            was if now is None else now for was, now in zip(before, self.values, strict=True)
        )


class RowChange(Struct, frozen=True, gc=False):
    """One row of one table: its new values, a patch of them, or None to delete it."""

    table: str
    key: Key
    row: Row | Patch | None


class TableWrites(Struct, frozen=True):
    """The statements for one table, and which of its columns a patch changes."""

    table: Table
    upsert: str
    delete: str
    patch: str
    patched: tuple[int, ...]


_VALUES: Final = re.compile(r"\bvalues\s*(\([^)]*\))", re.IGNORECASE)
CHUNK: Final = 32
_DIALECT: Final = sqlite.dialect(paramstyle="qmark")


def compiled(statement: ClauseElement) -> str:
    """Returns a Core statement as SQL with `?` in the order its parameters are written."""
    return str(statement.compile(dialect=_DIALECT))


def table_writes(table: Table, patched: tuple[str, ...] = ()) -> TableWrites:
    """Compiles the statements of a table whose key columns stand first."""
    keys = list(table.primary_key)
    others = [column for column in table.columns if not column.primary_key]
    inserting = insert(table)
    upsert = inserting.on_conflict_do_update(
        index_elements=keys,
        set_={column.name: inserting.excluded[column.name] for column in others},
    )
    deleting = delete(table).where(*(column == _any(column.name) for column in keys))
    patching = ""
    if patched:
        patching = compiled(
            update(table)
            .where(*(column == _any(column.name) for column in keys))
            .values({n: func.coalesce(_any("new_" + n), table.c[n]) for n in patched})
        )
    names = [column.name for column in table.columns]
    return TableWrites(
        table=table,
        upsert=compiled(upsert if others else inserting.on_conflict_do_nothing()),
        delete=compiled(deleting),
        patch=patching,
        patched=tuple(names.index(name) for name in patched),
    )


class RowBuffer:
    """The rows of one transaction: later changes of a row replace earlier ones."""

    def __init__(self, tables: dict[str, TableWrites]) -> None:
        self._tables = tables
        self.rows: dict[str, dict[Key, Row | Patch | None]] = {name: {} for name in tables}

    def add(self, changes: Iterable[RowChange]) -> None:
        """Takes changes in the order of their events."""
        for change in changes:
            rows = self.rows[change.table]
            row = change.row
            if isinstance(row, Patch) and change.key in rows:
                before = rows[change.key]
                if before is None:
                    continue
                if isinstance(before, tuple):
                    row = self._merged(change.table, before, row)
                else:
                    row = Patch(row.over(before.values))
            rows[change.key] = row

    def flush(self, connection: sqlite3.Connection) -> None:
        """Writes everything, table by table."""
        for name, rows in self.rows.items():
            if not rows:
                continue
            writes = self._tables[name]
            upserts, patches, deletes = [], [], []
            for key, row in rows.items():
                if row is None:
                    deletes.append(key)
                elif isinstance(row, Patch):
                    patches.append(row.values + key)
                else:
                    upserts.append(row)
            write_rows(connection, writes.upsert, upserts)
            if patches:
                connection.executemany(writes.patch, patches)
            delete_rows(connection, writes.delete, deletes)

    def _merged(self, table: str, before: Row, patch: Patch) -> Row:
        values = list(before)
        places = self._tables[table].patched
        now = patch.over([before[place] for place in places])
        for place, value in zip(places, now, strict=True):
            values[place] = value
        return tuple(values)


def write_rows(connection: sqlite3.Connection, sql: str, rows: Sequence[Row]) -> None:
    """Runs an `INSERT ... VALUES (...)` for many rows in few statements, in order."""
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        connection.execute(_for_rows(sql, len(part)), tuple(chain.from_iterable(part)))


def delete_rows(connection: sqlite3.Connection, sql: str, keys: Sequence[Key]) -> None:
    """Runs a `DELETE ... WHERE key = ?` for many keys, in one statement for a one-column key."""
    if not keys:
        return
    if len(keys[0]) > 1:
        connection.executemany(sql, keys)
    else:
        wanted = sql.replace("= ?", "IN (SELECT value FROM json_each(?))")
        connection.execute(wanted, (orjson.dumps([key[0] for key in keys]),))


@lru_cache(maxsize=1024)
def _for_rows(sql: str, rows: int) -> str:
    group = _VALUES.search(sql)
    if group is None:
        raise AssertionError(sql)
    start, end = group.span(1)
    return sql[:start] + ", ".join([group[1]] * rows) + sql[end:]


def _any(name: str) -> BindParameter[Value]:
    return bindparam(name)
