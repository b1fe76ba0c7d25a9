"""What is said of a run that is not there, with the nearest that is."""

from __future__ import annotations

import difflib
import sqlite3
from pathlib import Path

from ledger.errors import RunNotFound
from ledger.ids import quote
from ledger.log import HEAD_POSITION
from ledger.query import ask
from projections.load import recent_runs_query


def not_found(connection: sqlite3.Connection, path: Path, run_id: str) -> RunNotFound:
    """Returns the error, on a plain connection."""
    known: list[str] = ask(connection, recent_runs_query())
    near = difflib.get_close_matches(run_id, known, 1)
    hint = f"did you mean {quote(near[0])}? " if near else ""
    return RunNotFound(
        f"run {quote(run_id)} is not in {path}",
        hint=f"{hint}all: playledger runs --db {path}",
        runId=run_id,
        head=ask(connection, HEAD_POSITION),
    )
