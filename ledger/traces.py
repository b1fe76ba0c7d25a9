"""Perf traces: how long things took, beside the log and never read by a rule (SPEC 1.34, 7.38).

They are measurements, not facts: the table may be dropped, a full queue drops the oldest and
counts them, and a trace that cannot be written is forgotten.  What says what happened is the log.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import orjson
from msgspec import Struct

from ledger.canonical import Json
from ledger.query import Query

QUEUE_MAX: Final = 10_000
KEEP_MS: Final = 7 * 24 * 3_600_000
PRUNE_MAX: Final = 5_000


class Trace(Struct, frozen=True):
    """One measurement of a run; `extra` is what the phase says besides, as JSON."""

    run_id: str
    phase: str
    ms: int
    graph_hash: str | None
    extra: str | None
    at: int


class Traces:
    """Where traces are put, from any thread; whoever holds the log writes them now and then."""

    def __init__(self, now: Callable[[], int], size: int = QUEUE_MAX) -> None:
        self._now = now
        self._queue: deque[Trace] = deque(maxlen=size)
        self.dropped = 0

    def record(
        self, run_id: str, phase: str, ms: float, *, graph_hash: str | None = None, **extra: Json
    ) -> None:
        """Puts a trace; it never waits and never fails.  `ms` is rounded, and at least 0."""
        if len(self._queue) == self._queue.maxlen:
            self.dropped += 1
        text = orjson.dumps(extra).decode() if extra else None
        self._queue.append(Trace(run_id, phase, max(0, round(ms)), graph_hash, text, self._now()))

    def take(self) -> list[Trace]:
        """Returns what waits, and forgets it here."""
        taken = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken


def write_traces(traces: Sequence[Trace]) -> Callable[[sqlite3.Connection, int], None]:
    """Returns the job that writes traces, and takes away some that are older than a week."""

    def job(connection: sqlite3.Connection, at: int) -> None:
        connection.executemany(
            "insert into traces (run_id, phase, ms, graph_hash, extra, at)"
            " values (?, ?, ?, ?, ?, ?)",
            [(t.run_id, t.phase, t.ms, t.graph_hash, t.extra, t.at) for t in traces],
        )
        connection.execute(
            "delete from traces where rowid in"
            f" (select rowid from traces where at < ? order by rowid limit {PRUNE_MAX})",
            (at - KEEP_MS,),
        )

    return job


def traces_query(run_id: str, limit: int) -> Query[list[Trace]]:
    """Asks for the traces of a run, in the order in which they were put."""
    return Query(
        "select run_id, phase, ms, graph_hash, extra, at from traces where run_id = ?"
        " order by rowid limit ?",
        (run_id, limit),
        lambda rows: [Trace(*row) for row in rows],
    )


def shown(trace: Trace) -> dict[str, Json]:
    """Returns a trace as answers show it; `{runId, phase, ms, graphHash, extra?, at}`."""
    out: dict[str, Json] = {
        "at": trace.at,
        "graphHash": trace.graph_hash,
        "ms": trace.ms,
        "phase": trace.phase,
        "runId": trace.run_id,
    }
    if trace.extra is not None:
        out["extra"] = orjson.loads(trace.extra)
    return out
