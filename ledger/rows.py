"""How rows are written: one compiled statement per table and kind, from the Core tables.

The writer, the rebuild and the check of the read models write the same rows by these.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from sqlalchemy import BindParameter, Table, bindparam, delete, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.sql import ClauseElement

Value = str | int | bytes | None
Key = tuple[Value, ...]
Row = tuple[Value, ...]


class Patch(Struct, frozen=True, gc=False):
    """Changes some columns of a row that may be gone already; then it does nothing."""

    values: Row


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
            .values({name: _any("new_" + name) for name in patched})
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
            rows[change.key] = row

    def flush(self, connection: sqlite3.Connection) -> None:
        """Writes everything: one `executemany` per table and kind."""
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
            if upserts:
                connection.executemany(writes.upsert, upserts)
            if patches:
                connection.executemany(writes.patch, patches)
            if deletes:
                connection.executemany(writes.delete, deletes)

    def _merged(self, table: str, before: Row, patch: Patch) -> Row:
        values = list(before)
        for place, value in zip(self._tables[table].patched, patch.values, strict=True):
            values[place] = value
        return tuple(values)


def _any(name: str) -> BindParameter[Value]:
    return bindparam(name)
