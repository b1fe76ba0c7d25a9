"""The feed of one event loop: wakes those who wait for a stream, however many they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ledger.writer import Committed, Writer


class Watcher:
    """One who waits for news of a stream; `state` is the last one seen, if this process made it.

    With `until`, a state that is known and does not fulfil it is no news.
    """

    def __init__(self, until: Callable[[Any], bool] | None = None) -> None:
        self.news = asyncio.Event()
        self.until = until
        self.state: Any = None


class Feed:
    """Listens to commits once for a whole event loop."""

    def __init__(self, writer: Writer[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._watchers: dict[str | None, set[Watcher]] = {}
        self._stop: Callable[[], None] = writer.subscribe(loop, self._notice)

    @contextmanager
    def watching(
        self, stream: str | None, until: Callable[[Any], bool] | None = None
    ) -> Iterator[Watcher]:
        """Gives a watcher of one stream, or of all."""
        watcher = Watcher(until)
        self._watchers.setdefault(stream, set()).add(watcher)
        try:
            yield watcher
        finally:
            watchers = self._watchers[stream]
            watchers.discard(watcher)
            if not watchers:
                del self._watchers[stream]

    def close(self) -> None:
        """Stops listening."""
        self._stop()

    def _notice(self, committed: Committed) -> None:
        watchers = self._watchers
        if not watchers:
            return
        for watcher in watchers.get(None, ()):
            watcher.news.set()
        for stream in {recorded.subject for recorded in committed.events} & watchers.keys():
            state = committed.states.get(stream)
            for watcher in watchers[stream]:
                if state is None or watcher.until is None or watcher.until(state):
                    watcher.state = state
                    watcher.news.set()
