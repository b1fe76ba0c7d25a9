"""A node on a log in a folder, as tests drive it: the real engine, loop and writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import replay
from handlers.submit import DEFAULT_POLICY
from ledger import events as e
from ledger.codec import Recorded
from ledger.events import Event
from ledger.ids import run_stream
from ledger.log import system_clock
from ledger.writer import Clock
from playledger.embed import Ledger
from playledger.wiring import Driver, driving, open_log, plays_of

POLICY = replace(DEFAULT_POLICY, backoff_ms=1, cancel_grace_ms=2_000)
PATIENCE_S = 30.0


class Given:
    """An open ledger and the node that drives it."""

    def __init__(self, ledger: Ledger, driver: Driver) -> None:
        self.ledger = ledger
        self.driver = driver

    async def run(self, play: Any, input: Any = None, **options: Any) -> str:
        """Submits a run and returns its status at its end."""
        run = await self.ledger.submit(play, input, **options)
        return await self.end(run.id)

    async def end(self, run_id: str) -> str:
        """Waits for a run's end and returns its status."""
        async with asyncio.timeout(PATIENCE_S):
            return (await self.ledger.wait_for_end(run_id)).status

    async def seen(self, run_id: str, type_: str, times: int = 1) -> Recorded[Event]:
        """Waits for the n-th event of a type in a run's stream."""
        async with asyncio.timeout(PATIENCE_S):
            async for recorded in self.ledger.events(stream=run_stream(run_id), follow=True):
                if recorded.type == type_:
                    times -= 1
                    if times == 0:
                        return recorded
        raise AssertionError("a followed stream has no end")

    async def types(self, run_id: str) -> list[str]:
        """Returns the types of a run's events."""
        return [r.type async for r in self.ledger.events(stream=run_stream(run_id))]

    async def events(self, run_id: str, kind: type[Any]) -> list[Any]:
        """Returns the data of a run's events of one type."""
        found = [r.data async for r in self.ledger.events(stream=run_stream(run_id))]
        return [data for data in found if isinstance(data, kind)]

    async def logs(self, run_id: str) -> list[dict[str, Any]]:
        """Returns every log line of a run."""
        lines: list[dict[str, Any]] = []
        for event in await self.events(run_id, e.RunLog):
            revealed: Any = await self.ledger.reveal(event.lines)
            lines += revealed
        return lines


@asynccontextmanager
async def node(
    folder: Path,
    *plays: Callable[..., Any],
    isolation: e.Isolation = "task",
    policy: e.Policy = POLICY,
    clock: Clock = system_clock,
    name: str = "t.db",
    writer: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Given]:
    """Opens a log and drives these plays; every log that a test leaves behind verifies."""
    offered = plays_of(plays)
    log = await open_log(folder / name, clock=clock, **(writer or {}))
    ledger = Ledger(log, offered, policy=policy, clock=clock, isolation=isolation)
    try:
        async with driving(log, offered, ledger.submitter, clock=clock, **options) as driver:
            yield Given(ledger, driver)
    finally:
        await log.close()
    verdict = replay.verify(folder / name)
    assert verdict.ok, verdict


def completed(statuses: Iterable[str]) -> bool:
    """Says whether all of them are `completed`."""
    return all(status == "completed" for status in statuses)
