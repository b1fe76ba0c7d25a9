"""What every engine owes the coordinator, as checks that any adapter's tests can call.

An adapter gives `Bench`: how to open a node with it, and plays or scripts that complete, fail,
never end, and count how often they were begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from handlers.engine import Engine
from ledger import events as e
from tests.local_node import Given


@dataclass(frozen=True)
class Bench:
    """An engine under test; `begun` says how often an instance of a run was begun."""

    open: Callable[[], AbstractAsyncContextManager[tuple[Given, Engine]]]
    completes: str
    fails: str
    never: str
    begun: Callable[[str], int]


async def completes_once(bench: Bench) -> None:
    """A run that completes is begun once and has one end."""
    async with bench.open() as (given, _engine):
        assert await given.run(bench.completes, run_id="r") == "completed"
        assert bench.begun("r") == 1
        types = await given.types("r")
        assert types.count("instance.created") == 1
        assert types.count("instance.started") == 1
        assert types.count("instance.completed") == 1
        assert types[-1] == "run.completed"


async def classifies_an_error(bench: Bench) -> None:
    """A play's own error is user_error, and is not retried."""
    async with bench.open() as (given, _engine):
        assert await given.run(bench.fails, run_id="r") == "failed"
        (errored,) = await given.events("r", e.InstanceErrored)
        assert errored.error_class == "user_error"
        assert bench.begun("r") == 1


async def ends_when_asked(bench: Bench) -> None:
    """Cancel reaches the instance; it reports its end, and nothing runs afterwards."""
    async with bench.open() as (given, engine):
        run = await given.ledger.submit(bench.never, run_id="r")
        started = (await given.seen("r", "instance.started")).data
        assert isinstance(started, e.InstanceStarted)
        assert await engine.status(started.instance_id) == "running"
        await run.cancel()
        assert await given.end("r") == "cancelled"
        async with asyncio.timeout(20):
            # An engine elsewhere says only when asked that it let go.
            while await engine.status(started.instance_id) == "running":  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def finds_no_stranger(bench: Bench) -> None:
    """What it never created it does not know, and asking it to end says so."""
    async with bench.open() as (_given, engine):
        assert await engine.status("run-00000000-nobody") == "unknown"
        assert await engine.terminate("run-00000000-nobody", "cancelled") is False


async def creates_once_however_often_it_is_asked(bench: Bench) -> None:
    """The same run submitted again and again is one instance."""
    async with bench.open() as (given, _engine):
        for _ in range(5):
            await given.ledger.submit(bench.completes, run_id="r")
        assert await given.end("r") == "completed"
        assert bench.begun("r") == 1


CHECKS = (
    completes_once,
    classifies_an_error,
    ends_when_asked,
    finds_no_stranger,
    creates_once_however_often_it_is_asked,
)
