"""Who may come in over HTTP: deny by default, and what insecure-local means."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import get_args

import httpx
import pytest
from starlette.requests import Request

from playledger import HttpOptions
from playledger.http.app import DirectRoute
from playledger.http.auth import Guard
from playledger.http.door import Reach
from playledger.http.routes import ROUTES
from playledger.tokens import ControlToken
from tests.http_world import BASE, TOKEN, TOKENS, code, world


def test_every_route_declares_what_it_asks_for(tmp_path: Path) -> None:
    """Nothing is served that did not say what it asks for, and only what is harmless is open."""

    async def main() -> None:
        async with world(tmp_path) as w:
            served = w.app.router.routes
            assert len(served) == len(ROUTES)
            for route in served:
                assert isinstance(route, DirectRoute), f"{route} has no access"
                assert route.access in ("open", "read", "operate", "admin")
            opened = {r.path for r in served if isinstance(r, DirectRoute) and r.access == "open"}
            assert opened == {"/health", "/ready", "/openapi.json", "/docs", "/docs/errors"}

    asyncio.run(main())


def test_C047_every_route_declares_what_it_reaches() -> None:
    """A path that names a run reaches it; executors come in only there; what acts is no GET."""
    for route in ROUTES:
        assert route.reach in get_args(Reach), route.path
        assert ("{run_id" in route.path) == (route.reach in ("run", "new_run")), route.path
        assert not route.executors or route.reach == "run", route.path
        assert route.method == "POST" or not route.body, route.path


@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {TOKEN}", "Bearer", "Bearer é"])
def test_nobody_unknown_comes_in(tmp_path: Path, given: str | None) -> None:
    """Every route that is not open answers 401 before it looks at anything."""

    async def main() -> None:
        headers = (
            {} if given is None else {"Authorization": given.encode("latin-1").decode("latin-1")}
        )
        async with world(tmp_path, options=HttpOptions(tokens=TOKENS)) as w:
            before = await w.ledger.log.position()
            for route in ROUTES:
                url = route.path.replace("{run_id:segment}", "k1")
                raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
                answer = await w.http.request(route.method, url, headers=raw, json={})
                if route.access == "open":
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, url
                assert code(answer) == ("TOKEN_MISSING" if given is None else "TOKEN_INVALID")
                assert answer.headers["www-authenticate"].startswith("Bearer")
            assert await w.ledger.log.position() == before

    asyncio.run(main())


def test_without_tokens_nobody_comes_in_but_this_machine_if_it_was_said(tmp_path: Path) -> None:
    """No token set means refuse all; insecure-local means loopback, and no page of others."""

    async def main() -> None:
        async with world(tmp_path, options=HttpOptions()) as w:
            refused = await w.submit("k1")
            assert (refused.status_code, code(refused)) == (503, "TOKENS_NOT_SET")
            assert "retry-after" not in refused.headers
            assert (await w.http.get("/health")).status_code == 200
        async with world(tmp_path) as w:
            assert (await w.submit("k1")).status_code == 202
            for headers, wanted in (
                ({"Host": "ledger.example"}, "LOCAL_ONLY"),
                ({"Origin": "https://evil.example"}, "ORIGIN_REFUSED"),
                ({"Origin": "null"}, "ORIGIN_REFUSED"),
            ):
                refused = await w.http.get("/workflow/k1", headers=headers)
                assert (refused.status_code, code(refused)) == (403, wanted)
            ours = {"Origin": "http://localhost:7529", "Host": "localhost:7529"}
            assert (await w.http.get("/workflow/k1", headers=ours)).status_code == 200
            elsewhere = httpx.ASGITransport(app=w.app, client=("192.0.2.7", 40000))
            async with httpx.AsyncClient(transport=elsewhere, base_url=BASE) as far:
                refused = await far.get("/workflow/k1")
                assert (refused.status_code, code(refused)) == (403, "LOCAL_ONLY")

    asyncio.run(main())


def test_a_token_is_found_among_many_and_names_the_actor() -> None:
    """Every token is compared, whichever fits."""
    names = [f"n{n}" for n in range(20)]
    tokens = {n: ControlToken(sha256(n.encode()).hexdigest()) for n in names}
    guard = Guard(tokens, insecure_local=False)
    for name in names:
        header = (b"authorization", f"Bearer {name}".encode())
        request = Request({"type": "http", "path": "/", "headers": [header]})
        assert guard.admit(request, "operate").actor == f"api/{name}"
