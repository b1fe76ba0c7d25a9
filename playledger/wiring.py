"""Putting the parts together: the schema, the writer's function, and a node that drives runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from engines.local import LocalEngine
from engines.plays import Play, Plays
from handlers.effects import EffectLoop
from handlers.execute import execute, look_ahead
from handlers.node import FROZEN_S, Node, Watch
from handlers.outbox import Scope, born_leased
from handlers.port import RunLog
from handlers.submit import PlayInfo, Submitter
from handlers.sweep import sweep
from ledger import events as e
from ledger.log import Log, Schema, system_clock
from ledger.tables import METADATA
from ledger.writer import Clock
from playledger.version import VERSION
from projections.tables import TABLES

DEFAULT_SCOPE: Final = "default"


def migrate(path: Path) -> None:
    """Brings an older database to this release's schema."""
    from ledger.migrations import upgrade  # alembic is imported only when it is needed (T8)

    upgrade(path)


SCHEMA: Final = Schema(metadata=METADATA, tables=TABLES, version=VERSION, migrate=migrate)


class Driver(Struct):
    """A node that drives runs: its loop and its engine, stopped in the right order."""

    node: Node
    engine: LocalEngine
    loop: EffectLoop
    resumed: int = 0

    async def stop(self, grace_s: float) -> None:
        """Leases nothing more, waits the grace, ends what still runs, records the end (C058)."""
        self.loop.drain()
        clean = await self.engine.shut_down(grace_s)
        await self.loop.stop(clean=clean)
        await self.engine.close()
        self.node.close()


async def open_log(
    path: Path, *, clock: Clock = system_clock, read_only: bool = False, **options: Any
) -> RunLog:
    """Opens the log of runs, creating it if it may; a writer looks once for dead hosts."""
    if not read_only:
        options.setdefault("before_flush", born_leased("", Scope(frozenset())))
    return await Log.open(
        path,
        SCHEMA,
        execute,
        look_ahead,
        clock=clock,
        scope=DEFAULT_SCOPE,
        read_only=read_only,
        **options,
    )


async def look_once(log: RunLog) -> int:
    """The one look that a command takes which writes but drives nothing (CONTRACTS A.10)."""
    return await sweep(log, Watch(log.path, by_touch=False), None)


def submitter_for(
    log: RunLog, plays: Plays, *, find: Callable[[str], PlayInfo | None] | None = None,
    isolation: e.Isolation = "task",
) -> Submitter:  # fmt: skip
    """Returns what submits runs of these plays into a log."""
    return Submitter(
        log,
        find or plays.info,
        scope=DEFAULT_SCOPE,
        version=VERSION,
        plays=len(plays),
        isolation=isolation,
    )


async def start_driver(
    log: RunLog,
    plays: Plays,
    submitter: Submitter,
    *,
    family: str | None = None,
    clock: Clock = system_clock,
    max_instances: int = 64,
    frozen_s: float = FROZEN_S,
) -> Driver:
    """Makes this process a node that drives the runs of these plays, or of one family."""

    def now() -> int:
        """Does not go back with the machine's clock: what the log calls due is due (SPEC T3)."""
        return max(clock(), log.writer.recorded_at)

    node = Node(log.path, touch_s=frozen_s / 5)
    engine = LocalEngine(log, node.id, plays, now, max_instances=max_instances)
    scope = Scope(plays=plays, family=family)
    loop = EffectLoop(log, node, {engine.name: engine}, scope, submitter, now, frozen_s=frozen_s)
    driver = Driver(node, engine, loop)
    driver.resumed = await loop.start()
    return driver


@asynccontextmanager
async def driving(
    log: RunLog, plays: Plays, submitter: Submitter, *, grace_s: float = 0.0, **options: Any
) -> AsyncIterator[Driver]:
    """Drives runs inside the block; leaving it loses nothing."""
    driver = await start_driver(log, plays, submitter, **options)
    try:
        yield driver
    finally:
        await asyncio.shield(driver.stop(grace_s))


def plays_of(items: Any) -> Plays:
    """Returns plays given as functions or as Play values."""
    from engines.plays import as_play

    return Plays(item if isinstance(item, Play) else as_play(item, trusted=True) for item in items)
