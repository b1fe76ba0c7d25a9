"""The run-state doors: the endpoints of the origin's run-scoped state, by its names and shapes.

`/run-state/{runId}/…` (SPEC 1.12), so that an edge coordinator can keep its state in this log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.responses import Response

from handlers.submit import DEFAULT_ORG
from ledger.errors import InputInvalid
from ledger.ids import quote
from playledger import run_state, terminals
from playledger.http.auth import Access
from playledger.http.bodies import ENVELOPE_BYTES, read_body, read_query
from playledger.http.door import Call, Door, Handler, Reach, Route, answer
from playledger.http.scope import org_of
from playledger.views import status_view

RUN_STATE: Final = "/run-state/{run_id:segment}"
HOUR_MS: Final = 3_600_000
TTL_MS_MAX: Final = 30 * 24 * HOUR_MS
SESSIONS_BYTES: Final = 1 << 20

Ttl = Annotated[int, Field(ge=1000, le=TTL_MS_MAX)]
Id = Annotated[str, Field(min_length=1, max_length=200)]


class _Body(BaseModel):
    """`runId` may be repeated, and must be the path's then (INV-12)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=to_camel, populate_by_name=False
    )
    run_id: Id | None = None


class LaunchStateBody(_Body):
    params: dict[str, Any] | None = None
    params_ref: dict[str, Any] | None = None
    params_bytes: Annotated[int, Field(ge=0)] | None = None
    sessions: list[dict[str, Any]] = []
    retry_ttl_ms: Ttl = HOUR_MS
    db_sessions_ttl_ms: Ttl = HOUR_MS


class RetryStateBody(_Body):
    params: dict[str, Any] | None = None
    params_ref: dict[str, Any] | None = None
    params_bytes: Annotated[int, Field(ge=0)] | None = None
    ttl_ms: Ttl = HOUR_MS


class ClaimBody(_Body):
    max_attempts: Annotated[int, Field(ge=0, le=1000)]


class InstanceBody(_Body):
    instance_id: Id
    ttl_ms: Ttl = HOUR_MS


class SessionsBody(_Body):
    sessions: list[dict[str, Any]]
    ttl_ms: Ttl = HOUR_MS


class TerminalBody(_Body):
    event_key: Id
    data: Any = None
    stored_at: int | None = None


class RunEventBody(_Body):
    event: dict[str, Any]


class _Query(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=False
    )
    run_id: Id | None = None


class TerminalQuery(_Query):
    event_key: Id


class AwaitQuery(_Query):
    event_key: Id
    timeout_ms: float = 0


async def run_launch_state_put(door: Door, call: Call) -> Response:
    """Makes retry params and encrypted sessions durable together, before anything is dispatched."""
    body = await read_body(call.request, LaunchStateBody, max_bytes=_limit(door) + SESSIONS_BYTES)
    _same_run(call, body.run_id)
    put = await run_state.put_launch_state(
        door.ledger,
        call.run_id,
        params=body.params,
        params_ref=body.params_ref,
        sessions=body.sessions,
        retry_ttl_ms=body.retry_ttl_ms,
        sessions_ttl_ms=body.db_sessions_ttl_ms,
        org_id=_org(call, body.params),
        actor=call.actor,
    )
    return answer(
        {
            "ok": True,
            "retryExpiresAt": put.retry_expires_at,
            "dbSessionsExpiresAt": put.sessions_expire_at,
            "sessionCount": put.session_count,
            "position": put.position,
            "replayed": put.replayed,
        }
    )


async def run_retry_state_put(door: Door, call: Call) -> Response:
    """Makes retry params durable, for a run without sessions."""
    body = await read_body(call.request, RetryStateBody, max_bytes=_limit(door))
    _same_run(call, body.run_id)
    put = await run_state.put_launch_state(
        door.ledger,
        call.run_id,
        params=body.params,
        params_ref=body.params_ref,
        sessions=(),
        retry_ttl_ms=body.ttl_ms,
        sessions_ttl_ms=HOUR_MS,
        org_id=_org(call, body.params),
        actor=call.actor,
    )
    return answer({"ok": True, "retryExpiresAt": put.retry_expires_at, "position": put.position})


async def run_retry_claim(door: Door, call: Call) -> Response:
    """Claims a successor for the current instance; one instance yields one."""
    body = await read_body(call.request, ClaimBody, max_bytes=ENVELOPE_BYTES)
    _same_run(call, body.run_id)
    claim = await run_state.claim_retry(
        door.ledger, call.run_id, body.max_attempts, actor=call.actor
    )
    shown: dict[str, object] = {"claimed": claim.claimed, "attempts": claim.attempts}
    if claim.reason is not None:
        shown["reason"] = claim.reason
    if claim.params is not None:
        shown["params"] = claim.params
    if claim.params_ref is not None:
        shown["paramsRef"] = claim.params_ref
    return answer(shown)


async def workflow_instance_put(door: Door, call: Call) -> Response:
    """Maps a run to the instance that runs it; its attempt is the one its id names."""
    body = await read_body(call.request, InstanceBody, max_bytes=ENVELOPE_BYTES)
    _same_run(call, body.run_id)
    attempt = await run_state.put_instance(
        door.ledger, call.run_id, body.instance_id, actor=call.actor
    )
    return answer({"ok": True, "attempt": attempt})


async def workflow_instance_get(door: Door, call: Call) -> Response:
    """Returns the instance of the highest attempt, null before the first."""
    _same_run(call, read_query(call.request, _Query).run_id)
    found = await run_state.mapped_instance(door.ledger, call.run_id)
    return answer({"instanceId": found})


async def db_sessions_put(door: Door, call: Call) -> Response:
    """Keeps encrypted sessions in place of earlier ones."""
    body = await read_body(call.request, SessionsBody, max_bytes=SESSIONS_BYTES)
    _same_run(call, body.run_id)
    count, expires_at = await run_state.put_sessions(
        door.ledger, call.run_id, body.sessions, body.ttl_ms, actor=call.actor
    )
    return answer({"sessionCount": count, "expiresAt": expires_at})


async def db_sessions_get(door: Door, call: Call) -> Response:
    """Returns the encrypted sessions of a run, all of them or an error that says why not."""
    _same_run(call, read_query(call.request, _Query).run_id)
    return answer({"sessions": await run_state.get_sessions(door.ledger, call.run_id)})


async def child_terminal_set(door: Door, call: Call) -> Response:
    """Records how a child ended; the first stands, another one is recorded as a conflict."""
    body = await read_body(call.request, TerminalBody, max_bytes=_limit(door))
    _same_run(call, body.run_id)
    done = await terminals.set_terminal(
        door.ledger, call.run_id, body.event_key, body.data, actor=call.actor
    )
    return answer({"ok": True, "position": done.position})


async def child_terminal_get(door: Door, call: Call) -> Response:
    """Returns how a child ended, null if that is not known."""
    query = read_query(call.request, TerminalQuery)
    _same_run(call, query.run_id)
    return answer(
        {"state": await terminals.get_terminal(door.ledger, call.run_id, query.event_key)}
    )


async def child_terminal_await(door: Door, call: Call) -> Response:
    """Waits up to `timeoutMs`, at most 30 000, for how a child ended; null if that is not known."""
    query = read_query(call.request, AwaitQuery)
    _same_run(call, query.run_id)
    wait_ms = terminals.clamp_ms(query.timeout_ms)
    found = await terminals.get_terminal(door.ledger, call.run_id, query.event_key)
    if found is None and wait_ms:
        coming = terminals.await_terminal(door.ledger, call.run_id, query.event_key)
        await door.drain.unless_begun(coming, wait_ms / 1000)
        found = await terminals.get_terminal(door.ledger, call.run_id, query.event_key)
    return answer({"state": found})


async def terminal_state(door: Door, call: Call) -> Response:
    """Returns how a run ended, null while it has not (SPEC 7.32)."""
    _same_run(call, read_query(call.request, _Query).run_id)
    view = await door.ledger.status(call.run_id)
    if not view.run.terminal:
        return answer({"state": None})
    shown = await status_view(door.ledger, view)
    names = ("runId", "status", "result", "resultRef", "error", "outputRows", "attempt")
    state: dict[str, object] = {name: shown[name] for name in names if name in shown}
    return answer({"state": state | {"completedAt": view.run.ended_at}})


async def run_event_append(door: Door, call: Call) -> Response:
    """Records a status, a log line or a result of a run that another coordinator drives."""
    body = await read_body(call.request, RunEventBody, max_bytes=_limit(door))
    _same_run(call, body.run_id)
    position = await run_state.append_run_event(door.ledger, call.run_id, body.event)
    return answer({"ok": True, "position": position})


def _limit(door: Door) -> int:
    return door.ledger.policy.max_bytes + ENVELOPE_BYTES


def _org(call: Call, params: Mapping[str, Any] | None) -> str:
    """Returns the organisation that launch state is of."""
    said = (params or {}).get("orgId")
    return org_of(call, said if isinstance(said, str) and said else None, DEFAULT_ORG)


def _same_run(call: Call, run_id: str | None) -> None:
    if run_id is not None and run_id != call.run_id:
        raise InputInvalid(
            f"the path names run {quote(call.run_id)}, the request {quote(run_id)}",
            code="RUN_ID_MISMATCH",
            hint="one of them is wrong",
        )


def _put(
    path: str, handler: Handler, body: type[BaseModel], what: str, *,
    reach: Reach = "run", executors: bool = False,
) -> Route:  # fmt: skip
    answers: Mapping[int, str] = {200: what}
    return Route(
        method="POST",
        path=f"{RUN_STATE}/{path}",
        access="operate",
        reach=reach,
        executors=executors,
        handler=handler,
        body=body,
        answers=answers,
    )


def _get(
    path: str, handler: Handler, query: type[BaseModel], what: str, *,
    access: Access = "read", executors: bool = False,
) -> Route:  # fmt: skip
    return Route(
        method="GET",
        path=f"{RUN_STATE}/{path}",
        access=access,
        reach="run",
        executors=executors,
        handler=handler,
        query=query,
        answers={200: what},
    )


ROUTES: Final = (
    _put("run-launch-state-put", run_launch_state_put, LaunchStateBody, "durable", reach="new_run"),
    _put("run-retry-state-put", run_retry_state_put, RetryStateBody, "durable", reach="new_run"),
    _put("run-retry-claim", run_retry_claim, ClaimBody, "claimed, or why not"),
    _put("workflow-instance-put", workflow_instance_put, InstanceBody, "mapped"),
    _get("workflow-instance-get", workflow_instance_get, _Query, "the instance"),
    _put("db-sessions-put", db_sessions_put, SessionsBody, "kept"),
    # Ciphertexts, but whoever holds a token opens them: not for those who only read.
    _get(
        "db-sessions-get", db_sessions_get, _Query, "the sessions",
        access="operate", executors=True,
    ),
    _put("child-terminal-set", child_terminal_set, TerminalBody, "recorded"),
    _get(
        "child-terminal-get", child_terminal_get, TerminalQuery, "the terminal", executors=True
    ),
    _get(
        "child-terminal-await", child_terminal_await, AwaitQuery, "the terminal", executors=True
    ),
    _get("terminal-state", terminal_state, _Query, "the end", executors=True),
    _put("run-event-append", run_event_append, RunEventBody, "recorded", executors=True),
)  # fmt: skip
"""Run-scoped endpoints, and which of their callers may change something."""
