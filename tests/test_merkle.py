"""The tree of ledger/merkle.py against RFC 6962, read off its definition, and known answers."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import LogDamaged
from ledger.merkle import EMPTY_ROOT, CompactRange, leaf_hash, node_hash

KNOWN: dict[str, Any] = json.loads(
    Path(__file__).parent.joinpath("vectors/rfc6962.json").read_text("ascii")
)
LEAVES = st.lists(st.binary(max_size=40), max_size=70)


def root_by_definition(leaves: list[bytes]) -> bytes:
    """Computes RFC 6962 section 2.1 as it is written."""
    if not leaves:
        return sha256(b"").digest()
    if len(leaves) == 1:
        return sha256(b"\0" + leaves[0]).digest()
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    left, right = root_by_definition(leaves[:split]), root_by_definition(leaves[split:])
    return sha256(b"\1" + left + right).digest()


def grown(leaves: list[bytes]) -> CompactRange:
    tree = CompactRange()
    for leaf in leaves:
        tree.append(leaf_hash(leaf))
    return tree


def test_hashes_are_the_known_answers() -> None:
    """Leaf, node and empty tree hash as in Certificate Transparency."""
    assert EMPTY_ROOT.hex() == KNOWN["empty_root"]
    assert CompactRange().root().hex() == KNOWN["empty_root"]
    for leaf, answer in KNOWN["leaf_hashes"]:
        assert leaf_hash(bytes.fromhex(leaf)).hex() == answer
    for left, right, answer in KNOWN["node_hashes"]:
        assert node_hash(bytes.fromhex(left), bytes.fromhex(right)).hex() == answer


def test_roots_are_the_known_answers_at_every_size() -> None:
    """One tree, grown leaf by leaf, has each of the published roots in turn."""
    tree = CompactRange()
    roots = []
    for entry in KNOWN["entries"]:
        tree.append(leaf_hash(bytes.fromhex(entry)))
        roots.append(tree.root().hex())
    assert roots == KNOWN["roots_by_size"]


@given(LEAVES)
@settings(deadline=None)
def test_root_is_the_one_of_the_definition(leaves: list[bytes]) -> None:
    """Growing leaf by leaf and computing from all leaves give the same root."""
    assert grown(leaves).root() == root_by_definition(leaves)


@given(LEAVES, st.data())
@settings(deadline=None)
def test_range_stored_anywhere_grows_to_the_same_root(leaves: list[bytes], data: Any) -> None:
    """A writer that starts from the stored range goes on as if it had never stopped."""
    split = data.draw(st.integers(0, len(leaves)))
    before = grown(leaves[:split])
    after = CompactRange.load(before.dump(), split)
    for leaf in leaves[split:]:
        after.append(leaf_hash(leaf))
    assert (after.size, after.dump()) == (len(leaves), grown(leaves).dump())
    assert after.root() == root_by_definition(leaves)


def test_copy_grows_apart() -> None:
    """A batch that is given up leaves the range as it was."""
    kept = grown([b"a", b"b", b"c"])
    before = kept.dump()
    tried = kept.copy()
    tried.append(leaf_hash(b"d"))
    assert (kept.size, kept.dump()) == (3, before)
    assert (tried.size, tried.root()) == (4, root_by_definition([b"a", b"b", b"c", b"d"]))


@pytest.mark.parametrize(("size", "count"), [(0, 1), (1, 0), (3, 1), (4, 2), (-1, 1)])
def test_range_of_another_size_is_refused(size: int, count: int) -> None:
    """The number of hashes is the number of 1 bits of the size, else the head is damaged."""
    with pytest.raises(LogDamaged, match=f"the tree of {size} events"):
        CompactRange.load(bytes(32) * count, size)


def test_cut_hash_is_refused() -> None:
    """A range that ends inside a hash is damaged."""
    with pytest.raises(LogDamaged, match="needs 1 hashes, the head has 31 bytes"):
        CompactRange.load(bytes(31), 1)
