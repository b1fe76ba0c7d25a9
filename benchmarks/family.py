"""T4: a parent and its one child, both doing nothing, from submit to completed.

python -m benchmarks.family ours CALLERS RUNS FOLDER
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import playledger
from benchmarks.harness import Sample, answer, fresh, latencies
from benchmarks.plays import kid, parent
from playledger.server import run, settle_memory

WARM_UP_PER_CALLER = 4


async def ours(callers: int, runs: int, folder: Path) -> Sample:
    """Measures parents per second with `callers` in flight."""
    path = fresh(folder / "ours") / "log.db"
    waits: list[float] = []
    async with playledger.open(path, plays=[kid, parent]) as ledger:

        async def caller(share: int) -> None:
            for number in range(share):
                begun = time.perf_counter()
                handle = await ledger.submit(parent, number)
                assert await handle.result() == number
                waits.append(time.perf_counter() - begun)

        await asyncio.gather(*(caller(WARM_UP_PER_CALLER) for _ in range(callers)))
        waits.clear()
        settle_memory()
        begun = time.perf_counter()
        await asyncio.gather(*(caller(runs // callers) for _ in range(callers)))
        took = time.perf_counter() - begun
    return {"rate": len(waits) / took, **latencies(waits)}


def main() -> None:
    callers, runs, folder = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    answer(run(ours(callers, runs, folder)))  # on the loop that `serve` runs on


if __name__ == "__main__":
    main()
