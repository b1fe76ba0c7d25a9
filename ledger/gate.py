"""The strict gate: the only way bytes from outside become a value (CONTRACTS A.3).

Parsers differ where JSON is silent or ignored: the last of two equal keys, NaN, 2^64, half an
emoji, UTF-16.  Whatever two readers could read differently is refused here, with a code of its own
and its place, so that every later reader sees the one value that was meant.

    decode -> depth, on the bytes and without recursion -> json.loads -> canonical can write it

That is all a good body pays for.  A bad one is scanned a second time, to say where it is bad.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_left
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import orjson

from ledger.canonical import (
    DEPTH_MAX,
    HINTS,
    INTEGER_MAX,
    Json,
    canonical,
    integer_problem,
    json_path,
)
from ledger.errors import JsonInvalid, TooLarge
from ledger.ids import quote

_STEP: Final = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")  # as signed bytes: +1 and -1
_CHUNK: Final = 65_536
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STRING: Final = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_LEXEME: Final = re.compile(  # a row of small integers is one lexeme, for speed
    _STRING + r'|(?:-?[0-9]{0,15},)+|[\[\]{}:]|[^\s\[\]{},:"]+', re.DOTALL
)
_ESCAPE: Final = re.compile(
    r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>\\u[dD][89a-fA-F]..)|(?P<nul>\\u0000)|\\."
)
_BARE: Final = re.compile(r"""[^"'\\\[\]{}]+""")  # what a shell and JSON both take in quotes
_WORD: Final = re.compile(r'[^\s,:\[\]{}"]{1,40}|.', re.DOTALL)


class _DuplicateKey(Exception):
    """Leaves json.loads; where the key stands is found afterwards."""


def parse(data: bytes | str, *, what: str = "body", max_bytes: int | None = None) -> Json:
    """Returns the value of untrusted JSON, or raises JsonInvalid or TooLarge.

    `what` names it in messages, as its sender does: `body`, `--input`.
    """
    if max_bytes is not None and len(data) > max_bytes and isinstance(data, bytes):
        raise _too_large(len(data), max_bytes, what)
    raw, text = _decode(data, what)
    if max_bytes is not None and len(raw) > max_bytes:
        raise _too_large(len(raw), max_bytes, what)
    if raw.count(b"[") + raw.count(b"{") > DEPTH_MAX:
        _check_depth(raw[:_CHUNK], text, what)  # first, so that a flood of brackets costs nothing
        if len(raw) > _CHUNK:
            _check_depth(raw, text, what)
    try:
        value: Json = _DECODER.decode(text)
        # Plain types only by now, so orjson misses nothing but what it writes as null, and NUL.
        written = orjson.dumps(value, option=orjson.OPT_STRICT_INTEGER)
        if b"null" in written or b"\\u0000" in written:
            canonical(value)
    except json.JSONDecodeError as error:
        raise _syntax_error(text, error, what) from None
    except (_DuplicateKey, JsonInvalid, orjson.JSONEncodeError, ValueError):
        # ValueError: more digits than int() takes
        raise _first_problem(text, what) from None
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _DuplicateKey
    return value


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique)  # json.loads would build it anew


def _decode(data: bytes | str, what: str) -> tuple[bytes, str]:
    """Returns both forms of a text, or refuses what is not UTF-8 or not there."""
    if isinstance(data, str):
        try:
            raw, text = data.encode(), data
        except UnicodeEncodeError as error:
            problem = "half of a surrogate pair"
            raise _refusal("JSON_LONE_SURROGATE", problem, data, error.start, what) from None
    else:
        if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise JsonInvalid(f"{what}: UTF-16 is not JSON", hint="send it as UTF-8")
        try:
            raw, text = data, data.decode()
        except UnicodeDecodeError as error:
            before = data[: error.start].decode()
            raise _refusal(
                "JSON_INVALID_UTF8",
                f"byte 0x{data[error.start]:02x} is not UTF-8",
                before,
                len(before),
                what,
                hint="send it as UTF-8",
            ) from None
    if raw.startswith(BOM_UTF8):
        raise JsonInvalid(
            f"{what}: a byte order mark is not JSON, line 1 column 1",
            hint="send it without the mark",
            line=1,
            column=1,
        )
    if not text.strip(" \t\r\n"):
        raise JsonInvalid(f"{what}: is empty, and that is not JSON", hint="for nothing, send null")
    return raw, text


def _too_large(size: int, limit: int, what: str) -> TooLarge:
    return TooLarge(
        f"{what} is {size} bytes, the limit is {limit}",
        code="BODY_TOO_LARGE",
        hint="send less at a time, or stage it as a file",
        bytes=size,
        limit=limit,
    )


def _check_depth(raw: bytes, text: str, what: str) -> None:
    """Refuses a text that nests too deep, in a few passes over the bytes and without recursion.

    A closing bracket takes any opening one, and a backslash is taken for an escape outside strings
    too: such a text is no JSON, and json.loads stops there, before it could nest any deeper.
    """
    if b"\\" in raw:  # of the same length, so that places stay
        raw = raw.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    parts = raw.split(b'"')
    brackets = b"".join(parts[::2]).translate(_STEP, _NOT_BRACKETS)
    depth = 0
    for start in range(0, len(brackets), _CHUNK):
        steps = array("b", brackets[start : start + _CHUNK])
        if max(accumulate(steps, initial=depth)) > DEPTH_MAX:
            nth = start + list(accumulate(steps, initial=depth)).index(DEPTH_MAX + 1)
            at = len(raw[: _nth_bracket(parts, nth)].decode())
            raise _refusal("JSON_TOO_DEEP", f"nested deeper than {DEPTH_MAX}", text, at, what)
        depth += sum(steps)


def _nth_bracket(parts: list[bytes], nth: int) -> int:
    """Returns the place of the nth bracket, where every second part is the inside of a string."""

    def count(data: bytes) -> int:
        return len(data.translate(None, _NOT_BRACKETS))

    place = 0
    for index, part in enumerate(parts):
        if index % 2 == 0:
            inside = count(part)
            if nth <= inside:
                end = bisect_left(range(len(part)), nth, key=lambda end: count(part[:end]))
                return place + end - 1
            nth -= inside
        place += len(part) + 1
    raise AssertionError("fewer brackets than were counted")


def _syntax_error(text: str, error: json.JSONDecodeError, what: str) -> JsonInvalid:
    """Returns the refusal of what is no JSON at all (UX 4.3)."""
    at = error.pos
    if at >= len(text.rstrip(" \t\r\n")):
        problem, hint = "ends too early to be JSON", "close what is open"
    elif text[at] < " ":
        problem, hint = f"control character \\x{ord(text[at]):02x} is not JSON", "escape it"
    elif error.msg.startswith("Unterminated"):
        problem, hint = "a string without its end is not JSON", 'close it with "'
    else:
        match = _WORD.match(text, at)
        assert match is not None, "there is a character at this place"
        word = quote(match.group())[1:-1]
        if error.msg.startswith("Extra data"):
            problem, hint = f"{word} after the value is not JSON", "send one value"
        else:
            quotes = word[0].isalpha() or word[0] == "'"
            hint = "strings and keys need double quotes" if quotes else "look at what precedes it"
            problem = f"{word} is not JSON"
        if (
            what.startswith("-")
            and len(text) <= 40
            and _BARE.fullmatch(text)
            and text.isprintable()
        ):
            hint = f"a string needs its quotes: {what} '{json.dumps(text, ensure_ascii=False)}'"
    return _refusal("JSON_INVALID", problem, text, at, what, hint=hint)


def _first_problem(text: str, what: str) -> JsonInvalid:
    """Returns the refusal of the first thing that is JSON in form but not for us.

    The text is known to be well formed up to there, so its lexemes can be told by their first
    character.
    """
    path: list[str | int] = []
    keys: list[set[str] | None] = []  # of each open bracket: the keys so far, None in a list
    is_key = False
    for match in _LEXEME.finditer(text):
        lexeme, at = match.group(), match.start()
        if lexeme in "[{":
            is_key = lexeme == "{"
            keys.append(set() if is_key else None)
            path.append("" if is_key else 0)
        elif lexeme in "]}":
            keys.pop()
            path.pop()
        elif lexeme == ":":
            is_key = False
        elif lexeme[-1] == ",":
            is_key = keys[-1] is not None
            last = path[-1]
            if isinstance(last, int):
                path[-1] = last + lexeme.count(",")
        elif lexeme[0] == '"':
            here = path[:-1] if is_key else path
            problem = _string_problem(text, lexeme, at, here, what)
            if problem is not None:
                return problem
            seen = keys[-1] if is_key else None
            if seen is not None:
                key: str = json.loads(lexeme)
                if key in seen:
                    twice = f"key {quote(key)} twice"
                    return _refusal("JSON_DUPLICATE_KEY", twice, text, at, what, here)
                seen.add(key)
                path[-1] = key
        else:
            problem = _number_problem(text, lexeme, at, path, what)
            if problem is not None:
                return problem
    raise AssertionError("refused without a reason")


def _string_problem(
    text: str, lexeme: str, at: int, path: Sequence[str | int], what: str
) -> JsonInvalid | None:
    for match in _ESCAPE.finditer(lexeme):
        place = at + match.start()
        if match["half"]:
            half = f"{match['half']} is half of a surrogate pair"
            return _refusal("JSON_LONE_SURROGATE", half, text, place, what, path)
        if match["nul"]:
            return _refusal("JSON_NUL", "a NUL character in a string", text, place, what, path)
    return None


def _number_problem(
    text: str, lexeme: str, at: int, path: Sequence[str | int], what: str
) -> JsonInvalid | None:
    code = "JSON_NOT_FINITE"
    if lexeme in {"NaN", "Infinity", "-Infinity"}:
        return _refusal(code, f"{lexeme} is not JSON", text, at, what, path)
    if lexeme in {"true", "false", "null"}:
        return None
    shown = (
        lexeme if len(lexeme) <= 40 else f"{lexeme[:20]}... ({len(lexeme.lstrip('-'))} characters)"
    )
    if not lexeme.lstrip("-").isdigit():
        if math.isfinite(float(lexeme)):
            return None
        return _refusal(code, f"{shown} is beyond a double", text, at, what, path)
    if len(lexeme) <= 17 and -INTEGER_MAX <= int(lexeme) <= INTEGER_MAX:
        return None
    line, column = _line_column(text, at)
    return integer_problem(
        shown,
        path,
        negative=lexeme.startswith("-"),
        prefix=f"{what}: ",
        line=line,
        column=column,
    )


def _refusal(
    code: str,
    problem: str,
    text: str,
    at: int,
    what: str,
    path: Sequence[str | int] | None = None,
    hint: str | None = None,
) -> JsonInvalid:
    line, column = _line_column(text, at)
    message = f"{what}: {problem}, line {line} column {column}"
    hint = HINTS[code] if hint is None else hint
    if path is None:
        return JsonInvalid(message, code=code, hint=hint, line=line, column=column)
    place = json_path(path)
    return JsonInvalid(
        f"{message}, at {place}", code=code, hint=hint, line=line, column=column, path=place
    )


def _line_column(text: str, at: int) -> tuple[int, int]:
    """Returns where a character stands, both counted from 1."""
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
