"""The ends of a run, as the choices that make them."""

from __future__ import annotations

from ledger import events as e
from projections.state import RunState


def cancelled(state: RunState, refused: str | None) -> e.RunCancelled:
    """Returns the end of a cancelled run; `refused` is what its instance reported instead."""
    current = state.current
    return e.RunCancelled(
        attempt=max(state.run.attempt, 0),
        instance_id=current.instance_id if current else None,
        refused=refused,
        parent=parent_of(state),
    )


def parent_of(state: RunState) -> e.Parent | None:
    """Returns where a run's end has to be told; it rides in the terminal event."""
    lineage = state.run.lineage
    if lineage.parent_run_id is None or lineage.child_key is None:
        return None
    return e.Parent(run_id=lineage.parent_run_id, child_key=lineage.child_key)


def failed(
    state: RunState, error_class: e.ErrorClass, code: str, error: e.Seal | None
) -> e.RunFailed:
    """Returns the failure of a run."""
    current = state.current
    return e.RunFailed(
        attempt=max(state.run.attempt, 0),
        instance_id=current.instance_id if current else None,
        error_class=error_class,
        code=code,
        error=error,
        parent=parent_of(state),
    )
