"""The log: append through the writer, read by cursor, follow.

A reader's cursor is one integer, a position: positions are dense and in commit order, so a reader
that has seen n has seen everything up to n and can never miss an event (CASES C017, C019).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct
from sqlalchemy import MetaData

from ledger.codec import Recorded, decode
from ledger.database import (
    check_file,
    check_revision,
    create_schema,
    driver_connection,
    explain,
    explaining,
    stored_revision,
    writer_engine,
)
from ledger.errors import LogReadOnly, PlayledgerError, SchemaOlder
from ledger.events import Event, LogCreated
from ledger.failpoint import failpoint
from ledger.feed import Feed, Watcher
from ledger.ids import event_id
from ledger.keyring import KEYS, Keyring
from ledger.lock import WriteLock
from ledger.master import MasterSource, master_keys
from ledger.merkle import CompactRange
from ledger.migrations import REVISIONS
from ledger.query import Query, Reader, Rows, first_value
from ledger.rows import TableWrites, Value
from ledger.traces import Traces, write_traces
from ledger.transaction import Head, Names, Transaction
from ledger.vault import Vault
from ledger.writer import Clock, Writer

S = TypeVar("S")
C = TypeVar("C")
A = TypeVar("A")

PAGE = 1000
SYSTEM = "system"


class Schema(Struct, frozen=True):
    """What a log's file consists of: all tables, and how the read models among them are written."""

    metadata: MetaData
    tables: dict[str, TableWrites]
    version: str
    migrate: Callable[[Path], None]


def system_clock() -> int:
    """Returns the time in ms since 1970 UTC."""
    return time.time_ns() // 1_000_000


class Log(Generic[C, S, A]):
    """An open log; with a writer unless it was opened read-only."""

    def __init__(
        self, path: Path, writer: Writer[C, S, A] | None, keyring: Keyring, clock: Clock
    ) -> None:
        self.path = path
        self._writer = writer
        self.reader = Reader(path)
        self.vault = Vault(self.reader, self.run_job, keyring, clock)
        self.traces = Traces(clock)
        self._feeds: dict[asyncio.AbstractEventLoop, Feed] = {}

    @classmethod
    async def open(
        cls,
        path: Path,
        schema: Schema,
        transact: Callable[[Transaction[S], C], A],
        look_ahead: Callable[[Transaction[S], Sequence[C]], None],
        *,
        clock: Clock = system_clock,
        scope: str = "default",
        read_only: bool = False,
        master_key: MasterSource = None,
        **options: Any,
    ) -> Log[C, S, A]:
        """Opens a log, creating the file if there is none and it may be written.

        Raises VaultKeyMissing or VaultKeyWrong if it is not this log's `master_key`, and changes
        nothing then; without any a log may still be read, its encrypted values not.
        """
        keyring = Keyring(path, master_keys(master_key))
        if read_only:
            check_file(path)
            log: Log[C, S, A] = cls(path, None, keyring, clock)
        else:
            prepare(path, schema, keyring=keyring, scope=scope, clock=clock)
            with explaining(path):
                engine = writer_engine(path)
                writer = Writer(path, engine, transact, look_ahead, schema.tables, clock, **options)
            log = cls(path, writer, keyring, clock)
        await log.reader.open()
        if read_only:
            revision = await log.reader.ask(
                Query("select version_num from alembic_version", (), first_value)
            )
            if revision not in REVISIONS:
                await log.close()
                with sqlite3.connect(path) as connection:
                    check_revision(connection, path, REVISIONS, schema.version)
            keyring.look(await log.reader.ask(KEYS))
        return log

    @property
    def writer(self) -> Writer[C, S, A]:
        """The writer; raises LogReadOnly if the log was opened for reading only."""
        if self._writer is None:
            raise LogReadOnly(f"{self.path} was opened read-only", hint="open it for writing")
        return self._writer

    def feed(self) -> Feed:
        """Returns the feed of the running event loop; one listener, however many wait."""
        loop = asyncio.get_running_loop()
        feed = self._feeds.get(loop)
        if feed is None:
            feed = self._feeds[loop] = Feed(self.writer, loop)
        return feed

    async def transact(self, command: C) -> A:
        """Decides and appends one command in the next group commit, and returns its answer."""
        return await self.writer.submit(command)

    async def run_job(self, job: Callable[[sqlite3.Connection, int], Any]) -> Any:
        """Runs a write that is no event in the next group commit."""
        return await self.writer.run_job(job)

    async def position(self) -> int:
        """Returns the last position of the log."""
        found: int = await self.reader.ask(HEAD_POSITION)
        return found

    async def read(
        self, after: int = 0, *, stream: str | None = None, limit: int = PAGE
    ) -> list[Recorded[Event]]:
        """Returns the next events behind a position, of the whole log or of one stream."""
        return [decode(leaf) for _, leaf in await self.read_leaves(after, stream, limit)]

    async def read_leaves(
        self, after: int, stream: str | None, limit: int
    ) -> list[tuple[int, bytes]]:
        """Returns the next (position, stored bytes) behind a position."""
        return await self.reader.ask(leaves_query(after, stream, limit))

    async def events(
        self,
        after: int = 0,
        *,
        stream: str | None = None,
        types: Iterable[str] | None = None,
        follow: bool = False,
    ) -> AsyncIterator[Recorded[Event]]:
        """Yields events behind a position in order; with `follow` waits for more for ever."""
        wanted = None if types is None else frozenset(types)
        following = follow and self._writer is not None
        with self.feed().watching(stream) if following else nullcontext(Watcher()) as watcher:
            while True:
                watcher.news.clear()
                page = await self.read_leaves(after, stream, PAGE)
                for position, leaf in page:
                    after = position
                    recorded = decode(leaf)
                    if wanted is None or recorded.type in wanted:
                        yield recorded
                if len(page) == PAGE:
                    continue
                if not follow:
                    return
                if self._writer is None:
                    await asyncio.sleep(READ_ONLY_POLL_S)
                else:
                    await watcher.news.wait()

    async def write_traces(self) -> None:
        """Writes the traces that wait; what cannot be written is no news (SPEC 7.38)."""
        waiting = self.traces.take()
        if waiting and self._writer is not None:
            with contextlib.suppress(PlayledgerError, sqlite3.Error):
                await self.run_job(write_traces(waiting))

    async def close(self) -> None:
        """Commits what waits and closes everything.

        The writer last: the last connection copies the WAL back and takes it away, and a reader
        may not.
        """
        await self.write_traces()
        await self.reader.close()
        if self._writer is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._writer.close)


READ_ONLY_POLL_S = 0.02
HEAD_POSITION: Query[Any] = Query("select position from log_head", (), first_value)


def leaves_query(after: int, stream: str | None, limit: int) -> Query[list[tuple[int, bytes]]]:
    """Asks for the next (position, leaf) behind a position, of the log or of one stream."""
    if stream is None:
        return Query(
            "select position, leaf from events where position > ? order by position limit ?",
            (after, limit),
            _pairs,
        )
    version = "0" if after == 0 else _VERSION_AT
    parameters: tuple[Value, ...] = (stream,) if after == 0 else (stream, after, after)
    return Query(
        f"with s as (select stream_id from streams where name = ?) "
        f"select position, leaf from events where stream_id = (select stream_id from s)"
        f" and version > {version} order by version limit ?",
        (*parameters, limit),
        _pairs,
    )


# The cursor is usually an event of the stream itself; else the last one before it is searched from
# the end, where cursors are.
_VERSION_AT = (
    "coalesce((select version from events where position = ?"
    " and stream_id = (select stream_id from s)),"
    " (select version from events where stream_id = (select stream_id from s)"
    " and position <= ? order by version desc limit 1), 0)"
)


def _pairs(rows: Rows) -> list[tuple[int, bytes]]:
    return [(row[0], row[1]) for row in rows]


def prepare(
    path: Path, schema: Schema, *, scope: str, clock: Clock, keyring: Keyring | None = None
) -> None:
    """Creates the file if there is none, migrates an older one, refuses anything else.

    Also a log whose keys do not open: before anything is changed.
    """
    if keyring is None:
        keyring = Keyring(path, master_keys(None))
    if path.exists() and path.stat().st_size:
        check_file(path)
    with explaining(path):
        lock = WriteLock(path)
        try:
            lock.acquire()
            connection = driver_connection(writer_engine(path))
            try:
                found = stored_revision(connection)
                if found is None and not _has_tables(connection):
                    _create(connection, schema, keyring, scope, clock)
                    return
                if found in REVISIONS:
                    keyring.take_up(connection)
                try:
                    check_revision(connection, path, REVISIONS, schema.version)
                except SchemaOlder:
                    schema.migrate(path)
            finally:
                connection.close()
        finally:
            lock.close()


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("select 1 from sqlite_master limit 1").fetchone() is not None


def _create(
    connection: sqlite3.Connection, schema: Schema, keyring: Keyring, scope: str, clock: Clock
) -> None:
    """Makes a new log: schema, head and `log.created` at position 1, in one transaction."""
    failpoint("before_schema")
    connection.execute("begin immediate")
    try:
        create_schema(connection, schema.metadata, REVISIONS[-1])
        head = Head(secrets.token_hex(16), 0, 0, CompactRange().dump())
        connection.execute(
            "insert into log_head (one, log_id, position, recorded_at, range)"
            " values (1, ?, ?, ?, ?)",
            (head.log_id, head.position, head.recorded_at, head.range),
        )
        transaction: Transaction[None] = Transaction(
            connection, head, clock(), schema.tables, {}, Names()
        )
        staged = transaction.stage()
        staged.add(
            SYSTEM,
            1,
            LogCreated(log_id=head.log_id, scope=scope, version=schema.version),
            event_id=event_id(SYSTEM, "created"),
            cause=None,
            correlation=SYSTEM,
            actor="operator/local",
        )
        transaction.accept(staged, SYSTEM, None, (), keep=False)
        keyring.take_up(connection)
        transaction.flush()
        failpoint("before_schema_commit")
        connection.execute("commit")
        failpoint("after_schema_commit")
    except BaseException:
        connection.execute("rollback")
        raise


__all__: Sequence[str] = ("HEAD_POSITION", "Log", "Schema", "explain", "leaves_query", "prepare")
