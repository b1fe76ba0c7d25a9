"""Canonical JSON: equal values give equal bytes, and what JSON cannot say is refused."""

from __future__ import annotations

import enum
import json
import math
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.canonical import INTEGER_MAX, Json, canonical, check_leaf_text, json_path
from ledger.errors import JsonInvalid
from ledger.gate import parse

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
INTEGERS = st.integers(-INTEGER_MAX, INTEGER_MAX)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def values(scalars: st.SearchStrategy[Any], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | TEXT | scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


class Colour(enum.StrEnum):
    RED = "red"


def nested(depth: int) -> Json:
    value: Json = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def refusal(value: Any) -> JsonInvalid:
    with pytest.raises(JsonInvalid) as caught:
        canonical(value)
    return caught.value


# RFC 8785 sorts by UTF-16 unit, we by character: the same below the surrogates.
@given(values(INTEGERS, st.text(st.characters(max_codepoint=0xD7FF, exclude_characters="\0"))))
@settings(deadline=None)
def test_values_without_floats_are_written_as_in_rfc_8785(value: Json) -> None:
    """A second, independent writer of canonical JSON gives the same bytes."""
    assert canonical(value) == rfc8785.dumps(value)


@given(values(INTEGERS | FLOATS, TEXT))
@settings(deadline=None)
def test_what_is_written_passes_the_gate_unchanged(value: Json) -> None:
    """Reading gives the value back, its types too, and writing it again the same bytes."""
    data = canonical(value)
    again = parse(data)
    assert again == value
    assert canonical(again) == data


@given(st.dictionaries(TEXT, INTEGERS))
@settings(deadline=None)
def test_order_of_keys_does_not_matter(value: dict[str, Json]) -> None:
    """Equal values give equal bytes, in whatever order they were put together."""
    assert canonical(dict(reversed(value.items()))) == canonical(value)


def test_integer_and_float_differ() -> None:
    """A value is written as it was parsed; a writer that spells floats anew would break seals."""
    assert canonical([1, 1.0, -0.0, 1e16, 1e-7]) == b"[1,1.0,-0.0,1e+16,1e-7]"
    assert canonical([INTEGER_MAX, -INTEGER_MAX]) == b"[9007199254740991,-9007199254740991]"


@pytest.mark.parametrize(
    ("value", "message", "path"),
    [
        ({"loss": math.nan}, "NaN is not JSON, at $.loss", "$.loss"),
        ({"a": [0, {"b": math.inf}]}, "Infinity is not JSON, at $.a[1].b", "$.a[1].b"),
        (-math.inf, "-Infinity is not JSON, at $", "$"),
        ([None, math.nan], "NaN is not JSON, at $[1]", "$[1]"),
    ],
)
def test_C025_nan_is_refused_with_its_path(value: Any, message: str, path: str) -> None:
    """A play's result is refused as the same text over HTTP is, before anything is stored."""
    error = refusal(value)
    assert (error.code, error.message) == ("JSON_NOT_FINITE", message)
    assert (error.details["path"], error.hint) == (path, "use null or a string")


def test_C025_nan_as_a_key_is_refused() -> None:
    """Keys are text, for JSON has no others."""
    error = refusal({"a": {math.nan: 1}})
    assert (error.code, error.message) == ("JSON_KEY_NOT_TEXT", "a key is float, not text, at $.a")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"t": "half \ud83d emoji"}, "text with half of a surrogate pair, at $.t"),
        ({"a": {"\ud83d": 1}}, "key with half of a surrogate pair, at $.a"),
    ],
)
def test_C026_half_an_emoji_is_refused(value: Any, message: str) -> None:
    """Text that no store can hold is refused, in values and in keys."""
    error = refusal(value)
    assert (error.code, error.message) == ("JSON_LONE_SURROGATE", message)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"id": 2**53}, "9007199254740992 at $.id is beyond 9007199254740991"),
        ([-(2**53)], "-9007199254740992 at $[0] is beyond -9007199254740991"),
        ([10**5000], "an integer of 16610 bits at $[0] is beyond 9007199254740991"),
    ],
    ids=["above", "below", "5000 digits"],
)
def test_C028_large_integer_is_refused(value: Any, message: str) -> None:
    """What a browser would round is refused, and 5000 digits are no ValueError."""
    error = refusal(value)
    assert (error.code, error.message) == ("JSON_INTEGER_TOO_LARGE", message)


def test_C029_nesting_over_64_is_refused() -> None:
    """64 levels are written, 65 are not, and a list within itself is no endless loop."""
    assert parse(canonical(nested(64))) == nested(64)
    assert refusal(nested(65)).code == "JSON_TOO_DEEP"
    loop: list[Any] = []
    loop.append(loop)
    assert refusal(loop).code == "JSON_TOO_DEEP"


def test_nul_is_refused_and_its_spelling_is_not() -> None:
    """Six characters that spell an escaped NUL are harmless text."""
    assert refusal({"a": "x\0y"}).message == "text with a NUL character, at $.a"
    assert refusal({"\0": 1}).code == "JSON_NUL"
    assert json.loads(canonical({"a": "\\u0000"})) == {"a": "\\u0000"}


@pytest.mark.parametrize(
    "value", [(1, 2), {1, 2}, b"x", Colour.RED, object(), 1j, type("I", (int,), {})(1)], ids=repr
)
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    """A tuple, an enum or a subclass is converted by whoever knows its type, not in silence."""
    error = refusal({"a": value})
    name = type(value).__name__
    assert (error.code, error.message) == (
        "JSON_TYPE_UNSUPPORTED",
        f"{name} is not JSON, at $.a",
    )


def test_C050_line_separators_in_values_are_kept() -> None:
    """They are a user's text; they lie in the vault and never in a line of the export."""
    text = "a\u2028b\u2029c\u0085d"
    assert canonical(text).decode() == f'"{text}"'


@pytest.mark.parametrize("separator", ["\u0085", "\u2028", "\u2029"])
def test_C050_line_separator_in_a_leaf_is_refused(separator: str) -> None:
    """A leaf is one line of the export, for every reader of lines."""
    check_leaf_text('{"id":"é\u2027"}'.encode())
    check_leaf_text(b'{"id":"plain"}')
    with pytest.raises(JsonInvalid) as caught:
        check_leaf_text(f'{{"id":"{separator}"}}'.encode())
    assert caught.value.code == "JSON_LINE_SEPARATOR"
    assert caught.value.message == f"an event holds a raw U+{ord(separator):04X} at byte 8"


def test_path_is_short_and_safe_to_show() -> None:
    """Names that are no names are quoted, and the middle of an overlong path is left out."""
    assert json_path(["a", 0, "b c", "\u202e", ""]) == '$.a[0]["b c"]["\\u202e"][""]'
    assert len(json_path(["long"] * 64)) == 203
