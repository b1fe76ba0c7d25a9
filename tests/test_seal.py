"""Seals: equal values at equal places are equal, nothing can be guessed, everything is checked."""

from __future__ import annotations

import base64
import hmac
import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.canonical import Json, canonical
from ledger.seal import BlobRef, blob_ref, digest_of, disclose, request_digest, seal
from ledger.vault import ValueGone, check_blob, check_disclosure
from tests.given import KEY

PLACE = "signal.received/signal/s1/data"
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner),
    max_leaves=6,
)


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def test_a_seal_is_made_as_the_contract_says() -> None:
    """Made again here from its definition (CONTRACTS A.5), without our code."""
    value = canonical({"n": 1})
    salt = b64(hmac.digest(KEY, PLACE.encode(), "sha256"))
    text = b64(json.dumps([salt, "data", {"n": 1}], separators=(",", ":")).encode())
    made = seal(KEY, "r1", PLACE, value, 1000)
    assert made.disclosure.text == text
    assert made.seal.digest == b64(sha256(text.encode()).digest())
    assert made.seal.bytes == len(value)
    assert made.disclosure.subject == "run/r1"
    assert made.blob is None


@given(VALUES)
@settings(deadline=None, max_examples=60)
def test_a_value_comes_back_from_its_disclosure(value: Any) -> None:
    made = seal(KEY, "r1", PLACE, canonical(value), 10**6)
    assert check_disclosure(made.seal.digest, made.disclosure.text) == value


def test_INV_32_equal_values_at_equal_places_are_equal_and_others_are_not() -> None:
    """So a resubmit and a re-run compare equal, and two places or runs tell nothing."""
    one = seal(KEY, "r1", PLACE, b"1", 100).seal
    assert seal(KEY, "r1", PLACE, b"1", 100).seal == one
    others = [
        seal(KEY, "r1", PLACE, b"2", 100),
        seal(KEY, "r1", "signal.received/signal/s2/data", b"1", 100),
        seal(bytes(32), "r1", PLACE, b"1", 100),
    ]
    assert len({one.digest, *(other.seal.digest for other in others)}) == 4


@pytest.mark.parametrize("size", [9, 10, 11])
def test_INV_06_a_value_is_inline_up_to_the_threshold_and_a_blob_above(size: int) -> None:
    value = canonical("x" * (size - 2))
    assert len(value) == size
    made = seal(KEY, "r1", PLACE, value, 10)
    held = disclose(made.disclosure.text)
    if size <= 10:
        assert made.blob is None
        assert held == "x" * (size - 2)
    else:
        assert made.blob is not None
        assert held == made.blob[0] == blob_ref(KEY, value)
        assert made.disclosure.blobs == (made.blob[0].blob,)
    assert made.seal.bytes == size


def test_INV_05_sizes_are_bytes_of_utf_8() -> None:
    value = canonical("é€😀")
    assert seal(KEY, "r1", PLACE, value, 100).seal.bytes == len('"é€😀"'.encode()) == 11


def test_no_value_of_a_user_can_be_taken_for_a_reference() -> None:
    """A blob is marked in the name of its field, which no value reaches."""
    fake: dict[str, Json] = {"blob": "x", "bytes": 1, "sha256": "y"}
    made = seal(KEY, "r1", PLACE, canonical(fake), 1000)
    assert disclose(made.disclosure.text) == fake
    assert not isinstance(disclose(made.disclosure.text), BlobRef)


def test_the_key_of_a_blob_is_no_digest_a_stranger_could_compute() -> None:
    """Else a guess of the input could be checked against the store (AMENDMENTS 3)."""
    ref = blob_ref(KEY, b"input")
    assert ref != blob_ref(bytes(32), b"input")
    assert sha256(b"input").hexdigest() not in ref.blob
    assert ref.blob == blob_ref(KEY, b"input").blob


@pytest.mark.parametrize("flip", range(0, 60, 7))
def test_INV_36_a_flipped_byte_of_a_disclosure_is_found(flip: int) -> None:
    made = seal(KEY, "r1", PLACE, canonical({"a": "b" * 40}), 1000)
    text = made.disclosure.text
    spoiled = text[:flip] + ("A" if text[flip] != "A" else "B") + text[flip + 1 :]
    with pytest.raises(ValueGone) as caught:
        check_disclosure(made.seal.digest, spoiled)
    assert caught.value.code == "HASH_MISMATCH"


@pytest.mark.parametrize("text", ["", "!!", b64(b"[1,2]"), b64(b'["s","f@blob",{}]'), b64(b"{")])
def test_INV_36_a_disclosure_that_is_none_has_its_own_code(text: str) -> None:
    """Its digest may fit: the store held nonsense from the start."""
    with pytest.raises(ValueGone) as caught:
        check_disclosure(digest_of(text), text)
    assert caught.value.code == "REF_INVALID"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "MISSING"),
        (b"inpu", "BYTES_MISMATCH"),
        (b"input!", "BYTES_MISMATCH"),
        (b"Input", "HASH_MISMATCH"),
    ],
)
def test_INV_36_a_blob_is_checked_by_length_and_hash(content: bytes | None, code: str) -> None:
    with pytest.raises(ValueGone) as caught:
        check_blob(blob_ref(KEY, b"input"), content)
    assert caught.value.code == code
    assert check_blob(blob_ref(KEY, b"input"), b"input") == b"input"


def test_INV_09_the_digest_of_a_request_ignores_the_order_of_keys() -> None:
    assert request_digest({"a": 1, "b": [1]}) == request_digest({"b": [1], "a": 1})
    assert request_digest({"a": 1}) != request_digest({"a": 2})
