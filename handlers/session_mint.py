"""Minting the database sessions of a child at the origin (SPEC 1.15, 1.22).

All requirements at once, each with a key pair of its own and the child's token.  What comes back is
checked, opened, and encrypted again for that token, so that nothing in clear leaves this function.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from handlers.runtime import RuntimeApi
from handlers.session_checks import Scope, Session, SessionRefused, check_scope, check_shape
from handlers.session_crypto import Asked, EphemeralKey, SessionUnreadable, seal_for_token
from handlers.session_plan import Requirement
from ledger import gate
from ledger.canonical import Json, canonical
from ledger.errors import JsonInvalid

RUNTIME_PATH: Final = "/api/v2/plays/internal/runtime"
TIMEOUT_MS: Final = 15_000


class SessionRequest(Struct, frozen=True):
    """For whom sessions are minted; `token` is the one that will open them."""

    run_id: str
    scope: Scope
    token: str
    ttl_seconds: int
    user_email: str

    def __repr__(self) -> str:
        """Says for which run, and nothing of its token."""
        return f"SessionRequest({self.run_id})"


async def mint_sessions(
    api: RuntimeApi, request: SessionRequest, requirements: Sequence[Requirement]
) -> list[Session]:
    """Returns one encrypted session for each requirement, in their order.

    Raises SessionRefused for what is out of scope, unencrypted or no session (never to be asked for
    again), and whatever the runtime API fails with.
    """
    return list(await asyncio.gather(*(_mint(api, request, need) for need in requirements)))


async def _mint(api: RuntimeApi, request: SessionRequest, need: Requirement) -> Session:
    key = EphemeralKey()
    asked = Asked(run_id=request.run_id, request_id=secrets.token_hex(16))
    answer = await api.call(
        RUNTIME_PATH,
        canonical(
            {
                "action": "create_db_session",
                "limits": dict(need.limits) or None,
                "operations": list(need.operations),
                "playName": request.scope.play_name,
                "postgresUrlEncryption": key.request(),
                "runId": request.run_id,
                "sheetContract": None,
                "target": {
                    "logicalTable": need.logical_table,
                    "tableNamespace": need.table_namespace,
                },
                "ttlSeconds": request.ttl_seconds,
                "userEmail": request.user_email,
            }
        ),
        token=request.token,
        request_id=asked.request_id,
        timeout_ms=TIMEOUT_MS,
    )
    session = check_shape(_session_of(answer.body))
    check_scope(session, need, request.scope)
    if session.get("postgresUrl") is not None or session.get("encryptedPostgresUrl") is None:
        raise SessionRefused(
            "Runtime API returned an unencrypted DB session URL.", code="SESSION_NOT_ENCRYPTED"
        )
    try:
        url = key.open(session, asked)
    except SessionUnreadable:
        raise SessionRefused(
            f"the db session for {need.table} does not open with the key it was asked with",
            code="SESSION_UNREADABLE",
            hint="somebody changed it on its way, or the origin bound it to another request",
        ) from None
    return {**session, "encryptedPostgresUrl": seal_for_token(url, session, request.token)}


def _session_of(body: bytes) -> Json:
    try:
        answer = gate.parse(body, what="answer")
    except JsonInvalid:
        return None
    return answer.get("session") if isinstance(answer, dict) else None
