"""The write lock between processes: `flock` on a side file, taken before `BEGIN IMMEDIATE`.

SQLite's own busy handler lets one process starve for a second (NUMBERS).  Two locks make it fair:
whoever waits for the write lock holds the queue lock, so the process that has just let go cannot
take it again before the waiter.  The kernel frees both with the process, however it ends, and no
child inherits the descriptors.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ledger.errors import LogLocked, LogReadOnly

WAIT_S = 5.0
_PAUSE_S = 0.0002


class WriteLock:
    """Gives one process at a time the right to write; owned by the writer thread."""

    def __init__(self, database: Path) -> None:
        self._database = database
        try:
            self._lock = _open(database.with_name(database.name + ".lock"))
            self._queue = _open(database.with_name(database.name + ".queue"))
        except OSError as error:
            raise LogReadOnly(
                f"{database} cannot be written: {error.strerror}",
                hint="make its folder writable, or read it with status, runs, tail or replay",
            ) from error

    def acquire(self, wait_s: float = WAIT_S) -> None:
        """Waits for the lock; raises LogLocked after `wait_s` seconds."""
        until = time.monotonic() + wait_s
        self._wait(self._queue, until, wait_s)
        try:
            self._wait(self._lock, until, wait_s)
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)

    def release(self) -> None:
        """Lets go."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes both descriptors, which frees what is held."""
        os.close(self._lock)
        os.close(self._queue)

    def _wait(self, descriptor: int, until: float, wait_s: float) -> None:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise LogLocked(
                        f"{self._database} is locked: another process held the write lock for "
                        f"{wait_s:.1f} s",
                        hint=f"`fuser {self._database}` names it; "
                        "to copy a log: playledger db backup",
                    ) from None
                time.sleep(_PAUSE_S)
            else:
                return


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
