"""T20: many runs in flight, `kill -9`, and how long until all of them have been driven on.

python -m benchmarks.crash park    RUNS FILE   says READY with all of them waiting
python -m benchmarks.crash recover RUNS FILE   carries on, and tells how long it took
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import playledger
from benchmarks.harness import Sample, answer, child, expect, fresh, start_child
from benchmarks.plays import PARK_VARIABLE, parked
from ledger.query import Query, first_value

PARKED = Query("select count(*) from waits where outcome is null", (), first_value)
ENDED = Query("select count(*) from runs where status = 'completed'", (), first_value)
TOGETHER = 64
LIMIT_S = 120


async def park(runs: int, path: Path) -> None:
    """Brings every run to its wait, says so, and waits to be killed."""
    os.environ[PARK_VARIABLE] = "1"
    fresh(path.parent)
    async with playledger.open(path, plays=[parked]) as ledger:
        for first in range(0, runs, TOGETHER):
            numbers = range(first, min(runs, first + TOGETHER))
            await asyncio.gather(*(ledger.submit(parked, number) for number in numbers))
        while await ledger.log.reader.ask(PARKED) < runs:  # noqa: ASYNC110 - a count, no event
            await asyncio.sleep(0.05)
        print("READY", flush=True)
        await asyncio.Event().wait()


async def recover(runs: int, path: Path, started: float) -> Sample:
    """Opens what was left, and waits until every run has completed."""
    async with playledger.open(path, plays=[parked]) as ledger:
        ready = time.perf_counter()
        done = 0
        while done < runs and time.perf_counter() - ready < LIMIT_S:
            done = await ledger.log.reader.ask(ENDED)
            await asyncio.sleep(0.005)
        ended = time.perf_counter()
    return {"done": done, "seconds": ended - ready, "from_start": ended - started}


def kill_and_recover(module: str, runs: int, path: Path) -> Sample:
    """Kills one that has all of them in flight, and measures the next (for the parent)."""
    victim = start_child(module, "park", runs, path)
    try:
        expect(victim, "READY")
    finally:
        victim.kill()
        victim.communicate()
    sample = child(module, "recover", runs, path)
    assert sample["done"] == runs, sample
    return sample


def main() -> None:
    started = time.perf_counter()
    what, runs, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    match what:
        case "park":
            asyncio.run(park(runs, path))
        case "recover":
            answer(asyncio.run(recover(runs, path, started)))
        case _:
            raise SystemExit(f"no such side: {what}")


if __name__ == "__main__":
    main()
