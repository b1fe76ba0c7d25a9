"""DBOS on its default SQLite file, doing what ours does.

python -m benchmarks.peer_dbos family CALLERS RUNS FOLDER
python -m benchmarks.peer_dbos park    RUNS FOLDER     says READY, then waits to be killed
python -m benchmarks.peer_dbos recover RUNS FOLDER     carries on with what `park` left
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from pathlib import Path

from dbos import DBOS, DBOSConfig

from benchmarks.harness import Sample, answer, fresh, latencies

WARM_UP_PER_CALLER = 2
FINISHED: dict[int, float] = {}
PARK = "park" in sys.argv[1:2]


@DBOS.workflow()
async def kid(n: int) -> int:
    return n


@DBOS.workflow()
async def parent(n: int) -> int:
    return await kid(n)


@DBOS.step()
async def step(n: int) -> int:
    return n


@DBOS.workflow()
async def parked(n: int) -> int:
    await step(n)
    if PARK:
        await asyncio.sleep(600)
    FINISHED[n] = time.perf_counter()
    return n


def launch(folder: Path) -> None:
    """Starts DBOS on the folder's file, without its admin server."""
    logging.disable(logging.WARNING)
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": f"sqlite:///{folder / 'dbos.sqlite'}",
        "log_level": "ERROR",
        "executor_id": "local",
        "application_version": "1",
        "run_admin_server": False,
    }
    DBOS(config=config)
    DBOS.launch()


async def family(callers: int, runs: int) -> Sample:
    """Measures parents per second; a caller awaits the workflow itself, which needs no polling."""
    waits: list[float] = []

    async def caller(share: int) -> None:
        for number in range(share):
            begun = time.perf_counter()
            assert await parent(number) == number
            waits.append(time.perf_counter() - begun)

    await asyncio.gather(*(caller(WARM_UP_PER_CALLER) for _ in range(callers)))
    waits.clear()
    begun = time.perf_counter()
    await asyncio.gather(*(caller(runs // callers) for _ in range(callers)))
    return {"rate": len(waits) / (time.perf_counter() - begun), **latencies(waits)}


async def park(runs: int) -> None:
    """Brings runs behind their first step."""
    for first in range(0, runs, 50):
        await asyncio.gather(
            *(DBOS.start_workflow_async(parked, n) for n in range(first, min(runs, first + 50)))
        )
    await asyncio.sleep(5)
    print("READY", flush=True)
    await asyncio.sleep(600)


def recover(runs: int, launched: float) -> Sample:
    """Waits until all that was parked has finished."""
    while len(FINISHED) < runs and time.perf_counter() - launched < 120:
        time.sleep(0.01)
    return {"done": len(FINISHED), "seconds": max(FINISHED.values()) - launched}


def main() -> None:
    what = sys.argv[1]
    match what:
        case "family":
            callers, runs, folder = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
            launch(fresh(folder / "dbos"))
            answer(asyncio.run(family(callers, runs)))
        case "park":
            launch(fresh(Path(sys.argv[3])))
            asyncio.run(park(int(sys.argv[2])))
        case "recover":
            launched = time.perf_counter()
            launch(Path(sys.argv[3]))
            answer(recover(int(sys.argv[2]), launched))
        case _:
            raise SystemExit(f"no such side: {what}")
    sys.stdout.flush()
    os._exit(0)  # its threads would go on


if __name__ == "__main__":
    main()
