"""Reading a run's database sessions back: whole, encrypted and alive, or not at all.

SPEC 1.17, 4.4.  A session's URL is opened in one place alone, for the instance that asks for it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from handlers.session_checks import LIFE_MIN_MS, Session, check_count, check_encrypted
from handlers.session_crypto import open_with_token
from ledger.canonical import Json
from ledger.errors import SessionExpired, SessionNotPlanned
from ledger.ids import quote
from ledger.vault import Vault
from projections.state import Run

HIDDEN: Final = "***"


class SessionGrant(Struct, frozen=True, tag="session_grant"):
    """An opened session; `expires_at` in ms since 1970."""

    table: str
    url: str
    operations: tuple[str, ...]
    expires_at: int

    def __repr__(self) -> str:
        """Says which session, and never where it leads."""
        return f"SessionGrant({self.table}, {HIDDEN})"


async def hydrate(vault: Vault, run: Run, at: int) -> list[Session]:
    """Returns the sessions of a run, none if it has none.

    Raises SessionExpired for expired or lost ones, SessionRefused for another count than the run
    refers to or a raw URL (INV-41, INV-46, INV-49).
    """
    held = run.sessions
    if held is None:
        return []
    left = held.expires_at - at
    if left < LIFE_MIN_MS:
        raise SessionExpired(
            f"the db sessions of {run.run_id} have {max(0, left)} ms of life left, "
            f"{LIFE_MIN_MS} are needed",
            code="EXPIRED",
            hint="put new ones",
        )
    value = await vault.reveal(held.sessions)
    sessions = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    check_count(sessions, held.count)
    check_encrypted(sessions)
    return list(sessions)


async def open_session(vault: Vault, run: Run, table: str, at: int) -> SessionGrant:
    """Opens the session for a table, `namespace.table`, with the run's executor token.

    Raises SessionNotPlanned for a table the run has none for, SessionExpired, SessionRefused, and
    SessionUnreadable for one that was encrypted for another token (INV-44).
    """
    sessions = await hydrate(vault, run, at)
    planned = {_table_of(session): session for session in sessions}
    session = planned.get(table)
    if session is None:
        have = ", ".join(quote(name) for name in planned) or "none"
        raise SessionNotPlanned(
            f"run {run.run_id} has no db session for {quote(table)}, it has {have}",
            hint="plan it: the session comes with the submit",
            table=table,
        )
    if run.executor_token is None:
        raise SessionExpired(
            f"run {run.run_id} has no executor token to open its db sessions with",
            code="EXECUTOR_TOKEN_MISSING",
            hint="submit it with the token that the sessions were encrypted for",
        )
    token = (await vault.secret(run.executor_token)).decode()
    operations, expires_at = session.get("operations"), session.get("expiresAt")
    return SessionGrant(
        table=table,
        url=open_with_token(session, token),
        operations=tuple(str(name) for name in operations) if isinstance(operations, list) else (),
        expires_at=expires_at if type(expires_at) is int else 0,
    )


def _table_of(session: Session) -> str:
    target: Json = session.get("target")
    if not isinstance(target, dict):
        return ""
    return f"{target.get('tableNamespace')}.{target.get('logicalTable')}"
