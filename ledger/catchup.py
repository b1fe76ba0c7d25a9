"""What other processes appended since this one looked, and which streams that touched.

A stream with an event that this release cannot read stops here, and no other (INV-90).
"""

from __future__ import annotations

import sqlite3

import structlog
from msgspec import Struct

from ledger.codec import Recorded, decode
from ledger.errors import LogDamaged, PlayledgerError, SchemaNewer
from ledger.events import Event

log = structlog.get_logger("ledger.catchup")


class Foreign(Struct, frozen=True):
    """Events of others in order; `unreadable` says why a stream among `streams` is stopped."""

    events: list[Recorded[Event]]
    streams: set[str]
    unreadable: dict[str, PlayledgerError]


def read_foreign(connection: sqlite3.Connection, after: int, up_to: int) -> Foreign:
    """Reads the events behind one position up to another."""
    found = Foreign([], set(), {})
    cursor = connection.execute(
        "select e.leaf, s.name from events e join streams s on s.stream_id = e.stream_id"
        " where e.position > ? and e.position <= ? order by e.position",
        (after, up_to),
    )
    for leaf, stream in cursor:
        found.streams.add(stream)
        try:
            found.events.append(decode(leaf))
        except (SchemaNewer, LogDamaged) as error:
            found.unreadable[stream] = error
            log.warning("a stream cannot be read on", stream=stream, error=error.message)
    return found
