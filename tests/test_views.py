"""The one shape of a status, and what its parts say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from handlers.commands import Command
from ledger import events as e
from playledger.views import event_line, run_lines, status_view
from tests.http_world import policy, world

FIELDS = [
    "runId",
    "playName",
    "status",
    "attempt",
    "instanceId",
    "orgId",
    "parentRunId",
    "workflowFamilyKey",
    "result",
    "resultRef",
    "error",
    "retry",
    "progress",
    "children",
    "waitingOn",
    "parked",
    "submittedAt",
    "startedAt",
    "endedAt",
    "version",
    "asOfPosition",
]


def test_a_status_has_every_field_whatever_the_run_is(tmp_path: Path) -> None:
    """Absent is null and never missing, in a status and in each line of a list."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("done", waitMs=20_000)
            await w.submit("failed", "t:fail", waitMs=20_000)
            await w.submit("waits", "t:gate")
            await w.reach("waits", "run.wait_started")
            for run_id in ("done", "failed", "waits"):
                shown: Any = await status_view(w.ledger, await w.ledger.status(run_id))
                assert list(shown) == FIELDS
            for line in await run_lines(w.ledger, await w.ledger.runs()):
                assert list(line) == FIELDS

    asyncio.run(main())


def test_each_wait_names_the_event_that_ends_it(tmp_path: Path) -> None:
    """A signal, a child, a backoff: kind, key, since when, until when, where it began."""

    async def main() -> None:
        async with world(tmp_path) as w:
            for run_id, play_name, reached in (
                ("s", "t:gate", "run.wait_started"),
                ("c", "t:parent", "child.requested"),
                ("b", "t:later", "retry.claimed"),
            ):
                await w.submit(run_id, play_name)
                await w.reach(run_id, reached)
            waits: dict[str, Any] = {}
            for run_id in "scb":
                shown: Any = await status_view(w.ledger, await w.ledger.status(run_id))
                found = shown["waitingOn"]
                assert isinstance(found, list)
                assert len(found) == 1
                waits[run_id] = found[0]
            assert [(x["kind"], x["endsWith"]) for x in waits.values()] == [
                ("signal", "signal.received"),
                ("child", "child.terminal_set"),
                ("backoff", "instance.created"),
            ]
            assert (waits["s"]["key"], waits["c"]["key"]) == ("go", "only")
            assert waits["c"]["sinceAt"] > 0
            retry = (await status_view(w.ledger, await w.ledger.status("b")))["retry"]
            assert retry == {"attempt": 1, "reason": "play_retry", "used": 1, "limit": 3}
            lines: Any = await run_lines(w.ledger, await w.ledger.runs())
            kinds = {line["runId"]: [x["kind"] for x in line["waitingOn"]] for line in lines}
            assert (kinds["s"], kinds["c"], kinds["b"]) == (["signal"], ["child"], ["backoff"])

    asyncio.run(main())


def test_a_parked_item_shows_in_status_and_list(tmp_path: Path) -> None:
    """What was given up on is visible, with the event that resumes it."""

    async def main() -> None:
        async with world(tmp_path, driven=False) as w:
            await w.submit("r1")
            asked = (await w.ledger.log.read(stream="run/r1"))[2]
            fact = e.EffectFailed(
                intent_id=asked.id, kind="create", try_number=1, code="X", error_class="permanent"
            )
            await w.ledger.log.transact(
                Command(stream="run/r1", fact=fact, actor="node/n", cause=asked.id)
            )
            shown: Any = await status_view(w.ledger, await w.ledger.status("r1"))
            lines: Any = await run_lines(w.ledger, await w.ledger.runs())
            for view in (shown, lines[0]):
                assert [item["kind"] for item in view["parked"]] == ["create"]
                assert [item["endsWith"] for item in view["waitingOn"]] == ["effect.resumed"]

    asyncio.run(main())


def test_values_are_shown_where_they_may_be_and_can_be(tmp_path: Path) -> None:
    """Sealed on request, by reference when large, by reference with a reason when gone."""

    async def main() -> None:
        async with world(tmp_path, policy=policy(externalize_after_bytes=1024)) as w:
            await w.submit("small", input=[1], waitMs=20_000)
            await w.submit("large", input="x" * 2000, waitMs=20_000)
            small = await w.ledger.status("small")
            assert (await status_view(w.ledger, small))["result"] == [1]
            hidden: Any = await status_view(w.ledger, small, reveal=False)
            assert (hidden["result"], hidden["resultRef"]["bytes"]) == (None, 3)
            large: Any = await status_view(w.ledger, await w.ledger.status("large"))
            assert (large["result"], large["resultRef"]["bytes"]) == (None, 2002)
            await w.ledger.log.run_job(lambda c, _at: c.execute("delete from vault_values"))
        async with world(tmp_path) as w:
            gone: Any = await status_view(w.ledger, await w.ledger.status("small"))
            assert (gone["result"], gone["resultRef"]["gone"]) == (None, "MISSING")

    asyncio.run(main())


def test_an_event_in_words_keeps_its_place(tmp_path: Path) -> None:
    """Position, version, stream, time, type, and one line of text."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("r1", waitMs=20_000)
            lines = [event_line(r) for r in await w.ledger.log.read(stream="run/r1")]
            assert [line.version for line in lines] == list(range(1, len(lines) + 1))
            assert lines[0].type == "run.submitted"
            assert lines[0].text.startswith("t:echo")
            assert all("\n" not in line.text for line in lines)

    asyncio.run(main())
