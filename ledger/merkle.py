from __future__ import annotations

from hashlib import sha256


def leaf_hash(data: bytes) -> bytes:
    return sha256(b"\0" + data).digest()


class CompactRange:
    def __init__(self) -> None:
        self.size = 0
        self._hashes: list[bytes] = []

    @classmethod
    def load(cls, data: bytes, size: int) -> CompactRange:
        r = cls()
        r.size = size
        r._hashes = [data[i : i + 32] for i in range(0, len(data), 32)]
        return r

    def append(self, leaf: bytes) -> None:
        size = self.size
        while size & 1:
            leaf = sha256(b"\1" + self._hashes.pop() + leaf).digest()
            size >>= 1
        self._hashes.append(leaf)
        self.size += 1

    def dump(self) -> bytes:
        return b"".join(self._hashes)

    def root(self) -> bytes:
        h = self._hashes
        if not h:
            return sha256(b"").digest()
        out = h[-1]
        for x in reversed(h[:-1]):
            out = sha256(b"\1" + x + out).digest()
        return out
