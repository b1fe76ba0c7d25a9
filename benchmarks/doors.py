"""T7 and T8: what a status costs in the library and over HTTP, and what a start costs.

python -m benchmarks.doors clone   RUNS FILE   a log whose read models hold so many runs
python -m benchmarks.doors status  READS FILE  ledger.status of runs drawn at random
python -m benchmarks.doors nothing             a server with one GET that does nothing
python -m benchmarks.doors load    REQUESTS PORT PATH...   32 clients, one process
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import playledger
from benchmarks.harness import (
    ENVIRONMENT,
    ROOT,
    Sample,
    Unmeasured,
    answer,
    child,
    fresh,
    latencies,
    median_of,
    start_child,
)
from benchmarks.plays import kid

CLIENTS = 32
START_S = 60.0
IDLE_S = 3.0
STARTS = 5
LIBRARIES = (
    "aiosqlite, fastapi, httptools, pydantic_settings, sqlalchemy, structlog, uvicorn, uvloop"
)
_READY = re.compile(r"ready +http://[^:]+:(\d+)/")


async def clone(runs: int, path: Path) -> Sample:
    """Lets one real run end, and copies its rows; the log itself stays short."""
    fresh(path.parent)
    async with playledger.open(path, plays=[kid]) as ledger:
        await (await ledger.submit(kid, 1, run_id="original")).result()
    begun = time.perf_counter()
    connection = sqlite3.connect(path)
    connection.execute("pragma synchronous=off")
    connection.create_function("named", 1, lambda n: f"clone-{n:08d}", deterministic=True)
    counting = "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)"
    connection.execute(
        f"{counting} insert into runs select named(i), version, position, status, play_name,"
        " named(i), parent_run_id, attempt, submitted_at, ended_at,"
        " replace(state, '\"original\"', '\"' || named(i) || '\"') from n, runs"
        " where run_id = 'original'",
        (runs,),
    )
    connection.execute(
        f"{counting} insert into instances select named(i), attempt, named(i) || '-i', host, phase,"
        " replace(state, instance_id, named(i) || '-i') from n, instances"
        " where run_id = 'original'",
        (runs,),
    )
    connection.commit()
    connection.execute("pragma wal_checkpoint(truncate)").fetchall()
    connection.close()
    return {"runs": runs, "seconds": time.perf_counter() - begun}


async def status(reads: int, path: Path) -> Sample:
    """Measures a status of one run in the library."""
    with sqlite3.connect(path) as connection:
        (runs,) = connection.execute("select count(*) - 1 from runs").fetchone()
    draw = random.Random(7)
    waits = []
    async with playledger.open(path) as ledger:
        for number in range(reads + reads // 4):
            run_id = f"clone-{draw.randint(1, runs):08d}"
            begun = time.perf_counter()
            view = await ledger.status(run_id)
            if number >= reads // 4:
                waits.append(time.perf_counter() - begun)
            assert view.run.run_id == run_id
    return {**latencies(waits), "p50": median_of(waits) * 1e3}


def nothing() -> None:
    """Serves one GET that does nothing, on the server that `serve` uses, until it is ended."""
    import uvicorn  # noqa: PLC0415 - only this side needs it
    from fastapi import FastAPI, Response  # noqa: PLC0415

    from playledger.server import listen  # noqa: PLC0415

    app = FastAPI()

    @app.get("/nothing")
    async def do_nothing() -> Response:
        return Response(b"{}", media_type="application/json")

    listening = listen("127.0.0.1", 0)
    print(f"ready  http://127.0.0.1:{listening.getsockname()[1]}/", flush=True)
    config = uvicorn.Config(
        app, http="httptools", loop="uvloop", access_log=False, log_level="error"
    )
    uvicorn.Server(config).run(sockets=[listening])


class _Client(asyncio.Protocol):
    """Keeps one request under way on one connection; an answer is a head and its body."""

    def __init__(self, requests: Iterator[bytes], ended: asyncio.Future[int]) -> None:
        self._requests = requests
        self._ended = ended
        self._buffer = b""
        self._count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        if len(body) < length:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._ended.set_exception(Unmeasured(head.split(b"\r\n")[0].decode()))
            return
        self._buffer = body[length:]
        self._count += 1
        self._next()

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._transport.write(request)
            return
        self._transport.close()
        if not self._ended.done():
            self._ended.set_result(self._count)


async def load(requests: int, port: int, paths: list[str]) -> Sample:
    """Measures how many GETs a second a server answers to 32 clients."""
    loop = asyncio.get_running_loop()
    sent = [f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode() for path in paths]

    async def everybody(count: int) -> int:
        stream = iter(sent[number % len(sent)] for number in range(count))
        ended = [loop.create_future() for _ in range(CLIENTS)]
        for future in ended:
            await loop.create_connection(
                lambda future=future: _Client(stream, future), "127.0.0.1", port
            )
        return sum(await asyncio.gather(*ended))

    await everybody(max(CLIENTS, requests // 10))
    begun = time.perf_counter()
    count = await everybody(requests)
    return {"rate": count / (time.perf_counter() - begun)}


@contextmanager
def server(process: subprocess.Popen[str]) -> Iterator[int]:
    """Gives the port of a server once it says that it is ready, and ends it behind the block."""
    seen = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)
            found = _READY.search(line)
            if found:
                yield int(found[1])
                return
        raise Unmeasured(f"the server ended: {' '.join(seen)[-300:]}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def serve(path: Path) -> subprocess.Popen[str]:
    """Starts `playledger serve` on a log, on any free port."""
    command = [str(_program()), "serve", "benchmarks/plays.py", "--port", "0", "--insecure-local"]
    return subprocess.Popen(
        [*command, "--db", str(path)],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def status_over_http(requests: int, path: Path) -> Sample:
    """Measures GETs of a status (for the parent)."""
    with server(serve(path)) as port:
        paths = [f"/workflow/clone-{number:08d}/status" for number in range(1, 900, 7)]
        return child("doors", "load", requests, port, *paths)


def nothing_over_http(requests: int) -> Sample:
    """Measures GETs of nothing (for the parent)."""
    with server(start_child("doors", "nothing")) as port:
        return child("doors", "load", requests, port, "/nothing")


def help_time() -> Sample:
    """Measures `playledger --help`, and beside it Python itself and the server's libraries.

    These are what no code of ours can go below (for the parent).
    """

    def once(*command: str) -> float:
        begun = time.perf_counter()
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun

    once(str(_program()), "--help")  # the first after an install compiles
    helped, empty, libraries = [], [], []
    for _ in range(STARTS):
        helped.append(once(str(_program()), "--help"))
        empty.append(once(sys.executable, "-c", "pass"))
        libraries.append(once(sys.executable, "-c", f"import {LIBRARIES}"))
    return {
        "seconds": median_of(helped),
        "empty": median_of(empty),
        "libraries": median_of(libraries),
    }


def ready_time(path: Path) -> Sample:
    """Measures a `serve` from its start to ready, and what it holds when idle (for the parent)."""
    begun = time.perf_counter()
    process = serve(path)
    with server(process):
        seconds = time.perf_counter() - begun
        time.sleep(IDLE_S)
        status_of = Path(f"/proc/{process.pid}/status").read_text()
    rss = int(re.search(r"VmRSS:\s+(\d+) kB", status_of)[1])  # type: ignore[index]
    return {"seconds": seconds, "rss": rss * 1024 / 1e6}


def _program() -> Path:
    program = Path(sys.executable).parent / "playledger"
    if not program.exists():
        raise Unmeasured(f"{program} is not installed")
    return program


def main() -> None:
    what = sys.argv[1]
    match what:
        case "clone":
            answer(asyncio.run(clone(int(sys.argv[2]), Path(sys.argv[3]))))
        case "status":
            answer(asyncio.run(status(int(sys.argv[2]), Path(sys.argv[3]))))
        case "nothing":
            nothing()
        case "load":
            answer(asyncio.run(load(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
        case _:
            raise SystemExit(f"no such side: {what}")


if __name__ == "__main__":
    main()
