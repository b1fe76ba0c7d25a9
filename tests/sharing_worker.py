"""A process of its own that works on a log for tests/test_sharing.py.

python -m tests.sharing_worker LOG append RUN COUNT     appends signals, one commit each
python -m tests.sharing_worker LOG one RUN              appends one signal, says when
python -m tests.sharing_worker LOG submit RUN COUNT     submits one run COUNT times at once
python -m tests.sharing_worker LOG take NODE LIMIT      leases intents until none is left
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from handlers.commands import Command
from handlers.outbox import Scope, take, unleased_query
from handlers.port import RunLog
from ledger import events as e
from ledger.ids import run_stream
from playledger import Run, play
from playledger.embed import Ledger
from playledger.wiring import open_log, plays_of
from tests.given import KEY, sealed, submitted


@play
async def greet(run: Run, who: str) -> str:
    """Is submitted only: nothing drives it here."""
    run.log("hello")
    return who


def signal_to(run: str, signal_id: str) -> Command:
    fact = e.SignalReceived(signal_id=signal_id, signal="go", event_type="go", data=sealed())
    return Command(stream=run_stream(run), fact=fact, actor="cli/local")


async def append(log: RunLog, run: str, count: int) -> int:
    """Begins a run and appends to it; returns how many were new."""
    await log.transact(
        Command(stream=run_stream(run), fact=submitted(run), actor="cli/local", run_key=KEY)
    )
    fresh = 0
    for n in range(count):
        answer = await log.transact(signal_to(run, f"{run}-{n}"))
        fresh += not answer.replayed
    return fresh


async def submit(log: RunLog, run: str, count: int) -> int:
    """Submits the same request at once; returns how many made the run."""
    ledger = Ledger(log, plays_of([greet]))
    runs = await asyncio.gather(*(ledger.submit(greet, "ada", run_id=run) for _ in range(count)))
    return sum(r.answer is not None and not r.answer.replayed for r in runs)


async def take_all(log: RunLog, node: str, limit: int) -> list[str]:
    """Leases a few intents at a time until nobody has any left."""
    scope = Scope(plays=frozenset({"shop:refund"}))
    mine: list[str] = []
    while rows := await log.reader.ask(unleased_query(node, scope)):
        got = await log.run_job(take(node, rows[:limit]))
        assert len(got) <= limit
        mine += got
    return mine


async def main() -> None:
    path, job, name, *numbers = sys.argv[1:]
    count = int(numbers[0]) if numbers else 0
    log = await open_log(Path(path))
    print("ready", flush=True)
    sys.stdin.readline()
    said: object
    match job:
        case "append":
            said = await append(log, name, count)
        case "one":
            await log.transact(signal_to(name, "one"))
            said = time.time()
        case "submit":
            said = await submit(log, name, count)
        case _:
            said = await take_all(log, name, count)
    await log.close()
    print(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(main())
