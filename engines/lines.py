"""Log lines as they are kept: no control characters, no secrets in URLs, bounded, all JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from engines.values import write_value
from ledger.canonical import Json
from ledger.errors import PlayledgerError

LINE_CHARS: Final = 8192

_ANSI: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.?)", re.DOTALL)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_URL_USER: Final = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s:@]+:[^/\s@]+@")
_BEARER: Final = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}")


def sanitise(text: str, limit: int = LINE_CHARS) -> str:
    """Returns text without control characters and escape sequences, secrets in URLs masked.

    Cut between characters; halves of characters become U+FFFD (CASES C026).
    """
    if len(text) > limit:
        text = text[:limit] + f"... {len(text) - limit} more"
    text = _CONTROL.sub("\ufffd", _ANSI.sub("", text))
    return _BEARER.sub(r"\1***", _URL_USER.sub(r"\1***@", text))


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Json]:
    """Returns the fields of a log line as JSON."""
    return {sanitise(str(key), 200): _plain(item) for key, item in fields.items()}


def _plain(value: Any) -> Json:
    """Returns a log field as JSON; what has no JSON form, or a long one, is shown as text."""
    if isinstance(value, str):
        return sanitise(value)
    try:
        text = write_value([[[value]]])  # it is nested as deep where it is stored
    except PlayledgerError:
        return sanitise(repr(value))
    if len(text) > LINE_CHARS:
        return sanitise(text[3:-3].decode())
    plain: Json = orjson.loads(text[3:-3])
    return plain
