"""The first schema: log, vault, read models, and the guards that keep history as it is."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = (
    """CREATE TABLE blobs (
        "key" TEXT NOT NULL,
        subject TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        sha256 TEXT NOT NULL,
        content BLOB NOT NULL,
        expires_at BIGINT,
        PRIMARY KEY ("key")
    )""",
    "CREATE INDEX blobs_by_expiry ON blobs (expires_at) WHERE expires_at IS NOT NULL",
    """CREATE TABLE children (
        run_id TEXT NOT NULL,
        child_key TEXT NOT NULL,
        child_run_id TEXT,
        status TEXT NOT NULL,
        state TEXT NOT NULL,
        PRIMARY KEY (run_id, child_key)
    )
        WITHOUT ROWID""",
    """CREATE TABLE event_types (
        type_id INTEGER NOT NULL,
        name TEXT NOT NULL,
        PRIMARY KEY (type_id),
        UNIQUE (name)
    )""",
    """CREATE TABLE instances (
        run_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        instance_id TEXT NOT NULL,
        host TEXT,
        phase TEXT NOT NULL,
        state TEXT NOT NULL,
        PRIMARY KEY (run_id, attempt),
        UNIQUE (instance_id)
    )""",
    "CREATE INDEX instances_live ON instances (host) WHERE phase IN ('created', 'started')",
    """CREATE TABLE leases (
        intent_id TEXT NOT NULL,
        node_id TEXT NOT NULL,
        PRIMARY KEY (intent_id)
    )
        WITHOUT ROWID""",
    """CREATE TABLE log_head (
        one INTEGER NOT NULL,
        log_id TEXT NOT NULL,
        position INTEGER NOT NULL,
        recorded_at BIGINT NOT NULL,
        range BLOB NOT NULL,
        PRIMARY KEY (one)
    )""",
    """CREATE TABLE outbox (
        intent_id TEXT NOT NULL,
        position INTEGER NOT NULL,
        stream_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        lane TEXT,
        host TEXT,
        due_at BIGINT NOT NULL,
        tries INTEGER NOT NULL,
        parked INTEGER NOT NULL,
        PRIMARY KEY (intent_id)
    )
        WITHOUT ROWID""",
    "CREATE INDEX outbox_by_lane ON outbox (lane, position) WHERE lane IS NOT NULL",
    "CREATE INDEX outbox_by_stream ON outbox (stream_id)",
    """CREATE TABLE projections (
        name TEXT NOT NULL,
        version INTEGER NOT NULL,
        position INTEGER NOT NULL,
        PRIMARY KEY (name)
    )
        WITHOUT ROWID""",
    """CREATE TABLE runs (
        run_id TEXT NOT NULL,
        version INTEGER NOT NULL,
        position INTEGER NOT NULL,
        status TEXT NOT NULL,
        play_name TEXT NOT NULL,
        family TEXT NOT NULL,
        parent_run_id TEXT,
        attempt INTEGER NOT NULL,
        submitted_at BIGINT NOT NULL,
        ended_at BIGINT,
        state TEXT NOT NULL,
        PRIMARY KEY (run_id)
    )""",
    "CREATE INDEX runs_by_family ON runs (family)",
    "CREATE INDEX runs_by_position ON runs (position)",
    "CREATE INDEX runs_live ON runs (position) WHERE ended_at IS NULL",
    """CREATE TABLE signals (
        run_id TEXT NOT NULL,
        n INTEGER NOT NULL,
        signal_id TEXT NOT NULL,
        "key" TEXT NOT NULL,
        taken_by TEXT,
        state TEXT NOT NULL,
        PRIMARY KEY (run_id, n)
    )
        WITHOUT ROWID""",
    """CREATE TABLE streams (
        stream_id INTEGER NOT NULL,
        name TEXT NOT NULL,
        PRIMARY KEY (stream_id),
        UNIQUE (name)
    )""",
    """CREATE TABLE traces (
        run_id TEXT NOT NULL,
        phase TEXT NOT NULL,
        ms INTEGER NOT NULL,
        graph_hash TEXT,
        extra TEXT,
        at BIGINT NOT NULL
    )""",
    """CREATE TABLE vault_keys (
        subject TEXT NOT NULL,
        "key" BLOB,
        erased_at BIGINT,
        PRIMARY KEY (subject)
    )
        WITHOUT ROWID""",
    """CREATE TABLE vault_values (
        digest TEXT NOT NULL,
        subject TEXT NOT NULL,
        disclosure TEXT NOT NULL,
        expires_at BIGINT,
        PRIMARY KEY (digest)
    )""",
    """CREATE TABLE waits (
        run_id TEXT NOT NULL,
        wait_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        "key" TEXT NOT NULL,
        until_at BIGINT,
        outcome TEXT,
        state TEXT NOT NULL,
        PRIMARY KEY (run_id, wait_id)
    )
        WITHOUT ROWID""",
    "CREATE INDEX waits_open ON waits (run_id) WHERE outcome IS NULL",
    """CREATE TABLE events (
        position INTEGER NOT NULL,
        id TEXT NOT NULL,
        stream_id INTEGER NOT NULL,
        version INTEGER NOT NULL,
        type_id INTEGER NOT NULL,
        leaf BLOB NOT NULL,
        PRIMARY KEY (position),
        UNIQUE (stream_id, version),
        UNIQUE (id),
        FOREIGN KEY(stream_id) REFERENCES streams (stream_id),
        FOREIGN KEY(type_id) REFERENCES event_types (type_id)
    )""",
    """CREATE TRIGGER events_no_update before update on events
    begin select raise(abort, 'the log is append-only'); end""",
    """CREATE TRIGGER events_no_delete before delete on events
    begin select raise(abort, 'the log is append-only'); end""",
    """CREATE TRIGGER events_append_only before insert on events
    when new.position <= (select coalesce(max(position), 0) from events)
    or exists (select 1 from events where id = new.id)
    or exists (select 1 from events where stream_id = new.stream_id and version >= new.version)
    begin select raise(abort, 'the log is append-only'); end""",
    """CREATE TRIGGER log_head_no_delete before delete on log_head
    begin select raise(abort, 'the log is append-only'); end""",
    """CREATE TRIGGER log_head_forward before update on log_head
    when new.log_id <> old.log_id or new.one <> old.one or new.position < old.position
    or new.recorded_at < old.recorded_at
    begin select raise(abort, 'the log is append-only'); end""",
    """CREATE TRIGGER log_head_once before insert on log_head
    when exists (select 1 from log_head)
    begin select raise(abort, 'the log is append-only'); end""",
)


def upgrade() -> None:
    """Creates everything."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Refuses: history is kept."""
    raise NotImplementedError("restore a backup made before")
