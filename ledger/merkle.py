"""The Merkle tree over all leaves, as RFC 6962 defines it (AUDIT 1.1).

    leaf = SHA-256(0x00 || bytes)    node = SHA-256(0x01 || left || right)    empty = SHA-256("")

Appending needs only the roots of the perfect subtrees that the leaves so far fall into, one per 1
bit of their number, largest first: the compact range.  The head of the log keeps it, so that a
writer starts without reading a single leaf.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from ledger.errors import LogDamaged

HASH_BYTES: Final = 32
EMPTY_ROOT: Final = sha256(b"").digest()


def leaf_hash(data: bytes) -> bytes:
    """Returns the hash of one leaf."""
    return sha256(b"\0" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Returns the hash of the node over two subtrees."""
    return sha256(b"\1" + left + right).digest()


class CompactRange:
    """Grows a tree leaf by leaf; mutable, for a list is what a writer's hot path can afford.

    One writer owns it.  It appends to a copy, and keeps that only when the batch is committed.
    """

    __slots__ = ("_hashes", "size")

    def __init__(self) -> None:
        self.size = 0
        self._hashes: list[bytes] = []

    @classmethod
    def load(cls, data: bytes, size: int) -> CompactRange:
        """Returns the range that `dump` wrote at this size, or raises LogDamaged."""
        count = size.bit_count() if size >= 0 else -1
        if len(data) != count * HASH_BYTES:
            raise LogDamaged(
                f"the tree of {size} events needs {count} hashes, the head has {len(data)} bytes",
                hint="playledger db fsck names the place",
            )
        loaded = cls()
        loaded.size = size
        loaded._hashes = [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]
        return loaded

    def copy(self) -> CompactRange:
        """Returns a range that grows apart from this one."""
        other = CompactRange()
        other.size = self.size
        other._hashes = self._hashes.copy()
        return other

    def append(self, leaf: bytes) -> None:
        """Adds the hash of the next leaf: each 1 bit at the end of the size is a pair to close."""
        size = self.size
        hashes = self._hashes
        while size & 1:
            leaf = sha256(b"\1" + hashes.pop() + leaf).digest()  # node_hash without its call
            size >>= 1
        hashes.append(leaf)
        self.size += 1

    def dump(self) -> bytes:
        """Returns the hashes, largest subtree first; `load` needs the size beside them."""
        return b"".join(self._hashes)

    def root(self) -> bytes:
        """Returns the root of the tree over all leaves so far."""
        if not self._hashes:
            return EMPTY_ROOT
        *larger, root = self._hashes
        for left in reversed(larger):
            root = node_hash(left, root)
        return root
