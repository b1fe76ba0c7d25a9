"""Temporal's dev server on a SQLite file (WAL, `synchronous=FULL`), with the Python SDK's worker.

The server is a process of ours, on loopback, and is stopped by its own handle.

    python -m benchmarks.peer_temporal family CALLERS RUNS FOLDER
    python -m benchmarks.peer_temporal replay HISTORIES FOLDER
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from temporalio import workflow
from temporalio.client import Client, WorkflowHistory
from temporalio.service import RPCError
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

from benchmarks.harness import Sample, Unmeasured, answer, fresh, latencies

QUEUE = "bench"
WARM_UP_PER_CALLER = 1
START_S = 30


@workflow.defn
class Kid:
    @workflow.run
    async def run(self, n: int) -> int:
        return n


@workflow.defn
class Parent:
    @workflow.run
    async def run(self, n: int) -> int:
        child = workflow.info().workflow_id + "-kid"
        return await workflow.execute_child_workflow(Kid.run, n, id=child)


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[Client]:
    """Gives a client of a dev server that ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "temporal"), "server", "start-dev", "--headless"]
    command += ["--ip", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    command += ["--db-filename", str(fresh(folder) / "temporal.db")]
    for pragma in ("journal_mode=wal", "synchronous=2"):
        command += ["--sqlite-pragma", pragma]
    process = _start(command, folder / "server.out")
    try:
        yield await _connect(port, process)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def _start(command: list[str], out: Path) -> subprocess.Popen[bytes]:
    with out.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


async def _connect(port: int, process: subprocess.Popen[bytes]) -> Client:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            client = await Client.connect(f"127.0.0.1:{port}")
            await client.workflow_service.get_system_info(_system_info())
        except (RuntimeError, RPCError):
            await asyncio.sleep(0.1)
        else:
            await asyncio.sleep(1)  # its namespace is made a moment after it answers
            return client
    raise Unmeasured("the dev server did not start")


def _system_info() -> object:
    from temporalio.api.workflowservice.v1 import GetSystemInfoRequest  # noqa: PLC0415

    return GetSystemInfoRequest()


def worker(client: Client) -> Worker:
    """Returns a worker for both workflows."""
    return Worker(
        client,
        task_queue=QUEUE,
        workflows=[Parent, Kid],
        max_cached_workflows=2000,
        max_concurrent_workflow_tasks=100,
        workflow_runner=UnsandboxedWorkflowRunner(),
    )


async def family(callers: int, runs: int, folder: Path) -> Sample:
    """Measures parents per second with `callers` in flight."""
    waits: list[float] = []
    async with server(folder) as client, worker(client):

        async def caller(name: str, share: int) -> None:
            for number in range(share):
                begun = time.perf_counter()
                got = await client.execute_workflow(
                    Parent.run, number, id=f"{name}-{number}", task_queue=QUEUE
                )
                assert got == number
                waits.append(time.perf_counter() - begun)

        await asyncio.gather(*(caller(f"w{c}", WARM_UP_PER_CALLER) for c in range(callers)))
        waits.clear()
        begun = time.perf_counter()
        await asyncio.gather(*(caller(f"m{c}", max(1, runs // callers)) for c in range(callers)))
        took = time.perf_counter() - begun
    return {"rate": len(waits) / took, **latencies(waits)}


async def replay(histories: int, folder: Path) -> Sample:
    """Measures how many history events a second the SDK's Replayer takes."""
    async with server(folder) as client, worker(client):
        handle = await client.start_workflow(Parent.run, 1, id="replayed", task_queue=QUEUE)
        await handle.result()
        history = await handle.fetch_history()
    replayer = Replayer(workflows=[Parent, Kid], workflow_runner=UnsandboxedWorkflowRunner())

    async def again() -> AsyncIterator[WorkflowHistory]:
        for _ in range(histories):
            yield history

    begun = time.perf_counter()
    results = await replayer.replay_workflows(again(), raise_on_replay_failure=True)
    took = time.perf_counter() - begun
    assert not results.replay_failures
    return {"rate": histories * len(history.events) / took, "events": len(history.events)}


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[-1]) / "temporal"
    match what:
        case "family":
            answer(asyncio.run(family(int(sys.argv[2]), int(sys.argv[3]), folder)))
        case "replay":
            answer(asyncio.run(replay(int(sys.argv[2]), folder)))
        case _:
            raise SystemExit(f"no such side: {what}")


if __name__ == "__main__":
    main()
