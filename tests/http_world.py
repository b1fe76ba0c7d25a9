"""A ledger with plays and an HTTP client on it, for the tests of the HTTP face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import orjson
from fastapi import FastAPI

import playledger
from ledger import events as e
from playledger import HttpOptions, Ledger, Retry, Run, http_app, play
from playledger.tokens import ControlToken
from playledger.wiring import plays_of, submitter_for

BASE = "http://127.0.0.1"
TOKEN = "a-token-of-the-tests"
TOKENS = {"ci": ControlToken(sha256(TOKEN.encode()).hexdigest())}


@play(name="t:echo")
async def echo(_run: Run, value: Any = None) -> Any:
    return value


@play(name="t:gate")
async def gate(run: Run) -> Any:
    """Waits for a signal, so that a run stays where a test wants it."""
    return await run.signal("go")


@play(name="t:fail")
async def fail(_run: Run) -> None:
    raise ValueError("no such thing")


@play(name="t:parent")
async def parent(run: Run) -> Any:
    return await run.child(gate, key="only")


@play(name="t:say")
async def say(run: Run, lines: list[str]) -> int:
    for line in lines:
        run.log(line)
    return len(lines)


@play(name="t:files")
async def files(run: Run, value: Any = None) -> list[str]:
    return [run.file(value["file"]).read_text()]


@play(name="t:later", retries=3)
async def later(_run: Run) -> None:
    raise Retry("not now", after=timedelta(hours=1))


PLAYS = (later, echo, gate, fail, parent, say, files)


class World:
    """One ledger, its app, and a client that was let in."""

    def __init__(self, ledger: Ledger, app: FastAPI, http: httpx.AsyncClient) -> None:
        self.ledger = ledger
        self.app = app
        self.http = http

    async def submit(self, run_id: str, play_name: str = "t:echo", **body: Any) -> httpx.Response:
        return await self.http.post(
            f"/workflow/{run_id}/submit", json={"playName": play_name, **body}
        )

    async def reach(self, run_id: str, kind: str) -> int:
        """Waits for the first event of a type in a run's stream, and returns its position."""
        async with asyncio.timeout(20):
            async for recorded in self.ledger.events(stream=f"run/{run_id}", follow=True):
                if recorded.type == kind:
                    return recorded.position
        raise AssertionError("unreachable")

    async def end(self, run_id: str) -> str:
        """Waits for a run's end, and returns how it ended."""
        async with asyncio.timeout(20):
            return (await self.ledger.wait_for_end(run_id)).status

    async def types(self, run_id: str) -> list[str]:
        return [r.type async for r in self.ledger.events(stream=f"run/{run_id}")]


@asynccontextmanager
async def world(
    tmp_path: Path,
    *,
    plays: Iterable[Callable[..., Any]] = PLAYS,
    options: HttpOptions | None = None,
    headers: dict[str, str] | None = None,
    driven: bool = True,
    **opening: Any,
) -> AsyncIterator[World]:
    """Opens `http.db` in a folder; undriven, runs are taken and nobody runs them."""
    chosen = options or HttpOptions(insecure_local=True, keep_alive_s=0.05)
    offered = tuple(plays)
    async with playledger.open(
        tmp_path / "http.db", plays=offered if driven else (), **opening
    ) as ledger:
        if not driven:
            ledger.submitter = submitter_for(ledger.log, plays_of(offered))
        app = http_app(ledger, chosen)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url=BASE, headers=headers, timeout=30
        ) as http:
            yield World(ledger, app, http)


async def raw(app: FastAPI, method: str, raw_path: bytes, body: bytes = b"") -> tuple[int, Any]:
    """Sends a path that no client would: as its bytes, not normalised, of any length."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(raw_path.decode("latin-1")),
        "raw_path": raw_path,
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], orjson.loads(content)


def code(response: httpx.Response) -> str:
    """Returns the code of an error, checking that it is the one envelope."""
    error = response.json()["error"]
    assert {"code", "message", "phase", "retriable"} <= error.keys()
    assert "Traceback" not in response.text
    return str(error["code"])


def policy(**changes: Any) -> e.Policy:
    """Returns the default policy with changes."""
    from msgspec.structs import replace

    from handlers.submit import DEFAULT_POLICY

    return replace(DEFAULT_POLICY, **changes)
