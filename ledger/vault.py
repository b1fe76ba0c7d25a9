"""The vault: values and blobs that may be deleted without touching the log.

Values are written in the append that carries their digest; blobs before it, in a commit of their
own, and read back.  Until an event refers to it a blob has an expiry, so that one left by a crash
in between is removed (SPEC 6.1 S7).
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Final

import orjson

from ledger.canonical import Json, canonical_own
from ledger.errors import PlayledgerError, TooLarge, ValueGone, ValuesUnavailable
from ledger.events import Seal, SecretRef
from ledger.failpoint import failpoint
from ledger.keyring import Keyring
from ledger.query import Query, Reader, first_value
from ledger.seal import BlobRef, Sealed, digest_of, disclose
from ledger.secrets import (
    SecretRow,
    check_secret,
    close_secret,
    open_secret,
    remove_secrets,
    secret_query,
    write_secrets,
)
from ledger.transaction import Disclosure

BLOB_BYTES_MAX: Final = 32 * 1024 * 1024
ORPHAN_MS: Final = 24 * 3600 * 1000
_CACHE_BYTES_MAX: Final = 16 * 1024 * 1024

RunJob = Callable[[Callable[[sqlite3.Connection, int], object]], Awaitable[object]]


def key_query(run_id: str) -> Query[bytes | None]:
    """Asks for the key that a run's values are sealed under."""
    return Query("select key from vault_keys where subject = ?", ("run/" + run_id,), first_value)


def disclosure_query(digest: str) -> Query[tuple[str, str] | None]:
    """Asks for the subject and text of a sealed value."""
    return Query(
        "select subject, disclosure from vault_values where digest = ?",
        (digest,),
        lambda rows: (rows[0][0], rows[0][1]) if rows else None,
    )


def blob_query(key: str) -> Query[bytes | None]:
    """Asks for the content of a blob."""
    return Query("select content from blobs where key = ?", (key,), first_value)


def check_disclosure(digest: str, text: str) -> Json | BlobRef:
    """Returns what a disclosure holds, after checking it against the digest in the log."""
    if digest_of(text) != digest:
        raise ValueGone(f"value {digest[:8]} does not match its digest", code="HASH_MISMATCH")
    try:
        return disclose(text)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueGone(f"value {digest[:8]} cannot be read", code="REF_INVALID") from error


def check_blob(ref: BlobRef, content: bytes | None) -> bytes:
    """Returns a blob's bytes, after checking length and hash, each with its own code."""
    if content is None:
        raise ValueGone(f"blob {ref.blob[:8]} is missing", code="MISSING")
    if len(content) != ref.bytes:
        raise ValueGone(
            f"blob {ref.blob[:8]} byte length mismatch: expected {ref.bytes}, got {len(content)}",
            code="BYTES_MISMATCH",
        )
    if sha256(content).hexdigest() != ref.sha256:
        raise ValueGone(f"blob {ref.blob[:8]} hash mismatch", code="HASH_MISMATCH")
    return content


class Vault:
    """Stores and reveals values for one process; its cache only saves reads."""

    def __init__(
        self, reader: Reader, run_job: RunJob, keyring: Keyring, now: Callable[[], int]
    ) -> None:
        self.keyring = keyring
        self._now = now
        self._reader = reader
        self._run_job = run_job
        self._keys: OrderedDict[str, bytes] = OrderedDict()
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0

    async def run_key(self, run_id: str) -> bytes | None:
        """Returns the key of a run, or None if there is no such run."""
        found = self._keys.get(run_id)
        if found is None:
            found = await self._reader.ask(key_query(run_id))
            if found is not None:
                self.learn_key(run_id, found)
        return found

    def known_key(self, run_id: str) -> bytes | None:
        """Returns the key of a run if this process has met it."""
        return self._keys.get(run_id)

    def learn_key(self, run_id: str, key: bytes) -> None:
        """Remembers a key that this process has just used."""
        self._keys[run_id] = key
        if len(self._keys) > 50_000:
            self._keys.popitem(last=False)

    async def store_blobs(self, sealed: list[Sealed]) -> None:
        """Writes the blobs of sealed values and reads them back, before anything refers to them."""
        for item in sealed:
            if item.blob is not None:
                await self.store_blob(item.disclosure.subject, *item.blob)

    async def store_blob(self, subject: str, ref: BlobRef, content: bytes) -> None:
        """Writes one blob; raises TooLarge above 32 MiB, ValuesUnavailable if it did not hold."""
        if len(content) > BLOB_BYTES_MAX:
            raise TooLarge(
                f"{len(content)} bytes cannot be stored, the limit is {BLOB_BYTES_MAX}",
                code="BLOB_TOO_LARGE",
            )

        def put(connection: sqlite3.Connection, at: int) -> None:
            connection.execute(
                "insert into blobs (key, subject, bytes, sha256, content, expires_at)"
                " values (?, ?, ?, ?, ?, ?) on conflict (key) do update"
                " set expires_at = excluded.expires_at where expires_at is not null",
                (ref.blob, subject, ref.bytes, ref.sha256, content, at + ORPHAN_MS),
            )

        try:
            failpoint("before_blob_put")
            await self._run_job(put)
            failpoint("after_blob_put")
            check_blob(ref, await self._reader.ask(blob_query(ref.blob)))
            failpoint("after_blob_read_back")
        except PlayledgerError as error:
            if isinstance(error, TooLarge):
                raise
            raise ValuesUnavailable(
                f"Failed to persist workflow retry state before dispatching the play run. "
                f"({error.message})",
                hint=error.hint or "the same request again; nothing was recorded",
            ) from error

    def learn(self, sealed: Sealed, value: bytes) -> None:
        """Remembers a value that this process has just sealed."""
        self._keep(sealed.seal.digest, value)

    async def reveal(self, seal: Seal) -> Json:
        """Returns the value of a seal; raises ValueGone with a code if it cannot."""
        result: Json = orjson.loads(await self.reveal_bytes(seal))
        return result

    async def reveal_bytes(self, seal: Seal, subject: str | None = None) -> bytes:
        """Returns a sealed value as canonical JSON.

        With `subject` it is read and checked again, and must be that run's: a restart rests on what
        is stored, not on what this process remembers.
        """
        cached = self._values.get(seal.digest)
        if cached is not None and subject is None:
            return cached
        found = await self._reader.ask(disclosure_query(seal.digest))
        if found is None:
            raise ValueGone(f"value {seal.digest[:8]} is no longer in the vault")
        owner, text = found
        if subject is not None and owner != subject:
            raise ValueGone(f"value {seal.digest[:8]} belongs to {owner}", code="WRONG_RUN")
        held = check_disclosure(seal.digest, text)
        if isinstance(held, BlobRef):
            value = check_blob(held, await self._reader.ask(blob_query(held.blob)))
        else:
            value = canonical_own(held)
        if len(value) != seal.bytes:
            raise ValueGone(
                f"value {seal.digest[:8]} byte length mismatch: "
                f"expected {seal.bytes}, got {len(value)}",
                code="BYTES_MISMATCH",
            )
        self._keep(seal.digest, value)
        return value

    async def forget(self, seal: Seal) -> None:
        """Deletes a sealed value, and the blob it lies in; what refers to it stays as it is."""
        self._values.pop(seal.digest, None)
        found = await self._reader.ask(disclosure_query(seal.digest))
        if found is None:
            return
        _, text = found
        held = check_disclosure(seal.digest, text)

        def delete(connection: sqlite3.Connection, _at: int) -> None:
            connection.execute("delete from vault_values where digest = ?", (seal.digest,))
            if isinstance(held, BlobRef):
                connection.execute("delete from blobs where key = ?", (held.blob,))

        await self._run_job(delete)

    async def read_file(self, ref: BlobRef) -> bytes:
        """Returns the bytes of a staged file."""
        return check_blob(ref, await self._reader.ask(blob_query(ref.blob)))

    async def seal_secret(
        self, subject: str, name: str, value: bytes, expires_at: int | None
    ) -> tuple[SecretRef, SecretRow]:
        """Encrypts a secret of a subject (`run/<id>`); the row goes into `Command.secrets`.

        Raises VaultKeyMissing if there is no key for secrets and none can be made.
        """
        key = await self._secrets_key()
        return close_secret(self.keyring, key, subject, name, value, expires_at)

    async def put_secret(
        self, subject: str, name: str, value: bytes, expires_at: int | None
    ) -> SecretRef:
        """Stores a secret in a commit of its own, in place of the one of this name."""
        ref, row = await self.seal_secret(subject, name, value, expires_at)
        await self._run_job(lambda connection, _: write_secrets(connection, [row]))
        return ref

    async def secret(self, ref: SecretRef) -> bytes:
        """Returns a secret; raises ValueGone with the code SECRET_GONE or SECRET_EXPIRED."""
        row = check_secret(ref, await self._reader.ask(secret_query(ref.vault_key)), self._now())
        return open_secret(await self._secrets_key(), row)

    async def drop_secrets(self, subject: str) -> None:
        """Deletes all secrets of a subject; what refers to them stays as it is."""
        await self._run_job(lambda c, _: remove_secrets(c, "subject = ?", (subject,)))

    async def _secrets_key(self) -> bytes:
        key = self.keyring.secrets_key
        if key is None:
            await self._run_job(self.keyring.draw_secrets_key)
            key = self.keyring.secrets_key
        if key is None:
            raise self.keyring.secrets_key_missing()
        return key

    def _keep(self, digest: str, value: bytes) -> None:
        if len(value) > _CACHE_BYTES_MAX // 8 or digest in self._values:
            return
        self._values[digest] = value
        self._cached_bytes += len(value)
        while self._cached_bytes > _CACHE_BYTES_MAX:
            _, gone = self._values.popitem(last=False)
            self._cached_bytes -= len(gone)


def orphans_query(at: int) -> Query[bool]:
    """Asks whether a blob has expired."""
    return Query("select 1 from blobs where expires_at <= ? limit 1", (at,), bool)


def expire_orphans(connection: sqlite3.Connection, at: int) -> int:
    """Deletes blobs that no event came to refer to within a day; returns how many."""
    return connection.execute("delete from blobs where expires_at <= ?", (at,)).rowcount


__all__ = ["Disclosure", "ValueGone", "Vault", "expire_orphans", "orphans_query"]
