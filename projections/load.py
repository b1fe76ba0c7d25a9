"""Reading the states back from the read models, and the queries the doors ask.

`load` gives the state that a fold of the run's events gives (INV-89), so a cold run costs its rows,
not its history.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from immutables import Map
from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from ledger.errors import LogDamaged
from ledger.ids import quote
from ledger.query import Query, Rows
from projections.state import Child, Instance, Run, RunState, Signal, Wait

WARMUP: Final = "playledger:warmup"
"""The play of runs that only show that runs work (SPEC 1.4)."""

RUN: Final = Decoder(Run)
INSTANCE: Final = Decoder(Instance)
CHILD: Final = Decoder(Child)
SIGNAL: Final = Decoder(Signal)
WAIT: Final = Decoder(Wait)


def load(connection: sqlite3.Connection, run_id: str) -> RunState | None:
    """Returns the state of a run from its rows, or None if there is no such run."""
    row = connection.execute("select state from runs where run_id = ?", (run_id,)).fetchone()
    if row is None:
        return None

    def rows(table: str, where: str = "") -> Sequence[Any]:
        sql = f"select state from {table} where run_id = ?{where}"
        return connection.execute(sql, (run_id,)).fetchall()

    try:
        run = RUN.decode(row[0])
        instances = [INSTANCE.decode(text) for (text,) in rows("instances")]
        children = (
            [CHILD.decode(text) for (text,) in rows("children")] if run.children.total else []
        )
        signals = (
            [SIGNAL.decode(text) for (text,) in rows("signals", " and taken_by is null")]
            if run.signals
            else []
        )
        waits = [WAIT.decode(text) for (text,) in rows("waits", " and outcome is null")]
    except DecodeError as error:
        raise LogDamaged(
            f"the rows of run {quote(run_id)} cannot be read: {error}",
            hint="playledger projections rebuild makes them again from the log",
        ) from error
    return RunState(
        run=run,
        instances=Map((instance.attempt, instance) for instance in instances),
        children=Map((child.child_key, child) for child in children),
        signals=Map((signal.n, signal) for signal in signals),
        waits=Map((wait.wait_id, wait) for wait in waits),
    )


class OutboxRow(Struct, frozen=True):
    """One unsettled intent, in the columns of its row."""

    intent_id: str
    position: int
    stream: str
    kind: str
    lane: str | None
    host: str | None
    due_at: int
    tries: int
    parked: int


class RunView(Struct, frozen=True):
    """What a status shows: the run, what it waits for, and the head it was read at."""

    run: Run
    instance: Instance | None
    waits: tuple[Wait, ...]
    outbox: tuple[OutboxRow, ...]
    as_of_position: int


class RunLine(Struct, frozen=True):
    """One line of a list of runs."""

    run: Run
    waits: tuple[Wait, ...]
    parked: int


_VIEW_SQL: Final = """
select 'head', position, null from log_head
union all select 'run', 0, state from runs where run_id = ?1
union all select 'instance', attempt, state from instances where run_id = ?1
union all select 'wait', 0, state from waits where run_id = ?1 and outcome is null
union all select 'outbox', 0, json_array(intent_id, position, stream_id, kind, lane, host, due_at,
    tries, parked) from outbox where stream_id = 'run/' || ?1
"""
_OUTBOX_ROW: Final = Decoder(tuple[str, int, str, str, str | None, str | None, int, int, int])


def view_query(run_id: str) -> Query[RunView | None]:
    """Asks for everything a status shows, in one read."""
    return Query(_VIEW_SQL, (run_id,), _view)


def _view(rows: Rows) -> RunView | None:
    run: Run | None = None
    position = 0
    instances: dict[int, Instance] = {}
    waits: list[Wait] = []
    outbox: list[OutboxRow] = []
    for what, number, text in rows:
        if what == "head":
            position = number
        elif what == "run":
            run = RUN.decode(text)
        elif what == "instance":
            instances[number] = INSTANCE.decode(text)
        elif what == "wait":
            waits.append(WAIT.decode(text))
        else:
            outbox.append(OutboxRow(*_OUTBOX_ROW.decode(text)))
    if run is None:
        return None
    return RunView(
        run=run,
        instance=instances.get(run.attempt),
        waits=tuple(sorted(waits, key=lambda wait: wait.position)),
        outbox=tuple(sorted(outbox, key=lambda row: row.position)),
        as_of_position=position,
    )


def run_query(run_id: str) -> Query[Run | None]:
    """Asks for the row of a run."""
    return Query(
        "select state from runs where run_id = ?",
        (run_id,),
        lambda rows: RUN.decode(rows[0][0]) if rows else None,
    )


def child_query(run_id: str, child_key: str) -> Query[Child | None]:
    """Asks for one child of a run."""
    return Query(
        "select state from children where run_id = ? and child_key = ?",
        (run_id, child_key),
        lambda rows: CHILD.decode(rows[0][0]) if rows else None,
    )


def instance_query(run_id: str, attempt: int) -> Query[Instance | None]:
    """Asks for one attempt of a run."""
    return Query(
        "select state from instances where run_id = ? and attempt = ?",
        (run_id, attempt),
        lambda rows: INSTANCE.decode(rows[0][0]) if rows else None,
    )


def mapped_query(run_id: str) -> Query[str | None]:
    """Asks under which id another coordinator runs the highest attempt it has mapped."""

    def read(rows: Rows) -> str | None:
        mapped = (INSTANCE.decode(row[0]).mapped_id for row in rows)
        return next((name for name in mapped if name is not None), None)

    return Query(
        "select state from instances where run_id = ? order by attempt desc", (run_id,), read
    )


def wait_query(run_id: str, wait_id: str) -> Query[Wait | None]:
    """Asks for one wait of a run, open or ended."""
    return Query(
        "select state from waits where run_id = ? and wait_id = ?",
        (run_id, wait_id),
        lambda rows: WAIT.decode(rows[0][0]) if rows else None,
    )


def runs_query(
    *,
    status: str | None = None,
    play: str | None = None,
    family: str | None = None,
    waiting_on: str | None = None,
    org: str | None = None,
    before: int | None = None,
    limit: int = 100,
) -> Query[list[RunLine]]:
    """Asks for runs, newest first, behind a submit position; of one organisation, if it is given.

    The organisation is read from the state: newest first, a page ends long before the table does.
    """
    where: list[str] = ["1"]
    parameters: list[Any] = []
    if play is None:  # warm-up runs are nobody's work: they show when they are asked for
        where.append("r.play_name <> ?")
        parameters.append(WARMUP)
    for column, value in (("status", status), ("play_name", play), ("family", family)):
        if value is not None:
            where.append(f"r.{column} = ?")
            parameters.append(value)
    if org is not None:
        where.append("r.state ->> '$.orgId' = ?")
        parameters.append(org)
    if waiting_on is not None:
        where.append(
            "exists (select 1 from waits w where w.run_id = r.run_id and w.outcome is null"
            " and (w.kind = ? or w.key = ?))"
        )
        parameters += [waiting_on, waiting_on]
    if status in ("submitted", "running", "cancelling") or waiting_on is not None:
        where.append("r.ended_at is null")
    edge: list[int] = []
    if before is not None:
        where.append("r.position < ?")
        edge = [before]
    return Query(
        "select r.state, (select json_group_array(json(w.state)) from waits w"
        " where w.run_id = r.run_id and w.outcome is null and r.ended_at is null),"
        " (select count(*) from outbox o where o.stream_id = 'run/' || r.run_id and o.parked)"
        f" from runs r where {' and '.join(where)} order by r.position desc limit ?",
        (*parameters, *edge, limit),
        _lines,
    )


def _lines(rows: Rows) -> list[RunLine]:
    return [
        RunLine(
            run=RUN.decode(state),
            waits=tuple(_WAITS.decode(waits)),
            parked=parked,
        )
        for state, waits, parked in rows
    ]


_WAITS: Final = Decoder(list[Wait])


def recent_runs_query() -> Query[list[str]]:
    """Asks for the newest run ids, among which a mistyped one may be found."""
    return Query(
        "select run_id from runs order by position desc limit 500",
        (),
        lambda rows: [row[0] for row in rows],
    )


def outbox_query(run_id: str) -> Query[list[OutboxRow]]:
    """Asks for the unsettled intents of a run."""
    return Query(
        "select intent_id, position, stream_id, kind, lane, host, due_at, tries, parked"
        " from outbox where stream_id = ? order by position",
        ("run/" + run_id,),
        lambda rows: [OutboxRow(*row) for row in rows],
    )
