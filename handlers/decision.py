"""What deciding comes to: facts, nothing, or a refusal."""

from __future__ import annotations

from msgspec import Struct

from ledger.errors import PlayledgerError, RunNotFound, RunTerminal
from ledger.events import RunEvent
from ledger.ids import quote
from projections.state import RunState


class Rejected(Struct, frozen=True):
    """A refusal, and the one fact that may be kept of it."""

    error: PlayledgerError
    record: RunEvent | None = None


Decision = tuple[RunEvent, ...] | Rejected
NOTHING: tuple[RunEvent, ...] = ()


def run_not_found(run_id: str) -> RunNotFound:
    """Returns the error for a run that the log does not have."""
    return RunNotFound(
        f"run {quote(run_id)} is not in the log",
        hint="all: playledger runs",
        runId=run_id,
    )


def run_terminal(state: RunState, what: str) -> RunTerminal:
    """Returns the error for what an ended run no longer takes."""
    run = state.run
    return RunTerminal(
        f"{run.run_id} is {run.status} since @{run.ended_position} and {what}",
        hint=f"start another: playledger rerun {run.run_id}",
        runId=run.run_id,
        status=run.status,
        position=run.ended_position,
    )
