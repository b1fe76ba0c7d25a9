"""Opening the log for a command that writes: nothing is driven unless the command says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from engines.plays import Plays
from handlers.submit import PlayInfo
from ledger.database import check_file
from playledger.cli.console import Console
from playledger.embed import Ledger
from playledger.wiring import look_once, open_log

ACTOR: Final = "cli/local"


@asynccontextmanager
async def opened(
    console: Console,
    plays: Plays | None = None,
    *,
    create: bool = False,
    look: bool = True,
    find: Callable[[str], PlayInfo | None] | None = None,
) -> AsyncIterator[Ledger]:
    """Opens the log of this command; without `create` it has to exist.

    With `look` it ends the instances of dead hosts, as every process that writes does once.
    """
    settings = console.settings().values
    path = console.db
    if not create:
        check_file(path)
    write = settings.write
    log = await open_log(path, queue_max=write.queue, batch_max=write.batch)
    try:
        if look:
            await look_once(log)
        yield Ledger(
            log,
            plays or Plays(),
            policy=settings.run_policy(),
            actor=ACTOR,
            find=find,
            isolation=settings.engine.isolation,
        )
    finally:
        await log.close()
