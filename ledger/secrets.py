"""Secrets: what opens something elsewhere, kept encrypted and only for a while (SPEC 3.2).

An event holds a `SecretRef`: where the secret lies, a fingerprint under the log's own key, and
until when.  The row is encrypted under the data key of the secrets (ledger/keyring.py); its
additional data binds subject, key, fingerprint and expiry, and expiry is checked before anything is
decrypted (AUDIT 5.3).  Deleting the row is what makes a secret unrecoverable; the log stays as it
is (INV-48, INV-51).
"""

from __future__ import annotations

import secrets
import sqlite3
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Struct

from ledger.canonical import canonical_own
from ledger.errors import ValueGone
from ledger.events import SecretRef
from ledger.keyring import NONCE_BYTES, Keyring
from ledger.query import Query
from ledger.rows import Value, write_rows

SECRET_BYTES_MAX: Final = 64 * 1024


class SecretRow(Struct, frozen=True, gc=False):
    """One row of `vault_secrets`; `expires_at` in ms since 1970, None for as long as its run."""

    key: str
    subject: str
    fingerprint: str
    ciphertext: bytes
    expires_at: int | None


def close_secret(
    keyring: Keyring,
    secrets_key: bytes,
    subject: str,
    name: str,
    value: bytes,
    expires_at: int | None,
) -> tuple[SecretRef, SecretRow]:
    """Encrypts a secret; returns what an event may hold of it, and its row."""
    if len(value) > SECRET_BYTES_MAX:
        raise ValueError(f"a secret of {len(value)} bytes, the limit is {SECRET_BYTES_MAX}")
    ref = SecretRef(
        vault_key=f"{subject}/{name}", fingerprint=keyring.fingerprint(value), expires_at=expires_at
    )
    nonce = secrets.token_bytes(NONCE_BYTES)
    closed = AESGCM(secrets_key).encrypt(nonce, value, _context(ref, subject))
    return ref, SecretRow(ref.vault_key, subject, ref.fingerprint, nonce + closed, expires_at)


def open_secret(secrets_key: bytes, row: SecretRow) -> bytes:
    """Returns the secret of a row; raises ValueGone if the row was changed or moved."""
    ref = SecretRef(vault_key=row.key, fingerprint=row.fingerprint, expires_at=row.expires_at)
    try:
        return AESGCM(secrets_key).decrypt(
            row.ciphertext[:NONCE_BYTES], row.ciphertext[NONCE_BYTES:], _context(ref, row.subject)
        )
    except (InvalidTag, ValueError) as error:
        raise ValueGone(f"secret {row.fingerprint} cannot be opened", code="REF_INVALID") from error


def check_secret(ref: SecretRef, row: SecretRow | None, at: int) -> SecretRow:
    """Returns the row of a reference if it may be opened at `at`; raises ValueGone."""
    if ref.expires_at is not None and ref.expires_at <= at:
        raise ValueGone(
            f"secret {ref.fingerprint} expired {at - ref.expires_at} ms ago", code="SECRET_EXPIRED"
        )
    if row is None or not row.ciphertext:
        raise ValueGone(f"secret {ref.fingerprint} is no longer in the vault", code="SECRET_GONE")
    if row.fingerprint != ref.fingerprint or row.expires_at != ref.expires_at:
        raise ValueGone(
            f"secret {ref.fingerprint} is no longer in the vault: {row.fingerprint} took its place",
            code="SECRET_GONE",
        )
    return row


def secret_query(vault_key: str) -> Query[SecretRow | None]:
    """Asks for the row of a secret."""
    return Query(
        "select key, subject, fingerprint, ciphertext, expires_at from vault_secrets where key = ?",
        (vault_key,),
        lambda rows: SecretRow(*rows[0]) if rows else None,
    )


def write_secrets(connection: sqlite3.Connection, rows: list[SecretRow]) -> None:
    """Writes secrets; one under a key that is taken replaces it, as the newest row."""
    write_rows(
        connection,
        "insert or replace into vault_secrets (key, subject, fingerprint, ciphertext, expires_at)"
        " values (?, ?, ?, ?, ?)",
        [(row.key, row.subject, row.fingerprint, row.ciphertext, row.expires_at) for row in rows],
    )


def remove_secrets(
    connection: sqlite3.Connection, condition: str, parameters: tuple[Value, ...]
) -> int:
    """Deletes the secrets for which an SQL condition holds; returns how many.

    The newest row is only emptied: the number of the newest row tells other processes whether
    secrets came since they looked, so it may not be given twice (ledger/scrub.py).
    """
    newest = connection.execute("select max(rowid) from vault_secrets").fetchone()[0]
    emptied = connection.execute(
        f"update vault_secrets set ciphertext = x'', expires_at = null"
        f" where rowid = ? and ciphertext <> x'' and ({condition})",
        (newest, *parameters),
    ).rowcount
    deleted = connection.execute(
        f"delete from vault_secrets where rowid < ? and ({condition})", (newest, *parameters)
    ).rowcount
    return emptied + deleted


def _context(ref: SecretRef, subject: str) -> bytes:
    return canonical_own(
        {
            "expiresAt": -1 if ref.expires_at is None else ref.expires_at,
            "fingerprint": ref.fingerprint,
            "key": ref.vault_key,
            "subject": subject,
            "v": 1,
        }
    )
