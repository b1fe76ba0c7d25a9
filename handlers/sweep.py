"""The sweep: finds what died, in read models, and lets the writer decide.

It goes from unfinished instances to their hosts, never from the files, so a finder that dies
half-way leaves work for the next one.  Every process that writes looks at start, nodes look every
second.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from handlers.commands import Command
from handlers.node import Watch
from handlers.outbox import (
    ASKED_HOSTS,
    LEASE_HOLDERS,
    LIVE_HOSTS,
    asked_of_query,
    instances_of_query,
    intent_query,
    release,
)
from handlers.port import RunLog
from ledger import events as e
from ledger.errors import PlayledgerError
from ledger.failpoint import failpoint
from ledger.ids import run_stream

logger: Final = structlog.get_logger("handlers.sweep")


async def sweep(log: RunLog, watch: Watch, own: str | None) -> int:
    """Ends the instances of dead hosts, frees their leases; returns how many instances it ended."""
    hosts = await log.reader.ask(LIVE_HOSTS)
    asked = await log.reader.ask(ASKED_HOSTS)
    holders = await log.reader.ask(LEASE_HOLDERS)
    dead = {h for h in {*hosts, *asked, *holders} if h != own and watch.dead(h)}
    if not dead:
        return 0
    actor = "node/" + own if own is not None else "cli/local"
    ended = 0
    for host in sorted(dead):
        failpoint("before_node_removed")
        watch.remove(host)
        failpoint("after_node_removed")
        if host in hosts:
            ended += await _end_instances(log, host, actor)
            failpoint("after_losses")
        if host in asked:
            await _settle_asked(log, host, actor)
        if host in holders:
            await log.run_job(release(host))
    return ended


async def _end_instances(log: RunLog, host: str, actor: str) -> int:
    lost = await log.reader.ask(instances_of_query(host))
    answers = await asyncio.gather(
        *(
            log.transact(
                Command(
                    stream=run_stream(run_id),
                    fact=e.InstanceLost(
                        instance_id=instance_id,
                        attempt=attempt,
                        error_class="coordinator_restart",
                        evidence=f"host {host} is gone",
                    ),
                    actor=actor,
                )
            )
            for run_id, attempt, instance_id in lost
        ),
        return_exceptions=True,
    )
    # One run that cannot be told keeps nobody else waiting (INV-88): it is found again next time.
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    for failure in failures:
        logger.warning("a lost instance could not be recorded", host=host, error=str(failure))
    return len(lost) - len(failures)


async def _settle_asked(log: RunLog, host: str, actor: str) -> None:
    """Nobody but the dead host could end its instances: they are gone with it."""
    for row in await log.reader.ask(asked_of_query(host)):
        recorded = await log.reader.ask(intent_query(row.intent_id))
        if recorded is None or not isinstance(recorded.data, e.InstanceTerminateRequested):
            continue
        asked = recorded.data
        try:
            await log.transact(
                Command(
                    stream=recorded.subject,
                    fact=e.InstanceTerminated(
                        instance_id=asked.instance_id, attempt=asked.attempt, found=False
                    ),
                    actor=actor,
                    cause=recorded.id,
                )
            )
        except PlayledgerError as error:
            logger.warning("an end could not be recorded", stream=row.stream, error=error.message)
