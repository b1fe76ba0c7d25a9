"""Ids: derived ones are pure, a caller's own are checked once, the same on every surface."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import IdInvalid
from ledger.ids import (
    check_key,
    check_run_id,
    child_run_id,
    event_id,
    instance_id,
    quote,
    run_stream,
    slug,
)

RUN_IDS = st.text("abzAZ09._:~/-", min_size=1, max_size=20)


def odd_ids() -> list[tuple[str, str]]:
    path = Path(__file__).parent / "cases/odd_ids.json"
    return [
        (case["id"] if "id" in case else case["repeat"] * case["times"], case["want"])
        for case in json.loads(path.read_text("utf-8"))["ids"]
    ]


def accepts_run_id(text: str) -> bool:
    try:
        return check_run_id(text) is text
    except IdInvalid:
        return False


def accepts_key(text: str) -> bool:
    try:
        return check_key(text, "child key") is text
    except IdInvalid:
        return False


@pytest.mark.parametrize(("text", "want"), odd_ids(), ids=lambda text: quote(text, 20))
def test_C034_odd_id_is_accepted_as_it_is_or_refused(text: str, want: str) -> None:
    """An id is taken byte by byte or refused with IdInvalid; never changed, never another error."""
    accepted = accepts_run_id(text), accepts_key(text)
    kind, _, other = want.partition(":")
    if kind == "422":
        assert accepted == (False, False)
    elif kind == "distinct_from":
        assert accepted == (True, True)
        assert text != other
        assert instance_id("s", text, 0) != instance_id("s", other, 0)
    elif kind == "same_rule_as":
        assert accepted == (accepts_run_id(other), accepts_key(other))
    else:
        assert kind == "accept_or_422"


@pytest.mark.parametrize(
    ("run_id", "message"),
    [
        ("a//b", 'run id "a//b" has an empty segment at 3'),
        ("a/", 'run id "a/" has an empty segment at 3'),
        ("a/../b", 'run id "a/../b" has the segment .. at 3'),
        (".", 'run id "." has the segment . at 1'),
        ("", 'run id "" is empty'),
        ("-rf", 'run id "-rf" starts with -'),
        ("/a", 'run id "/a" starts with /'),
        ("a b", 'run id "a b" has a character that is not allowed at 2: " "'),
        ("a\n", 'run id "a\\x0a" has a character that is not allowed at 2: "\\x0a"'),
        ("x" * 201, f'run id "{"x" * 80}..." has 201 characters, the limit is 200'),
    ],
)
def test_refused_run_id_says_where(run_id: str, message: str) -> None:
    """The message names the first offending place, the hint the alphabet."""
    with pytest.raises(IdInvalid) as refusal:
        check_run_id(run_id)
    assert (refusal.value.code, refusal.value.message) == ("RUN_ID_INVALID", message)
    assert refusal.value.hint == "1 to 200 of A-Za-z0-9._:~/-"


@given(st.text(max_size=210))
@settings(deadline=None)
def test_any_text_is_an_id_or_refused(text: str) -> None:
    """No text raises anything but IdInvalid; a run id is a key as well, unless it is a path."""
    if accepts_run_id(text):
        assert accepts_key(text)
    accepts_key(text)


@given(st.text())
@settings(deadline=None)
def test_quoted_text_is_safe_for_a_terminal(text: str) -> None:
    """What is quoted in a message is printable, one line, and encodable."""
    shown = quote(text)
    assert shown.isprintable()
    assert shown.encode()


def test_quoted_astral_character_cannot_be_taken_for_two() -> None:
    """Above U+FFFF the escape has eight digits."""
    assert quote("\U000e0001") == '"\\U000e0001"'
    assert quote('a"\u2028') == '"a\\"\\u2028"'


@given(st.tuples(RUN_IDS, st.integers(0, 5)), st.tuples(RUN_IDS, st.integers(0, 5)))
@settings(deadline=None)
def test_instance_ids_are_equal_for_equal_attempts_only(
    one: tuple[str, int], other: tuple[str, int]
) -> None:
    """An instance id names one attempt of one run (INV-13)."""
    assert (instance_id("s", *one) == instance_id("s", *other)) == (one == other)


def test_derived_ids_never_change() -> None:
    """Stored logs hold these: another derivation would do everything a second time."""
    assert run_stream("r1") == "run/r1"
    assert event_id("run/r1", "submit") == "bdfc153f300a76638ea1e61445342934"
    assert instance_id("scope", "r1", 2) == "run-5f161c91-82f3e9c695dc6b8d1b11818d5701919e-retry-2"
    assert child_run_id("shop:pay", "r1", "k") == "shop-pay-39a06ab041e7215708873ea2"


def test_child_run_id_is_a_run_id() -> None:
    """Whatever the play is called, its children can be addressed."""
    assert slug("  ") == "play"
    assert slug("weather:one_year") == "weather-one_year"
    for name in ("", "-", "/..", "x" * 300, "\u00e9"):
        assert accepts_run_id(child_run_id(name, "r1", "any key"))
