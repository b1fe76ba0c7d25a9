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

from handlers.commands import Command
from handlers.edge import attempt_of
from handlers.launch_params import SECRET_FIELDS, strip_params
from handlers.port import InstanceRef, Port, decode_params
from handlers.session_checks import LIFE_MIN_MS, Session, check_count, check_encrypted
from handlers.submit import Submission
from ledger import events as e
from ledger.canonical import Json, canonical, canonical_own
from ledger.errors import Conflict, InputInvalid, NotFound, RunNotFound, RunTerminal
from ledger.ids import check_key, instance_id, quote, run_stream
from ledger.log import system_clock
from ledger.seal import seal
from ledger.vault import ValueGone
from projections.load import run_query
from projections.state import EDGE, Run

if TYPE_CHECKING:
    from playledger.embed import Ledger

SESSIONS_MAX: Final = 64
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
            org_id=_text(held.get("orgId")) or "local",
            engine=EDGE,
            secrets={field: held[field] for field in SECRET_FIELDS if _text(held.get(field))},
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
