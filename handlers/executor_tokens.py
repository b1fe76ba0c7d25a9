"""Executor tokens: what an instance shows to speak for its run, and for no other.

JWTs signed with EdDSA (`Ed25519`, its name since RFC 9864) under a key that is derived from the
log's own, so that every process on the log reads what another one minted, and nobody else mints.  A
token is of one attempt: with the next one it changes nothing more (CASES C047).  It is never stored
in the log, never logged, and a child never gets its parent's (INV-45).
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from ledger.errors import PlayledgerError
from ledger.keyring import Keyring

ALGORITHM: Final = "Ed25519"
AUDIENCE: Final = "playledger/executor"
PURPOSE: Final = b"executor-token"
TTL_MS: Final = 24 * 3_600_000


class ExecutorTokenRefused(PlayledgerError):
    """Says that an executor token is expired, was not minted by this log, or was changed."""

    code = "TOKEN_INVALID"


class ExecutorClaims(Struct, frozen=True, kw_only=True):
    """For whom a token speaks; `expires_at` in ms since 1970, `max_credits` where there is a limit.

    Claim names on the wire: `sub` (run), `play`, `org`, `attempt`, `parent`, `credits`, `exp`.
    """

    run_id: str
    play_name: str
    org_id: str
    attempt: int
    expires_at: int
    parent_run_id: str | None = None
    max_credits: float | None = None


class ExecutorTokens:
    """Mints and reads the tokens of one log."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._key: Any = None

    def mint(self, claims: ExecutorClaims) -> str:
        """Returns a signed token that says this."""
        from joserfc import jwt  # imported with the first token: most runs have none

        said: dict[str, Any] = {
            "aud": AUDIENCE,
            "sub": claims.run_id,
            "play": claims.play_name,
            "org": claims.org_id,
            "attempt": claims.attempt,
            "exp": claims.expires_at // 1000,
        }
        if claims.parent_run_id is not None:
            said["parent"] = claims.parent_run_id
        if claims.max_credits is not None:
            said["credits"] = claims.max_credits
        return jwt.encode({"alg": ALGORITHM}, said, self._signing_key(), algorithms=[ALGORITHM])

    def read(self, token: str, now_ms: int) -> ExecutorClaims:
        """Returns what a token says.

        Raises ExecutorTokenRefused: `TOKEN_EXPIRED`, or `TOKEN_INVALID` for everything else.
        """
        from joserfc import jwt
        from joserfc.errors import ExpiredTokenError, JoseError

        registry = jwt.JWTClaimsRegistry(
            now=now_ms // 1000,
            aud={"essential": True, "value": AUDIENCE},
            sub={"essential": True},
            play={"essential": True},
            org={"essential": True},
            attempt={"essential": True},
            exp={"essential": True},
        )
        try:
            said = jwt.decode(token, self._signing_key(), algorithms=[ALGORITHM]).claims
            registry.validate(said)
            return ExecutorClaims(
                run_id=_text(said["sub"]),
                play_name=_text(said["play"]),
                org_id=_text(said["org"]),
                attempt=int(said["attempt"]),
                expires_at=int(said["exp"]) * 1000,
                parent_run_id=None if said.get("parent") is None else _text(said["parent"]),
                max_credits=said.get("credits"),
            )
        except ExpiredTokenError:
            raise ExecutorTokenRefused(
                "the executor token that was sent has expired",
                code="TOKEN_EXPIRED",
                hint="an instance is given a new one with its next attempt",
            ) from None
        except (JoseError, ValueError, TypeError, UnicodeError):
            raise ExecutorTokenRefused(
                "the token that was sent is not known here", hint="Authorization: Bearer TOKEN"
            ) from None

    def _signing_key(self) -> Any:
        if self._key is None:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from joserfc.jwk import OKPKey

            seed = self._keyring.derived(PURPOSE)
            self._key = OKPKey.import_key(Ed25519PrivateKey.from_private_bytes(seed))
        return self._key


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
