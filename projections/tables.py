"""The read models' tables (CONTRACTS A.6), and those that only help operation.

`state` is canonical JSON of what has bounded size; instances, children, signals and waits have a
row each, so that an append costs the same at any length of the history.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Index, Integer, Table, Text

from ledger.rows import TableWrites, table_writes
from ledger.tables import METADATA

RUNS: Final = Table(
    "runs",
    METADATA,
    Column("run_id", Text, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("position", Integer, nullable=False),  # of run.submitted: the order of lists
    Column("status", Text, nullable=False),
    Column("play_name", Text, nullable=False),
    Column("family", Text, nullable=False),
    Column("parent_run_id", Text),
    Column("attempt", Integer, nullable=False),
    Column("submitted_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("state", Text, nullable=False),
)
Index("runs_by_position", RUNS.c.position)
Index("runs_by_family", RUNS.c.family)
Index("runs_live", RUNS.c.position, sqlite_where=RUNS.c.ended_at.is_(None))

INSTANCES: Final = Table(
    "instances",
    METADATA,
    Column("run_id", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("instance_id", Text, nullable=False, unique=True),
    Column("host", Text),
    Column("phase", Text, nullable=False),
    Column("state", Text, nullable=False),
)
Index(
    "instances_live", INSTANCES.c.host, sqlite_where=INSTANCES.c.phase.in_(("created", "started"))
)

CHILDREN: Final = Table(
    "children",
    METADATA,
    Column("run_id", Text, primary_key=True),
    Column("child_key", Text, primary_key=True),
    Column("child_run_id", Text),
    Column("status", Text, nullable=False),
    Column("state", Text, nullable=False),
    sqlite_with_rowid=False,
)
SIGNALS: Final = Table(
    "signals",
    METADATA,
    Column("run_id", Text, primary_key=True),
    Column("n", Integer, primary_key=True),
    Column("signal_id", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("taken_by", Text),
    Column("state", Text, nullable=False),
    sqlite_with_rowid=False,
)
WAITS: Final = Table(
    "waits",
    METADATA,
    Column("run_id", Text, primary_key=True),
    Column("wait_id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("until_at", BigInteger),
    Column("outcome", Text),
    Column("state", Text, nullable=False),
    sqlite_with_rowid=False,
)
Index("waits_open", WAITS.c.run_id, sqlite_where=WAITS.c.outcome.is_(None))

OUTBOX: Final = Table(
    "outbox",
    METADATA,
    Column("intent_id", Text, primary_key=True),
    Column("position", Integer, nullable=False),
    Column("stream_id", Text, nullable=False),  # the stream's name: integers are not compared
    Column("kind", Text, nullable=False),
    Column("lane", Text),
    Column("host", Text),
    Column("due_at", BigInteger, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("parked", Integer, nullable=False),
    sqlite_with_rowid=False,
)
Index("outbox_by_lane", OUTBOX.c.lane, OUTBOX.c.position, sqlite_where=OUTBOX.c.lane.isnot(None))
Index("outbox_by_stream", OUTBOX.c.stream_id)

LEASES: Final = Table(
    "leases",
    METADATA,
    Column("intent_id", Text, primary_key=True),
    Column("node_id", Text, nullable=False),
    sqlite_with_rowid=False,
)
PROJECTIONS: Final = Table(
    "projections",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("position", Integer, nullable=False),
    sqlite_with_rowid=False,
)
TRACES: Final = Table(
    "traces",
    METADATA,
    Column("run_id", Text, nullable=False),
    Column("phase", Text, nullable=False),
    Column("ms", Integer, nullable=False),
    Column("graph_hash", Text),
    Column("extra", Text),
    Column("at", BigInteger, nullable=False),
)

READ_MODELS: Final = (RUNS, INSTANCES, CHILDREN, SIGNALS, WAITS, OUTBOX)
"""What a refold must give value by value; leases, projections and traces are left out."""

PROJECTION_VERSION: Final = 1
"""Of `evolve` and `project` together: a change of what they yield needs a rebuild."""

TABLES: Final[dict[str, TableWrites]] = {
    RUNS.name: table_writes(RUNS),
    INSTANCES.name: table_writes(INSTANCES),
    CHILDREN.name: table_writes(CHILDREN),
    SIGNALS.name: table_writes(SIGNALS),
    WAITS.name: table_writes(WAITS),
    OUTBOX.name: table_writes(OUTBOX, ("due_at", "tries", "parked")),
    LEASES.name: table_writes(LEASES),
}
