"""Reads as values: a statement, its parameters, and how its rows are understood.

The same query runs on a plain connection (`ask`, for replay and the writer) and from a coroutine
(`Reader.ask`, one hop to a held aiosqlite connection), so no read is written twice.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiosqlite
from msgspec import Struct

from ledger.database import async_reader, explain
from ledger.rows import Value

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]


class Query(Struct, Generic[T], frozen=True):
    """One SELECT; `read` turns its rows into the answer."""

    sql: str
    parameters: tuple[Value, ...]
    read: Callable[[Rows], T]


def ask(connection: sqlite3.Connection, query: Query[T]) -> T:
    """Returns the answer of a query on a plain connection."""
    return query.read(connection.execute(query.sql, query.parameters).fetchall())


def first_value(rows: Rows) -> Any:
    """Reads one column of one row, or None."""
    return rows[0][0] if rows else None


class Reader:
    """A held connection that reads from coroutines; it sees every commit made before the call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: aiosqlite.Connection | None = None

    async def open(self) -> Reader:
        """Takes the connection."""
        try:
            self._connection = await async_reader(self._path)
        except sqlite3.Error as error:
            raise explain(error, self._path) from error
        return self

    async def ask(self, query: Query[T]) -> T:
        """Returns the answer of a query."""
        if self._connection is None:
            await self.open()
        if self._connection is None:
            raise RuntimeError("the reader is not open")
        try:
            rows = await self._connection.execute_fetchall(query.sql, query.parameters)
        except sqlite3.Error as error:
            raise explain(error, self._path) from error
        return query.read(list(rows))

    async def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()
