"""The writer: one thread per process that decides and commits whatever waits, in one transaction.

Authoritative for the order of the log.  Under the write lock it reads the head, stamps the time,
runs each command through `transact`, writes everything with one `executemany` per table, commits,
and wakes everybody once per event loop.  A kill at any instant leaves the whole batch or none of
it; callers that heard nothing find out by asking again, because every id is derived (CONTRACTS
A.8).

Owned by the thread: its connection, the state cache, the names.  Other threads only use `submit`,
`run_job`, `subscribe` and `close`.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import structlog
from msgspec import Struct
from sqlalchemy import Engine

from ledger.catchup import read_foreign
from ledger.checkpoint import Checkpointer
from ledger.codec import Recorded
from ledger.database import driver_connection, explain
from ledger.errors import Overloaded, PlayledgerError, Unavailable
from ledger.events import Event
from ledger.failpoint import failpoint
from ledger.lock import WriteLock
from ledger.rows import Key, Patch, Row, TableWrites
from ledger.transaction import Head, Names, Transaction, read_head

S = TypeVar("S")
C = TypeVar("C")
A = TypeVar("A")

QUEUE_MAX: Final = 4096
BATCH_MAX: Final = 512
POLL_S: Final = 0.005
CACHE_MAX: Final = 20_000

Clock = Callable[[], int]
Job = Callable[[sqlite3.Connection, int], Any]
Rows = dict[str, dict[Key, Row | Patch | None]]
log = structlog.get_logger("ledger.writer")


class Committed(Struct, frozen=True):
    """What one commit brought: its events, and, if it was ours, its rows and the states it left."""

    events: list[Recorded[Event]]
    rows: Rows | None = None
    states: dict[str, Any] = {}


class _Item(Struct):
    """Something that waits for the writer; `command` or `job` is set."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    command: Any = None
    job: Job | None = None
    answer: Any = None
    error: BaseException | None = None


Listener = Callable[[Committed], None]


class Writer(Generic[C, S, A]):
    """Commits commands in groups.

    `transact` is what a command does inside a transaction, `look_ahead` what a batch may ask for
    once instead of every command for itself.
    """

    def __init__(
        self,
        path: Path,
        engine: Engine,
        transact: Callable[[Transaction[S], C], A],
        look_ahead: Callable[[Transaction[S], Sequence[C]], None],
        tables: dict[str, TableWrites],
        clock: Clock,
        *,
        queue_max: int = QUEUE_MAX,
        batch_max: int = BATCH_MAX,
        before_flush: Callable[[Transaction[S]], None] | None = None,
        failpoint: Callable[[str], None] = failpoint,
    ) -> None:
        self._path = path
        self._engine = engine
        self._transact = transact
        self._look_ahead = look_ahead
        self._tables = tables
        self._clock = clock
        self._queue_max = queue_max
        self._batch_max = batch_max
        self.before_flush = before_flush
        self._failpoint = failpoint
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = WriteLock(path)
        self._connection = driver_connection(engine)
        self._cache: dict[str, S] = {}
        self._unreadable: dict[str, PlayledgerError] = {}
        self._names = Names()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Listener]] = []
        self._known = read_head(self._connection)
        self._data_version = self._read_data_version()
        self._closed = False
        self._checkpointer = Checkpointer(engine)
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    @property
    def position(self) -> int:
        """The last position this process knows to be committed."""
        return self._known.position

    @property
    def recorded_at(self) -> int:
        """The time of the last commit this process knows of; the next one is not before it."""
        return self._known.recorded_at

    @property
    def log_id(self) -> str:
        return self._known.log_id

    async def submit(self, command: C) -> A:
        """Commits one command and returns its answer; raises what it was refused with."""
        return await self._offer(command=command)  # type: ignore[no-any-return]

    async def run_job(self, job: Job) -> Any:
        """Runs writes that are no events (vault, leases) in the next group commit."""
        return await self._offer(job=job)

    def subscribe(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> Callable[[], None]:
        """Calls `listener` on `loop` after each commit, ours and others', in order.

        Returns how to stop that.
        """
        entry = (loop, listener)
        self._listeners = [*self._listeners, entry]

        def unsubscribe() -> None:
            self._listeners = [other for other in self._listeners if other is not entry]

        return unsubscribe

    def close(self) -> None:
        """Commits what waits, then ends the thread and frees the lock and the connection."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._refuse_left()
        self._checkpointer.close()
        self._connection.close()
        self._lock.close()

    def _offer(self, *, command: C | None = None, job: Job | None = None) -> asyncio.Future[Any]:
        if self._closed:
            raise _closed()
        waiting = self._queue.qsize()
        if waiting >= self._queue_max:
            raise Overloaded(
                f"the write queue is full: {waiting} of {self._queue_max} wait", hint="again in 1 s"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.put(_Item(loop=loop, future=future, command=command, job=job))
        if not self._thread.is_alive():
            self._refuse_left()
        return future

    def _refuse_left(self) -> None:
        """Answers what was put into the queue while another thread closed the log."""
        while not self._queue.empty():
            item = self._queue.get()
            if item is not None:
                self._fail([item], _closed())

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                first = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                self._look()
                continue
            batch = []
            item: _Item | None = first
            while item is not None:
                batch.append(item)
                if len(batch) >= self._batch_max:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            if batch:
                self._commit(batch)
            if item is None:
                return

    def _look(self) -> None:
        """Notices what other processes committed, within one poll interval."""
        try:
            seen = self._read_data_version()
            if seen != self._data_version:
                committed = self._catch_up(read_head(self._connection))
                self._data_version = seen
                if committed is not None:
                    self._deliver([], [committed])
        except (sqlite3.Error, PlayledgerError) as error:
            log.warning("cannot look at the log", error=str(explain(error, self._path)))

    def _commit(self, batch: list[_Item]) -> None:
        committed: list[Committed] = []
        try:
            self._lock.acquire()
        except PlayledgerError as error:
            self._fail(batch, error)
            return
        try:
            self._connection.execute("begin immediate")
            head = read_head(self._connection)
            foreign = self._catch_up(head)
            if foreign is not None:
                committed.append(foreign)
            at = max(head.recorded_at, self._clock())
            transaction = Transaction(
                self._connection,
                head,
                at,
                self._tables,
                self._cache,
                self._names,
                self._unreadable,
            )
            self._look_ahead(transaction, [i.command for i in batch if i.job is None])
            for item in batch:
                self._perform(transaction, item)
            if self.before_flush is not None:
                self.before_flush(transaction)
            self._failpoint("before_flush")
            new_head = transaction.flush()
            self._failpoint("before_commit")
        except BaseException as error:  # noqa: BLE001 - every caller is answered
            self._roll_back()
            self._lock.release()
            self._fail(batch, explain(error, self._path) if _is_ours(error) else error)
            self._deliver([], committed)
            return
        try:
            self._connection.execute("commit")
            self._failpoint("after_commit")
        except BaseException as error:  # noqa: BLE001 - every caller is answered
            if not self._committed_after_all(transaction, new_head):
                self._fail(batch, explain(error, self._path) if _is_ours(error) else error)
                self._deliver([], committed)
                return
        self._lock.release()
        self._checkpointer.notice()
        self._known = new_head
        self._update_cache(transaction)
        if transaction.events or any(transaction.rows.rows.values()):
            committed.append(
                Committed(transaction.events, transaction.rows.rows, transaction.states)
            )
        self._deliver(batch, committed)

    def _perform(self, transaction: Transaction[S], item: _Item) -> None:
        try:
            if item.job is None:
                item.answer = self._transact(transaction, item.command)
                return
            transaction.connection.execute("savepoint job")
            try:
                item.answer = item.job(transaction.connection, transaction.at)
            except BaseException:
                transaction.connection.execute("rollback to job")
                raise
            finally:
                transaction.connection.execute("release job")
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001 - a refused command fails its own caller only
            item.error = error

    def _catch_up(self, head: Head) -> Committed | None:
        """Drops the states of streams that another process appended to, and reads its events."""
        known = self._known.position
        if head.position == known:
            return None
        foreign = read_foreign(self._connection, known, head.position)
        self._known = head
        for stream in foreign.streams:
            self._cache.pop(stream, None)
        self._unreadable.update(foreign.unreadable)
        return Committed(foreign.events)

    def _update_cache(self, transaction: Transaction[S]) -> None:
        cache = self._cache
        for stream, state in transaction.states.items():
            cache.pop(stream, None)
            if stream not in transaction.dropped:
                cache[stream] = state
        while len(cache) > CACHE_MAX:
            del cache[next(iter(cache))]
        self._names.trim()

    def _committed_after_all(self, transaction: Transaction[S], head: Head) -> bool:
        """Finds out, on a new connection, whether an interrupted COMMIT happened (C059)."""
        self._roll_back()
        self._lock.release()
        try:
            fresh = driver_connection(self._engine)
            self._connection.close()
            self._connection = fresh
            self._data_version = self._read_data_version()
            if not transaction.events:
                return read_head(self._connection).position >= head.position
            return (
                self._connection.execute(
                    "select 1 from events where position = ? and id = ?",
                    (head.position, transaction.events[-1].id),
                ).fetchone()
                is not None
            )
        except sqlite3.Error:
            return False

    def _roll_back(self) -> None:
        self._names = Names()
        try:
            if self._connection.in_transaction:
                self._connection.execute("rollback")
        except sqlite3.Error as error:
            log.warning("rollback failed", error=str(error))

    def _read_data_version(self) -> int:
        return int(self._connection.execute("pragma data_version").fetchone()[0])

    def _fail(self, batch: Sequence[_Item], error: BaseException) -> None:
        for item in batch:
            item.error = error
        self._deliver(batch, [])

    def _deliver(self, batch: Sequence[_Item], committed: Sequence[Committed]) -> None:
        """Wakes each event loop once, with its answers and what was committed."""
        answers: dict[asyncio.AbstractEventLoop, list[_Item]] = {}
        for item in batch:
            answers.setdefault(item.loop, []).append(item)
        listeners: dict[asyncio.AbstractEventLoop, list[Listener]] = {}
        if committed:
            for loop, listener in self._listeners:
                listeners.setdefault(loop, []).append(listener)
        for loop in answers.keys() | listeners.keys():
            try:
                loop.call_soon_threadsafe(
                    _wake, answers.get(loop, ()), listeners.get(loop, ()), committed
                )
            except RuntimeError:  # the loop is closed: nobody waits there any more
                continue


def _wake(
    answers: Sequence[_Item], listeners: Sequence[Listener], committed: Sequence[Committed]
) -> None:
    for commit in committed:
        for listener in listeners:
            listener(commit)
    for item in answers:
        if item.future.done():
            continue
        if item.error is not None:
            item.future.set_exception(item.error)
        else:
            item.future.set_result(item.answer)


def _closed() -> Unavailable:
    return Unavailable("the log is closed", code="LOG_CLOSED", hint="open it again")


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error | PlayledgerError)
