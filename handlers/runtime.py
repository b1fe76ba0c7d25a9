"""The runtime API port: what the coordinator asks of the origin of its runs (SPEC 1.31).

One transport with one policy for every caller; an HTTP implementation and an embedded one stand in
engines/.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from ledger.errors import Unavailable


class RuntimeAnswer(Struct, frozen=True):
    """What the runtime API answered; `retry_after_ms` where it said when to ask again."""

    status: int
    body: bytes
    retry_after_ms: int | None = None

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class RuntimeUnavailable(Unavailable):
    """Says that the runtime API could not be asked: what it did, if anything, is unknown."""

    code = "RUNTIME_UNAVAILABLE"


class RuntimeApi(Protocol):
    """Asks the origin.  A call may be repeated with the same `request_id`."""

    async def call(
        self, path: str, body: bytes, *, token: str, request_id: str, timeout_ms: int = 15_000
    ) -> RuntimeAnswer:
        """Posts JSON under a bearer token; raises RuntimeUnavailable without an answer."""
