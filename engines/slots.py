"""Slots: how many instances may compute at a time, counted across threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class Slots:
    """A bounded number of rights, first come first served; a waiter is woken on its own loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def acquire(self) -> None:
        """Takes a slot, waiting if none is free."""
        with self._lock:
            if self._free > 0 and not self._waiting:
                self._free -= 1
                return
            loop = asyncio.get_running_loop()
            entry = (loop, loop.create_future())
            self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            with self._lock:
                waiting = entry in self._waiting
                if waiting:
                    self._waiting.remove(entry)
            if not waiting:  # it was handed over just now
                self.release()
            raise

    def release(self) -> None:
        """Gives a slot back, or hands it to whoever has waited longest."""
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            loop, future = self._waiting.popleft()
        try:
            loop.call_soon_threadsafe(_hand_over, future)
        except RuntimeError:  # that loop is closed, and its waiter with it
            self.release()


def _hand_over(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
