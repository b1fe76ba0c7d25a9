"""Timelines, states and changes as text and as JSON, as UX section 3 shows them.

A terminal gets columns, a pipe gets the same fields between tabs, whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec import Struct

from ledger.canonical import Json
from ledger.codec import format_time
from ledger.errors import Conflict, LogMissing, NotFound, PlayledgerError, Refused
from ledger.events import Seal
from ledger.ids import instance_id
from projections.describe import Reveal, describe_seal, plain, sealed, visible
from projections.history import Change, Line, Snapshot
from projections.load import OutboxRow
from projections.waiting import waiting_on, waiting_text

TYPE_WIDTH: Final = 28
TEXT_WIDTH: Final = 36
PLACE_WIDTH: Final = 74


class Look(Struct, frozen=True):
    """What one stream takes: columns or tabs, colour or none."""

    columns: bool = False
    colour: bool = False

    def dim(self, text: str) -> str:
        return self._in(text, "2")

    def red(self, text: str) -> str:
        return self._in(text, "31")

    def green(self, text: str) -> str:
        return self._in(text, "32")

    def bold(self, text: str) -> str:
        return self._in(text, "1")

    def _in(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text


PIPE: Final = Look()


def timeline_lines(lines: Iterable[Line], head: int, look: Look = PIPE) -> Iterator[str]:
    """Yields a timeline: position, seconds since the start, type, what it says, its cause."""
    width = len(str(head)) + 2
    for line in lines:
        place = "" if line.position is None else f"@{line.position}"
        cause = "" if line.cause is None else f"<- @{line.cause}"
        if not look.columns:
            yield "\t".join((place, format_time(line.at), line.type, line.text, cause))
            continue
        seconds = f"+{line.since_ms / 1000:.3f}"
        if line.position is None:
            yield f"{'':{width}} {look.dim(seconds)}  {line.text}"
            continue
        text = f"{line.text:{TEXT_WIDTH}} {look.dim(cause)}" if cause else line.text
        yield f"{look.dim(f'{place:{width}}')} {look.dim(seconds)}  {line.type:{TYPE_WIDTH}} {text}"


def snapshot_lines(found: Snapshot, reveal: Reveal = sealed, look: Look = PIPE) -> Iterator[str]:
    """Yields a run as it was at a position."""
    run = found.state.run
    place = f"v{run.version}, {format_time(found.at)}"
    yield f"{look.bold(run.run_id)} as of @{found.position} ({place})"
    attempt = "" if run.attempt < 0 else f", attempt {run.attempt}"
    rows = [
        ("status", f"{run.status}{attempt}"),
        ("waits for", waiting_text(found.state, found.at, found.outbox)),
        ("children", _children(found)),
        ("outbox", _outbox(found)),
    ]
    if run.retry is not None:
        rows.append(("retry", f"{run.retry.attempt}, after {run.retry.reason}"))
    if run.result is not None:
        rows.append(("result", describe_seal(run.result, reveal)))
    if run.status == "failed":
        rows.append(("error", f"{run.error_class} {plain(run.code or '')}"))
        if run.error is not None:
            rows.append(("", describe_seal(run.error, reveal)))
    for name, text in rows:
        yield f"  {name:11} {text}" if look.columns else f"{name}\t{text}"


def snapshot_json(found: Snapshot, reveal: Reveal = sealed) -> dict[str, Json]:
    """Returns a run as it was, in the shape of a status."""
    run, counts = found.state.run, found.state.run.children
    attempt = max(run.attempt, 0)
    result, reference = _resolved(run.result, reveal)
    error: Json = None
    if run.status == "failed":
        told, _ = _resolved(run.error, reveal)
        error = {
            "class": run.error_class,
            "code": run.code,
            "message": told.get("message") if isinstance(told, dict) else run.code,
        }
    return {
        "runId": run.run_id,
        "playName": run.play_name,
        "status": run.status,
        "attempt": attempt,
        "instanceId": instance_id(run.scope, run.run_id, attempt),
        "orgId": run.org_id,
        "parentRunId": run.lineage.parent_run_id,
        "workflowFamilyKey": run.lineage.family_key,
        "result": result,
        "resultRef": reference,
        "error": error,
        "retry": None
        if run.retry is None
        else {"attempt": run.retry.attempt, "reason": run.retry.reason},
        "progress": None
        if run.progress is None
        else {"done": run.progress.done, "of": run.progress.of, "at": run.progress.at},
        "children": {
            "total": counts.total,
            "running": counts.running,
            "completed": counts.completed,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
        },
        "waitingOn": list(waiting_on(found.state, found.at, found.outbox)),
        "parked": [_parked(row) for row in found.outbox if row.parked],
        "submittedAt": run.submitted_at,
        "startedAt": run.started_at,
        "endedAt": run.ended_at,
        "version": run.version,
        "asOfPosition": found.position,
    }


def change_lines(changes: Sequence[Change], look: Look = PIPE) -> Iterator[str]:
    """Yields what changed, each with the positions of the events that did it."""
    width = max((len(change.path) for change in changes), default=0)
    for change in changes:
        places = " ".join(f"@{place}" for place in _ends(change.positions))
        text = f"{_shown(change.before)} -> {_shown(change.after)}"
        if not look.columns:
            yield f"{change.path}\t{text}\t{places}"
            continue
        left = f"  {change.path:{width}}  {text}"
        yield f"{left:{max(0, PLACE_WIDTH - len(places))}} {look.dim(places)}"
    if not changes:
        yield "  nothing" if look.columns else "nothing"


def changes_json(run_id: str, first: int, last: int, changes: Sequence[Change]) -> dict[str, Any]:
    """Returns a comparison of two positions."""
    return {
        "runId": run_id,
        "from": first,
        "to": last,
        "changes": [
            {
                "path": change.path,
                "before": change.before,
                "after": change.after,
                "positions": list(change.positions),
            }
            for change in changes
        ],
        "asOfPosition": last,
    }


def error_lines(error: Exception) -> list[str]:
    """Returns an error as people read it: what happened, and what to do (UX section 4)."""
    if not isinstance(error, PlayledgerError):
        return [f"error: {visible(repr(error))}", "hint: --traceback shows where"]
    hint = [f"hint: {visible(error.hint)}"] if error.hint else []
    return [f"error: {visible(error.message)}", *hint]


def error_json(error: Exception) -> dict[str, Any]:
    """Returns an error as one object."""
    known = error if isinstance(error, PlayledgerError) else PlayledgerError(repr(error))
    return {
        "error": {
            "code": known.code,
            "message": known.message,
            "phase": "replay",
            "runId": known.details.get("runId"),
            "retriable": known.retriable,
            "hint": known.hint or None,
            "details": known.details,
        }
    }


def exit_code(error: Exception) -> int:
    """Returns the exit code of an error (UX section 4); 1 is a fault of ours."""
    match error:
        case LogMissing() | Refused():
            return 2
        case NotFound():
            return 4
        case Conflict():
            return 5
        case PlayledgerError():
            return 6
        case _:
            return 1


def _children(found: Snapshot) -> str:
    counts = found.state.run.children
    if not counts.total:
        return "none"
    parts = [
        f"{number} {word}"
        for number, word in (
            (counts.completed, "completed"),
            (counts.running, "running"),
            (counts.failed, "failed"),
            (counts.cancelled, "cancelled"),
        )
        if number
    ]
    return f"{counts.total}: {', '.join(parts)}"


def _outbox(found: Snapshot) -> str:
    due = [row for row in found.outbox if not row.parked and row.due_at <= found.at]
    parked = sum(1 for row in found.outbox if row.parked)
    later = len(found.outbox) - len(due) - parked
    parts = [
        ", ".join(f"{row.kind} due" for row in due[:4]) + (" ..." if len(due) > 4 else ""),
        f"{parked} parked" if parked else "",
        f"{later} later" if later else "",
    ]
    return ", ".join(part for part in parts if part) or "nothing due"


def _parked(row: OutboxRow) -> dict[str, Json]:
    return {
        "intentId": row.intent_id,
        "kind": row.kind,
        "lane": row.lane,
        "tries": row.tries,
        "sinceAt": row.due_at,
        "position": row.position,
    }


def _resolved(seal: Seal | None, reveal: Reveal) -> tuple[Json, Json]:
    """Returns a value, or what stands for it."""
    if seal is None:
        return None, None
    try:
        return reveal(seal), None
    except NotFound as error:
        return None, {"digest": seal.digest, "bytes": seal.bytes, "gone": error.code}


def _ends(positions: tuple[int, ...]) -> tuple[int, ...]:
    return positions if len(positions) <= 2 else (positions[0], positions[-1])


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
