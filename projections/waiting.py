"""What a run waits for, from its state alone; each wait names the event that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ledger.canonical import Json
from projections.describe import plain
from projections.load import OutboxRow
from projections.state import RunState

SHOWN: Final = 4
_ENDS: Final = {"signal": "signal.received", "sleep": "timer.fired", "permit": "rate.acquired"}


def waiting_on(state: RunState, at: int, outbox: Sequence[OutboxRow] = ()) -> list[dict[str, Json]]:
    """Returns what a run waits for at a time, in the shape that every face shows."""
    run = state.run
    waits: list[dict[str, Json]] = []
    if run.status == "running":
        waits += [
            wait_shape(wait.kind, wait.key, wait.since_at, wait.until_at, wait.position)
            for wait in sorted(state.waits.values(), key=lambda wait: wait.position)
        ]
        if run.children.running:
            waits += [
                wait_shape("child", child.child_key, None, None, child.position)
                for child in sorted(state.children.values(), key=lambda child: child.position)
                if child.status == "requested"
            ]
    current = state.current
    if current is not None and current.phase == "requested" and not run.terminal:
        until = current.not_before_at
        waits.append(
            wait_shape(
                "engine" if until is None or until <= at else "backoff",
                current.instance_id,
                current.requested_at,
                until,
                current.requested_position,
            )
        )
    waits += [
        wait_shape("parked", row.kind, row.due_at, None, row.position)
        for row in outbox
        if row.parked
    ]
    if run.status == "cancelling" and run.cancel is not None:
        until = run.cancel.at + run.policy.cancel_grace_ms
        waits.append(wait_shape("end", "end", run.cancel.at, until, run.cancel.position))
    return waits


def wait_shape(
    kind: str, key: str, since: int | None, until: int | None, position: int
) -> dict[str, Json]:
    """Returns one wait as `waitingOn` holds it."""
    ends_with = {
        "child": "child.terminal_set",
        "engine": "instance.created",
        "backoff": "instance.created",
        "parked": "effect.resumed",
        "end": "run.cancelled",
        **_ENDS,
    }[kind]
    return {
        "kind": "engine" if kind == "end" else kind,
        "key": key,
        "sinceAt": since,
        "untilAt": until,
        "position": position,
        "endsWith": ends_with,
    }


def waiting_text(state: RunState, at: int = 0, outbox: Sequence[OutboxRow] = ()) -> str:
    """Returns what a run waits for on one line."""
    waits = waiting_on(state, at, outbox)
    shown = [f"{wait['kind']} {plain(str(wait['key']))}" for wait in waits[:SHOWN]]
    if len(waits) > SHOWN:
        shown.append(f"and {len(waits) - SHOWN} more")
    return ", ".join(shown) or "none"
