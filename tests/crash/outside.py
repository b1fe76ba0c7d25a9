"""An engine whose instances live outside: a folder that keeps them, whoever is killed here.

It does what a service does: an id it knows is not created again, and it goes on by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engines.plays import Plays
from handlers.acts import instance_ref
from handlers.effects import EffectLoop
from handlers.engine import CreateRequest, EngineError, EngineStatus, EngineTransient
from handlers.node import Node
from handlers.outbox import Scope
from handlers.port import Port, RunLog
from handlers.submit import Submitter
from ledger import events as e
from ledger.failpoint import failpoint
from ledger.log import system_clock
from tests.crash.scenarios import effect_line


class OutsideEngine:
    """Keeps one file per instance; fails as often as it is told before it creates one.

    An attempt in `resets` is told that its platform was reset, one in `refused` is never created.
    """

    name = "outside"

    def __init__(
        self,
        log: RunLog,
        *,
        failures: int = 0,
        resets: tuple[int, ...] = (),
        refused: tuple[int, ...] = (),
    ) -> None:
        self._port = Port(log)
        self._folder = folder_of(log.path)
        self._folder.mkdir(exist_ok=True)
        self._failures = failures
        self._resets = resets
        self._refused = refused

    def offers(self, play_name: str) -> bool:
        return bool(play_name)

    async def create(self, request: CreateRequest) -> None:
        if self._failures:
            self._failures -= 1
            raise EngineTransient("the service is busy", code="BUSY")
        if request.attempt in self._refused:
            raise EngineError("the service takes no more", code="NO_MORE")
        kept = self._folder / request.instance_id
        existed = kept.exists()
        if not existed:
            kept.touch()
            effect_line(request.run.run_id, request.attempt)
            failpoint("created_outside")
        ref = instance_ref(request.run, request.instance_id, request.attempt, None)
        await self._port.created(ref, request.intent_id, already_existed=existed)
        await self._port.started(ref)
        if request.attempt in self._resets:
            await self._port.errored(ref, "platform_reset", "RESET", {"message": "deployed"})
        else:
            await self._port.completed(ref, b'"from outside"')

    async def status(self, instance_id: str) -> EngineStatus:
        return "ended" if (self._folder / instance_id).exists() else "unknown"

    async def terminate(self, instance_id: str, reason: e.TerminateReason) -> bool:
        del reason
        return (self._folder / instance_id).exists()


def folder_of(path: Path) -> Path:
    """Returns where the service keeps the instances of a log."""
    return path.with_name(path.name + ".outside")


@asynccontextmanager
async def driving_outside(
    log: RunLog, plays: Plays, submitter: Submitter, *, frozen_s: float = 15.0, **engine: Any
) -> AsyncIterator[None]:
    """Drives runs by this engine inside the block."""
    node = Node(log.path, touch_s=frozen_s / 5)
    scope = Scope(plays=plays.names)
    engines = {"outside": OutsideEngine(log, **engine)}
    loop = EffectLoop(log, node, engines, scope, submitter, system_clock, frozen_s=frozen_s)
    await loop.start()
    try:
        yield
    finally:
        await loop.stop(clean=True)
        node.close()
