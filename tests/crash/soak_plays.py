"""The plays of the soak: parents with children, signals and sleeps, and results that are known."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import playledger
from playledger import play
from tests.crash.scenarios import effect


@play
async def leaf(run: playledger.Run, number: int) -> int:
    """Works a little, sleeps a little, and ends."""
    effect(run)
    await asyncio.sleep(0.02)
    await run.sleep("nap", timedelta(milliseconds=100 + 37 * number % 400))
    return number * number


@play
async def tree(run: playledger.Run, number: int) -> int:
    """Two rounds of children, with a sleep and a signal between them."""
    effect(run)
    first = [run.child(leaf, number + extra, key=f"first-{extra}") for extra in range(2)]
    total = sum([await child for child in first])
    run.log(f"first round of {number} gave {total}")
    await run.sleep("pause", timedelta(milliseconds=200 + 53 * number % 700))
    total += int(str(await run.signal("more")))
    try:
        await run.signal("never", timeout=timedelta(milliseconds=150))
    except TimeoutError:
        total += 1
    run.progress(1, 2)
    total += await run.child(leaf, number + 2, key="second")
    return total


def expected(number: int, more: int) -> int:
    """What a tree of a number gives, however often it was started again."""
    return number**2 + (number + 1) ** 2 + more + 1 + (number + 2) ** 2
