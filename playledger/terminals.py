"""Child terminals by key: facts in the parent's stream, set, read and awaited.

SPEC 1.26; INV-62, INV-63.  A terminal may come before the parent asks for it, before its request
even, or by another process.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from handlers.execute import Answer
from ledger.canonical import Json, canonical
from ledger.errors import InputInvalid
from ledger.ids import check_key, run_stream
from projections.load import child_query

if TYPE_CHECKING:
    from playledger.embed import Ledger

AWAIT_MS_MAX: Final = 30_000


async def set_terminal(
    ledger: Ledger, parent_run_id: str, event_key: str, data: Json, *, actor: str
) -> Answer:
    """Records a child's terminal as the signal it is: one append, first write wins.

    The same data again is the same signal; other data is kept as a conflict.
    """
    check_key(event_key, "event key")
    named = sha256(event_key.encode() + b"\n" + canonical(data)).hexdigest()[:32]
    return await ledger.signal(
        parent_run_id,
        event_key,
        data,
        signal="integration_event",
        signal_id=f"terminal-{named}",
        actor=actor,
    )


async def get_terminal(ledger: Ledger, parent_run_id: str, event_key: str) -> Json:
    """Returns `{eventKey, data, storedAt}` of a child that has ended, None if it is not known."""
    if not parent_run_id or not event_key:
        raise InputInvalid("parentRunId and eventKey are required.", code="EVENT_KEY_REQUIRED")
    child = await ledger.log.reader.ask(child_query(parent_run_id, event_key))
    if child is None or child.ended_position is None:
        return None
    data: Json = {"status": child.status, "runId": child.child_run_id, "code": child.code}
    if child.result is not None:
        data = await ledger.reveal(child.result)
    recorded = (await ledger.log.read(child.ended_position - 1, limit=1))[0]
    return {"data": data, "eventKey": event_key, "storedAt": recorded.at}


async def await_terminal(ledger: Ledger, parent_run_id: str, event_key: str) -> None:
    """Returns when a child's terminal stands in the log: woken by commits, without polling."""
    with ledger.log.feed().watching(run_stream(parent_run_id)) as watcher:
        while True:
            watcher.news.clear()
            child = await ledger.log.reader.ask(child_query(parent_run_id, event_key))
            if child is not None and child.ended_position is not None:
                return
            await watcher.news.wait()


def clamp_ms(timeout_ms: float) -> int:
    """Returns a timeout within 0 to 30 000 ms; what is no finite number waits for nothing."""
    if not math.isfinite(timeout_ms):
        return 0
    return max(0, min(AWAIT_MS_MAX, math.floor(timeout_ms)))
