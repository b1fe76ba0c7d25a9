"""The log as the run-state store of another coordinator (SPEC 1.10 to 1.14, 1.26 to 1.28).

What that coordinator puts becomes events like everything else: its launch state is a run of the
engine `edge`, its instance ids are mapped to attempts, its retry claims are decided by the same
rule, its children's terminals are facts of the parent.  Every put may be sent twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from engines.lines import sanitise
from handlers.commands import Command
from handlers.edge import attempt_of
from handlers.launch_params import SECRET_FIELDS, strip_params
from handlers.port import InstanceRef, Port, decode_params
from handlers.session_checks import Session, check_encrypted
from handlers.sessions import hydrate
from handlers.submit import Submission
from ledger import events as e
from ledger.canonical import Json, canonical
from ledger.errors import Conflict, InputInvalid, RunNotFound, RunTerminal
from ledger.ids import check_key, instance_id, quote, run_stream
from ledger.seal import seal
from ledger.vault import ValueGone
from projections.load import instance_query, mapped_query, run_query
from projections.state import EDGE, Run

if TYPE_CHECKING:
    from playledger.embed import Ledger

SESSIONS_MAX: Final = 64
ERROR_CHARS: Final = 4000
REF_FIELDS: Final = ("storageKind", "storageKey", "bytes", "hash", "expiresAt")


class LaunchStatePut(Struct, frozen=True):
    """When what was put expires, in ms since 1970, and how many sessions are kept."""

    retry_expires_at: int
    sessions_expire_at: int | None
    session_count: int
    position: int
    replayed: bool


class Claim(Struct, frozen=True):
    """The answer to a claim; `params` and `params_ref` as they were put, without the other one."""

    claimed: bool
    attempts: int
    reason: str | None = None
    params: Mapping[str, Json] | None = None
    params_ref: Mapping[str, Json] | None = None


async def put_launch_state(
    ledger: Ledger,
    run_id: str,
    *,
    params: Mapping[str, Json] | None,
    params_ref: Mapping[str, Json] | None,
    sessions: Sequence[Session],
    retry_ttl_ms: int,
    sessions_ttl_ms: int,
    org_id: str,
    actor: str,
) -> LaunchStatePut:
    """Makes retry params and sessions durable in one append (INV-03); the same again is the same.

    Raises InputInvalid, TooLarge (`PARAMS_TOO_LARGE`), SessionRefused for a raw URL, RunConflict
    for another request, ValuesUnavailable if it could not be stored.
    """
    _check_one_of(params, params_ref)
    _check_sessions(sessions)
    held = dict(params or {})
    if held.get("runId", run_id) != run_id:
        raise InputInvalid(
            f"params are of run {quote(str(held['runId']))}, the path names {quote(run_id)}",
            code="RUN_ID_MISMATCH",
            hint="one of them is wrong",
        )
    name = held.get("playName")
    answer = await ledger.submitter.submit(
        Submission(
            run_id=run_id,
            play_name=name if isinstance(name, str) and name else EDGE,
            input=_stored(held, params_ref),
            actor=actor,
            policy=replace(ledger.policy, retry_ttl_ms=retry_ttl_ms),
            org_id=org_id,
            engine=EDGE,
            secrets={
                field: value
                for field in SECRET_FIELDS
                if (value := _text(held.get(field))) is not None
            },
            sessions=tuple(sessions),
            sessions_ttl_ms=sessions_ttl_ms,
        )
    )
    run = _known(answer.state, run_id).run
    stored = run.sessions
    return LaunchStatePut(
        retry_expires_at=0 if run.launch is None else run.launch.expires_at,
        sessions_expire_at=None if stored is None else stored.expires_at,
        session_count=0 if stored is None else stored.count,
        position=answer.position,
        replayed=answer.replayed,
    )


async def claim_retry(ledger: Ledger, run_id: str, max_attempts: int, *, actor: str) -> Claim:
    """Claims a successor for the run's current instance, once however many ask (INV-27).

    The params are loaded and checked before (INV-29).  An instance that was claimed and not yet
    mapped is claimed again by whoever asks: its id is the same, so it is created once.
    """
    run = await _edge_run(ledger, run_id)
    params = await _launch_params(ledger, run)
    current = instance_id(run.scope, run_id, run.attempt)
    instance = await ledger.log.reader.ask(instance_query(run_id, run.attempt))
    if run.attempt > 0 and instance is not None and instance.mapped_id is None:
        return _claimed(run.attempt, params)
    try:
        answer = await ledger.log.transact(
            Command(
                stream=run_stream(run_id),
                fact=e.RetryClaimRequested(
                    failed_instance_id=current,
                    failed_attempt=run.attempt,
                    max_attempts=max_attempts,
                ),
                actor=actor,
            )
        )
    except RunTerminal as error:
        return Claim(claimed=False, attempts=run.attempt, reason=str(error.details.get("status")))
    after = _known(answer.state, run_id).run
    if after.attempt > run.attempt:
        return _claimed(after.attempt, params)
    return Claim(claimed=False, attempts=after.attempt, reason=after.code or "stale_instance")


async def put_instance(ledger: Ledger, run_id: str, mapped_id: str, *, actor: str) -> int:
    """Maps the attempt that an instance id names; returns the attempt.

    A put that comes late for an earlier attempt moves nothing back (INV-17); the map does not
    expire (INV-20).  Raises Conflict for an attempt that was not claimed or has another instance.
    """
    check_key(mapped_id, "instance id")
    run = await _edge_run(ledger, run_id)
    attempt = attempt_of(mapped_id)
    await ledger.log.transact(
        Command(
            stream=run_stream(run_id),
            fact=e.InstanceMapped(
                instance_id=instance_id(run.scope, run_id, attempt),
                attempt=attempt,
                mapped_id=mapped_id,
            ),
            actor=actor,
        )
    )
    return attempt


async def mapped_instance(ledger: Ledger, run_id: str) -> str | None:
    """Returns the instance of the highest mapped attempt (INV-16)."""
    await _edge_run(ledger, run_id)
    return await ledger.log.reader.ask(mapped_query(run_id))


async def put_sessions(
    ledger: Ledger, run_id: str, sessions: Sequence[Session], ttl_ms: int, *, actor: str
) -> tuple[int, int]:
    """Keeps encrypted sessions in place of earlier ones; returns their count and expiry."""
    if not sessions:
        raise InputInvalid("no sessions were put", code="SESSIONS_EMPTY", hint="put at least one")
    _check_sessions(sessions)
    run, key = await ledger.run_and_key(run_id)
    value = canonical([dict(session) for session in sessions])
    place = f"session.stored/sessions/{ledger.log.vault.keyring.fingerprint(value)}/sessions"
    sealed = seal(key, run_id, place, value, run.policy.externalize_after_bytes)
    await ledger.log.vault.store_blobs([sealed])
    expires_at = ledger.now() + ttl_ms
    answer = await ledger.log.transact(
        Command(
            stream=run_stream(run_id),
            fact=e.SessionStored(
                session_count=len(sessions), expires_at=expires_at, sessions=sealed.seal
            ),
            actor=actor,
            values=(sealed.disclosure,),
        )
    )
    stored = _known(answer.state, run_id).run.sessions
    if stored is None:
        raise RuntimeError("sessions that were put are there")
    return stored.count, stored.expires_at


async def get_sessions(ledger: Ledger, run_id: str) -> list[Session]:
    """Returns the sessions of a run; raises SessionExpired or SessionRefused, with their codes."""
    run, _ = await ledger.run_and_key(run_id)
    return await hydrate(ledger.log.vault, run, ledger.now())


async def append_run_event(ledger: Ledger, run_id: str, event: Mapping[str, Any]) -> int:
    """Records what another coordinator says of its run, as its current instance's report.

    `status` completed or failed and `result` end it, `log` is one line; any other status is what
    the log knows by itself.  Returns the position.
    """
    run = await _edge_run(ledger, run_id)
    ref = InstanceRef(
        run_id=run_id,
        instance_id=instance_id(run.scope, run_id, run.attempt),
        attempt=run.attempt,
        host=None,
        externalize_after_bytes=run.policy.externalize_after_bytes,
    )
    port = Port(ledger.log)
    match event:
        case {"type": "log", "seq": int(seq), "message": str(message), **rest}:
            line: dict[str, Json] = {
                "at": rest.get("ts") or ledger.now(),
                "level": rest.get("level") or "info",
                "message": sanitise(message),
            }
            return (await port.log(ref, seq, [line], 0)).position
        case {"type": "result", **rest}:
            rows = rest.get("outputRows")
            value = canonical(rest.get("result"))
            return (await port.completed(ref, value, rows if type(rows) is int else None)).position
        case {"type": "status", "status": "completed"}:
            return (await port.completed(ref, b"null")).position
        case {"type": "status", "status": "failed", **rest}:
            text = sanitise(str(rest.get("error") or "failed"), ERROR_CHARS)
            error: Json = {"message": text, "type": "RunFailed"}
            return (await port.errored(ref, "user_error", "RUN_FAILED", error)).position
        case {"type": "status", "status": str()}:
            return run.position
        case _:
            raise InputInvalid(
                "a run event is a status, a log line with seq and message, or a result",
                code="RUN_EVENT_INVALID",
                hint='for example {"type":"status","status":"completed"}',
            )


async def _launch_params(ledger: Ledger, run: Run) -> Mapping[str, Json]:
    """Returns what was put, its tokens included, read and checked again (INV-29, INV-36)."""
    vault = ledger.log.vault
    stored = await vault.reveal_bytes(run.params, subject=run_stream(run.run_id))
    held = decode_params(stored).get("input")
    if not isinstance(held, dict):
        raise ValueGone(f"the params of {run.run_id} are no object", code="NOT_OBJECT")
    named = {"executorToken": run.executor_token, "coordinatorInternalToken": run.internal_token}
    tokens = {
        field: (await vault.secret(ref)).decode() for field, ref in named.items() if ref is not None
    }
    if "params" in held:
        return {"params": {**held["params"], **tokens}}
    return {"paramsRef": held.get("paramsRef")}


def _claimed(attempts: int, params: Mapping[str, Any]) -> Claim:
    return Claim(
        claimed=True,
        attempts=attempts,
        params=params.get("params"),
        params_ref=params.get("paramsRef"),
    )


def _stored(params: Mapping[str, Json], ref: Mapping[str, Json] | None) -> Json:
    if ref is None:
        return {"params": strip_params(params)}
    return {"paramsRef": {field: ref.get(field) for field in REF_FIELDS}}


def _check_one_of(params: object, ref: object) -> None:
    if (params is None) == (ref is None):
        raise InputInvalid(
            "launch state is either params or paramsRef",
            code="LAUNCH_STATE_INVALID",
            hint="put one of them",
        )


def _check_sessions(sessions: Sequence[Session]) -> None:
    if len(sessions) > SESSIONS_MAX:
        raise InputInvalid(
            f"{len(sessions)} sessions were put, the limit is {SESSIONS_MAX}",
            code="SESSIONS_TOO_MANY",
        )
    check_encrypted(sessions)


async def _edge_run(ledger: Ledger, run_id: str) -> Run:
    run = await ledger.log.reader.ask(run_query(run_id))
    if run is None:
        raise await ledger.not_found(run_id)
    if run.engine != EDGE:
        raise Conflict(
            f"{run_id} is driven here, by engine {quote(run.engine)}",
            code="RUN_DRIVEN_HERE",
            hint="run-state doors are for runs whose launch state came through them",
        )
    return run


def _known(state: Any, run_id: str) -> Any:
    if state is None:
        raise RunNotFound(f"run {quote(run_id)} has no state", runId=run_id)
    return state


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) and value else None
