"""What each kind of token may reach: every route, every caller, every run (CASES C047, K22)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from handlers.executor_tokens import ExecutorClaims, ExecutorTokenRefused, ExecutorTokens
from playledger import HttpOptions
from playledger.http.door import Route
from playledger.http.routes import ROUTES
from playledger.tokens import ControlToken
from tests.http_world import World, code, world

HOUR_MS: Final = 3_600_000
OPEN: Final = frozenset({"/health", "/ready", "/openapi.json", "/docs", "/docs/errors"})
CONTROL: Final[Mapping[str, tuple[str, str | None]]] = {
    "reader": ("read", None),
    "operator": ("operate", None),
    "admin": ("admin", None),
    "acme-reader": ("read", "acme"),
    "acme-operator": ("operate", "acme"),
    "acme-admin": ("admin", "acme"),
}
TOKENS: Final = {
    name: ControlToken(sha256(f"token-of-{name}".encode()).hexdigest(), role, org)  # type: ignore[arg-type]
    for name, (role, org) in CONTROL.items()
}
EXECUTORS: Final = ("executor", "executor-old", "executor-other", "executor-expired")
CALLERS: Final = ("none", "garbage", *EXECUTORS, *CONTROL)
REFUSALS: Final = frozenset(
    {
        "TOKEN_MISSING",
        "TOKEN_INVALID",
        "TOKEN_EXPIRED",
        "ROLE_TOO_LOW",
        "EXECUTOR_OUT_OF_SCOPE",
        "ORG_OUT_OF_SCOPE",
        "STALE_ATTEMPT",
        "RUN_NOT_FOUND",
        "RUN_CONFLICT",
    }
)
EXECUTOR_READS: Final = frozenset({"", "/status", "/result"})


async def prepare(w: World) -> dict[str, str]:
    """Makes a run in each of two organisations, and returns every caller's token."""
    for run_id, org in (("ours", "acme"), ("theirs", "rival")):
        made = await w.http.post(
            f"/workflow/{run_id}/submit",
            headers={"Authorization": "Bearer token-of-admin"},
            json={"playName": "t:gate", "orgId": org},
        )
        assert made.status_code == 202
        await w.reach(run_id, "run.wait_started")
    executors = ExecutorTokens(w.ledger.log.vault.keyring)
    now = w.ledger.now()

    def minted(run_id: str, org: str, attempt: int, expires_at: int) -> str:
        return executors.mint(
            ExecutorClaims(
                run_id=run_id, play_name="t:gate", org_id=org, attempt=attempt,
                expires_at=expires_at,
            )
        )  # fmt: skip

    return {
        "garbage": "a.b.c",
        "executor": minted("ours", "acme", 0, now + HOUR_MS),
        "executor-old": minted("ours", "acme", 7, now + HOUR_MS),
        "executor-other": minted("theirs", "rival", 0, now + HOUR_MS),
        "executor-expired": minted("ours", "acme", 0, now - HOUR_MS),
        **{name: f"token-of-{name}" for name in CONTROL},
    }


def expected(route: Route, caller: str, run: str) -> str | None:
    """Returns the refusal that a caller must get, stated apart from the code; None if it is let in.

    `run` is `ours` (of org acme, attempt 0) or `theirs` (of org rival).
    """
    if route.path in OPEN:
        return None
    if caller == "none":
        return "TOKEN_MISSING"
    if caller == "garbage":
        return "TOKEN_INVALID"
    if caller == "executor-expired":
        return "TOKEN_EXPIRED"
    acts = route.access in ("operate", "admin")
    if caller in EXECUTORS:
        return _expected_of_executor(route, caller, run, acts=acts)
    role, org = CONTROL[caller]
    if acts and (role == "read" or (route.access == "admin" and role != "admin")):
        return "ROLE_TOO_LOW"
    if org is None:
        return None
    if route.path == "/events":
        return "ORG_OUT_OF_SCOPE"
    if "{run_id" in route.path and run == "theirs":
        return "RUN_CONFLICT" if route.reach == "new_run" else "RUN_NOT_FOUND"
    return None


def _expected_of_executor(route: Route, caller: str, run: str, *, acts: bool) -> str | None:
    if not route.executors:
        return "EXECUTOR_OUT_OF_SCOPE"
    if (run == "ours") == (caller == "executor-other"):
        return "RUN_NOT_FOUND"
    return "STALE_ATTEMPT" if caller == "executor-old" and acts else None


async def ask(w: World, route: Route, run: str, token: str | None) -> httpx.Response:
    """Asks a route with an empty body: whoever is let in is refused for that, and changes nothing.

    `submit-child`, `cancel` and `retry` take an empty body or refuse it otherwise; a cancel is
    asked with a field that is not its own.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = route.path.replace("{run_id:segment}", run)
    assert "{" not in url, "a new kind of path needs a case of its own"
    if route.method == "GET":
        return await w.http.get(url, headers=headers)
    return await w.http.request(route.method, url, headers=headers, json={"notAField": 1})


def test_C047_every_route_by_every_caller_on_every_run(tmp_path: Path) -> None:
    """The whole matrix; whoever is refused changed nothing and learned nothing of foreign runs."""

    async def main() -> None:
        async with world(tmp_path, options=HttpOptions(tokens=TOKENS, keep_alive_s=0.05)) as w:
            tokens = await prepare(w)
            before = await w.ledger.log.position()
            for route in ROUTES:
                if route.path == "/warmup/submit":
                    continue  # takes any body's label, and has its own test
                for run in ("ours", "theirs"):
                    for caller in CALLERS:
                        answer = await ask(w, route, run, tokens.get(caller))
                        where = f"{route.method} {route.path} by {caller} on {run}"
                        wanted = expected(route, caller, run)
                        got = code(answer) if answer.status_code >= 400 else None
                        if wanted is None:
                            assert got not in REFUSALS, f"{where}: {answer.text}"
                        else:
                            assert got == wanted, f"{where}: {answer.status_code} {answer.text}"
                        if got == "RUN_NOT_FOUND":
                            assert "did you mean" not in answer.text, where
            # Resuming what waits is an event; nothing waited, so nothing at all was recorded.
            assert await w.ledger.log.position() == before

    asyncio.run(main())


def test_C047_a_list_shows_the_runs_of_its_callers_organisation(tmp_path: Path) -> None:
    """A list asks the database for the organisation; a confined caller can choose no other."""

    async def main() -> None:
        async with world(tmp_path, options=HttpOptions(tokens=TOKENS)) as w:
            tokens = await prepare(w)

            async def seen(caller: str, **query: Any) -> tuple[int, list[str]]:
                headers = {"Authorization": f"Bearer {tokens[caller]}"}
                answer = await w.http.get("/workflow", headers=headers, params=query)
                runs = answer.json().get("runs", [])
                return answer.status_code, sorted(run["runId"] for run in runs)

            assert await seen("reader") == (200, ["ours", "theirs"])
            assert await seen("reader", org="rival") == (200, ["theirs"])
            assert await seen("acme-reader") == (200, ["ours"])
            assert await seen("acme-reader", org="acme") == (200, ["ours"])
            assert await seen("acme-reader", org="rival") == (403, [])
            assert await seen("executor") == (403, [])

    asyncio.run(main())


def test_C047_a_new_run_is_of_its_callers_organisation(tmp_path: Path) -> None:
    """A confined caller names no other, and takes no run id of another, whatever it sends."""

    async def main() -> None:
        headers = {"Authorization": "Bearer token-of-acme-operator"}
        async with world(tmp_path, options=HttpOptions(tokens=TOKENS), headers=headers) as w:
            await prepare(w)
            made = await w.submit("new", "t:echo", waitMs=20_000)
            assert made.status_code == 202
            submitted = (await w.ledger.log.read(stream="run/new"))[0]
            assert (submitted.data.org_id, submitted.actor) == ("acme", "api/acme-operator")  # type: ignore[union-attr]
            other = await w.submit("new2", "t:echo", orgId="rival")
            assert (other.status_code, code(other)) == (403, "ORG_OUT_OF_SCOPE")
            taken = await w.submit("theirs", "t:gate")
            assert (taken.status_code, code(taken)) == (409, "RUN_CONFLICT")
            assert "rival" not in taken.text
            again = await w.http.post("/workflow/new/rerun", json={"runId": "theirs"})
            assert (again.status_code, code(again)) == (409, "RUN_CONFLICT")
            put = await w.http.post(
                "/run-state/edge/run-retry-state-put", json={"params": {"orgId": "rival"}}
            )
            assert (put.status_code, code(put)) == (403, "ORG_OUT_OF_SCOPE")

    asyncio.run(main())


def test_C047_an_executor_speaks_for_its_run_by_its_own_name(tmp_path: Path) -> None:
    """Its events say that the executor of this attempt sent them."""

    async def main() -> None:
        async with world(tmp_path, options=HttpOptions(tokens=TOKENS)) as w:
            tokens = await prepare(w)
            headers = {"Authorization": f"Bearer {tokens['executor']}"}
            sent = await w.http.post(
                "/workflow/ours/signal", headers=headers, json={"signal": "go", "data": 1}
            )
            assert sent.status_code == 202
            received = list(await w.ledger.log.read(stream="run/ours"))
            actors = {r.type: r.actor for r in received}
            assert actors["signal.received"] == "executor/ours.0"
            assert await w.end("ours") == "completed"

    asyncio.run(main())


def test_C047_no_token_is_taken_from_a_query_or_written_anywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A token in the query is a field that is not known; no token lies in database or log."""

    async def main() -> dict[str, str]:
        async with world(tmp_path, options=HttpOptions(tokens=TOKENS)) as w:
            tokens = await prepare(w)
            for name in ("access_token", "token"):
                asked = await w.http.get("/workflow", params={name: "token-of-admin"})
                assert (asked.status_code, code(asked)) == (401, "TOKEN_MISSING")
            for token in tokens.values():
                headers = {"Authorization": f"Bearer {token}"}
                await w.http.get("/workflow/ours", headers=headers)
                await w.http.post("/workflow/ours/signal", headers=headers, json={"signal": "x"})
        return tokens

    tokens = asyncio.run(main())
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for token in tokens.values():
        assert token == "a.b.c" or token.encode() not in written
        assert token not in caplog.text


@pytest.mark.parametrize("change", ["header", "claims", "signature", "alg-none", "other-log"])
def test_C047_an_executor_token_that_was_not_minted_here_is_refused(
    tmp_path: Path, change: str
) -> None:
    """Another log's token, one without a signature, and one with a changed byte are nobody's."""
    from base64 import urlsafe_b64encode

    async def main() -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with world(tmp_path / "a") as w, world(tmp_path / "b") as other:
            tokens = ExecutorTokens(w.ledger.log.vault.keyring)
            now = w.ledger.now()
            claims = ExecutorClaims(
                run_id="r", play_name="p", org_id="acme", attempt=0, expires_at=now + HOUR_MS,
                parent_run_id="up", max_credits=2.5,
            )  # fmt: skip
            minted = tokens.mint(claims)
            assert tokens.read(minted, now).max_credits == 2.5
            head, body, signature = minted.split(".")
            none = urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
            flipped = ("A" if signature[0] != "A" else "B") + signature[1:]
            spoiled = {
                "header": f"{head[:-1]}.{body}.{signature}",
                "claims": f"{head}.{body[:-2]}AA.{signature}",
                "signature": f"{head}.{body}.{flipped}",
                "alg-none": f"{none}.{body}.",
                "other-log": ExecutorTokens(other.ledger.log.vault.keyring).mint(claims),
            }
            with pytest.raises(ExecutorTokenRefused) as refused:
                tokens.read(spoiled[change], now)
            assert refused.value.code == "TOKEN_INVALID"

    asyncio.run(main())
