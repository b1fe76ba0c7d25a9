"""T21 and T26: two processes on one SQLite file.

    python -m benchmarks.crossing append CALLERS SECONDS NAME FILE   says READY, waits for GO
    python -m benchmarks.crossing react  FILE                        drives `clocked` until told END
    python -m benchmarks.crossing submit RUNS FILE                   submits them, one by one

All clocks are the machine's monotonic one, which its processes share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import playledger
from benchmarks.append import Journey
from benchmarks.harness import (
    Sample,
    answer,
    child,
    expect,
    fresh,
    latencies,
    median_of,
    start_child,
    tell,
)
from benchmarks.plays import STARTED_AT, clocked
from playledger.embed import Ledger
from playledger.wiring import open_log, plays_of

SETTLE_S = 1.0
PAUSE_S = 0.030
STEP_S = 0.0017
"""So that commits fall on every phase of the other's look."""


async def append(callers: int, seconds: float, name: int, path: Path) -> Sample:
    """Appends for so long, from GO on, and tells how often and how long each append took."""
    log = await open_log(path)
    waits: list[float] = []
    print("READY", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    until = time.perf_counter() + seconds

    async def caller(number: int) -> None:
        journey = Journey(log, waits)
        index = 0
        while time.perf_counter() < until:
            await journey.go(index, name * 1000 + number)
            index += 1

    begun = time.perf_counter()
    await asyncio.gather(*(caller(number) for number in range(callers)))
    took = time.perf_counter() - begun
    await log.close()
    return {"count": len(waits), "seconds": took, **latencies(waits)}


def together(processes: int, callers: int, seconds: float, folder: Path) -> Sample:
    """Measures so many processes at once on one fresh file (for the parent)."""
    path = fresh(folder) / "log.db"
    started = []
    for name in range(processes):
        process = start_child("crossing", "append", callers, seconds, name, path)
        expect(process, "READY")
        started.append(process)
    for process in started:
        tell(process, "GO")
    found = [_told(expect(process, "DONE")) for process in started]
    for process in started:
        process.communicate()
    total = sum(sample["count"] for sample in found)
    return {
        "rate": sum(sample["count"] / sample["seconds"] for sample in found),
        "least": min(sample["count"] for sample in found) / total,
        "max": max(sample["max"] for sample in found),
    }


def _told(text: str) -> Sample:
    count, seconds, longest = text.split()
    return {"count": int(count), "seconds": float(seconds), "max": float(longest)}


async def react(path: Path) -> None:
    """Drives plays of the file until told to end, and tells when each began."""
    async with playledger.open(path, plays=[clocked]):
        print("READY", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print("DONE", *STARTED_AT, flush=True)


async def submit(runs: int, path: Path) -> Sample:
    """Submits runs without driving any, and tells when each was durable."""
    durable = []
    log = await open_log(path)
    ledger = Ledger(log, plays_of([clocked]))
    for number in range(runs):
        await ledger.submit(clocked, number)
        durable.append(time.monotonic())
        await asyncio.sleep(PAUSE_S + STEP_S * (number % 7))
    await asyncio.sleep(SETTLE_S)
    await log.close()
    return {"durable": durable}


def reactions(runs: int, folder: Path) -> Sample:
    """Measures from a commit in one process to its play's start in another (for the parent)."""
    path = fresh(folder) / "log.db"
    driver = start_child("crossing", "react", path)
    expect(driver, "READY")
    durable = child("crossing", "submit", runs, path)["durable"]
    tell(driver, "END")
    began = [float(text) for text in expect(driver, "DONE").split()]
    driver.communicate()
    assert len(began) == runs, (len(began), runs)
    waits = [b - d for b, d in zip(began, durable, strict=True)]
    return {**latencies(waits), "p50": median_of(waits) * 1e3}


def main() -> None:
    what = sys.argv[1]
    match what:
        case "append":
            callers, seconds, name = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
            sample = asyncio.run(append(callers, seconds, name, Path(sys.argv[5])))
            print("DONE", sample["count"], sample["seconds"], sample["max"], flush=True)
        case "react":
            asyncio.run(react(Path(sys.argv[2])))
        case "submit":
            answer(asyncio.run(submit(int(sys.argv[2]), Path(sys.argv[3]))))
        case _:
            raise SystemExit(f"no such side: {what}")


if __name__ == "__main__":
    main()
