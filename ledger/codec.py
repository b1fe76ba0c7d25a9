"""The envelope, and the one way an event becomes bytes and comes back (CONTRACTS A.2, A.3).

The encoded envelope is the Merkle leaf, the stored row and the exported line, in one: it is written
once and never written again to check it.  It is a CloudEvents 1.0 event in canonical JSON: sorted
ASCII keys, no floats, absent instead of null.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

import msgspec
import orjson
from msgspec import Struct

from ledger.canonical import check_leaf_text
from ledger.errors import LogDamaged, SchemaNewer, TooLarge
from ledger.events import EVENT_TYPES, SCHEMA_VERSIONS, WIRE_NAMES, Event
from ledger.upcast import UPCASTERS, upcast

LEAF_BYTES_MAX = 16_384

E_co = TypeVar("E_co", bound=Event, covariant=True)


class Recorded(
    Struct, Generic[E_co], frozen=True, gc=False, kw_only=True, omit_defaults=True,
    forbid_unknown_fields=True,
):  # fmt: skip
    """An event with its envelope, as it stands in the log; the fields are the stored attributes."""

    actor: str
    causationid: str | None = None
    correlationid: str
    data: E_co
    id: str
    schemaversion: int
    sequence: str
    source: str
    specversion: str
    streamversion: int
    subject: str
    time: str
    type: str

    @property
    def position(self) -> int:
        """The count of events in the log up to and including this one."""
        return int(self.sequence)

    @property
    def version(self) -> int:
        """The same count within the stream."""
        return self.streamversion

    @property
    def stream(self) -> str:
        """The stream's name, such as `run/weather-demo`."""
        return self.subject

    @property
    def at(self) -> int:
        """When it was recorded, in ms since 1970 UTC: the only time a rule reads."""
        return parse_time(self.time)


_ENCODER: Final = msgspec.json.Encoder(order="sorted")
_DECODERS: Final = {
    name.encode(): msgspec.json.Decoder(Recorded[cls]).decode  # type: ignore[valid-type]
    for name, cls in EVENT_TYPES.items()
}
_CURRENT: Final = {name: SCHEMA_VERSIONS[cls] for name, cls in EVENT_TYPES.items()}
_TYPE_KEY: Final = b',"type":"'
_TYPE_KEY_BYTES: Final = len(_TYPE_KEY)


def wire_name(event: Event) -> str:
    """Returns the stored name of an event's type."""
    return WIRE_NAMES[type(event)]


def encode(recorded: Recorded[Event]) -> bytes:
    """Returns the leaf of an event, or raises TooLarge above 16 KiB."""
    leaf = _ENCODER.encode(recorded)
    check_leaf_text(leaf)
    if len(leaf) > LEAF_BYTES_MAX:
        raise TooLarge(
            f"{recorded.type} takes {len(leaf)} bytes, an event holds {LEAF_BYTES_MAX}",
            code="EVENT_TOO_LARGE",
            hint="shorten the ids it carries; values are sealed and do not count",
        )
    return leaf


def type_of(leaf: bytes) -> str:
    """Returns the type's name without decoding: sorted keys put it last, whatever `data` holds."""
    start = leaf.rfind(_TYPE_KEY)
    if start < 0 or not leaf.endswith(b'"}'):
        raise LogDamaged(f"not an event: {leaf[:60]!r}", hint="playledger db fsck names the place")
    return leaf[start + len(_TYPE_KEY) : -2].decode("ascii", "replace")


def decode(leaf: bytes) -> Recorded[Event]:
    """Returns the event of a leaf, upcast to today's schema.

    Raises SchemaNewer for a type or schema this release does not know (INV-90), LogDamaged for
    bytes that are no event.
    """
    decoder = _DECODERS.get(leaf[leaf.rfind(_TYPE_KEY) + _TYPE_KEY_BYTES : -2])
    if decoder is not None:
        try:
            recorded = decoder(leaf)
        except msgspec.DecodeError:
            return _decode_other(leaf)
        if recorded.schemaversion == _CURRENT[recorded.type]:
            return recorded
    return _decode_other(leaf)


def _decode_other(leaf: bytes) -> Recorded[Event]:
    """Decodes what the fast path does not take: an older schema, or a reason to refuse."""
    name = type_of(leaf)
    cls = EVENT_TYPES.get(name)
    if cls is None:
        raise SchemaNewer(
            f'event type "{name}" is not known to this release',
            code="EVENT_TYPE_UNKNOWN",
            hint="upgrade playledger; nothing was changed",
        )
    try:
        envelope: dict[str, Any] = orjson.loads(leaf)
        stored = int(envelope["schemaversion"])
        envelope["data"] = upcast(name, envelope["data"], stored, SCHEMA_VERSIONS[cls], UPCASTERS)
        recorded: Recorded[Event] = msgspec.convert(
            envelope,
            Recorded[cls],  # type: ignore[valid-type]
        )
    except (orjson.JSONDecodeError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise LogDamaged(
            f"an event of type {name} cannot be read: {error}",
            hint="playledger db fsck names the place",
        ) from error
    return recorded


def encode_value(value: Struct) -> str:
    """Returns a frozen value of a read model as canonical JSON text."""
    return _ENCODER.encode(value).decode()


@lru_cache(maxsize=4096)
def parse_time(text: str) -> int:
    """Returns `2026-12-01T08:00:00.004Z` as ms since 1970 UTC."""
    moment = datetime.fromisoformat(text)
    return round((moment - _EPOCH).total_seconds() * 1000)


def format_time(at: int) -> str:
    """Returns ms since 1970 UTC as `2026-12-01T08:00:00.004Z`."""
    moment = datetime.fromtimestamp(at // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{at % 1000:03d}Z"


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
