"""Master keys: given by a file, the environment or a callable, and stored nowhere here.

A key file holds one key a line, in hex or base64: the first wraps, the others still open, so that a
key is exchanged while the log is in use (`playledger vault rotate`).
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from ledger.errors import VaultKeyMissing, VaultKeyWrong

KEY_BYTES: Final = 32
ID_BYTES: Final = 4
MASTER_KEY: Final = "PLAYLEDGER_VAULT__MASTER_KEY"
MASTER_KEY_FILE: Final = "PLAYLEDGER_VAULT__MASTER_KEY_FILE"

MasterSource = bytes | str | Path | Callable[[], bytes | str | Sequence[bytes | str]] | None
"""A key, a path to a file of keys, or what returns keys; None looks into the environment."""


class MasterKey(Struct, frozen=True):
    """A key that wraps data keys; `id` is safe to show."""

    id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"MasterKey({self.id})"


def master_keys(source: MasterSource) -> tuple[MasterKey, ...]:
    """Returns the master keys of a source: the first wraps, the others still open.

    Bytes are one key, text and files hold keys in hex or base64, one a line; raises VaultKeyWrong
    for what is no key, VaultKeyMissing for a file that cannot be read.
    """
    if source is None:
        text, file = os.environ.get(MASTER_KEY), os.environ.get(MASTER_KEY_FILE)
        if text:
            return _parse(text, MASTER_KEY)
        return read_keys(Path(file)) if file else ()
    if isinstance(source, Path):
        return read_keys(source)
    given = source() if callable(source) else source
    items = [given] if isinstance(given, bytes | str) else list(given)
    keys: list[MasterKey] = []
    for item in items:
        if isinstance(item, str):
            keys += _parse(item, "master_key")
        else:
            keys.append(_master(item, "master_key"))
    return tuple(keys)


def new_key_text() -> str:
    """Draws a master key, as a line of a key file."""
    return urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode() + "\n"


def write_key_file(path: Path) -> None:
    """Draws a master key into a new file that only its owner may read, durably."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, new_key_text().encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _master(secret: bytes, where: str) -> MasterKey:
    if len(secret) != KEY_BYTES:
        raise VaultKeyWrong(
            f"{where} holds a key of {len(secret)} bytes, a master key has {KEY_BYTES}",
            hint="draw one: playledger vault key FILE",
        )
    shown = hmac.digest(secret, b"playledger/1/master-key-id", "sha256")[:ID_BYTES]
    return MasterKey(shown.hex(), secret)


def _parse(text: str, where: str) -> tuple[MasterKey, ...]:
    words = [word for line in text.splitlines() for word in line.partition("#")[0].split()]
    if not words:
        raise VaultKeyWrong(f"{where} holds no key", hint="draw one: playledger vault key FILE")
    return tuple(_master(_key_bytes(word, where), where) for word in words)


def _key_bytes(word: str, where: str) -> bytes:
    if re.fullmatch(r"[0-9a-fA-F]{64}", word):
        return bytes.fromhex(word)
    try:
        return b64decode(word.replace("-", "+").replace("_", "/") + "=" * (-len(word) % 4))
    except ValueError:
        raise VaultKeyWrong(
            f"{where} holds what is neither hex nor base64",
            hint="draw one: playledger vault key FILE",
        ) from None


def read_keys(path: Path) -> tuple[MasterKey, ...]:
    """Returns the keys of a key file; raises VaultKeyMissing or VaultKeyWrong."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise VaultKeyMissing(
            f"master key file {path} cannot be read: {reason}",
            hint="check the path and its permissions, or draw one: playledger vault key FILE",
        ) from None
    return _parse(text, str(path))
