"""Upcasters: old payloads read as today's, while the stored bytes stay (DESIGN section 3).

An upcaster is a pure function from the payload of schema n to the payload of schema n + 1, keyed by
the type's wire name and n.  The chain runs on read; nothing is ever rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ledger.errors import SchemaNewer

Payload = dict[str, Any]
Upcaster = Callable[[Payload], Payload]

UPCASTERS: Final[dict[tuple[str, int], Upcaster]] = {}


def upcast(
    type_name: str,
    payload: Payload,
    stored: int,
    current: int,
    upcasters: Mapping[tuple[str, int], Upcaster] = UPCASTERS,
) -> Payload:
    """Returns `payload`, stored with schema `stored`, as schema `current` has it.

    Raises SchemaNewer if it was written by a newer release, or no chain leads to today's schema.
    """
    if stored > current:
        raise SchemaNewer(
            f"{type_name} has schema {stored}, this release knows up to {current}",
            code="EVENT_SCHEMA_NEWER",
            hint="upgrade playledger; nothing was changed",
        )
    for schema in range(stored, current):
        step = upcasters.get((type_name, schema))
        if step is None:
            raise SchemaNewer(
                f"{type_name} has schema {stored}: no upcaster leads from {schema} to {current}",
                code="UPCASTER_MISSING",
                hint="upgrade playledger; nothing was changed",
            )
        payload = step(payload)
    return payload
