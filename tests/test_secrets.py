"""Secrets in the vault: stored encrypted, for a while, and named in events by a fingerprint."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

import playledger
from ledger import errors
from ledger.events import SecretRef
from ledger.secrets import open_secret, secret_query
from playledger.embed import Ledger

TOKEN = b"canary-3-0123456789abcdef0123456789abcdef"
HOUR = 3_600_000


class Clock:
    """A clock that a test sets, in ms since 1970."""

    def __init__(self, at: int = 1_800_000_000_000) -> None:
        self.at = at

    def __call__(self) -> int:
        return self.at


def bytes_on_disk(folder: Path) -> bytes:
    """Returns every byte of every file in a folder."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_a_secret_is_put_read_replaced_and_dropped(tmp_path: Path) -> None:
    """The reference opens what it was made for, and nothing that took its place."""

    async def main() -> None:
        async with playledger.open(tmp_path / "a.db") as ledger:
            vault = ledger.log.vault
            ref = await vault.put_secret("run/r", "executor_token", TOKEN, None)
            assert ref.vault_key == "run/r/executor_token"
            assert len(ref.fingerprint) == 16
            assert await vault.secret(ref) == TOKEN
            second = await vault.put_secret("run/r", "executor_token", b"another", None)
            assert await vault.secret(second) == b"another"
            assert await code_of(ledger, ref) == "SECRET_GONE"
            other = await vault.put_secret("run/r2", "executor_token", TOKEN, None)
            assert other.fingerprint == ref.fingerprint
            await vault.drop_secrets("run/r")
            assert await code_of(ledger, second) == "SECRET_GONE"
            assert await vault.secret(other) == TOKEN

    asyncio.run(main())


async def code_of(ledger: Ledger, ref: SecretRef) -> str:
    """Returns the code with which a secret is refused."""
    with pytest.raises(errors.ValueGone) as refused:
        await ledger.log.vault.secret(ref)
    return refused.value.code


def test_an_expired_secret_is_not_opened(tmp_path: Path) -> None:
    """Crypto does not expire: the time is looked at before anything is decrypted (AUDIT 5.3)."""
    clock = Clock()

    async def main() -> None:
        async with playledger.open(tmp_path / "a.db", clock=clock) as ledger:
            vault = ledger.log.vault
            ref = await vault.put_secret("run/r", "token", TOKEN, clock.at + HOUR)
            clock.at += HOUR - 1
            assert await vault.secret(ref) == TOKEN
            clock.at += 1
            assert await code_of(ledger, ref) == "SECRET_EXPIRED"

    asyncio.run(main())


def test_without_a_master_key_the_secrets_have_a_file_of_their_own(tmp_path: Path) -> None:
    """Drawn with the first secret, for its owner alone; without it no secret opens."""
    path = tmp_path / "a.db"
    beside = tmp_path / "a.db.key"

    async def main() -> None:
        async with playledger.open(path) as ledger:
            assert not beside.exists()
            ref = await ledger.log.vault.put_secret("run/r", "token", TOKEN, None)
            assert stat.S_IMODE(beside.stat().st_mode) == 0o600
        async with playledger.open(path) as ledger:
            assert await ledger.log.vault.secret(ref) == TOKEN
        assert TOKEN not in bytes_on_disk(tmp_path)
        kept = beside.read_bytes()
        beside.unlink()
        async with playledger.open(path) as ledger:
            with pytest.raises(errors.VaultKeyMissing, match=r"a\.db\.key"):
                await ledger.log.vault.secret(ref)
        beside.write_bytes(kept)
        async with playledger.open(path, read_only=True) as ledger:
            assert await ledger.log.vault.secret(ref) == TOKEN

    asyncio.run(main())


@pytest.mark.parametrize(
    "change",
    [
        "update vault_secrets set expires_at = expires_at + 1",
        "update vault_secrets set fingerprint = '0123456789abcdef'",
        "update vault_secrets set subject = 'run/other'",
        "update vault_secrets set ciphertext = cast(x'00' || substr(ciphertext, 2) as blob)",
    ],
)
def test_inv43_a_row_that_was_changed_does_not_open(tmp_path: Path, change: str) -> None:
    """Subject, key, fingerprint and expiry are bound to the ciphertext."""
    path = tmp_path / "a.db"

    async def main() -> None:
        async with playledger.open(path) as ledger:
            vault = ledger.log.vault
            ref = await vault.put_secret("run/r", "token", TOKEN, 1 << 45)
            await ledger.log.run_job(lambda connection, _: connection.execute(change))
            row = await ledger.log.reader.ask(secret_query(ref.vault_key))
            key = vault.keyring.secrets_key
            assert row is not None
            assert key is not None
            with pytest.raises(errors.ValueGone):
                open_secret(key, row)

    asyncio.run(main())


def test_two_processes_draw_one_key(tmp_path: Path) -> None:
    """The key of the secrets is drawn under the write lock; who comes second takes it."""
    path = tmp_path / "a.db"

    async def main() -> None:
        async with playledger.open(path) as one, playledger.open(path) as two:
            first = await one.log.vault.put_secret("run/a", "token", TOKEN, None)
            second = await two.log.vault.put_secret("run/b", "token", TOKEN, None)
            assert await two.log.vault.secret(first) == await one.log.vault.secret(second) == TOKEN

    asyncio.run(main())


def test_two_logs_give_one_secret_two_fingerprints(tmp_path: Path) -> None:
    """The key of the fingerprints is drawn once, with the log."""

    async def fingerprint(name: str) -> str:
        async with playledger.open(tmp_path / name) as ledger:
            return ledger.log.vault.keyring.fingerprint(TOKEN)

    async def main() -> None:
        assert await fingerprint("a.db") == await fingerprint("a.db")
        assert await fingerprint("a.db") != await fingerprint("b.db")

    asyncio.run(main())
