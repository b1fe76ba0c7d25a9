"""The file under the log: opening, creating and checking it, and what its errors mean.

SQLAlchemy Core owns schema, URLs, pool and pragmas; the writer and the readers take driver
connections of its engines, so that a group commit is one plain `executemany` per table.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote as percent

import aiosqlite
from sqlalchemy import Engine, MetaData, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateIndex, CreateTable

from ledger.errors import (
    LogDamaged,
    LogFull,
    LogLocked,
    LogMissing,
    LogReadOnly,
    PlayledgerError,
    Refused,
    SchemaNewer,
    SchemaOlder,
    Unavailable,
)
from ledger.tables import GUARDS

BUSY_MS: Final = 5000
CHECKPOINT_PAGES: Final = 10_000
STATEMENTS: Final = 1024  # one for each table and number of rows up to a chunk (ledger/rows.py)
READER_PRAGMAS: Final = (
    f"pragma busy_timeout={BUSY_MS}",
    "pragma query_only=on",
    "pragma cache_size=-16384",
)
_MAGIC: Final = b"SQLite format 3\x00"


def database_path(path_or_url: str | Path) -> Path:
    """Returns the file that a path or `sqlite:///` URL names."""
    text = str(path_or_url)
    if "://" not in text:
        return Path(text)
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise Refused(
            "the database URL cannot be read", code="DB_URL_INVALID", hint="--db PATH"
        ) from error
    if url.get_backend_name() != "sqlite" or not url.database:
        raise Refused(
            f"no log can be kept in {url.get_backend_name()} yet",
            code="DB_URL_INVALID",
            hint="--db PATH, or sqlite:///PATH",
        )
    return Path(url.database)


def writer_engine(path: Path) -> Engine:
    """Returns the engine whose driver connections may write: WAL, `synchronous=FULL`."""
    engine = create_engine(
        _url(path, "rwc"), poolclass=NullPool, connect_args={"cached_statements": STATEMENTS}
    )

    def configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        connection.execute(f"pragma busy_timeout={BUSY_MS}")
        if connection.execute("pragma journal_mode").fetchone()[0] != "wal":
            connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=full")
        connection.execute(f"pragma wal_autocheckpoint={CHECKPOINT_PAGES}")
        connection.execute("pragma temp_store=memory")
        connection.execute("pragma cache_size=-65536")

    event.listen(engine, "connect", configure)
    return engine


def reader_engine(path: Path) -> Engine:
    """Returns the engine for synchronous reads; its connections cannot write."""
    engine = create_engine(_url(path, _read_mode(path)), poolclass=NullPool)
    event.listen(engine, "connect", _configure_reader)
    return engine


async def async_reader(path: Path) -> aiosqlite.Connection:
    """Returns a connection for reads from coroutines; the caller closes it.

    Without SQLAlchemy's asyncio side, which brings its whole ORM and greenlets along: a held
    connection needs no pool, and a command line no half second of imports.
    """
    uri = f"file:{percent(str(path))}?mode={_read_mode(path)}"
    connection = await aiosqlite.connect(uri, uri=True, isolation_level=None)
    for pragma in READER_PRAGMAS:
        await connection.execute_fetchall(pragma)
    return connection


def driver_connection(engine: Engine) -> sqlite3.Connection:
    """Returns a driver connection of the engine; the caller closes it."""
    pooled = engine.raw_connection()
    connection = pooled.driver_connection
    pooled.detach()
    if not isinstance(connection, sqlite3.Connection):
        raise TypeError(type(connection).__name__)
    return connection


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Gives a read-only connection to an existing log, and says plainly why there is none."""
    check_file(path)
    with explaining(path):
        connection = driver_connection(reader_engine(path))
    try:
        with explaining(path):
            yield connection
    finally:
        connection.close()


def first_bytes(path: Path) -> bytes:
    """Returns how a log's file begins, or says plainly why it cannot be read.

    A database is looked at through SQLite alone.  Closing any other descriptor of it would free
    every lock that this process holds on it (POSIX), and the next process that leaves would take
    the log for unused and remove the WAL under us.
    """
    if _is_sqlite(path):
        return _MAGIC
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC))
    except FileNotFoundError:
        raise LogMissing(
            f"{path} does not exist, and reading creates nothing",
            hint=f"check the path, or make one: playledger db create {path}",
        ) from None
    except IsADirectoryError:
        raise LogMissing(f"{path} is a folder, not a log", hint="check the path") from None
    except OSError as error:
        raise LogReadOnly(
            f"{path} cannot be read: {error.strerror}", hint="check its permissions"
        ) from error


def _is_sqlite(path: Path) -> bool:
    """Asks SQLite whether a file is one of its own, without a lock and without files beside it."""
    if (
        not path.is_file()
        or not path.stat().st_size
        or not os.access(path, os.R_OK, effective_ids=True)
    ):
        return False
    connection = sqlite3.connect(f"file:{percent(str(path))}?immutable=1&mode=ro", uri=True)
    try:
        connection.execute("pragma schema_version").fetchone()
    except sqlite3.Error as error:
        name: str = getattr(error, "sqlite_errorname", "") or ""
        return not name.startswith(("SQLITE_NOTADB", "SQLITE_CANTOPEN"))
    finally:
        connection.close()
    return True


def check_file(path: Path) -> None:
    """Raises LogMissing unless `path` is a database file."""
    start = first_bytes(path)
    if start != _MAGIC:
        what = (
            f'it starts with {start[:3].hex()}, not "SQLite format 3"' if start else "it is empty"
        )
        raise LogMissing(
            f"{path} is not a playledger log: {what}",
            code="LOG_NOT_A_LOG",
            hint="check the path, or make one: playledger db create PATH",
        )


def check_revision(
    connection: sqlite3.Connection, path: Path, known: Sequence[str], version: str
) -> None:
    """Raises SchemaNewer or SchemaOlder unless the file has the last of the known revisions."""
    found = stored_revision(connection)
    if found is None:
        raise LogMissing(
            f"{path} is a database, but not a playledger log",
            code="LOG_NOT_A_LOG",
            hint="check the path, or make one: playledger db create PATH",
        )
    if found not in known:
        raise SchemaNewer(
            f"{path} has schema {found}, playledger {version} knows up to {known[-1]}",
            hint="upgrade playledger; nothing was changed",
        )
    if found != known[-1]:
        raise SchemaOlder(
            f"{path} has schema {found}, playledger {version} needs {known[-1]}",
            hint=f"playledger db migrate {path}",
        )


def stored_revision(connection: sqlite3.Connection) -> str | None:
    """Returns the schema revision of the file, or None if it is no log."""
    if not connection.execute(
        "select 1 from sqlite_master where name = 'alembic_version'"
    ).fetchone():
        return None
    row = connection.execute("select version_num from alembic_version").fetchone()
    return str(row[0]) if row else None


def create_schema(connection: sqlite3.Connection, metadata: MetaData, revision: str) -> None:
    """Creates every table, index and guard in an open transaction, and stamps the revision."""
    dialect = create_engine("sqlite://").dialect
    for table in metadata.sorted_tables:
        connection.execute(str(CreateTable(table).compile(dialect=dialect)))
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            connection.execute(str(CreateIndex(index).compile(dialect=dialect)))
    for guard in GUARDS:
        connection.execute(guard)
    connection.execute(
        "create table alembic_version (version_num varchar(32) not null primary key)"
    )
    connection.execute("insert into alembic_version values (?)", (revision,))


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turns the driver's errors inside the block into ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise explain(error, path) from error


def explain(error: BaseException, path: Path) -> PlayledgerError:
    """Returns what a driver error means for the caller, and what to do."""
    if isinstance(error, PlayledgerError):
        return error
    name: str = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return LogFull(
            f"{path}: disk full ({_free_bytes(path)} bytes free), nothing was recorded",
            hint="free space, then the same command again",
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return LogLocked(
            f"{path} is locked: another process held the write lock for {BUSY_MS / 1000:.1f} s",
            hint=f"`fuser {path}` names it; to copy a log: playledger db backup",
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return LogReadOnly(
            f"{path} cannot be opened for this: {error}",
            hint="check the permissions of the file and of its folder",
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return LogDamaged(
            f"{path} is damaged: {error}",
            hint=f"no writes before a restore; to see how much is whole: playledger db fsck {path}",
        )
    return Unavailable(f"{path}: {error}", code="LOG_IO", hint="playledger db fsck; check the disk")


def _configure_reader(connection: sqlite3.Connection, _record: object) -> None:
    for pragma in READER_PRAGMAS:
        connection.execute(pragma)


def _read_mode(path: Path) -> str:
    """Returns `ro`, or `immutable` for a file in a folder that cannot be written.

    A reader of a WAL file needs a -shm beside it; what lies in a read-only folder does not change.
    """
    return "ro" if os.access(path.parent, os.W_OK, effective_ids=True) else "ro&immutable=1"


def _url(path: Path, mode: str) -> URL:
    query = {"uri": "true", **dict(part.split("=") for part in f"mode={mode}".split("&"))}
    return URL.create("sqlite", database="file:" + percent(str(path)), query=query)


def _free_bytes(path: Path) -> int:
    try:
        return os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    except OSError:
        return 0
