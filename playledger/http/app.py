"""The ASGI app: one table of routes, each with what it asks of its caller.

    raw path -> route -> guard -> handler -> the writer -> answer, or the one error envelope

A path is matched as it was sent, so a run id is one percent-encoded segment and `a%2Fb` is `a/b`
while `a%252Fb` is not (CASES C034).  FastAPI describes the routes; requests are read by our own
models behind our own gate, so what it would make of a body never matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from handlers.executor_tokens import ExecutorTokens
from ledger.errors import PlayledgerError
from playledger.embed import Ledger
from playledger.http import docs
from playledger.http.auth import Access, Guard
from playledger.http.bodies import run_id_of
from playledger.http.door import Call, Door, Drain, HttpOptions, Route
from playledger.http.errors import MethodNotAllowed, RouteNotFound, error_response
from playledger.http.routes import ROUTES, RUN
from playledger.http.scope import check_scope
from playledger.version import VERSION

log = structlog.get_logger("playledger.http")

DESCRIBED: Final = ("/workflow", "/run-state", "/warmup", "/events", "/health", "/ready")
SECURITY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        (
            b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; "
            b"base-uri 'none'; form-action 'none'"
        ),
    ),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
"""On every answer; nothing here sets one of them itself."""


def http_app(
    ledger: Ledger, options: HttpOptions | None = None, *, drain: Drain | None = None
) -> FastAPI:
    """Returns the app over a ledger; without tokens in `options` nobody is let in.

    `drain` is how a server says that it is on its way out.
    """
    chosen = options or HttpOptions()
    door = Door(
        ledger=ledger,
        options=chosen,
        guard=Guard(
            chosen.tokens,
            insecure_local=chosen.insecure_local,
            executors=ExecutorTokens(ledger.log.vault.keyring),
            now=ledger.now,
        ),
        drain=drain or Drain(),
    )
    app = FastAPI(
        title="playledger",
        version=VERSION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.drain = door.drain
    straight: dict[tuple[str, str], ASGIApp] = {}
    for route in ROUTES:
        direct = DirectRoute(route, door)
        app.router.routes.append(direct)
        if route.path.startswith(RUN):
            straight[route.method, route.path.removeprefix(RUN).removeprefix("/")] = direct.app
    app.add_middleware(_Outside, straight=straight)
    app.add_exception_handler(HTTPException, _unrouted)
    return app


class DirectRoute(APIRoute):
    """A route that FastAPI describes and that we answer, without its reading of requests.

    It cannot be made without saying what it asks of its caller.
    """

    def __init__(self, route: Route, door: Door) -> None:
        super().__init__(
            route.path,
            _endpoint(route, door),
            methods=[route.method],
            name=f"{route.phase} {route.path}",
            summary=route.handler.__doc__,
            response_class=Response,
            response_model=None,
            openapi_extra=docs.described(route),
            operation_id=f"{route.phase}{'_short' if route.path == RUN else ''}",
            include_in_schema=route.path.startswith(DESCRIBED),
        )
        self.access: Access = route.access
        endpoint = self.endpoint

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)

        self.app = app


def _endpoint(route: Route, door: Door) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        run_id = ""
        try:
            caller = door.guard.admit(
                request, route.access, executors=route.executors, phase=route.phase
            )
            segment = request.scope["path_params"].get("run_id")
            if segment is not None:
                run_id = run_id_of(segment)
            call = Call(request=request, caller=caller, run_id=run_id)
            if caller.org is not None:
                await check_scope(door, call, route)
            return await route.handler(door, call)
        except PlayledgerError as error:
            path = door.ledger.log.path
            return error_response(request, error, phase=route.phase, run_id=run_id, path=path)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception:
            log.exception("a request could not be answered", phase=route.phase, run=run_id)
            return error_response(
                request,
                PlayledgerError(
                    "the server could not answer this, and has logged why",
                    hint="the same request again; if it stays, report it",
                ),
                phase=route.phase,
                run_id=run_id,
            )

    return endpoint


class _Segment(Convertor[str]):
    """One path segment as it was sent, the empty one too, so that it is refused as an id."""

    regex = "[^/]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("segment", _Segment())


class _Outside:
    """Puts the path as it was sent in the place of its decoded form, and guards every answer.

    The routes of one run are found by their last segment, without the walk through the table of
    all routes that the others take: a status costs little more than that walk (NUMBERS T7, T9).
    """

    def __init__(self, app: ASGIApp, straight: Mapping[tuple[str, str], ASGIApp]) -> None:
        self._app = app
        self._straight = straight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = dict(scope)
        raw = scope.get("raw_path")
        path: str = scope["path"] if raw is None else raw.decode("latin-1")
        scope["path"] = path

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *SECURITY_HEADERS]
            await send(message)

        app = self._app
        parts = path.split("/")
        if len(parts) in (3, 4) and parts[1] == "workflow" and not scope.get("root_path"):
            found = self._straight.get((scope["method"], parts[3] if len(parts) == 4 else ""))
            if found is not None:
                scope["path_params"] = {"run_id": parts[2]}
                app = found
        await app(scope, receive, guarded)


async def _unrouted(request: Request, error: Exception) -> Response:
    """Answers what no route took, in the same envelope as everything else."""
    assert isinstance(error, HTTPException), "registered for these"
    shown: PlayledgerError
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        shown = MethodNotAllowed(
            f"{request.method} is not for this resource", hint=f"it takes {allow}", allow=allow
        )
    else:
        shown = RouteNotFound("there is no such resource", hint="all of them: /docs")
    return error_response(request, shown, phase="route")
