"""How the URL of a database session travels and rests: never in clear, bound to its scope.

    origin -> coordinator   RFC 9180 HPKE, base mode: X25519, HKDF-SHA256, AES-256-GCM.  The key
                            pair is drawn for one request, used once.  `info` holds the context,
                            built by both sides and never echoed (AUDIT 5.4).
    coordinator -> instance AES-256-GCM under HKDF-SHA256 of the executor token that will open it;
                            the session without its URL is the associated data (SPEC 7.14, 7.15).

So a changed scope, operation or expiry, another run, or another token gives one error, always the
same one.  Nothing here has a `repr` that shows a key or a URL.
"""

from __future__ import annotations

import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Struct

from ledger.canonical import Json, canonical
from ledger.errors import Refused

TRANSPORT: Final = "HPKE-X25519-HKDF-SHA256-A256GCM"
AT_REST: Final = "HKDF-SHA256-A256GCM"
_PURPOSE: Final = "playledger/db-session-url/1"
_INFO: Final = b"db-session-url/v1"
_SALT_BYTES: Final = 16
_IV_BYTES: Final = 12
_CHECK_BYTES: Final = 16
_URL_FIELDS: Final = frozenset({"postgresUrl", "encryptedPostgresUrl"})
_SUITE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)

Session = Mapping[str, Json]


class SessionUnreadable(Refused):
    """Says that a session's URL cannot be opened: wrong key, or anything it is bound to changed."""

    code = "SESSION_UNREADABLE"


class Asked(Struct, frozen=True):
    """Who asks for a session, in which request: bound into what the origin encrypts."""

    run_id: str
    request_id: str


class EphemeralKey:
    """The key pair of one request.  It opens one answer and is gone."""

    __slots__ = ("_private", "public")

    def __init__(self) -> None:
        private = X25519PrivateKey.generate()
        self._private: X25519PrivateKey | None = private
        self.public: Final = private.public_key().public_bytes_raw()

    def request(self) -> dict[str, Json]:
        """Returns the public half as the request carries it."""
        return {"alg": TRANSPORT, "publicKey": _b64(self.public)}

    def open(self, session: Session, asked: Asked) -> str:
        """Returns the URL of an answered session; raises SessionUnreadable, also a second time."""
        private, self._private = self._private, None
        sealed = session.get("encryptedPostgresUrl")
        if private is None or not isinstance(sealed, Mapping) or sealed.get("alg") != TRANSPORT:
            raise _unreadable()
        try:
            plain = _SUITE.decrypt(
                _unb64(sealed.get("ct")), private, transport_info(session, asked, self.public)
            )
            return plain.decode()
        except (InvalidTag, ValueError, TypeError):
            # An all-zero exchange is a ValueError: an attack, and no reason to ask again.
            raise _unreadable() from None


def seal_for_request(url: str, session: Session, asked: Asked, public: bytes) -> dict[str, Json]:
    """Returns a URL encrypted to a request's key: what an origin does (and our embedded one)."""
    key = X25519PublicKey.from_public_bytes(public)
    text = _SUITE.encrypt(url.encode(), key, transport_info(session, asked, public))
    return {"alg": TRANSPORT, "ct": _b64(text), "v": 1}


def transport_info(session: Session, asked: Asked, public: bytes) -> bytes:
    """Returns the context of one exchange: purpose, request, run, key, and the session itself."""
    return canonical(
        {
            "key": _b64(sha256(public).digest()),
            "purpose": _PURPOSE,
            "requestId": asked.request_id,
            "runId": asked.run_id,
            "session": _scope(session),
        }
    )


def seal_for_token(url: str, session: Session, token: str) -> dict[str, Json]:
    """Returns a URL encrypted for whoever holds an executor token."""
    salt, iv = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_IV_BYTES)
    key, check = _derive(token, salt)
    text = AESGCM(key).encrypt(iv, url.encode(), session_aad(session))
    return {
        "alg": AT_REST,
        "check": _b64(check),
        "ct": _b64(text),
        "iv": _b64(iv),
        "salt": _b64(salt),
        "v": 1,
    }


def open_with_token(session: Session, token: str) -> str:
    """Returns the URL of a session at rest; raises SessionUnreadable."""
    sealed = session.get("encryptedPostgresUrl")
    if not isinstance(sealed, Mapping) or sealed.get("alg") != AT_REST or sealed.get("v") != 1:
        raise _unreadable()
    try:
        key, check = _derive(token, _unb64(sealed.get("salt")))
        # AES-GCM does not commit to its key: the check says first whether this is the key.
        if not hmac.compare_digest(check, _unb64(sealed.get("check"))):
            raise _unreadable()
        plain = AESGCM(key).decrypt(
            _unb64(sealed.get("iv")), _unb64(sealed.get("ct")), session_aad(session)
        )
        return plain.decode()
    except (InvalidTag, ValueError, TypeError):
        raise _unreadable() from None


def session_aad(session: Session) -> bytes:
    """Returns what a session's ciphertext is bound to: all of it but its URL (SPEC 7.15)."""
    return canonical(_scope(session))


def _scope(session: Session) -> dict[str, Json]:
    return {name: value for name, value in session.items() if name not in _URL_FIELDS}


def _derive(token: str, salt: bytes) -> tuple[bytes, bytes]:
    material = HKDF(SHA256(), 32 + _CHECK_BYTES, salt, _INFO).derive(token.encode())
    return material[:32], material[32:]


def _unreadable() -> SessionUnreadable:
    return SessionUnreadable(
        "a database session cannot be opened",
        hint="it is bound to its run, scope, expiry and token; ask for a new one",
    )


def _b64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: object) -> bytes:
    if not isinstance(text, str):
        raise TypeError("no base64url text")
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
