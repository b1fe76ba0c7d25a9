"""What every route has at hand: the ledger, who may come in, and whether the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Literal

import orjson
from msgspec import Struct
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from playledger.embed import Ledger
from playledger.http.auth import Access, Caller, Guard
from playledger.tokens import ControlToken

KEEP_ALIVE_S: Final = 15.0


class HttpOptions(Struct, frozen=True, kw_only=True):
    """How an app is set up; `tokens` gives each control token by its name."""

    tokens: Mapping[str, ControlToken] = {}
    insecure_local: bool = False
    keep_alive_s: float = KEEP_ALIVE_S


class Drain:
    """Whether the server is on its way out; begun once, never undone."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.grace_s = 0.0

    def begin(self, grace_s: float) -> None:
        """New work is refused and tails end from here on."""
        self.grace_s = grace_s
        self.begun.set()

    async def unless_begun(self, work: Coroutine[Any, Any, object], timeout_s: float) -> bool:
        """Waits for something, no longer than this and not beyond the drain; says if it came."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self.begun.wait())]
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            return tasks[0].done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Door(Struct, frozen=True):
    """One app's parts."""

    ledger: Ledger
    options: HttpOptions
    guard: Guard
    drain: Drain


class Call(Struct, frozen=True):
    """One request that was let in; `run_id` is empty where the path names no run."""

    request: Request
    caller: Caller
    run_id: str = ""

    @property
    def actor(self) -> str:
        """Whom the events of this request name; set by the server alone."""
        return self.caller.actor


Handler = Callable[[Door, Call], Awaitable[Response]]
Reach = Literal["nothing", "run", "new_run", "list", "log"]
"""What a route shows or changes: nothing of a run, the run of its path, one that it may make, the
runs that its caller may see, everything there is."""


class Route(Struct, frozen=True):
    """One resource and method: what it asks of its caller, and what answers it.

    `executors` says that a run's own executor token may come in, too.
    """

    method: str
    path: str
    access: Access
    reach: Reach
    handler: Handler
    answers: Mapping[int, str]
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    called: str | None = None
    executors: bool = False

    @property
    def phase(self) -> str:
        """The verb of this route, as errors name it."""
        return self.called or self.handler.__name__


def answer(
    body: bytes | Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a JSON answer; bytes are JSON already."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    return Response(content, status, headers, media_type="application/json")
