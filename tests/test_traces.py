"""Perf traces and warm-up runs: measurements beside the log, never facts (SPEC 1.4, 1.34, 7.38)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import replay
from ledger import events as e
from ledger.traces import Traces, traces_query, write_traces
from playledger.warmup import warmup_play
from projections.load import WARMUP
from tests.http_world import PLAYS, World, world


def test_a_full_queue_drops_the_oldest_and_counts_them() -> None:
    traces = Traces(lambda: 5, size=3)
    for n in range(5):
        traces.record(f"r{n}", "phase", n)
    assert traces.dropped == 2
    assert [trace.run_id for trace in traces.take()] == ["r2", "r3", "r4"]
    assert traces.take() == []


def test_a_trace_is_rounded_and_never_negative() -> None:
    traces = Traces(lambda: 5)
    traces.record("r", "phase", -3.2)
    traces.record("r", "phase", 2.6, graph_hash="g", sessions=2)
    first, second = traces.take()
    assert (first.ms, first.extra, first.at) == (0, None, 5)
    assert (second.ms, second.graph_hash, second.extra) == (3, "g", '{"sessions":2}')


def test_a_run_leaves_its_phases(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        await here.submit("r", "t:parent")
        await here.reach("r", "child.requested")
        asked = [r.data async for r in here.ledger.events(stream="run/r")]
        child = next(d.child_run_id for d in asked if isinstance(d, e.ChildRequested))
        await here.reach(child, "run.submitted")
        await here.ledger.signal(child, "go")
        assert await here.end("r") == "completed"
        shown = (await here.http.get("/workflow/r/traces")).json()
        assert shown["runId"] == "r"
        phases = [trace["phase"] for trace in shown["traces"]]
        assert phases == [
            "coordinator.retry_state_persistence",
            "coordinator.workflow_start_gap",
            "coordinator.workflow_create",
            "coordinator.dispatch_workflow",
            "coordinator.child_submit_workflow",
        ]
        extras = {trace["phase"]: trace.get("extra") for trace in shown["traces"]}
        assert extras["coordinator.retry_state_persistence"] == {"combinedLaunchState": False}
        assert extras["coordinator.child_submit_workflow"] == {
            "childRunId": child,
            "status": "submitted",
        }
        assert (await here.http.get("/workflow/nobody/traces")).status_code == 404

    run(tmp_path, scenario)


def test_traces_may_be_dropped_and_old_ones_go(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        log = here.ledger.log
        await here.submit("r")
        await here.end("r")
        await log.write_traces()
        assert await log.reader.ask(traces_query("r", 10))
        await log.run_job(lambda connection, _at: connection.execute("update traces set at = 0"))
        log.traces.record("other", "phase", 1)
        await log.write_traces()
        assert not await log.reader.ask(traces_query("r", 10))
        assert await log.reader.ask(traces_query("other", 10))
        await log.run_job(lambda connection, _at: connection.execute("drop table traces"))
        log.traces.record("other", "phase", 1)
        await log.write_traces()
        await here.submit("later")
        assert await here.end("later") == "completed"

    run(tmp_path, scenario)


def test_writing_nothing_is_no_commit(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        here.ledger.log.traces.take()
        await here.ledger.log.write_traces()
        assert await here.ledger.log.run_job(write_traces([])) is None

    run(tmp_path, scenario)


def test_a_warm_up_runs_as_others_do_and_is_in_no_list(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        answered = await here.http.post("/warmup/submit", json={"label": "deploy"})
        assert answered.status_code == 200
        shown = answered.json()
        assert (shown["status"], shown["terminalState"], shown["code"]) == (
            "submitted",
            "completed",
            None,
        )
        assert (await here.http.get("/workflow")).json()["runs"] == []
        named = await here.http.get("/workflow", params={"play": WARMUP})
        assert [line["runId"] for line in named.json()["runs"]] == [shown["runId"]]
        traces = (await here.http.get(f"/workflow/{shown['runId']}/traces")).json()["traces"]
        warm = [trace for trace in traces if trace["phase"] == "coordinator.warmup"]
        assert [trace["extra"] for trace in warm] == [{"label": "deploy", "status": "submitted"}]

    run(tmp_path, scenario, plays=(*PLAYS, warmup_play().function))
    assert replay.verify(tmp_path / "http.db").ok


def test_a_warm_up_that_cannot_run_says_so(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        answered = await here.http.post("/warmup/submit", json={})
        assert answered.status_code == 503
        assert answered.json()["code"] == "PLAY_NOT_FOUND"

    run(tmp_path, scenario)


def run(tmp_path: Path, scenario: Any, **opening: Any) -> None:
    async def inside() -> None:
        async with world(tmp_path, **opening) as here:
            await scenario(here)

    asyncio.run(inside())
