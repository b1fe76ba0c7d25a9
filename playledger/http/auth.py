"""Who may come in, and as what: bearer tokens; without one, everybody is refused.

A control token has a role and may be confined to an organisation; it is compared in constant time.
An executor token speaks for one attempt of one run, on the few routes that take it.

`insecure_local` opens the door to this machine only.  A page in a browser of this machine is not
this machine: its requests name their origin, or a host that some name server led here, and are
refused by that.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from hashlib import sha256
from ipaddress import ip_address
from typing import Final, Literal
from urllib.parse import urlsplit

from msgspec import Struct
from starlette.requests import Request

from handlers.executor_tokens import ExecutorClaims, ExecutorTokenRefused, ExecutorTokens
from ledger.ids import quote
from ledger.log import system_clock
from playledger.http.errors import Forbidden, NoTokenSet, Unauthorised
from playledger.tokens import ControlToken

Access = Literal["open", "read", "operate", "admin"]
"""What a route asks for: nothing, or the role that a token needs at least."""

_RANK: Final[Mapping[Access, int]] = {"open": 0, "read": 1, "operate": 2, "admin": 3}
_JWT_DOTS: Final = 2


class Caller(Struct, frozen=True):
    """Who was let in: the actor of its events, its organisation if it is confined to one.

    `executor` is what an executor token says; its organisation is that of its run.
    """

    actor: str
    org: str | None = None
    executor: ExecutorClaims | None = None


LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """Knows the control tokens of a server by their hashes, and reads the executor tokens of a log.

    `now` is the time in ms since 1970 that a token's expiry is held against.
    """

    def __init__(
        self,
        tokens: Mapping[str, ControlToken],
        *,
        insecure_local: bool,
        executors: ExecutorTokens | None = None,
        now: Callable[[], int] = system_clock,
    ) -> None:
        self._tokens = {name: (bytes.fromhex(t.digest), t) for name, t in tokens.items()}
        self._insecure_local = insecure_local
        self._executors = executors
        self._now = now

    def admit(
        self, request: Request, access: Access, *, executors: bool = False, phase: str = "this"
    ) -> Caller:
        """Returns who calls, or raises why nobody may: 401, 403, or 503 without any token set.

        `executors` says that the route takes executor tokens; `phase` names it in errors.
        """
        if access == "open":
            return Caller("api/anonymous")
        given = request.headers.get("authorization")
        if given is None:
            return self._nobody(request)
        scheme, _, token = given.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer":
            raise _unknown()
        if self._executors is not None and token.count(".") == _JWT_DOTS:
            return self._executor(token, self._executors, executors=executors, phase=phase)
        name = self._find(token)
        if name is None:
            raise _unknown()
        known = self._tokens[name][1]
        if _RANK[known.role] < _RANK[access]:
            where = f" in org {known.org}" if known.org is not None else ""
            raise Forbidden(
                f"token {quote(name)} may {known.role}; {phase} needs {access}",
                code="ROLE_TOO_LOW",
                hint=f"ask for role {access}{where}",
            )
        return Caller("api/" + name, org=known.org)

    def _nobody(self, request: Request) -> Caller:
        if self._insecure_local:
            _check_local(request)
            return Caller("api/local")
        if not self._tokens:
            raise NoTokenSet(
                "no control token is set, so nobody is let in",
                hint="set PLAYLEDGER_TOKENS_FILE, or --insecure-local on 127.0.0.1",
            )
        raise Unauthorised(
            f"{request.scope['path']} wants a token and none was sent",
            hint="Authorization: Bearer TOKEN",
        )

    def _executor(
        self, token: str, tokens: ExecutorTokens, *, executors: bool, phase: str
    ) -> Caller:
        try:
            claims = tokens.read(token, self._now())
        except ExecutorTokenRefused as error:
            raise Unauthorised(error.message, code=error.code, hint=error.hint) from None
        if not executors:
            raise Forbidden(
                f"an executor token speaks for its run alone, and {phase} is not that",
                code="EXECUTOR_OUT_OF_SCOPE",
                hint="a control token does this",
            )
        actor = f"executor/{instance_label(claims)}"
        return Caller(actor, org=claims.org_id, executor=claims)

    def _find(self, token: str) -> str | None:
        """Compares with every token, whichever fits, so that time tells nothing."""
        digest = sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for name, (known, _) in self._tokens.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found


def instance_label(claims: ExecutorClaims) -> str:
    """Returns how events name who an executor token speaks for: its run and attempt."""
    return f"{claims.run_id}.{claims.attempt}"


def _unknown() -> Unauthorised:
    return Unauthorised(
        "the token that was sent is not known here",
        code="TOKEN_INVALID",
        hint="Authorization: Bearer TOKEN",
    )


def is_loopback(host: str) -> bool:
    """Says whether an address or name is of this machine alone."""
    if host in LOCAL_NAMES:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _check_local(request: Request) -> None:
    client = request.client
    host = _host_name(request.headers.get("host", ""))
    origin = request.headers.get("origin")
    if client is None or not is_loopback(client.host) or not is_loopback(host):
        raise Forbidden(
            f"without tokens only this machine is served, this came for {host or 'no host'}",
            code="LOCAL_ONLY",
            hint="http://127.0.0.1 from this machine, or set PLAYLEDGER_TOKENS_FILE",
        )
    if origin is not None and not is_loopback(urlsplit(origin).hostname or ""):
        raise Forbidden(
            "without tokens no page of another origin is served",
            code="ORIGIN_REFUSED",
            hint="set PLAYLEDGER_TOKENS_FILE",
        )


def _host_name(header: str) -> str:
    """Returns the name of a Host header without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
