"""Reading and leasing the outbox: which intents this node may do.

A lease is a row beside the outbox that only prevents double work.  It is no event, is not compared,
may be deleted, and holds as long as its node lives (CONTRACTS A.9).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Final

from msgspec import Struct

from handlers.execute import State
from ledger.codec import Recorded, decode
from ledger.events import Event
from ledger.query import Query
from ledger.rows import Row, RowChange
from ledger.transaction import Transaction
from projections.load import OutboxRow
from projections.state import Run, RunState

TAKE_MAX: Final = 500
_COLUMNS: Final = (
    "o.intent_id, o.position, o.stream_id, o.kind, o.lane, o.host, o.due_at, o.tries, o.parked"
)


class Scope(Struct, frozen=True):
    """Which runs' intents a node takes: those of one family, or those of the plays it offers.

    `plays` may grow: a play can start others of its file.
    """

    plays: AbstractSet[str]
    family: str | None = None

    def covers(self, run: Run) -> bool:
        """Says whether this node does what this run intends."""
        if self.family is not None:
            return run.lineage.family_key == self.family
        return run.play_name in self.plays


def born_leased(node_id: str, scope: Scope) -> Callable[[Transaction[State]], None]:
    """Returns what the writer does before it writes: it leases what this node can do itself."""

    def lease(transaction: Transaction[State]) -> None:
        changes: list[RowChange] = []
        for (intent_id,), row in transaction.rows.rows["outbox"].items():
            if row is None:
                changes.append(RowChange("leases", (intent_id,), None))
            elif isinstance(row, tuple) and row[8] == 0 and row[5] in (None, node_id):
                state = transaction.states.get(str(row[2]))
                if isinstance(state, RunState) and scope.covers(state.run):
                    changes.append(RowChange("leases", (intent_id,), (intent_id, node_id)))
        transaction.rows.add(changes)

    return lease


def unleased_query(node_id: str, scope: Scope) -> Query[list[OutboxRow]]:
    """Asks for intents that nobody holds and this node may do, oldest first."""
    where, values = _scope_clause(scope)
    return Query(
        f"select {_COLUMNS} from outbox o join runs r on r.run_id = substr(o.stream_id, 5)"
        " where o.parked = 0 and (o.host is null or o.host = ?)"
        " and not exists (select 1 from leases l where l.intent_id = o.intent_id)"
        f" and {where} order by o.position limit {TAKE_MAX}",
        (node_id, *values),
        lambda rows: [OutboxRow(*row) for row in rows],
    )


def take(node_id: str, rows: Iterable[OutboxRow]) -> Callable[[sqlite3.Connection, int], list[str]]:
    """Returns the job that leases rows for a node and says which it got."""
    wanted = [row.intent_id for row in rows]

    def job(connection: sqlite3.Connection, _at: int) -> list[str]:
        got = []
        for intent_id in wanted:
            cursor = connection.execute(
                "insert into leases (intent_id, node_id)"
                " select intent_id, ? from outbox where intent_id = ?"
                " on conflict (intent_id) do nothing",
                (node_id, intent_id),
            )
            if cursor.rowcount:
                got.append(intent_id)
        return got

    return job


def rows_query(intent_ids: Iterable[str]) -> Query[list[OutboxRow]]:
    """Asks how rows stand that another process may have changed."""
    wanted = tuple(intent_ids)
    marks = ",".join("?" * len(wanted))
    return Query(
        f"select {_COLUMNS} from outbox o where o.intent_id in ({marks})",
        wanted,
        lambda rows: [OutboxRow(*row) for row in rows],
    )


def earlier_query(row: OutboxRow) -> Query[bool]:
    """Asks whether something of the same lane has to be done first."""
    return Query(
        "select 1 from outbox where lane = ? and position < ? limit 1",
        (row.lane, row.position),
        bool,
    )


def intent_query(intent_id: str) -> Query[Recorded[Event] | None]:
    """Asks for the event that opened an intent."""
    return Query(
        "select leaf from events where id = ?",
        (intent_id,),
        lambda rows: decode(rows[0][0]) if rows else None,
    )


LEASE_HOLDERS: Final[Query[list[str]]] = Query(
    "select distinct node_id from leases", (), lambda rows: [row[0] for row in rows]
)
LIVE_HOSTS: Final[Query[list[str]]] = Query(
    "select distinct host from instances where phase in ('created', 'started')"
    " and host is not null",
    (),
    lambda rows: [row[0] for row in rows],
)
ASKED_HOSTS: Final[Query[list[str]]] = Query(
    "select distinct host from outbox where host is not null", (), lambda rows: [r[0] for r in rows]
)


def instances_of_query(host: str) -> Query[list[tuple[str, int, str]]]:
    """Asks for the unfinished instances of a host: run id, attempt, instance id."""
    return Query(
        "select run_id, attempt, instance_id from instances"
        " where host = ? and phase in ('created', 'started')",
        (host,),
        lambda rows: [(row[0], row[1], row[2]) for row in rows],
    )


def asked_of_query(host: str) -> Query[list[OutboxRow]]:
    """Asks for the intents that only this host could do."""
    return Query(
        f"select {_COLUMNS} from outbox o where o.host = ?",
        (host,),
        lambda rows: [OutboxRow(*row) for row in rows],
    )


def release(node_id: str) -> Callable[[sqlite3.Connection, int], None]:
    """Returns the job that gives up every lease of a node."""

    def job(connection: sqlite3.Connection, _at: int) -> None:
        connection.execute("delete from leases where node_id = ?", (node_id,))

    return job


def outbox_row(row: Row) -> OutboxRow:
    """Returns an outbox row as a value."""
    return OutboxRow(*row)  # type: ignore[arg-type]


def _scope_clause(scope: Scope) -> tuple[str, tuple[str, ...]]:
    if scope.family is not None:
        return "r.family = ?", (scope.family,)
    plays = tuple(sorted(scope.plays))
    if not plays:
        return "0", ()
    return f"r.play_name in ({','.join('?' * len(plays))})", plays
