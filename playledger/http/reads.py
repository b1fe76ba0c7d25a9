"""The routes that look: a run, its result, why it stands where it does, lists, the log itself.

Events are given as the bytes that are stored, put side by side and never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote as encode
from urllib.parse import urlencode

import orjson
from starlette.responses import Response

from ledger.codec import type_of
from ledger.errors import RunCancelled, RunFailed, Unavailable
from ledger.events import EVENT_TYPES
from ledger.ids import run_stream
from ledger.traces import shown, traces_query
from playledger.http.bodies import (
    EventsQuery,
    ListQuery,
    ResultQuery,
    StatusQuery,
    TailQuery,
    TracesQuery,
    WhyQuery,
    read_query,
    unchanged,
)
from playledger.http.door import Call, Door, answer
from playledger.http.errors import FieldInvalid, NotEnded
from playledger.http.scope import org_of
from playledger.http.sse import revealed, tail_stream, wants_stream
from playledger.views import run_lines, status_view
from playledger.why import explain
from projections.load import run_query, runs_query

SCAN_MAX = 20_000
"""How many events one page of a filtered log looks at."""


async def status(door: Door, call: Call) -> Response:
    """Returns a run as it is; `minPosition` waits until the log has come that far."""
    query = read_query(call.request, StatusQuery)
    view = await door.ledger.status(
        call.run_id, min_position=query.min_position, wait_s=query.wait_ms / 1000
    )
    headers = {
        "ETag": f'W/"v{view.run.version}"',
        "As-Of-Position": str(view.as_of_position),
    }
    if unchanged(call.request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return answer(orjson.dumps(await status_view(door.ledger, view)), 200, headers)


async def result(door: Door, call: Call) -> Response:
    """Returns what a run returned, however large; 409 if it has none, or none yet."""
    query = read_query(call.request, ResultQuery)
    ledger = door.ledger
    if query.wait_ms:
        await door.drain.unless_begun(ledger.wait_for_end(call.run_id), query.wait_ms / 1000)
    run = await ledger.log.reader.ask(run_query(call.run_id))
    if run is None:
        raise await ledger.not_found(call.run_id)
    if not run.terminal:
        raise NotEnded(
            f"{run.run_id} is {run.status} and has no result yet",
            hint="?waitMs=30000 waits for it",
            status=run.status,
        )
    if run.status == "failed":
        raise RunFailed(
            f"{run.run_id} failed: {run.code}",
            hint=f"playledger why {run.run_id}",
            errorClass=run.error_class,
            runCode=run.code,
        )
    if run.status == "cancelled":
        raise RunCancelled(f"{run.run_id} was cancelled", hint=f"playledger why {run.run_id}")
    value = b"null" if run.result is None else await ledger.log.vault.reveal_bytes(run.result)
    head = orjson.dumps(
        {
            "runId": run.run_id,
            "status": run.status,
            "outputRows": run.output_rows,
            "version": run.version,
            "asOfPosition": await ledger.log.position(),
        }
    )
    return answer(head[:-1] + b',"result":' + value + b"}", 200, {"ETag": f'W/"v{run.version}"'})


async def tail(door: Door, call: Call) -> Response:
    """Returns a page of a run's events, or, as text/event-stream, each as it is recorded."""
    query = read_query(call.request, TailQuery)
    stream = run_stream(call.run_id)
    if wants_stream(call.request):
        return await tail_stream(door, call, query)
    leaves = await door.ledger.log.read_leaves(query.after, stream, query.limit + 1)
    if not leaves and await door.ledger.log.reader.ask(run_query(call.run_id)) is None:
        raise await door.ledger.not_found(call.run_id)
    page = leaves[: query.limit]
    bodies = [leaf for _, leaf in page]
    if query.reveal:
        bodies = [await revealed(door.ledger, leaf) for leaf in bodies]
    after = page[-1][0] if page else query.after
    path = f"/workflow/{encode(call.run_id, safe='')}/tail"
    return await _page(door, path, query, bodies, after, more=len(leaves) > query.limit)


async def traces(door: Door, call: Call) -> Response:
    """Returns how long the steps of a run took; measurements, kept for a week, no facts."""
    query = read_query(call.request, TracesQuery)
    ledger = door.ledger
    if await ledger.log.reader.ask(run_query(call.run_id)) is None:
        raise await ledger.not_found(call.run_id)
    await ledger.log.write_traces()
    found = await ledger.log.reader.ask(traces_query(call.run_id, query.limit))
    return answer({"runId": call.run_id, "traces": [shown(trace) for trace in found]})


async def why(door: Door, call: Call) -> Response:
    """Says in sentences, each with its events, why a run is where it is, now or at `asOf`."""
    query = read_query(call.request, WhyQuery)
    return answer((await explain(door.ledger, call.run_id, at=query.as_of)).to_json())


async def runs(door: Door, call: Call) -> Response:
    """Lists runs, newest first, behind the submit position `before`."""
    query = read_query(call.request, ListQuery)
    found = await door.ledger.log.reader.ask(
        runs_query(
            status=query.status,
            play=query.play,
            family=query.family,
            waiting_on=query.waiting_on,
            org=org_of(call, query.org, "") or None,
            before=query.before,
            limit=query.limit + 1,
        )
    )
    page = found[: query.limit]
    more = len(found) > query.limit
    before = page[-1].run.submitted_position if page else query.before
    headers = {}
    if more:
        given = query.model_dump(by_alias=True, exclude_none=True) | {"before": before}
        headers["Link"] = f'</workflow?{urlencode(given)}>; rel="next"'
    shown = {
        "runs": await run_lines(door.ledger, page),
        "before": before,
        "more": more,
        "asOfPosition": await door.ledger.log.position(),
    }
    return answer(shown, 200, headers)


async def events(door: Door, call: Call) -> Response:
    """Returns a page of the whole log, of some types or one stream if asked."""
    query = read_query(call.request, EventsQuery)
    wanted = None if query.types is None else frozenset(query.types.split(","))
    unknown = sorted((wanted or frozenset()) - EVENT_TYPES.keys())
    if unknown:
        raise FieldInvalid(
            f'query: "types" names {unknown[0][:80]!r}, which is no event', hint="see /openapi.json"
        )
    log = door.ledger.log
    found: list[bytes] = []
    after, scanned, more = query.after, 0, True
    while more and len(found) < query.limit and scanned < SCAN_MAX:
        leaves = await log.read_leaves(after, query.stream, query.limit + 1)
        more = len(leaves) > query.limit
        for position, leaf in leaves[: query.limit]:
            if len(found) == query.limit:
                more = True
                break
            after, scanned = position, scanned + 1
            if wanted is None or type_of(leaf) in wanted:
                found.append(leaf)
    return await _page(door, "/events", query, found, after, more=more)


async def health(door: Door, call: Call) -> Response:
    """Says that the process answers; it touches nothing and stays so while the server drains."""
    del door, call
    return answer(b'{"status":"ok"}')


async def ready(door: Door, call: Call) -> Response:
    """Says whether new work is taken: the log can be read and the server does not drain."""
    del call
    if door.drain.begun.is_set():
        raise Unavailable(
            "this server is shutting down", code="SHUTTING_DOWN", hint="ask another one"
        )
    position = await door.ledger.log.position()
    return answer(
        {"ready": True, "plays": sorted(door.ledger.plays.names), "asOfPosition": position}
    )


async def _page(
    door: Door,
    path: str,
    query: TailQuery | EventsQuery,
    leaves: Sequence[bytes],
    after: int,
    *,
    more: bool,
) -> Response:
    position = await door.ledger.log.position()
    headers = {}
    if more:
        given = query.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
        headers["Link"] = f'<{path}?{urlencode(given | {"after": after})}>; rel="next"'
    foot = {"after": after, "more": more, "asOfPosition": position}
    body = b'{"events":[' + b",".join(leaves) + b"]," + orjson.dumps(foot)[1:]
    return answer(body, 200, headers)
