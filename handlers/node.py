"""Nodes: which process is alive, told by a lock that dies with it (CONTRACTS A.10).

A node is a process that runs the effect loop.  It holds `flock` on `<db>.nodes/<id>`, which the
kernel frees the moment the process is gone, and touches the file every 3 s from its own thread, so
that a process that is frozen can be told from one that works.  Authoritative for one thing only:
whether a host's instances may be ended by others.  Slow is never dead.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from ledger.failpoint import failpoint

TOUCH_S: Final = 3.0
FROZEN_S: Final = 15.0
log = structlog.get_logger("handlers.node")


def nodes_dir(database: Path) -> Path:
    """Returns the folder in which the nodes of a database keep their files."""
    return database.with_name(database.name + ".nodes")


class Node:
    """A process as a node; `lost` says that somebody took it for dead."""

    def __init__(self, database: Path, *, touch_s: float = TOUCH_S) -> None:
        self._folder = nodes_dir(database)
        self._folder.mkdir(exist_ok=True)
        self._touch_s = touch_s
        self._begin()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="node", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether the file is gone: others have ended this node's instances."""
        return not self._path.exists()

    def renew(self) -> None:
        """Becomes another node; what the old one had is for others to end."""
        os.close(self._descriptor)
        self._begin()

    def close(self) -> None:
        """Takes the file away and lets go of the lock."""
        self._stopped.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _begin(self) -> None:
        self.id = "n-" + secrets.token_hex(4)
        self._path = self._folder / self.id
        failpoint("before_node_file")
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        failpoint("after_node_file")

    def _touch(self) -> None:
        while not self._stopped.wait(self._touch_s):
            try:
                os.utime(self._path)
            except FileNotFoundError:
                continue  # taken for dead: the loop sees it too, and begins again
            except OSError as error:
                log.warning("cannot touch the node's file", error=str(error))


class Watch:
    """Tells which hosts are dead, by the finder's own monotonic clock, never by two clocks.

    So a machine that slept kills nobody: both stood still.  With `by_touch=False` (a command that
    looks once) only file and lock count.
    """

    def __init__(
        self,
        database: Path,
        *,
        by_touch: bool = True,
        frozen_s: float = FROZEN_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = nodes_dir(database)
        self._by_touch = by_touch
        self._frozen_s = frozen_s
        self._monotonic = monotonic
        self._seen: dict[str, tuple[int, float]] = {}

    def dead(self, host: str) -> bool:
        """Says whether nothing can come from this host any more."""
        path = self._folder / host
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._by_touch and self._stands_still(host, os.fstat(descriptor).st_mtime_ns)
        else:
            return True
        finally:
            os.close(descriptor)

    def remove(self, host: str) -> None:
        """Takes a dead host's file away, so that it knows when it wakes, and others see it."""
        (self._folder / host).unlink(missing_ok=True)
        self._seen.pop(host, None)

    def _stands_still(self, host: str, touched: int) -> bool:
        now = self._monotonic()
        before = self._seen.get(host)
        if before is None or before[0] != touched:
            self._seen[host] = (touched, now)
            return False
        return now - before[1] >= self._frozen_s
