"""The database sessions of a run: from their keeping to their end (SPEC 1.15 to 1.17)."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from handlers.session_crypto import seal_for_token
from handlers.submit import Submission
from ledger import events as e
from ledger.canonical import Json
from tests import process_plays as plays
from tests.local_node import POLICY, Given, node

TOKEN = "canary-executor-token-77aa"
URL = "postgresql://runner:canary-db-password@db.example/crm"
CANARIES = (b"canary-executor-token", b"canary-db-password")
PLAYS = (plays.query, plays.plain_query)
FAR = 4_000_000_000_000


def session(token: str = TOKEN, **changes: Json) -> dict[str, Json]:
    """Returns a session as a caller sends it: its URL encrypted for the run's token."""
    base: dict[str, Json] = {
        "expiresAt": FAR,
        "operations": ["select"],
        "playName": "query",
        "target": {"logicalTable": "leads", "orgId": "local", "tableNamespace": "crm"},
        **changes,
    }
    return {**base, "encryptedPostgresUrl": seal_for_token(URL, base, token)}


async def submit(given: Given, play: Any = plays.query, **changes: Any) -> None:
    request: dict[str, Any] = {
        "input": "crm.leads",
        "secrets": {"executorToken": TOKEN},
        "sessions": (session(),),
        "sessions_ttl_ms": 3_600_000,
        **changes,
    }
    await given.ledger.submitter.submit(
        Submission(
            run_id="r",
            play_name=f"tests.process_plays:{play.__name__}",
            actor="library/local",
            policy=POLICY,
            **request,
        )
    )


async def failure(given: Given) -> str:
    assert await given.end("r") == "failed"
    (failed,) = await given.events("r", e.RunFailed)
    return str(failed.code)


@pytest.mark.parametrize("isolation", ["task", "process"])
def test_INV_39_INV_40_a_play_opens_its_session_and_nobody_else_sees_where_it_leads(
    tmp_path: Path, isolation: e.Isolation, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with node(tmp_path, *PLAYS, isolation=isolation) as given:
            await submit(given)
            assert await given.end("r") == "completed"
            assert await given.ledger.run("r").result() == {
                "host": "db.example/crm",
                "operations": ["select"],
            }
            await given.seen("r", "session.revoked")

    asyncio.run(main())
    out, err = capfd.readouterr()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for canary in CANARIES:
        assert not any(canary in content for content in written)
        assert canary.decode() not in out + err


def test_a_plain_play_opens_its_session_through_its_bridge(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, *PLAYS) as given:
            await submit(given, plays.plain_query)
            assert await given.end("r") == "completed"

    asyncio.run(main())


def test_INV_03_sessions_are_kept_before_anything_is_dispatched(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, *PLAYS) as given:
            await submit(given)
            await given.end("r")
            types = await given.types("r")
            assert types.index("session.stored") < types.index("instance.create_requested")

    asyncio.run(main())


def test_INV_48_a_run_that_ended_leaves_no_session_behind(tmp_path: Path) -> None:
    async def main() -> str:
        async with node(tmp_path, *PLAYS) as given:
            await submit(given)
            await given.seen("r", "session.revoked")
            types = await given.types("r")
            assert types[-3:] == ["run.completed", "session.revoke_requested", "session.revoked"]
            (stored,) = await given.events("r", e.SessionStored)
            return str(stored.sessions.digest)

    digest = asyncio.run(main())
    (log,) = tmp_path.glob("*.db")
    with sqlite3.connect(log) as connection:
        held = connection.execute("select count(*) from vault_values where digest = ?", (digest,))
        assert held.fetchone() == (0,)


def test_INV_49_no_instance_starts_on_sessions_about_to_expire(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, *PLAYS) as given:
            await submit(given, sessions_ttl_ms=29_000)
            assert await failure(given) == "EXPIRED"
            assert not await given.events("r", e.InstanceStarted)

    asyncio.run(main())


def test_a_table_that_nobody_planned_is_refused_with_what_there_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, *PLAYS) as given:
            await submit(given, input="crm.notes")
            assert await failure(given) == "SESSION_NOT_PLANNED"

    asyncio.run(main())


def test_a_run_without_sessions_has_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, *PLAYS) as given:
            await submit(given, sessions=())
            assert await failure(given) == "SESSION_NOT_PLANNED"
            assert "session.revoke_requested" not in await given.types("r")

    asyncio.run(main())


def test_INV_44_a_session_for_another_token_does_not_open(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, *PLAYS) as given:
            await submit(given, sessions=(session("another-token-entirely"),))
            assert await failure(given) == "SESSION_UNREADABLE"

    asyncio.run(main())
