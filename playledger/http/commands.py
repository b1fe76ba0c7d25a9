"""The routes that act: each translates one request into one command and its answer back.

They look at no read model to refuse anything: what a run takes is decided by the writer.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import quote as encode

from starlette.responses import Response

from handlers.child_submit import ChildSubmitRefused
from handlers.execute import Answer
from handlers.port import decode_params
from handlers.submit import DEFAULT_ORG, StagedFile, Submission
from ledger import gate
from ledger.canonical import Json
from ledger.errors import InputInvalid, JsonInvalid, RunNotFound, TooLarge
from ledger.ids import check_key, quote, slug
from ledger.log import system_clock
from ledger.vault import BLOB_BYTES_MAX
from playledger import children, warmup
from playledger.embed import new_run_id
from playledger.http.bodies import (
    ENVELOPE_BYTES,
    FILES_BYTES_MAX,
    CancelBody,
    FileBody,
    NoQuery,
    RerunBody,
    RetryBody,
    SignalBody,
    SubmitBody,
    WarmupBody,
    check_media_type,
    expected_version,
    idempotency_key,
    read_body,
    read_bytes,
    read_query,
)
from playledger.http.door import Call, Door, answer
from playledger.http.errors import FieldInvalid, ShuttingDown
from playledger.http.scope import check_same_org, org_of
from playledger.views import status_view
from projections.load import run_query
from projections.state import RunState


async def submit(door: Door, call: Call) -> Response:
    """Records a run; the same request again is the same run, another one is refused."""
    _open_for_work(door)
    read_query(call.request, NoQuery)
    policy = door.ledger.policy
    plain = policy.max_bytes + ENVELOPE_BYTES
    body = await read_body(
        call.request, SubmitBody, max_bytes=plain + FILES_BYTES_MAX, plain_bytes=plain
    )
    staged = tuple([_staged(item) for item in body.files])
    value: Json = body.input
    if value is None and len(staged) == 1:
        value = {"file": staged[0].name}
    return await _submitted(
        door,
        call,
        Submission(
            run_id=call.run_id,
            play_name=body.play_name,
            input=value,
            actor=call.actor,
            policy=policy,
            org_id=org_of(call, body.org_id, DEFAULT_ORG),
            staged=staged,
            options=body.options,
            secrets={} if body.executor_token is None else {"executorToken": body.executor_token},
            sessions=tuple(body.preloaded_db_sessions),
            sessions_ttl_ms=door.ledger.session_ttl_ms,
        ),
        body.wait_ms,
    )


async def warm_up(door: Door, call: Call) -> Response:
    """Submits a run that does nothing, waits for its end, and says how that went."""
    _open_for_work(door)
    read_query(call.request, NoQuery)
    body = await read_body(call.request, WarmupBody, max_bytes=ENVELOPE_BYTES)
    done = await warmup.warm_up(door.ledger, body.label, actor=call.actor)
    shown = {
        "runId": done.run_id,
        "status": done.status,
        "terminalState": done.terminal,
        "code": done.code,
        "ms": done.ms,
    }
    return answer(shown, 200 if done.terminal == "completed" else 503)


async def rerun(door: Door, call: Call) -> Response:
    """Starts a new run from an old one's input and files, or from another input."""
    _open_for_work(door)
    read_query(call.request, NoQuery)
    ledger = door.ledger
    limit = ledger.policy.max_bytes + ENVELOPE_BYTES
    body = await read_body(call.request, RerunBody, max_bytes=limit)
    old = await ledger.log.reader.ask(run_query(call.run_id))
    if old is None:
        raise await ledger.not_found(call.run_id)
    params = decode_params(await ledger.log.vault.reveal_bytes(old.params))
    key = idempotency_key(call.request, None)
    if body.run_id is not None:
        new_id = body.run_id
    elif key is not None:
        check_key(key, "request id")
        digest = sha256(f"rerun\n{call.run_id}\n{key}".encode()).hexdigest()[:24]
        new_id = f"{slug(old.play_name)}-{digest}"
    else:
        new_id = new_run_id(old.play_name, system_clock())
    return await _submitted(
        door,
        call,
        Submission(
            run_id=new_id,
            play_name=old.play_name,
            input=body.input if "input" in body.model_fields_set else params.get("input"),
            actor=call.actor,
            policy=ledger.policy,
            org_id=old.org_id,
            files=tuple(params.get("files", ())),
            options=params.get("options", {}),
        ),
        body.wait_ms,
    )


async def submit_child(door: Door, call: Call) -> Response:
    """Asks for a child of this run, by a manifest; the same key again is the same child."""
    _open_for_work(door)
    read_query(call.request, NoQuery)
    limit = door.ledger.policy.max_bytes + ENVELOPE_BYTES
    data = await read_bytes(call.request, limit)
    check_media_type(call.request)
    try:
        body = gate.parse(data, what="body")
    except JsonInvalid as error:
        raise ChildSubmitRefused(
            error.message, hint=error.hint, parentRunId=call.run_id, reason=error.code
        ) from None
    done = await children.submit_child(
        door.ledger,
        call.run_id,
        body,
        actor=call.actor,
        request_key=idempotency_key(call.request, None),
    )
    shown = {
        "runId": done.run_id,
        "workflowId": done.run_id,
        "status": "started",
        "mode": "workflow",
        "childKey": done.child_key,
        "position": done.position,
        "replayed": done.replayed,
        "timings": [],
    }
    location = {"Location": "/workflow/" + encode(done.run_id, safe="")}
    return answer(shown, 200 if done.replayed else 202, location)


async def signal(door: Door, call: Call) -> Response:
    """Records a signal, early or late; answered means durable."""
    read_query(call.request, NoQuery)
    limit = door.ledger.policy.max_bytes + ENVELOPE_BYTES
    body = await read_body(call.request, SignalBody, max_bytes=limit)
    if body.event_key is None and body.signal is None:
        raise FieldInvalid('body needs "eventKey" or "signal"', hint="send one of them")
    done = await door.ledger.signal(
        call.run_id,
        str(body.event_key or body.signal),
        body.data,
        signal_id=idempotency_key(call.request, body.signal_id),
        signal=body.signal if body.event_key is not None else None,
        event_type=body.event_type,
        expected_version=expected_version(call.request),
        actor=call.actor,
    )
    return _done(call, done, 202)


async def cancel(door: Door, call: Call) -> Response:
    """Asks a run and its children to end: 200 when it has, 202 while it does."""
    read_query(call.request, NoQuery)
    body = await read_body(call.request, CancelBody, max_bytes=ENVELOPE_BYTES)
    done = await door.ledger.cancel(
        call.run_id,
        body.reason,
        request_id=idempotency_key(call.request, body.request_id),
        expected_version=expected_version(call.request),
        actor=call.actor,
    )
    ended = done.state is not None and done.state.run.terminal
    return _done(call, done, 200 if ended else 202)


async def retry(door: Door, call: Call) -> Response:
    """Does now what waits: skips a backoff, tries a parked item again; reopens nothing."""
    read_query(call.request, NoQuery)
    await read_body(call.request, RetryBody, max_bytes=ENVELOPE_BYTES)
    resumed = await door.ledger.retry(
        call.run_id, actor=call.actor, expected_version=expected_version(call.request)
    )
    return answer(
        {
            "runId": call.run_id,
            "resumed": [{"intentId": row.intent_id, "kind": row.kind} for row in resumed],
            "asOfPosition": await door.ledger.log.position(),
        }
    )


# --- shapes ---------------------------------------------------------------------------------------


async def _submitted(door: Door, call: Call, submission: Submission, wait_ms: int) -> Response:
    done = await door.ledger.submitter.submit(submission)
    state = done.state
    if state is None:
        raise RunNotFound(f"run {quote(submission.run_id)} has no state", runId=submission.run_id)
    check_same_org(call.caller, state.run)
    shown: dict[str, Any] = {
        "runId": state.run.run_id,
        "status": state.run.status,
        "instanceId": None if state.current is None else state.current.instance_id,
        "attempt": max(state.run.attempt, 0),
        "version": state.run.version,
        "position": done.position,
        "replayed": done.replayed,
        "timings": [],
    }
    if wait_ms:
        shown |= await _ended(door, state, wait_ms)
    headers = {
        "Location": "/workflow/" + encode(state.run.run_id, safe=""),
        "ETag": f'W/"v{shown["version"]}"',
    }
    return answer(shown, 200 if done.replayed else 202, headers)


async def _ended(door: Door, state: RunState, wait_ms: int) -> Mapping[str, Any]:
    """Waits for a run's end as long as its caller asked, and returns what has become of it."""
    run_id = state.run.run_id
    await door.drain.unless_begun(door.ledger.wait_for_end(run_id), wait_ms / 1000)
    view = await status_view(door.ledger, await door.ledger.status(run_id))
    names = ("status", "attempt", "instanceId", "version", "result", "resultRef", "error")
    return {name: view[name] for name in names}


def _done(call: Call, done: Answer, status: int) -> Response:
    run = None if done.state is None else done.state.run
    version = 0 if run is None else run.version
    return answer(
        {
            "runId": call.run_id,
            "status": None if run is None else run.status,
            "version": version,
            "position": done.position,
            "replayed": done.replayed,
        },
        status,
        {"ETag": f'W/"v{version}"'},
    )


def _staged(item: FileBody) -> StagedFile:
    if len(item.content) > FILES_BYTES_MAX:
        raise TooLarge(
            f"file {quote(item.name)} is over {BLOB_BYTES_MAX} bytes",
            code="BLOB_TOO_LARGE",
            hint="put it where the play can read it, and send its address",
            limit=BLOB_BYTES_MAX,
        )
    check_key(item.name, "file name")
    try:
        return StagedFile(name=item.name, content=b64decode(item.content, validate=True))
    except (binascii.Error, ValueError):
        raise InputInvalid(
            f"file {quote(item.name)} is not base64", code="FILE_NOT_BASE64", hint="encode it"
        ) from None


def _open_for_work(door: Door) -> None:
    if door.drain.begun.is_set():
        refusal = ShuttingDown(
            "this server is shutting down and takes no new run", hint="the same request again"
        )
        refusal.retry_after = max(1, round(door.drain.grace_s) + 1)
        raise refusal
