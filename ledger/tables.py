"""The tables of the log and the vault (CONTRACTS A.6); the read models stand in projections.

`events` and the vault are the truth; the integer columns beside a leaf only repeat it, and `fsck`
compares them.  `streams` and `event_types` give the integers their names and can be rebuilt.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

METADATA: Final = MetaData()

EVENTS: Final = Table(
    "events",
    METADATA,
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False, unique=True),
    Column("stream_id", Integer, ForeignKey("streams.stream_id"), nullable=False),
    Column("version", Integer, nullable=False),
    Column("type_id", Integer, ForeignKey("event_types.type_id"), nullable=False),
    Column("leaf", LargeBinary, nullable=False),
    UniqueConstraint("stream_id", "version"),
)
STREAMS: Final = Table(
    "streams",
    METADATA,
    Column("stream_id", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False, unique=True),
)
EVENT_TYPES: Final = Table(
    "event_types",
    METADATA,
    Column("type_id", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False, unique=True),
)
LOG_HEAD: Final = Table(
    "log_head",
    METADATA,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("log_id", Text, nullable=False),
    Column("position", Integer, nullable=False),
    Column("recorded_at", BigInteger, nullable=False),
    Column("range", LargeBinary, nullable=False),
)
VAULT_KEYS: Final = Table(
    "vault_keys",
    METADATA,
    Column("subject", Text, primary_key=True),
    Column("key", LargeBinary),
    Column("erased_at", BigInteger),
    sqlite_with_rowid=False,
)
VAULT_VALUES: Final = Table(
    "vault_values",
    METADATA,
    Column("digest", Text, primary_key=True),
    Column("subject", Text, nullable=False),
    Column("disclosure", Text, nullable=False),
    Column("expires_at", BigInteger),
)
VAULT_SECRETS: Final = Table(
    "vault_secrets",
    METADATA,
    Column("key", Text, primary_key=True),
    Column("subject", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("ciphertext", LargeBinary, nullable=False),
    Column("expires_at", BigInteger),
)
Index("vault_secrets_by_subject", VAULT_SECRETS.c.subject)
BLOBS: Final = Table(
    "blobs",
    METADATA,
    Column("key", Text, primary_key=True),
    Column("subject", Text, nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("expires_at", BigInteger),
)
# Behind the content in its row: without an index the look for orphans would read every blob.
Index("blobs_by_expiry", BLOBS.c.expires_at, sqlite_where=BLOBS.c.expires_at.isnot(None))

# The database itself refuses to change history, whoever asks: an update, a delete, a gap, and an
# `INSERT OR REPLACE`, which removes the row it replaces without firing a delete trigger.
GUARDS: Final = (
    """create trigger events_no_update before update on events
    begin select raise(abort, 'the log is append-only'); end""",
    """create trigger events_no_delete before delete on events
    begin select raise(abort, 'the log is append-only'); end""",
    """create trigger events_append_only before insert on events
    when new.position <= (select coalesce(max(position), 0) from events)
      or exists (select 1 from events where id = new.id)
      or exists (select 1 from events where stream_id = new.stream_id and version >= new.version)
    begin select raise(abort, 'the log is append-only'); end""",
    """create trigger log_head_no_delete before delete on log_head
    begin select raise(abort, 'the log is append-only'); end""",
    """create trigger log_head_forward before update on log_head
    when new.log_id <> old.log_id or new.one <> old.one or new.position < old.position
      or new.recorded_at < old.recorded_at
    begin select raise(abort, 'the log is append-only'); end""",
    """create trigger log_head_once before insert on log_head
    when exists (select 1 from log_head)
    begin select raise(abort, 'the log is append-only'); end""",
)
