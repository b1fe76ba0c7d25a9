"""Who may come in: bearer tokens, compared in constant time; without one, everybody is refused.

`insecure_local` opens the door to this machine only.  A page in a browser of this machine is not
this machine: its requests name their origin, or a host that some name server led here, and are
refused by that.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from ipaddress import ip_address
from typing import Final, Literal
from urllib.parse import urlsplit

from starlette.requests import Request

from playledger.http.errors import Forbidden, NoTokenSet, Unauthorised

Access = Literal["open", "read", "operate"]
"""What a route asks for: nothing, a token that may look, one that may act; today each may both."""

LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """Knows the tokens of a server, by the SHA-256 of each."""

    def __init__(self, tokens: Mapping[str, str], *, insecure_local: bool) -> None:
        self._tokens = {name: bytes.fromhex(digest) for name, digest in tokens.items()}
        self._insecure_local = insecure_local

    def admit(self, request: Request, access: Access) -> str:
        """Returns the actor that events are recorded with, or raises why there is none."""
        if access == "open":
            return "api/anonymous"
        given = request.headers.get("authorization")
        if given is None:
            if self._insecure_local:
                _check_local(request)
                return "api/local"
            if not self._tokens:
                raise NoTokenSet(
                    "no control token is set, so nobody is let in",
                    hint="set PLAYLEDGER_TOKENS_FILE, or --insecure-local on 127.0.0.1",
                )
            raise Unauthorised(
                f"{request.scope['path']} wants a token and none was sent",
                hint="Authorization: Bearer TOKEN",
            )
        scheme, _, token = given.partition(" ")
        name = self._find(token.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise Unauthorised(
                "the token that was sent is not known here",
                code="TOKEN_INVALID",
                hint="Authorization: Bearer TOKEN",
            )
        return "api/" + name

    def _find(self, token: str) -> str | None:
        """Compares with every token, whichever fits, so that time tells nothing."""
        digest = sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for name, known in self._tokens.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found


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
