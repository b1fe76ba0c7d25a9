"""The keys of the vault: master keys from outside, data keys in the database, wrapped by them.

    master key (a file, the environment, a callable)      never stored
      wraps  `log`       the log's own key: fingerprints, references to people
             `secrets`   the data key of the table `vault_secrets`
             `run/<id>`  a run's key: its salts, and the cipher of its values and blobs

Everything is AES-256-GCM whose additional data names subject and place, so that no ciphertext can
be moved to another place (AUDIT 5.1, INV-43).  A wrapped key says which master key wraps it, so a
master key is exchanged by wrapping the data keys again; values are not touched.

Without a master key runs' keys and values are stored as they are, and only secrets are encrypted,
under a key of their own that is drawn into `<database>.key` (mode 0600) with the first of them.
What was stored before a master key was set stays readable beside what came later.
"""

from __future__ import annotations

import hmac
import secrets
import sqlite3
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ledger.canonical import canonical_own
from ledger.errors import VaultKeyMissing, VaultKeyWrong
from ledger.master import ID_BYTES, KEY_BYTES, MASTER_KEY_FILE, MasterKey, read_keys, write_key_file
from ledger.query import Query, ask

NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
LOG_KEY: Final = "log"
SECRETS_KEY: Final = "secrets"

KEYS: Final[Query[Mapping[str, bytes]]] = Query(
    "select subject, key from vault_keys where subject in (?, ?) and key is not null",
    (LOG_KEY, SECRETS_KEY),
    lambda rows: {row[0]: row[1] for row in rows},
)
"""Asks for the keys of the log itself."""

_WRAPPED: Final = b"\x01"
_WRAPPED_BYTES: Final = 1 + ID_BYTES + NONCE_BYTES + KEY_BYTES + TAG_BYTES
_VALUE_MARK: Final = "."
"""Begins the text of an encrypted disclosure; a clear one is base64url, which has no full stop."""
_BLOB_MARK: Final = b"\x00playledger-blob-1\x00"
_CIPHERS_MAX: Final = 4096


class Keyring:
    """The keys of one open log; shared by its threads, each entry is only ever set once."""

    def __init__(self, path: Path, master: Sequence[MasterKey] = ()) -> None:
        self.path = path
        self.master = tuple(master)
        self._log_key: bytes | None = None
        self._secrets_key: bytes | None = None
        self._ciphers: OrderedDict[tuple[str, bytes], AESGCM] = OrderedDict()

    @property
    def encrypts(self) -> bool:
        """Whether values are encrypted: a master key was given."""
        return bool(self.master)

    @property
    def own_file(self) -> Path:
        """Where the key of the secrets lies if no master key was given."""
        return self.path.with_name(self.path.name + ".key")

    # --- taking up a log --------------------------------------------------------------------------

    def take_up(self, connection: sqlite3.Connection) -> None:
        """Reads the log's keys, and draws or wraps again what needs it; under the write lock.

        Raises VaultKeyMissing or VaultKeyWrong, before anything is changed, if they do not open.
        """
        rows = ask(connection, KEYS)
        self.look(rows, write=True)
        found = rows.get(LOG_KEY)
        if self._log_key is None:
            self._log_key = secrets.token_bytes(KEY_BYTES)
        if found is None or self.stale(found):
            self._store(connection, LOG_KEY, self._log_key)
        if self._secrets_key is not None and self.stale(rows[SECRETS_KEY]):
            self._store(connection, SECRETS_KEY, self._secrets_key)

    def look(self, rows: Mapping[str, bytes], *, write: bool = False) -> None:
        """Takes the log's keys from the answer of `KEYS`.

        A reader without a master key goes without what needs one; a wrong one is refused.
        """
        found = rows.get(LOG_KEY)
        if found is not None and (write or self.encrypts or len(found) == KEY_BYTES):
            self._log_key = self.unwrap(LOG_KEY, found)
        if SECRETS_KEY in rows:
            self._take_up_secrets(rows[SECRETS_KEY])

    def _take_up_secrets(self, stored: bytes) -> None:
        keys = (*self.master, *self._own_keys())
        wanted = stored[1 : 1 + ID_BYTES].hex()
        if any(key.id == wanted for key in keys):
            self._secrets_key = self._unwrap_with(keys, SECRETS_KEY, stored)

    def _own_keys(self) -> tuple[MasterKey, ...]:
        return read_keys(self.own_file) if self.own_file.is_file() else ()

    def _store(self, connection: sqlite3.Connection, subject: str, key: bytes) -> None:
        connection.execute(
            "insert into vault_keys (subject, key) values (?, ?)"
            " on conflict (subject) do update set key = excluded.key",
            (subject, self.wrap(subject, key)),
        )

    # --- data keys --------------------------------------------------------------------------------

    def wrap(self, subject: str, key: bytes) -> bytes:
        """Returns a data key as it is stored: wrapped, or as it is without a master key."""
        return _wrap(self.master[0], subject, key) if self.master else key

    def unwrap(self, subject: str, stored: bytes) -> bytes:
        """Returns a stored data key; raises VaultKeyMissing or VaultKeyWrong."""
        if len(stored) == KEY_BYTES:
            return stored
        return self._unwrap_with(self.master, subject, stored)

    def stale(self, stored: bytes) -> bool:
        """Whether a data key is stored otherwise than `wrap` would store it now."""
        if not self.master:
            return False
        return len(stored) == KEY_BYTES or stored[1 : 1 + ID_BYTES].hex() != self.master[0].id

    def _unwrap_with(self, keys: Sequence[MasterKey], subject: str, stored: bytes) -> bytes:
        wanted = stored[1 : 1 + ID_BYTES].hex()
        if not keys:
            raise VaultKeyMissing(
                f"{self.path} is encrypted under master key {wanted}, and none is set",
                hint=f"{MASTER_KEY_FILE}=FILE, or playledger.open(master_key=...)",
                key=wanted,
            )
        master = next((key for key in keys if key.id == wanted), None)
        if master is None or len(stored) != _WRAPPED_BYTES or stored[:1] != _WRAPPED:
            given = ", ".join(key.id for key in keys)
            raise VaultKeyWrong(
                f"{self.path} is encrypted under master key {wanted}, the one set is {given}",
                hint="set the key this log was written with; several may stand in one key file",
                key=wanted,
                given=given,
            )
        nonce_at = 1 + ID_BYTES
        try:
            return AESGCM(master.secret).decrypt(
                stored[nonce_at : nonce_at + NONCE_BYTES],
                stored[nonce_at + NONCE_BYTES :],
                _wrap_context(master, subject),
            )
        except InvalidTag as error:
            raise VaultKeyWrong(
                f'the data key of "{subject}" does not open under master key {master.id}',
                hint="it was changed or moved in the database: playledger db fsck",
                subject=subject,
            ) from error

    # --- values and blobs -------------------------------------------------------------------------

    def close_value(self, run_key: bytes, subject: str, digest: str, text: str) -> str:
        """Returns a disclosure as it is stored.

        The nonce is taken from the digest: a nonce comes twice only with the same text.
        """
        if not self.master:
            return text
        clear = _unb64(text)
        context = b"value\n%b\n%b" % (subject.encode(), digest.encode())
        nonce = _unb64(digest)[:NONCE_BYTES]
        return _VALUE_MARK + _b64(self._cipher("value", run_key).encrypt(nonce, clear, context))

    def open_value(self, run_key: bytes | None, subject: str, digest: str, stored: str) -> str:
        """Returns a stored disclosure; raises InvalidTag if it was changed or moved."""
        if not stored.startswith(_VALUE_MARK):
            return stored
        if run_key is None:
            raise InvalidTag
        context = b"value\n%b\n%b" % (subject.encode(), digest.encode())
        nonce = _unb64(digest)[:NONCE_BYTES]
        return _b64(self._cipher("value", run_key).decrypt(nonce, _unb64(stored[1:]), context))

    def close_blob(self, run_key: bytes, subject: str, key: str, content: bytes) -> bytes:
        """Returns a blob as it is stored; `key` names its content, so its nonce comes once."""
        if not self.master:
            return content
        context = b"blob\n%b\n%b" % (subject.encode(), key.encode())
        nonce = sha256(key.encode()).digest()[:NONCE_BYTES]
        return _BLOB_MARK + self._cipher("blob", run_key).encrypt(nonce, content, context)

    def open_blob(
        self, run_key: bytes | None, subject: str, key: str, size: int, stored: bytes
    ) -> bytes:
        """Returns a stored blob of `size` clear bytes; raises InvalidTag if it was changed."""
        if not is_closed_blob(size, stored):
            return stored
        if run_key is None:
            raise InvalidTag
        context = b"blob\n%b\n%b" % (subject.encode(), key.encode())
        nonce = sha256(key.encode()).digest()[:NONCE_BYTES]
        return self._cipher("blob", run_key).decrypt(nonce, stored[len(_BLOB_MARK) :], context)

    def _cipher(self, purpose: str, key: bytes) -> AESGCM:
        found = self._ciphers.get((purpose, key))
        if found is None:
            found = AESGCM(hmac.digest(key, b"playledger/1/" + purpose.encode(), "sha256"))
            self._ciphers[purpose, key] = found
            while len(self._ciphers) > _CIPHERS_MAX:
                self._ciphers.popitem(last=False)
        return found

    # --- fingerprints and secrets -----------------------------------------------------------------

    def fingerprint(self, value: bytes) -> str:
        """Returns what an event may say of a secret: 16 hex, worth nothing without the log's key.

        HMAC-SHA256 under the log's own key (SPEC 3.2).
        """
        return self._reference(b"fingerprint", value)

    def user_ref(self, user: str) -> str:
        """Returns what an event says of a person: the same for the same one in this log."""
        return self._reference(b"user", user.encode())

    def _reference(self, purpose: bytes, value: bytes) -> str:
        return hmac.digest(self.derived(purpose), value, "sha256").hex()[:16]

    def derived(self, purpose: bytes) -> bytes:
        """Returns a key of 32 bytes for one purpose, the same in every process on this log."""
        if self._log_key is None:
            raise VaultKeyMissing(
                f"{self.path} was opened without its keys", hint="open it for writing"
            )
        return hmac.digest(self._log_key, b"playledger/1/" + purpose, "sha256")

    @property
    def secrets_key(self) -> bytes | None:
        """The data key of the secrets, if there is one and it opens here."""
        return self._secrets_key

    def draw_secrets_key(self, connection: sqlite3.Connection, _at: int = 0) -> bytes:
        """Returns the data key of the secrets, drawing it with the first; a job of the writer.

        Without a master key it is wrapped by a key in a file beside the database, which is written
        and synced before anything rests on it.
        """
        row = connection.execute(
            "select key from vault_keys where subject = ?", (SECRETS_KEY,)
        ).fetchone()
        if row is not None:
            self._take_up_secrets(row[0])
            if self._secrets_key is None:
                raise self.secrets_key_missing()
            return self._secrets_key
        keys = self.master or self._own_keys()
        if not keys:
            try:
                write_key_file(self.own_file)
            except OSError as error:
                raise VaultKeyMissing(
                    f"no key for secrets: {self.own_file} cannot be written: {error.strerror}",
                    hint=f"{MASTER_KEY_FILE}=FILE, or playledger.open(master_key=...)",
                ) from error
            keys = self._own_keys()
        key = secrets.token_bytes(KEY_BYTES)
        connection.execute(
            "insert into vault_keys (subject, key) values (?, ?)",
            (SECRETS_KEY, _wrap(keys[0], SECRETS_KEY, key)),
        )
        self._secrets_key = key
        return key

    def secrets_key_missing(self) -> VaultKeyMissing:
        """Returns the error for secrets whose key is not here."""
        return VaultKeyMissing(
            f"the secrets of {self.path} do not open: their key is neither set nor in "
            f"{self.own_file.name}",
            hint=f"put {self.own_file.name} back beside it, or {MASTER_KEY_FILE}=FILE",
        )


def is_closed_blob(size: int, stored: bytes) -> bool:
    """Whether a stored blob is encrypted; a clear one is exactly as long as its reference says."""
    return len(stored) == len(_BLOB_MARK) + size + TAG_BYTES and stored.startswith(_BLOB_MARK)


def _wrap(master: MasterKey, subject: str, key: bytes) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    wrapped = AESGCM(master.secret).encrypt(nonce, key, _wrap_context(master, subject))
    return b"%b%b%b%b" % (_WRAPPED, bytes.fromhex(master.id), nonce, wrapped)


def _wrap_context(master: MasterKey, subject: str) -> bytes:
    return canonical_own({"kid": master.id, "subject": subject, "v": 1})


def _b64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
