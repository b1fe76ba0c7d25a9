"""The envelope and its bytes: written once, read for ever, refused where they are not ours."""

from __future__ import annotations

import orjson
import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger import events as e
from ledger.codec import (
    LEAF_BYTES_MAX,
    Recorded,
    decode,
    encode,
    format_time,
    parse_time,
    type_of,
)
from ledger.errors import JsonInvalid, LogDamaged, SchemaNewer, TooLarge
from ledger.events import Event
from ledger.upcast import upcast
from tests.given import T0, record, sealed, signal, submitted

LEAF = encode(record(signal(), 7, 3))


def changed(**attributes: object) -> bytes:
    """Returns a leaf with other attributes, in canonical form."""
    envelope = orjson.loads(LEAF) | attributes
    return orjson.dumps(envelope, option=orjson.OPT_SORT_KEYS)


def test_a_leaf_is_a_cloudevent_with_sorted_keys() -> None:
    """Attribute values are strings or int32, what is absent is not there, no space between."""
    envelope = orjson.loads(LEAF)
    assert list(envelope) == sorted(envelope)
    assert envelope["specversion"] == "1.0"
    assert envelope["sequence"] == "0000000000000007"
    assert envelope["streamversion"] == 3
    assert envelope["time"] == format_time(T0)
    assert "causationid" not in envelope
    assert all(isinstance(v, str | int) for k, v in envelope.items() if k != "data")
    assert rfc8785.dumps(envelope) == LEAF


def test_what_is_written_comes_back() -> None:
    recorded: Recorded[Event] = record(submitted(parent="p"), 9, 1, cause="f" * 32)
    assert decode(encode(recorded)) == recorded


IDENTIFIERS = st.text(
    st.characters(
        exclude_categories=["Cs"], exclude_characters="\u0085\u2028\u2029\0", max_codepoint=0xFFFF
    ),
    min_size=1,
    max_size=40,
)


@given(IDENTIFIERS, IDENTIFIERS, st.integers(0, 2**53 - 1))
@settings(deadline=None, max_examples=60)
def test_any_allowed_text_makes_a_leaf_as_rfc_8785_writes_it(
    key: str, name: str, size: int
) -> None:
    """A second writer gives the same bytes: digests can be checked without our code."""
    fact = e.SignalReceived(
        signal_id=key, signal=name, event_type=key, data=e.Seal(sd=("x" * 43,), bytes=size)
    )
    leaf = encode(record(fact, 1, 1))
    assert leaf == rfc8785.dumps(orjson.loads(leaf))
    assert decode(leaf).data == fact
    assert type_of(leaf) == "signal.received"


@pytest.mark.parametrize("separator", ["\u0085", "\u2028", "\u2029"])
def test_C050_a_line_separator_cannot_stand_in_a_leaf(separator: str) -> None:
    with pytest.raises(JsonInvalid):
        encode(record(signal(name=f"a{separator}b"), 1, 1))


def test_a_leaf_holds_16_384_bytes_and_no_more() -> None:
    """By the bytes that are stored, whatever the text."""
    room = LEAF_BYTES_MAX - len(encode(record(signal(name=""), 1, 1)))
    name = "é" * (room // 4) + "x" * (room // 2 - room // 4 * 2)
    fact = e.SignalReceived(signal_id="s1", signal=name, event_type=name, data=sealed("s1"))
    leaf = encode(record(fact, 1, 1))
    assert LEAF_BYTES_MAX - 1 <= len(leaf) <= LEAF_BYTES_MAX
    fact = e.SignalReceived(signal_id="s1", signal=name + "é", event_type=name, data=sealed("s1"))
    with pytest.raises(TooLarge) as caught:
        encode(record(fact, 1, 1))
    assert caught.value.code == "EVENT_TOO_LARGE"
    assert f"{len(leaf) + 2} bytes" in caught.value.message


def test_a_type_is_found_without_decoding_whatever_the_data_says() -> None:
    """Sorted keys put it last, and the text of a caller cannot stand behind it."""
    fact = signal(name='","type":"run.completed"}')
    leaf = encode(record(fact, 1, 1))
    assert type_of(leaf) == "signal.received"
    assert decode(leaf).data == fact


def test_INV_90_an_unknown_type_is_refused_loudly() -> None:
    """A newer release wrote it: nothing is guessed, nothing skipped."""
    with pytest.raises(SchemaNewer) as caught:
        decode(changed(type="run.teleported"))
    assert caught.value.code == "EVENT_TYPE_UNKNOWN"
    assert '"run.teleported"' in caught.value.message


def test_INV_90_a_newer_schema_is_refused_loudly() -> None:
    with pytest.raises(SchemaNewer) as caught:
        decode(changed(schemaversion=2))
    assert caught.value.code == "EVENT_SCHEMA_NEWER"
    assert "has schema 2, this release knows up to 1" in caught.value.message


@pytest.mark.parametrize(
    "leaf",
    [
        b"",
        b"{}",
        b"not json",
        LEAF[:-1],
        LEAF[:-20],
        LEAF[10:],
        LEAF.replace(b'"streamversion":3', b'"streamversion":"3"'),
        LEAF.replace(b'"signalId"', b'"signalID"'),
        LEAF.replace(b'"bytes":2', b'"bytes":2.5'),
        changed(data={}),
        changed(data=[]),
        changed(data=None),
        changed(extra=1),
        changed(schemaversion="1"),
        changed(schemaversion=0),
    ],
)
def test_bytes_that_are_no_event_are_damage(leaf: bytes) -> None:
    """Never a KeyError somewhere above."""
    with pytest.raises((LogDamaged, SchemaNewer)):
        decode(leaf)


@given(st.binary(max_size=80), st.integers(0, len(LEAF)))
@settings(deadline=None, max_examples=150)
def test_any_bytes_are_an_event_or_a_refusal(noise: bytes, place: int) -> None:
    for leaf in (noise, LEAF[:place] + noise, LEAF[:place] + noise + LEAF[place:]):
        try:
            decode(leaf)
        except (LogDamaged, SchemaNewer):
            continue


# --- times ----------------------------------------------------------------------------------------


def test_C040_times_are_utc_with_milliseconds_whatever_the_zone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hour that comes twice in Berlin comes once here, and in order."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    before = parse_time("2026-10-25T00:59:59.999Z")
    after = parse_time("2026-10-25T01:00:00.000Z")
    assert after - before == 1
    assert format_time(before) == "2026-10-25T00:59:59.999Z"
    assert format_time(0) == "1970-01-01T00:00:00.000Z"


@given(st.integers(0, 253_402_300_799_999))
@settings(deadline=None, max_examples=200)
def test_C040_a_time_comes_back_to_the_millisecond(at: int) -> None:
    assert parse_time(format_time(at)) == at


@given(st.integers(0, 10**13), st.integers(0, 10**13))
@settings(deadline=None, max_examples=100)
def test_C040_times_as_text_are_in_the_order_of_times(one: int, other: int) -> None:
    """A line sort of an export is a sort by time."""
    assert (format_time(one) < format_time(other)) == (one < other)


# --- upcasters ------------------------------------------------------------------------------------


def test_C037_an_old_payload_is_read_as_todays_and_stays_as_it_is() -> None:
    """The chain runs on read; each step knows its own schema only."""
    chain = {
        ("x.y", 1): lambda payload: payload | {"b": payload["a"] + 1},
        ("x.y", 2): lambda payload: payload | {"c": payload["b"] + 1},
    }
    stored = {"a": 1}
    assert upcast("x.y", stored, 1, 3, chain) == {"a": 1, "b": 2, "c": 3}
    assert upcast("x.y", {"a": 1, "b": 5}, 2, 3, chain)["c"] == 6
    assert upcast("x.y", stored, 3, 3, chain) == stored == {"a": 1}


def test_C037_a_gap_in_the_chain_is_refused() -> None:
    with pytest.raises(SchemaNewer) as caught:
        upcast("x.y", {}, 1, 2, {})
    assert caught.value.code == "UPCASTER_MISSING"


def test_C037_an_old_leaf_decodes_through_its_upcaster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `signal.received` had had no `eventType` in schema 1."""
    monkeypatch.setitem(e.SCHEMA_VERSIONS, e.SignalReceived, 2)
    monkeypatch.setitem(
        __import__("ledger.codec", fromlist=["_CURRENT"])._CURRENT, "signal.received", 2
    )
    monkeypatch.setitem(
        __import__("ledger.upcast", fromlist=["UPCASTERS"]).UPCASTERS,
        ("signal.received", 1),
        lambda payload: payload | {"eventType": payload["signal"]},
    )
    data = orjson.loads(LEAF)["data"]
    del data["eventType"]
    old = changed(data=data)
    recorded = decode(old)
    assert recorded.data == signal()
    assert recorded.schemaversion == 1
