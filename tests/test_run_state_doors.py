"""The run-state doors: another coordinator keeps its runs here (SPEC 1.10 to 1.14, 1.28)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import replay
from ledger import events as e
from ledger.canonical import Json
from tests.http_world import World, world

TOKEN_CANARY = "canary-executor-token-5c1d"
URL_CANARY = "postgresql://u:canary-password@db.example/crm"
PARAMS: dict[str, Json] = {
    "artifactHash": "a1",
    "contractSnapshot": {"source": "published", "sourceCode": "canary-source"},
    "dynamicWorkerCode": "canary-code",
    "executorToken": TOKEN_CANARY,
    "input": {"n": 1},
    "orgId": "acme",
    "packagedFiles": [{"bytes": 3, "content": "canary-file", "playPath": "a", "storageKey": "k"}],
    "playName": "enrich",
    "runId": "r",
}
SESSION: dict[str, Json] = {
    "encryptedPostgresUrl": {"alg": "A", "ct": "AAAA", "v": 1},
    "expiresAt": 4_000_000_000_000,
    "operations": ["select"],
    "playName": "enrich",
    "target": {"logicalTable": "leads", "orgId": "acme", "tableNamespace": "crm"},
}
REF: dict[str, Json] = {
    "bytes": 10,
    "expiresAt": 4_000_000_000_000,
    "hash": "h",
    "storageKey": "plays/workflow-retry-params/r/h.json",
    "storageKind": "r2",
}
Scenario = Callable[["Edge"], Awaitable[None]]


class Edge:
    """An edge coordinator with this log as its store."""

    def __init__(self, here: World) -> None:
        self.here = here

    async def put(self, path: str, run_id: str = "r", **body: Any) -> tuple[int, Any]:
        answered = await self.here.http.post(f"/run-state/{run_id}/{path}", json=body)
        return answered.status_code, answered.json()

    async def get(self, path: str, run_id: str = "r", **query: Any) -> tuple[int, Any]:
        answered = await self.here.http.get(f"/run-state/{run_id}/{path}", params=query)
        return answered.status_code, answered.json()

    async def launch(self, **changes: Any) -> Any:
        status, shown = await self.put("run-launch-state-put", params={**PARAMS, **changes})
        assert status == 200, shown
        return shown


def run(tmp_path: Path, scenario: Scenario) -> None:
    """Runs a scenario, and then verifies the whole log: every choice, every read model."""

    async def inside() -> None:
        async with world(tmp_path, driven=False) as here:
            await scenario(Edge(here))

    asyncio.run(inside())
    assert replay.verify(tmp_path / "http.db").ok


def test_INV_03_params_and_sessions_are_one_append(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        status, shown = await edge.put(
            "run-launch-state-put", runId="r", params=PARAMS, sessions=[SESSION, SESSION]
        )
        assert status == 200
        assert (shown["ok"], shown["sessionCount"]) == (True, 2)
        assert shown["retryExpiresAt"] > 0
        assert shown["dbSessionsExpiresAt"] > 0
        assert await edge.here.types("r") == [
            "run.submitted",
            "session.stored",
            "run.launch_state_put",
            "instance.create_requested",
        ]
        assert await edge.get("db-sessions-get") == (200, {"sessions": [SESSION, SESSION]})

    run(tmp_path, scenario)


def test_INV_09_the_same_put_again_changes_nothing_and_another_is_refused(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        first = await edge.launch()
        again = await edge.launch()
        assert (first["replayed"], again["replayed"]) == (False, True)
        assert first["retryExpiresAt"] == again["retryExpiresAt"]
        status, shown = await edge.put("run-launch-state-put", params={**PARAMS, "input": {"n": 2}})
        assert (status, shown["error"]["code"]) == (409, "RUN_CONFLICT")

    run(tmp_path, scenario)


def test_INV_12_the_path_names_the_run(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        for body in ({"runId": "q", "params": PARAMS}, {"params": {**PARAMS, "runId": "q"}}):
            status, shown = await edge.put("run-launch-state-put", **body)
            assert (status, shown["error"]["code"]) == (422, "RUN_ID_MISMATCH")
        assert await edge.here.types("r") == []

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"postgresUrl": URL_CANARY}, "RAW_DB_URL_REFUSED"),
        ({"encryptedPostgresUrl": None}, "SESSION_NOT_ENCRYPTED"),
    ],
)
def test_INV_41_raw_sessions_are_refused_at_both_doors(
    tmp_path: Path, changes: dict[str, Json], code: str
) -> None:
    async def scenario(edge: Edge) -> None:
        bad = [{**SESSION, **changes}]
        status, shown = await edge.put("run-launch-state-put", params=PARAMS, sessions=bad)
        assert (status, shown["error"]["code"]) == (400, code)
        assert await edge.here.types("r") == []
        await edge.launch()
        status, shown = await edge.put("db-sessions-put", sessions=bad)
        assert (status, shown["error"]["code"]) == (400, code)

    run(tmp_path, scenario)
    _assert_nowhere(tmp_path, b"canary-password")


def test_INV_04_INV_40_code_and_tokens_are_in_nothing_that_is_stored(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        _, claim = await edge.put("run-retry-claim", maxAttempts=2)
        params = claim["params"]
        assert params["executorToken"] == TOKEN_CANARY
        assert params["dynamicWorkerCode"] is None
        assert params["contractSnapshot"] == {"source": "published"}
        assert params["packagedFiles"] == [
            {"bytes": 3, "contentType": None, "playPath": "a", "storageKey": "k"}
        ]
        assert params["preloadedDbSessions"] is None

    run(tmp_path, scenario)
    for canary in (TOKEN_CANARY.encode(), b"canary-source", b"canary-code", b"canary-file"):
        _assert_nowhere(tmp_path, canary)


def test_INV_05_params_over_the_limit_are_413_with_and_without_sessions(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        large = {**PARAMS, "input": "x" * 1_048_576}
        for body in ({"params": large}, {"params": large, "sessions": [SESSION]}):
            status, shown = await edge.put("run-launch-state-put", **body)
            assert (status, shown["error"]["code"]) == (413, "PARAMS_TOO_LARGE")
        assert await edge.here.types("r") == []

    run(tmp_path, scenario)


def test_launch_state_is_params_or_a_reference(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        both: list[dict[str, Any]] = [{}, {"params": PARAMS, "paramsRef": REF}]
        for body in both:
            status, shown = await edge.put("run-launch-state-put", **body)
            assert (status, shown["error"]["code"]) == (422, "LAUNCH_STATE_INVALID")
        status, _ = await edge.put(
            "run-retry-state-put", paramsRef={**REF, "more": 1}, ttlMs=60_000
        )
        assert status == 200
        _, claim = await edge.put("run-retry-claim", maxAttempts=2)
        assert claim == {"attempts": 1, "claimed": True, "paramsRef": REF}

    run(tmp_path, scenario)


def test_INV_16_INV_17_the_map_goes_forward_only(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        assert await edge.get("workflow-instance-get") == (200, {"instanceId": None})
        await edge.put("workflow-instance-put", instanceId="run-abc")
        await edge.put("run-retry-claim", maxAttempts=2)
        status, shown = await edge.put("workflow-instance-put", instanceId="run-abc-retry-1")
        assert (status, shown) == (200, {"attempt": 1, "ok": True})
        await edge.put("workflow-instance-put", instanceId="run-abc")
        assert await edge.get("workflow-instance-get") == (200, {"instanceId": "run-abc-retry-1"})
        status, shown = await edge.put("workflow-instance-put", instanceId="run-xyz-retry-1")
        assert (status, shown["error"]["code"]) == (409, "INSTANCE_ID_CONFLICT")

    run(tmp_path, scenario)


def test_INV_17_a_map_that_comes_late_changes_nothing(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        await edge.put("run-retry-claim", maxAttempts=2)
        await edge.put("workflow-instance-put", instanceId="run-abc-retry-1")
        before = await edge.here.types("r")
        assert (await edge.put("workflow-instance-put", instanceId="run-abc"))[0] == 200
        assert await edge.here.types("r") == before

    run(tmp_path, scenario)


def test_INV_18_an_attempt_that_nobody_claimed_is_refused(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        for name in ("run-abc-retry-1", "run-abc-retry-99"):
            status, shown = await edge.put("workflow-instance-put", instanceId=name)
            assert (status, shown["error"]["code"]) == (409, "ATTEMPT_NOT_CLAIMED")

    run(tmp_path, scenario)


def test_INV_27_many_observers_of_one_failure_claim_once(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        await edge.put("workflow-instance-put", instanceId="run-abc")
        answers = await asyncio.gather(
            *(edge.put("run-retry-claim", maxAttempts=2) for _ in range(50))
        )
        assert {(status, body["claimed"], body["attempts"]) for status, body in answers} == {
            (200, True, 1)
        }
        assert (await edge.here.types("r")).count("retry.claimed") == 1

    run(tmp_path, scenario)


@pytest.mark.parametrize(("asked", "yes"), [(0, 0), (1, 1), (2, 2), (10, 2)])
def test_INV_26_attempts_stay_within_what_is_frozen_and_asked(
    tmp_path: Path, asked: int, yes: int
) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        for attempt in range(yes):
            suffix = f"-retry-{attempt}" if attempt else ""
            await edge.put("workflow-instance-put", instanceId=f"run-abc{suffix}")
            status, claim = await edge.put("run-retry-claim", maxAttempts=asked)
            assert (status, claim["claimed"], claim["attempts"]) == (200, True, attempt + 1)
        suffix = f"-retry-{yes}" if yes else ""
        await edge.put("workflow-instance-put", instanceId=f"run-abc{suffix}")
        status, claim = await edge.put("run-retry-claim", maxAttempts=asked)
        assert (status, claim["claimed"], claim["attempts"]) == (200, False, yes)
        assert claim["reason"] == "LIMIT_REACHED"
        assert (await edge.here.types("r"))[-2:] == ["retry.denied", "run.failed"]
        status, claim = await edge.put("run-retry-claim", maxAttempts=asked)
        assert (claim["claimed"], claim["reason"]) == (False, "LIMIT_REACHED")

    run(tmp_path, scenario)


def test_INV_29_nothing_is_claimed_with_params_that_cannot_be_read(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()

        def lose(connection: Any, _at: int) -> None:
            connection.execute("delete from vault_values")

        await edge.here.ledger.log.run_job(lose)
        before = await edge.here.types("r")
        status, shown = await edge.put("run-retry-claim", maxAttempts=2)
        assert (status, shown["error"]["code"]) == (410, "MISSING")
        assert await edge.here.types("r") == before

    run(tmp_path, scenario)


def test_INV_46_INV_49_sessions_come_whole_and_alive_or_not_at_all(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        assert await edge.get("db-sessions-get") == (200, {"sessions": []})
        status, shown = await edge.put("db-sessions-put", sessions=[SESSION], ttlMs=20_000)
        assert (status, shown["sessionCount"]) == (200, 1)
        status, shown = await edge.get("db-sessions-get")
        assert (status, shown["error"]["code"]) == (404, "EXPIRED")
        status, _ = await edge.put("db-sessions-put", sessions=[SESSION, SESSION], ttlMs=60_000)
        assert status == 200
        assert len((await edge.get("db-sessions-get"))[1]["sessions"]) == 2
        status, shown = await edge.put("db-sessions-put", sessions=[])
        assert (status, shown["error"]["code"]) == (422, "SESSIONS_EMPTY")

    run(tmp_path, scenario)


def test_INV_62_INV_63_a_childs_terminal_is_set_once_and_awaited(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        assert await edge.get("child-terminal-get", eventKey="k") == (200, {"state": None})
        waiting = asyncio.ensure_future(
            edge.get("child-terminal-await", eventKey="k", timeoutMs=30_000)
        )
        status, _ = await edge.put("child-terminal-set", eventKey="k", data={"v": 1}, storedAt=5)
        assert status == 200
        status, shown = await waiting
        assert (status, shown["state"]["data"], shown["state"]["eventKey"]) == (200, {"v": 1}, "k")
        assert shown["state"]["storedAt"] > 0
        await edge.put("child-terminal-set", eventKey="k", data={"v": 1})
        assert "child.terminal_conflict" not in await edge.here.types("r")
        await edge.put("child-terminal-set", eventKey="k", data={"v": 2})
        assert "child.terminal_conflict" in await edge.here.types("r")
        _, shown = await edge.get("child-terminal-await", eventKey="k", timeoutMs="nan")
        assert shown["state"]["data"] == {"v": 1}

    run(tmp_path, scenario)


def test_INV_63_an_await_ends_with_its_timeout(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        for timeout in ("20", "-5", "nan", "inf"):
            answered = await edge.get("child-terminal-await", eventKey="k", timeoutMs=timeout)
            assert answered == (200, {"state": None})

    run(tmp_path, scenario)


def test_a_run_ends_by_what_its_coordinator_reports(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        await edge.put("workflow-instance-put", instanceId="run-abc")
        assert await edge.get("terminal-state") == (200, {"state": None})
        status, _ = await edge.put(
            "run-event-append", event={"type": "status", "status": "running"}
        )
        assert status == 200
        line = {"type": "log", "seq": 1, "message": "half \x1b[31mway", "level": "info"}
        assert (await edge.put("run-event-append", event=line))[0] == 200
        result = {"type": "result", "result": {"rows": [1]}, "outputRows": 1}
        assert (await edge.put("run-event-append", event=result))[0] == 200
        _, shown = await edge.get("terminal-state")
        assert shown["state"]["status"] == "completed"
        assert shown["state"]["result"] == {"rows": [1]}
        assert shown["state"]["completedAt"] > 0
        assert await edge.here.types("r") == [
            "run.submitted",
            "run.launch_state_put",
            "instance.create_requested",
            "instance.mapped",
            "run.log",
            "instance.completed",
            "run.completed",
        ]

    run(tmp_path, scenario)


def test_a_run_fails_by_what_its_coordinator_reports(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        await edge.put("workflow-instance-put", instanceId="run-abc")
        failed = {"type": "status", "status": "failed", "error": f"cannot reach {URL_CANARY}"}
        assert (await edge.put("run-event-append", event=failed))[0] == 200
        _, shown = await edge.get("terminal-state")
        assert shown["state"]["status"] == "failed"
        assert "***@db.example" in shown["state"]["error"]["message"]
        status, shown = await edge.put("run-event-append", event={"type": "odd"})
        assert (status, shown["error"]["code"]) == (422, "RUN_EVENT_INVALID")

    run(tmp_path, scenario)
    _assert_nowhere(tmp_path, b"canary-password")


def test_what_only_its_coordinator_can_do_is_refused_here(tmp_path: Path) -> None:
    async def scenario(edge: Edge) -> None:
        await edge.launch()
        answered = await edge.here.http.post("/workflow/r/cancel", json={})
        assert answered.status_code == 409
        assert answered.json()["error"]["code"] == "RUN_DRIVEN_ELSEWHERE"
        await edge.here.submit("local", "t:gate")
        for path, body in (
            ("workflow-instance-put", {"instanceId": "x"}),
            ("run-retry-claim", {"maxAttempts": 1}),
            ("run-event-append", {"event": {"type": "status", "status": "completed"}}),
        ):
            status, shown = await edge.put(path, "local", **body)
            assert (status, shown["error"]["code"]) == (409, "RUN_DRIVEN_HERE")
        status, shown = await edge.put("run-retry-claim", "nobody", maxAttempts=1)
        assert (status, shown["error"]["code"]) == (404, "RUN_NOT_FOUND")

    run(tmp_path, scenario)


def test_nothing_here_creates_instances_of_such_a_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            edge = Edge(here)
            await edge.launch()
            await here.submit("other")
            assert await here.end("other") == "completed"
            intents = [r async for r in here.ledger.events(stream="run/r")]
            assert not [r for r in intents if isinstance(r.data, e.InstanceCreated)]
            assert (await here.http.get("/workflow/r/status")).json()["status"] == "submitted"

    asyncio.run(scenario())
    assert replay.verify(tmp_path / "http.db").ok


def _assert_nowhere(folder: Path, canary: bytes) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            assert canary not in path.read_bytes(), path
