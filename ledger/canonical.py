"""The one way user values become bytes (CONTRACTS A.3).

Equal values give equal bytes, so that seals and request digests compare: sorted keys, no spaces,
finite floats as parsed (`1` and `1.0` differ).  What JSON, a store or a browser would silently
change is refused with its place, whether it comes from a play or through the gate.

Text is kept exactly, U+0085, U+2028 and U+2029 included: these bytes lie in the vault and are
exported in base64, so they never break a line.  Leaves are lines and may not hold them raw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from ledger.errors import JsonInvalid
from ledger.ids import quote

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

INTEGER_MAX: Final = 2**53 - 1  # beyond it a browser rounds
DEPTH_MAX: Final = 64  # below what every later reader takes
PATH_MAX: Final = 200  # characters of a path in a message

HINTS: Final = {
    "JSON_DUPLICATE_KEY": "keep one",
    "JSON_INTEGER_TOO_LARGE": "send it as a string",
    "JSON_KEY_NOT_TEXT": "keys are strings",
    "JSON_LONE_SURROGATE": "send whole characters",
    "JSON_NOT_FINITE": "use null or a string",
    "JSON_NUL": "leave it out, or send the bytes as base64",
    "JSON_TOO_DEEP": "nest less",
    "JSON_TYPE_UNSUPPORTED": "use null, true, false, a number, a string, a list or a dict",
}

# Raw, these end a line for some readers, though not for JSON: U+0085, U+2028, U+2029.
_LINE_ENDS: Final = {b"\xc2\x85": "U+0085", b"\xe2\x80\xa8": "U+2028", b"\xe2\x80\xa9": "U+2029"}


def canonical(value: Json) -> bytes:
    """Returns a value's bytes, or raises JsonInvalid with the path of what cannot be written."""
    if _writable((value,), 0):
        try:
            data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:  # a lone surrogate, or a key that is no text
            pass
        else:
            # An escaped NUL, or a backslash before "u0000": only the second may pass.
            if b"\\u0000" not in data or _find_problem(value, []) is None:
                return data
    problem = _find_problem(value, [])
    assert problem is not None, "refused without a reason"
    raise problem


def canonical_own(value: object) -> bytes:
    """Returns the bytes of a value that is known to be writable: ours, or canonical before."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def check_leaf_text(leaf: bytes) -> None:
    """Raises JsonInvalid if a leaf, which is one exported line, holds a raw line separator."""
    if leaf.isascii():
        return
    for separator, name in _LINE_ENDS.items():
        place = leaf.find(separator)
        if place >= 0:
            raise JsonInvalid(
                f"an event holds a raw {name} at byte {place + 1}",
                code="JSON_LINE_SEPARATOR",
                hint="leave it out of ids and names; values are sealed and may hold it",
                separator=name,
            )


def json_path(steps: Sequence[str | int]) -> str:
    """Returns `$.a[0]["b c"]` for the steps a, 0, "b c"; an overlong path loses its middle."""
    out = ["$"]
    for step in steps:
        if isinstance(step, int):
            out.append(f"[{step}]")
        elif step.isidentifier() and step.isascii() and len(step) <= 80:
            out.append("." + step)
        else:
            out.append(f"[{quote(step)}]")
    path = "".join(out)
    if len(path) > PATH_MAX:
        half = PATH_MAX // 2
        return f"{path[:half]}...{path[-half:]}"
    return path


def _writable(values: Iterable[Any], depth: int) -> bool:
    """Says whether orjson would write these exactly; text and keys it checks itself.

    orjson alone would write NaN as null, and enums and tuples as something else that reads back.
    """
    for value in values:
        kind = type(value)
        if kind is str or kind is bool or value is None:
            continue
        if kind is int:
            if not -INTEGER_MAX <= value <= INTEGER_MAX:
                return False
        elif kind is float:
            if value - value != 0.0:
                return False
        elif depth == DEPTH_MAX:
            return False
        elif kind is dict:
            if not _writable(value.values(), depth + 1):
                return False
        elif kind is not list or not _writable(value, depth + 1):
            return False
    return True


def _find_problem(value: object, path: list[str | int]) -> JsonInvalid | None:
    """Returns what is wrong with a value, in the order of the text; None if nothing is."""
    kind = type(value)
    if value is None or kind is bool:
        return None
    if isinstance(value, str) and kind is str:
        return _text_problem(value, "text", path)
    if isinstance(value, int) and kind is int:
        if -INTEGER_MAX <= value <= INTEGER_MAX:
            return None
        return integer_problem(
            str(value) if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits",
            path,
            negative=value < 0,
        )
    if isinstance(value, float) and kind is float:
        if math.isfinite(value):
            return None
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return _problem("JSON_NOT_FINITE", f"{name} is not JSON", path)
    if kind not in {list, dict}:
        return _problem("JSON_TYPE_UNSUPPORTED", f"{kind.__name__} is not JSON", path)
    if len(path) == DEPTH_MAX:
        return _problem("JSON_TOO_DEEP", f"nested deeper than {DEPTH_MAX}", path)
    return _item_problem(value, path)


def _item_problem(value: object, path: list[str | int]) -> JsonInvalid | None:
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for step, item in items:
        if isinstance(value, dict):
            if not isinstance(step, str) or type(step) is not str:
                name = type(step).__name__
                return _problem("JSON_KEY_NOT_TEXT", f"a key is {name}, not text", path)
            problem = _text_problem(step, "key", path)
            if problem is not None:
                return problem
        assert isinstance(step, (str, int))
        problem = _find_problem(item, [*path, step])
        if problem is not None:
            return problem
    return None


def _text_problem(text: str, what: str, path: Sequence[str | int]) -> JsonInvalid | None:
    if "\0" in text:
        return _problem("JSON_NUL", f"{what} with a NUL character", path)
    try:
        text.encode()
    except UnicodeEncodeError:
        return _problem("JSON_LONE_SURROGATE", f"{what} with half of a surrogate pair", path)
    return None


def _problem(code: str, what: str, path: Sequence[str | int]) -> JsonInvalid:
    place = json_path(path)
    return JsonInvalid(f"{what}, at {place}", code=code, hint=HINTS[code], path=place)


def integer_problem(
    number: str, path: Sequence[str | int], *, negative: bool, prefix: str = "", **details: int
) -> JsonInvalid:
    """Returns the refusal of an integer, the same from a play and through the gate (UX 4.6)."""
    place = json_path(path)
    limit = -INTEGER_MAX if negative else INTEGER_MAX
    code = "JSON_INTEGER_TOO_LARGE"
    return JsonInvalid(
        f"{prefix}{number} at {place} is beyond {limit}",
        code=code,
        hint=HINTS[code],
        path=place,
        **details,
    )
