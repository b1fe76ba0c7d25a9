"""Sealed values: what may be personal or large lies in the vault, the event holds a commitment.

    salt       = b64url(HMAC-SHA256(run key, place)),  place = <type>/<natural key>/<field>
    disclosure = b64url(canonical([salt, field, value]))
    digest     = b64url(SHA-256(disclosure))

The same value at the same place of the same run gives the same digest, so resubmits and re-runs
compare equal; without run key and disclosure nobody can guess the value (CONTRACTS A.5, AUDIT 5.2).
A value above the run's threshold is replaced by a reference to a blob, and its field by
`<field>@blob`, so that no value of a user can be taken for a reference.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Any

import orjson
from msgspec import Struct

from ledger.canonical import Json, canonical_own
from ledger.events import Seal
from ledger.transaction import Disclosure

BLOB_MARK = "@blob"


class BlobRef(Struct, frozen=True):
    """Where an externalised value lies, its size in bytes and the SHA-256 of those bytes."""

    blob: str
    bytes: int
    sha256: str


class Sealed(Struct, frozen=True):
    """A seal, and what the vault has to keep for it; `blob` must be stored before the append."""

    seal: Seal
    disclosure: Disclosure
    blob: tuple[BlobRef, bytes] | None = None


def seal(run_key: bytes, run_id: str, place: str, value: bytes, externalize_after: int) -> Sealed:
    """Seals a value, given as canonical JSON, at `<type>/<natural key>/<field>`."""
    subject = "run/" + run_id
    field = place.rsplit("/", 1)[1]
    salt = _b64(hmac.digest(run_key, place.encode(), "sha256"))
    blob: tuple[BlobRef, bytes] | None = None
    content = value
    if len(value) > externalize_after:
        ref = blob_ref(run_key, value)
        blob = (ref, value)
        field += BLOB_MARK
        content = canonical_own({"blob": ref.blob, "bytes": ref.bytes, "sha256": ref.sha256})
    text = _b64(b'["%b","%b",%b]' % (salt.encode(), field.encode(), content))
    digest = digest_of(text)
    return Sealed(
        seal=Seal(sd=(digest,), bytes=len(value)),
        disclosure=Disclosure(
            digest=digest, subject=subject, text=text, blobs=(blob[0].blob,) if blob else ()
        ),
        blob=blob,
    )


def blob_ref(run_key: bytes, content: bytes) -> BlobRef:
    """Names a blob by run key and content: repeatable, and no digest a stranger could compute."""
    digest = sha256(content).hexdigest()
    key = _b64(hmac.digest(run_key, b"blob/" + digest.encode(), "sha256"))
    return BlobRef(blob=key, bytes=len(content), sha256=digest)


def digest_of(text: str) -> str:
    """Returns the digest of a disclosure."""
    return _b64(sha256(text.encode()).digest())


def disclose(text: str) -> Json | BlobRef:
    """Returns the value of a disclosure, or the reference to it."""
    _salt, field, value = orjson.loads(_unb64(text))
    if field.endswith(BLOB_MARK):
        return BlobRef(blob=value["blob"], bytes=value["bytes"], sha256=value["sha256"])
    result: Json = value
    return result


def request_digest(request: dict[str, Any]) -> str:
    """Returns the digest of what a caller asked for (CONTRACTS A.5)."""
    return _b64(sha256(canonical_own(request)).digest())


def _b64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
