"""`serve` on its way out: nothing acknowledged is lost, nothing ends twice (CASES C058)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

import playledger
from engines.plays import plays_in
from ledger import events as e
from playledger import HttpOptions, Ledger, http_app
from tests.http_world import BASE

PLAYS = '''
import asyncio
from pathlib import Path
from playledger import Run, play

@play(name="s:until")
async def until(run: Run, path: str) -> str:
    """Runs, without waiting for anything recorded, until a file is there."""
    while not Path(path).exists():
        await asyncio.sleep(0.01)
    return "ended by itself"

@play(name="s:gate")
async def gate(run: Run) -> object:
    return await run.signal("go")
'''
STREAM = {"Accept": "text/event-stream"}
ENDS = {"run.completed", "run.failed", "run.cancelled"}


class Served:
    """A `playledger serve` of its own, and a client of it."""

    def __init__(self, process: subprocess.Popen[bytes], http: httpx.AsyncClient) -> None:
        self.process = process
        self.http = http

    async def submit(self, run_id: str, play_name: str, value: Any = None) -> httpx.Response:
        body = {"playName": play_name, "input": value}
        return await self.http.post(f"/workflow/{run_id}/submit", json=body)

    async def stand(self, run_id: str, kind: str) -> None:
        """Waits until an event of this type stands in a run's stream."""
        async with (
            asyncio.timeout(20),
            self.http.stream("GET", f"/workflow/{run_id}/tail", headers=STREAM) as tail,
        ):
            async for line in tail.aiter_lines():
                if line == f"event: {kind}":
                    return

    async def exit_code(self) -> int:
        """Waits for the process to be gone."""
        return await asyncio.to_thread(self.process.wait, 30)


@asynccontextmanager
async def serving(tmp_path: Path, *, grace: str) -> AsyncIterator[Served]:
    process = _start(tmp_path, grace)
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(
            base_url=json.loads(line)["url"].rstrip("/"), timeout=40, limits=limits
        ) as http:
            yield Served(process, http)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _start(folder: Path, grace: str) -> subprocess.Popen[bytes]:
    plays = folder / "shutdown_plays.py"
    plays.write_text(PLAYS)
    command = [
        sys.executable,
        "-c",
        "import sys; from playledger.cli import main; sys.exit(main())",
    ]
    command += ["serve", str(plays), "--db", str(folder / "s.db"), "--json"]
    command += ["--port", "0", "--insecure-local", "--grace", grace]
    root = str(Path(__file__).parent.parent)
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
    )


async def _story(ledger: Ledger, run_id: str) -> list[Any]:
    return [r async for r in ledger.events(stream=f"run/{run_id}")]


async def _finish(tmp_path: Path, run_ids: list[str]) -> None:
    """Drives the log again, signals what waits, and expects every run to complete, once."""
    offered = plays_in(str(tmp_path / "shutdown_plays.py"))
    async with playledger.open(tmp_path / "s.db", plays=offered) as ledger:
        for run_id in run_ids:
            if not (await ledger.status(run_id)).run.terminal:
                await ledger.signal(run_id, "go", signal_id="go")
        async with asyncio.timeout(30):
            for run_id in run_ids:
                assert (await ledger.wait_for_end(run_id)).status == "completed"
        for run_id in run_ids:
            types = [r.type for r in await _story(ledger, run_id)]
            assert sum(kind in ENDS for kind in types) == 1, types


def test_C058_a_drain_refuses_new_work_lets_runs_end_and_releases_the_rest(
    tmp_path: Path,
) -> None:
    """SIGTERM with ten runs, three tails and two awaits in flight; exit 0 within the grace."""
    flag = tmp_path / "flag"
    quick = [f"q{n}" for n in range(5)]
    slow = [f"w{n}" for n in range(5)]

    async def main() -> None:
        async with serving(tmp_path, grace="4s") as s:
            for run_id in quick:
                assert (await s.submit(run_id, "s:until", str(flag))).status_code == 202
            for run_id in slow:
                assert (await s.submit(run_id, "s:gate")).status_code == 202
            for run_id in quick:
                await s.stand(run_id, "instance.started")
            for run_id in slow:
                await s.stand(run_id, "run.wait_started")
            tails = [
                asyncio.ensure_future(s.http.get(f"/workflow/{r}/tail", headers=STREAM))
                for r in slow[:3]
            ]
            awaits = [
                asyncio.ensure_future(s.http.get(f"/workflow/{r}/result?waitMs=30000"))
                for r in slow[:2]
            ]
            export = asyncio.ensure_future(s.http.get("/events?limit=1000"))
            assert (await s.http.get("/ready")).status_code == 200
            s.process.send_signal(signal.SIGTERM)
            for tail in tails:
                answer = await tail
                assert answer.content.endswith(b": shutting down\n\nretry: 1000\n\n")
            for waiting in awaits:
                assert (await waiting).json()["error"]["code"] == "RUN_NOT_ENDED"
            assert (await export).status_code == 200
            refused = await s.submit("new", "s:gate")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "SHUTTING_DOWN"
            assert int(refused.headers["retry-after"]) >= 1
            assert (await s.http.get("/ready")).status_code == 503
            assert (await s.http.get("/health")).status_code == 200
            late = {"eventKey": "note", "data": 1}
            assert (await s.http.post("/workflow/w0/signal", json=late)).status_code == 202
            flag.touch()
            assert await s.exit_code() == 0
        async with playledger.open(tmp_path / "s.db", read_only=True) as ledger:
            for run_id in quick:
                assert (await ledger.status(run_id)).run.status == "completed"
            for run_id in slow:
                run = (await ledger.status(run_id)).run
                assert run.status == "running"
                assert (run.used.restart, run.used.lost, run.used.retry) == (0, 0, 0)
                lost = [r.data for r in await _story(ledger, run_id) if r.type == "instance.lost"]
                assert [x.error_class for x in lost] == ["coordinator_shutdown"]
            assert [r async for r in ledger.events(stream="run/new")] == []
            system = [r.data async for r in ledger.events(stream="system")]
            assert isinstance(system[-1], e.NodeStopped)
        await _finish(tmp_path, [*quick, *slow])

    asyncio.run(main())


def test_C058_a_second_signal_skips_the_wait(tmp_path: Path) -> None:
    """A minute of grace, two signals: exit 0 at once, and nothing is lost."""

    async def main() -> None:
        async with serving(tmp_path, grace="60s") as s:
            await s.submit("w0", "s:gate")
            await s.stand("w0", "run.wait_started")
            s.process.send_signal(signal.SIGTERM)
            while (await s.http.get("/ready")).status_code == 200:  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.01)
            s.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                assert await s.exit_code() == 0
        await _finish(tmp_path, ["w0"])

    asyncio.run(main())


def test_C058_without_anything_running_it_leaves_at_once(tmp_path: Path) -> None:
    """The grace is a limit, not a pause."""

    async def main() -> None:
        async with serving(tmp_path, grace="60s") as s:
            assert (await s.http.get("/health")).status_code == 200
            s.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(20):
                assert await s.exit_code() == 0

    asyncio.run(main())


def test_C058_a_kill_in_the_middle_of_the_drain_loses_nothing(tmp_path: Path) -> None:
    """What was acknowledged is there, and goes on as after any other crash."""

    async def main() -> None:
        async with serving(tmp_path, grace="60s") as s:
            names = [f"w{n}" for n in range(4)]
            for run_id in names:
                await s.submit(run_id, "s:gate")
            for run_id in names:
                await s.stand(run_id, "run.wait_started")
            s.process.send_signal(signal.SIGTERM)
            while (await s.http.get("/ready")).status_code == 200:  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.01)
            kept = {"eventKey": "go", "signalId": "go", "data": None}
            assert (await s.http.post("/workflow/w0/signal", json=kept)).status_code == 202
            s.process.kill()
            await s.exit_code()
        await _finish(tmp_path, names)

    asyncio.run(main())


def test_C010_c_a_cancel_after_the_host_was_killed_ends_the_run(tmp_path: Path) -> None:
    """The answer is true, and the run is cancelled though nothing of it runs any more."""

    async def main() -> None:
        async with serving(tmp_path, grace="1s") as s:
            await s.submit("w0", "s:gate")
            await s.stand("w0", "run.wait_started")
            s.process.kill()
            await s.exit_code()
        async with playledger.open(tmp_path / "s.db") as ledger:  # drives nothing
            app = http_app(ledger, HttpOptions(insecure_local=True))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
                answer = await http.post("/workflow/w0/cancel", json={"reason": "stuck"})
                assert answer.status_code in (200, 202)
                shown = (await http.get("/workflow/w0")).json()
                assert shown["status"] == answer.json()["status"] == "cancelled"

    asyncio.run(main())
