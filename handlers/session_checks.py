"""What a database session must be before anybody may keep it or hand it on (SPEC 1.15, INV-41, 42).

Pure.  Codes are stable; no text here repeats a URL, a key, or what an origin answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from handlers.session_plan import Requirement
from ledger.canonical import Json
from ledger.errors import Refused

LIFE_MIN_MS: Final = 30_000
"""A session that lives less than this is not started on (SPEC 4.4)."""

_TARGET: Final = ("orgId", "tableNamespace", "logicalTable")
Session = Mapping[str, Json]


class SessionRefused(Refused):
    """Refuses a session that is out of scope, raw, or not what was asked for."""

    code = "SESSION_INVALID"


class Scope(Struct, frozen=True):
    """Whom a session must be for."""

    play_name: str
    org_id: str


def check_shape(session: Json) -> Session:
    """Returns a session whose fields have the types the rules rest on; raises SessionRefused."""
    if not isinstance(session, Mapping):
        raise SessionRefused("the origin answered no db session", code="SESSION_RESPONSE_INVALID")
    target = session.get("target")
    fits = (
        isinstance(session.get("playName"), str)
        and isinstance(target, Mapping)
        and all(
            isinstance(target.get(name), str)
            for name in ("orgId", "tableNamespace", "logicalTable")
        )
        and _texts(session.get("operations")) is not None
        and _whole(session.get("expiresAt"))
    )
    if not fits:
        raise SessionRefused(
            "the origin answered a db session without playName, target, operations or expiresAt",
            code="SESSION_RESPONSE_INVALID",
        )
    return session


def check_scope(session: Session, requirement: Requirement, scope: Scope) -> None:
    """Raises SessionRefused unless a session is just what was asked for, for whom it was asked."""
    target = session.get("target")
    wanted = {
        "logicalTable": requirement.logical_table,
        "orgId": scope.org_id,
        "tableNamespace": requirement.table_namespace,
    }
    in_scope = (
        isinstance(target, Mapping)
        and session.get("playName") == scope.play_name
        and all(target.get(name) == value for name, value in wanted.items())
    )
    if not in_scope:
        raise SessionRefused(
            "Runtime API returned a DB session outside the child play scope.",
            code="SESSION_OUT_OF_SCOPE",
            hint=f"asked for {requirement.table} of {scope.play_name}",
        )
    operations = _texts(session.get("operations"))
    if operations is None or tuple(sorted(operations)) != requirement.operations:
        raise SessionRefused(
            "Runtime API returned a DB session with unexpected operations.",
            code="SESSION_OPERATIONS_UNEXPECTED",
            hint=f"asked for {', '.join(requirement.operations)} on {requirement.table}",
        )


def check_encrypted(sessions: Sequence[Session]) -> None:
    """Raises SessionRefused for a raw URL, or for none at all: at every boundary (INV-41)."""
    for session in sessions:
        if session.get("postgresUrl") is not None:
            raise SessionRefused(
                "Preloaded Runtime DB sessions must not carry raw Postgres URLs.",
                code="RAW_DB_URL_REFUSED",
                hint="encrypt the URL for the run's executor token",
            )
        sealed = session.get("encryptedPostgresUrl")
        if not isinstance(sealed, Mapping) or not isinstance(sealed.get("ct"), str):
            raise SessionRefused(
                "Preloaded Runtime DB sessions must carry encrypted Postgres URLs.",
                code="SESSION_NOT_ENCRYPTED",
                hint="encrypt the URL for the run's executor token",
            )


def check_count(sessions: Sequence[Session], referenced: int) -> None:
    """Raises SessionRefused unless as many sessions came as the run refers to (INV-46)."""
    if len(sessions) != referenced:
        raise SessionRefused(
            f"{len(sessions)} db sessions are stored, the run refers to {referenced}",
            code="COUNT_MISMATCH",
        )


def life_left_ms(sessions: Sequence[Session], at: int) -> int:
    """Returns how long the shortest-lived session still lives; 0 for one that says nothing."""
    ends = [_end(session) for session in sessions]
    return max(0, min(ends, default=at) - at)


def _end(session: Session) -> int:
    end = session.get("expiresAt")
    return end if isinstance(end, int) and not isinstance(end, bool) else 0


def _texts(value: Json) -> list[str] | None:
    if not isinstance(value, list):
        return None
    texts = [item for item in value if isinstance(item, str)]
    return texts if len(texts) == len(value) else None


def _whole(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
