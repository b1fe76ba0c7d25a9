"""Building the read models anew from the log, while appends and reads go on (CASES C035).

    1  fold the log into rows of its own, holding no lock, until nearly caught up
    2  on one snapshot of the log and its rows, find which stored rows differ
    3  fold what came meanwhile, and note which rows that touched
    4  under the write lock: fold the last events, write those rows, all in one transaction

So readers see the old rows or the new ones, never none; the lock is held for what differs, not for
what there is; and a kill before the commit leaves nothing behind, as the rows of its own lie in a
temporary file that has no name.  What writers keep in memory are states, not rows, and a fold gives
the same ones.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct
from sqlalchemy import Table

from ledger.codec import decode, type_of
from ledger.database import check_file, driver_connection, explaining, reading, writer_engine
from ledger.errors import Conflict, LogReadOnly
from ledger.events import EVENT_TYPES
from ledger.lock import WAIT_S, WriteLock
from ledger.rows import Key
from ledger.transaction import read_head
from projections.tables import PROJECTION_VERSION, READ_MODELS, TABLES
from projections.verify import Progress, Refold, catch_up, count_rows, quiet_gc

NAME: Final = "read_models"
LAG_MAX: Final = 2_000
ROUNDS_MAX: Final = 20
KEYS_MAX: Final = 20_000

Touched = dict[str, set[Key] | None]


class Rebuilt(Struct, frozen=True):
    """What a rebuild did: `differed` counts the rows that were not as they should be."""

    position: int
    rows: int
    differed: int
    names: int
    corrupt: tuple[str, ...]


class Names(Struct, frozen=True):
    """Names that the index columns use and their tables lack, taken from the leaves."""

    streams: list[tuple[int, str]]
    types: list[tuple[int, str]]


def rebuild(
    path: Path,
    progress: Progress | None = None,
    *,
    before_swap: Callable[[], None] | None = None,
    lock_wait_s: float = WAIT_S,
) -> Rebuilt:
    """Rebuilds every read model of a log.

    Raises Conflict while another rebuild runs, LogLocked, LogReadOnly or LogDamaged; then nothing
    has changed.
    """
    check_file(path)
    with _alone(path), reading(path) as connection, quiet_gc():
        refold = Refold()
        try:
            _nearly(refold, connection, progress)
            refold.flush()
            touched, differed = _compared(refold, connection)
            names = _missing_names(connection)
            _nearly(refold, connection, progress)
            _touch(touched, refold.flush())
            if before_swap is not None:
                before_swap()
            _swap(path, refold, touched, names, lock_wait_s)
            return Rebuilt(
                position=refold.position,
                rows=count_rows(refold.shadow),
                differed=differed,
                names=len(names.streams) + len(names.types),
                corrupt=tuple(refold.corrupt.values()),
            )
        finally:
            refold.close()


def _nearly(refold: Refold, connection: sqlite3.Connection, progress: Progress | None) -> None:
    """Folds until what is left costs the writers nothing they would notice."""
    for _ in range(ROUNDS_MAX):
        head = read_head(connection).position
        if head - refold.position <= LAG_MAX and refold.position:
            return
        catch_up(refold, connection, head, progress)


def _compared(refold: Refold, connection: sqlite3.Connection) -> tuple[Touched, int]:
    """Returns the keys of stored rows that differ; None for a table where nearly all of them do."""
    touched: Touched = {table.name: set() for table in READ_MODELS}
    count = 0
    connection.execute("begin")
    catch_up(refold, connection, read_head(connection).position)
    for difference in refold.differences(connection):
        count += 1
        keys = touched[difference.table]
        if keys is not None:
            keys.add(difference.key)
            if len(keys) > KEYS_MAX:
                touched[difference.table] = None
    connection.execute("commit")
    return touched, count


def _touch(touched: Touched, changed: dict[str, set[Key]]) -> None:
    for name, more in changed.items():
        keys = touched[name]
        if keys is not None:
            keys |= more


def _swap(path: Path, refold: Refold, touched: Touched, names: Names, lock_wait_s: float) -> None:
    with explaining(path):
        lock = WriteLock(path)
        try:
            lock.acquire(lock_wait_s)
            connection = driver_connection(writer_engine(path))
            try:
                connection.execute("begin immediate")
                catch_up(refold, connection, read_head(connection).position)
                _touch(touched, refold.flush())
                for table in READ_MODELS:
                    _write(connection, refold, table, touched[table.name])
                _write_names(connection, names)
                connection.execute(
                    "insert or replace into projections (name, version, position) values (?, ?, ?)",
                    (NAME, PROJECTION_VERSION, refold.position),
                )
                connection.execute("commit")
            finally:
                connection.close()
        finally:
            lock.close()


def _write(
    connection: sqlite3.Connection, refold: Refold, table: Table, keys: set[Key] | None
) -> None:
    writes = TABLES[table.name]
    if keys is None:
        connection.execute(f"delete from {table.name}")
        connection.executemany(writes.upsert, refold.rows(table))
        return
    rows = {key: refold.row(table, key) for key in keys}
    connection.executemany(writes.delete, [key for key, row in rows.items() if row is None])
    connection.executemany(writes.upsert, [row for row in rows.values() if row is not None])


def _missing_names(connection: sqlite3.Connection) -> Names:
    """Finds streams and types without a name; the scan for types is made only if one can be."""
    streams = [
        (stream_id, decode(leaf).subject)
        for stream_id, leaf in connection.execute(
            "select e.stream_id, e.leaf from events e where e.version = 1"
            " and not exists (select 1 from streams s where s.stream_id = e.stream_id)"
        )
    ]
    types: list[tuple[int, str]] = []
    known = connection.execute("select count(*) from event_types").fetchone()[0]
    if known < len(EVENT_TYPES):
        types = [
            (type_id, type_of(leaf))
            for type_id, leaf in connection.execute(
                "select e.type_id, e.leaf from events e join (select min(position) as first"
                " from events where type_id not in (select type_id from event_types)"
                " group by type_id) f on f.first = e.position"
            )
        ]
    return Names(streams, types)


def _write_names(connection: sqlite3.Connection, names: Names) -> None:
    connection.executemany(
        "insert into streams (stream_id, name) values (?, ?) on conflict do nothing", names.streams
    )
    connection.executemany(
        "insert into event_types (type_id, name) values (?, ?) on conflict do nothing", names.types
    )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps a second rebuild of the same log out; the kernel frees the lock however this ends."""
    side = path.with_name(path.name + ".rebuild")
    try:
        descriptor = os.open(side, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LogReadOnly(
            f"{path} cannot be written: {error.strerror}", hint="make its folder writable"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"{path} is being rebuilt by another process",
                code="REBUILD_RUNNING",
                hint="wait for it; what was there before serves meanwhile",
            ) from None
        yield
    finally:
        os.close(descriptor)
