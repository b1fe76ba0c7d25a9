"""The plays that the measurements run: they do nothing, so that only the coordinator costs."""

from __future__ import annotations

import os
import time

from playledger import Run, play

PARK_VARIABLE = "PLAYLEDGER_BENCH_PARK"
STARTED_AT: list[float] = []
"""When `clocked` began, by the monotonic clock, which all processes of a machine share."""


@play
async def kid(run: Run, n: int) -> int:
    """Is its parent's one child."""
    del run
    return n


@play
async def parent(run: Run, n: int) -> int:
    """Waits for its one child."""
    return await run.child(kid, n, key="kid")


@play
async def parked(run: Run, n: int) -> int:
    """Waits for a signal that never comes, until a process without the variable takes it over."""
    if os.environ.get(PARK_VARIABLE):
        await run.signal("never")
    return n


@play
async def clocked(run: Run, n: int) -> int:
    """Says when it began."""
    del run
    STARTED_AT.append(time.monotonic())
    return n
