"""The client of the soak: submits and signals beside the server, and notes what was answered.

    python -m tests.crash.soak_client DB IN_FLIGHT

It holds so many runs in flight, ends when a line or the end of its input comes, and has then seen
every one of its runs at its end.  What it is refused for the moment it asks again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

from msgspec.structs import replace

from handlers.submit import DEFAULT_POLICY
from ledger.errors import Unavailable
from playledger.embed import Ledger
from playledger.wiring import look_once, open_log, plays_of
from tests.crash.driver import files_of
from tests.crash.soak_plays import expected, leaf, tree

POLICY: Final = replace(DEFAULT_POLICY, restart_limit=1000, backoff_ms=50)
T = TypeVar("T")


async def insist(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks again while the log cannot be used, which is what a client has to do."""
    while True:
        try:
            return await ask()
        except Unavailable:
            await asyncio.sleep(0.05)


async def follow(ledger: Ledger, number: int, acks: Path) -> None:
    """Takes one run from its submit to its end, and checks what it gave."""
    run_id = f"tree-{number}"

    def note(line: str) -> None:
        with acks.open("a") as file:
            file.write(line + "\n")

    await insist(lambda: ledger.submit(tree, number, run_id=run_id))
    note(f"submit {run_id}")
    if number % 2:  # half of the signals come early, the others when the first round is over
        await asyncio.sleep(number % 7 * 0.2)
    await insist(lambda: ledger.signal(run_id, "more", number % 10, signal_id="m"))
    note(f"signal {run_id}/m")
    result = await ledger.run(run_id).result()
    assert result == expected(number, number % 10), f"{run_id} gave {result}"
    note(f"end {run_id}")


async def main(path: Path, in_flight: int) -> None:
    """Starts runs as others end, until it is told to stop."""
    log, plays = await open_log(path), plays_of([tree, leaf])
    ledger, acks = Ledger(log, plays, policy=POLICY), files_of(path)["acks"]
    await look_once(log)
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    running: set[asyncio.Task[None]] = set()
    number = 0
    while not told.done() or running:
        while len(running) < in_flight and not told.done():
            running.add(asyncio.create_task(follow(ledger, number, acks)))
            number += 1
        waiting = running | ({told} if not told.done() else set())
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done & running:
            task.result()
        running -= done
    await log.close()
    print(number, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
