"""What a run looks like from outside: one shape for HTTP, `--json` and the library.

The shape of a status is fixed (UX section 3): camelCase, absent is null and never missing, a sealed
value is shown where it may be and can be, else what stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from handlers.retry import BUDGETS
from ledger import events as e
from ledger.canonical import Json
from ledger.codec import Recorded, decode
from ledger.errors import NotFound
from ledger.events import Event, Seal
from ledger.ids import instance_id
from ledger.log import system_clock
from ledger.query import Query
from ledger.rows import Value
from projections.describe import Reveal, describe, sealed
from projections.load import OutboxRow, RunLine, RunView
from projections.state import Run, Wait
from projections.waiting import wait_shape

if TYPE_CHECKING:
    from playledger.embed import Ledger

CHILDREN_SHOWN: Final = 100
"""How many of the children a run waits for are named; `children.running` counts all."""


CHILDREN_LISTED: Final = 3
"""The same for each line of a list."""


class Awaited(Struct, frozen=True):
    """A live child, and when and where it was asked for."""

    key: str
    since_at: int
    position: int


async def status_view(
    ledger: Ledger, view: RunView, *, reveal: bool = True, now: int | None = None
) -> dict[str, Json]:
    """Returns a run as `status --json` and HTTP show it."""
    run = view.run
    waits_for_children = run.status == "running" and run.children.running > 0
    children: list[Awaited] = []
    if waits_for_children and view.instance is not None and view.instance.live:
        children = await ledger.log.reader.ask(_awaited_query(run.run_id, CHILDREN_SHOWN))
    shown = _shape(
        run,
        as_of=view.as_of_position,
        waiting=_waiting(
            run, view.waits, view.outbox, system_clock() if now is None else now, children
        ),
        parked=[row for row in view.outbox if row.parked],
    )
    await _add_values(ledger, run, shown, reveal=reveal)
    return shown


def run_line(
    line: RunLine,
    as_of: int,
    *,
    outbox: Sequence[OutboxRow] = (),
    children: Sequence[Awaited] = (),
    now: int | None = None,
) -> dict[str, Json]:
    """Returns one line of a list of runs: a status whose values stay sealed.

    `outbox` are the open intents of this run, `children` those it waits for; without them a backoff
    or a child does not show.
    """
    run = line.run
    shown = _shape(
        run,
        as_of=as_of,
        waiting=_waiting(run, line.waits, outbox, system_clock() if now is None else now, children),
        parked=[row for row in outbox if row.parked],
    )
    if run.result is not None:
        shown["resultRef"] = _reference(run.result)
    if run.status == "failed":
        shown["error"] = _error(run, {})
    return shown


async def run_lines(
    ledger: Ledger, lines: Sequence[RunLine], *, now: int | None = None
) -> list[dict[str, Json]]:
    """Returns a list of runs with what each waits for."""
    streams = ["run/" + line.run.run_id for line in lines]
    found = await ledger.log.reader.ask(_outboxes_query(streams))
    as_of = await ledger.log.position()
    shown = []
    for line in lines:
        run = line.run
        children: list[Awaited] = []
        if run.status == "running" and run.children.running:
            children = await ledger.log.reader.ask(_awaited_query(run.run_id, CHILDREN_LISTED))
        outbox = found.get("run/" + run.run_id, ())
        shown.append(run_line(line, as_of, outbox=outbox, children=children, now=now))
    return shown


class EventLine(Struct, frozen=True):
    """One event for a reader: where it stands, when it was recorded, what it says."""

    position: int
    version: int
    stream: str
    at: int
    type: str
    text: str


def event_line(recorded: Recorded[Event], reveal: Reveal = sealed) -> EventLine:
    """Returns an event in words; `reveal` opens sealed values, without it their size shows."""
    return EventLine(
        position=recorded.position,
        version=recorded.version,
        stream=recorded.stream,
        at=recorded.at,
        type=recorded.type,
        text=describe(recorded, reveal),
    )


# --- the shape ------------------------------------------------------------------------------------


def _shape(
    run: Run, *, as_of: int, waiting: list[Json], parked: Sequence[OutboxRow]
) -> dict[str, Json]:
    counts = run.children
    attempt = max(run.attempt, 0)
    return {
        "runId": run.run_id,
        "playName": run.play_name,
        "status": run.status,
        "attempt": attempt,
        "instanceId": instance_id(run.scope, run.run_id, attempt),
        "orgId": run.org_id,
        "parentRunId": run.lineage.parent_run_id,
        "workflowFamilyKey": run.lineage.family_key,
        "result": None,
        "resultRef": None,
        "error": None,
        "retry": _retry(run),
        "progress": None,
        "children": {
            "total": counts.total,
            "running": counts.running,
            "completed": counts.completed,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
        },
        "waitingOn": waiting,
        "parked": [
            {
                "intentId": row.intent_id,
                "kind": row.kind,
                "lane": row.lane,
                "tries": row.tries,
                "sinceAt": row.due_at,
                "position": row.position,
            }
            for row in parked
        ],
        "submittedAt": run.submitted_at,
        "startedAt": run.started_at,
        "endedAt": run.ended_at,
        "version": run.version,
        "asOfPosition": as_of,
    }


def _retry(run: Run) -> Json:
    """Says which retry runs, why, and how much of its frozen budget is used."""
    if run.retry is None:
        return None
    used, limit = budget_of(run, run.retry.reason)
    return {
        "attempt": run.retry.attempt,
        "reason": run.retry.reason,
        "used": used,
        "limit": limit,
    }


def budget_of(run: Run, reason: str) -> tuple[int, int | None]:
    """Returns how much of the budget of a cause is used, and its limit, None for a free one."""
    budgets: Mapping[str, e.Budget] = {str(cause): budget for cause, budget in BUDGETS.items()}
    match budgets.get(reason):
        case "retry":
            return run.used.retry, run.policy.retry_limit
        case "lost":
            return run.used.lost, run.policy.lost_limit
        case "restart":
            return run.used.restart, run.policy.restart_limit
        case "play":
            return run.used.play, run.policy.play_retries
        case _:
            return 0, None


def _waiting(
    run: Run,
    waits: Iterable[Wait],
    outbox: Sequence[OutboxRow],
    now: int,
    children: Sequence[Awaited],
) -> list[Json]:
    """Says what a run waits for; each entry names the event that ends it."""
    found: list[Json] = []
    if run.status == "running":
        found += [
            wait_shape(wait.kind, wait.key, wait.since_at, wait.until_at, wait.position)
            for wait in waits
        ]
        found += [
            wait_shape("child", child.key, child.since_at, None, child.position)
            for child in children
        ]
    for row in outbox:
        if row.parked:
            found.append(wait_shape("parked", row.kind, row.due_at, None, row.position))
        elif row.kind == "create" and not run.terminal:
            kind = "backoff" if row.due_at > now else "engine"
            until = row.due_at if kind == "backoff" else None
            found.append(wait_shape(kind, str(row.lane), None, until, row.position))
    if run.status == "cancelling" and run.cancel is not None:
        until = run.cancel.at + run.policy.cancel_grace_ms
        found.append(wait_shape("end", "end", run.cancel.at, until, run.cancel.position))
    return found


# --- sealed values --------------------------------------------------------------------------------


async def _add_values(ledger: Ledger, run: Run, shown: dict[str, Json], *, reveal: bool) -> None:
    if run.result is not None:
        inline = reveal and run.result.bytes <= run.policy.externalize_after_bytes
        try:
            if inline:
                shown["result"] = await ledger.reveal(run.result)
            else:
                shown["resultRef"] = _reference(run.result)
        except NotFound as error:
            shown["resultRef"] = _reference(run.result, gone=error.code)
    if run.status == "failed":
        shown["error"] = _error(run, await _told(ledger, run.error, reveal=reveal))
    if run.progress is not None:
        shown["progress"] = {
            "done": run.progress.done,
            "of": run.progress.of,
            "note": (await _told(ledger, run.progress.note, reveal=reveal)).get("message"),
            "at": run.progress.at,
            "position": run.progress.position,
        }


def _reference(seal: Seal, gone: str | None = None) -> Json:
    """Stands for a result that is not shown here: its digest in the log, its size, why it is gone.

    `GET /workflow/{runId}/result` gives the value itself.
    """
    return {"digest": seal.digest, "bytes": seal.bytes, "gone": gone}


def _error(run: Run, told: Mapping[str, Json]) -> Json:
    return {
        "class": run.error_class,
        "code": run.code,
        "message": told.get("message") or run.code,
        "type": told.get("type"),
        "stack": told.get("stack"),
    }


async def _told(ledger: Ledger, seal: Seal | None, *, reveal: bool) -> Mapping[str, Json]:
    """Returns what a sealed text says; a bare text is its own message, nothing if it is gone."""
    if seal is None or not reveal:
        return {}
    try:
        value = await ledger.reveal(seal)
    except NotFound:
        return {}
    return value if isinstance(value, dict) else {"message": value}


# --- reads ----------------------------------------------------------------------------------------


def _awaited_query(run_id: str, limit: int) -> Query[list[Awaited]]:
    """Asks for the first live children of a run."""
    return Query(
        "select e.leaf from children c join events e"
        " on e.position = cast(json_extract(c.state, '$.position') as integer)"
        " where c.run_id = ? and c.status = 'requested' limit ?",
        (run_id, limit),
        _awaited,
    )


def _awaited(rows: Sequence[Sequence[Any]]) -> list[Awaited]:
    found = [
        Awaited(recorded.data.child_key, recorded.at, recorded.position)
        for recorded in (decode(row[0]) for row in rows)
        if isinstance(recorded.data, e.ChildRequested)
    ]
    return sorted(found, key=lambda child: child.position)


def _outboxes_query(streams: Sequence[str]) -> Query[dict[str, list[OutboxRow]]]:
    """Asks for the open intents of several runs that a list may show."""
    marks = ",".join("?" * len(streams))
    parameters: tuple[Value, ...] = tuple(streams)
    return Query(
        "select intent_id, position, stream_id, kind, lane, host, due_at, tries, parked from outbox"
        f" where stream_id in ({marks}) and (kind = 'create' or parked) order by position",
        parameters,
        _by_stream,
    )


def _by_stream(rows: Sequence[Sequence[Any]]) -> dict[str, list[OutboxRow]]:
    found: dict[str, list[OutboxRow]] = {}
    for row in rows:
        found.setdefault(row[2], []).append(OutboxRow(*row))
    return found
