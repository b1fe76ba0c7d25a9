"""What an instance says while it runs: log lines and progress, sanitised, batched, in order.

One per instance, on the loop its play runs on; a plain play's thread may call `log` and `progress`
too.  Lines go in batches of 250 ms, 100 lines or 64 KiB, one sealed value each; what is over 500 a
second is dropped and counted (INV-70).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from engines.lines import plain_fields, sanitise
from handlers.port import InstanceRef, Port
from ledger.canonical import Json, canonical
from ledger.errors import Conflict, PlayledgerError
from ledger.writer import Clock

BATCH_S: Final = 0.25
BATCH_LINES: Final = 100
BATCH_BYTES: Final = 65_536
LINES_PER_SECOND: Final = 500
PROGRESS_MS: Final = 1000


class Journal:
    """Collects what one instance says and records it through the port."""

    def __init__(self, ref: InstanceRef, port: Port, clock: Clock) -> None:
        self._ref = ref
        self._port = port
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lines: deque[tuple[dict[str, Json], int]] = deque()
        self._bytes = 0
        self.muted = False
        """Set when the instance was given up: nothing it says is recorded any more."""
        self._dropped = 0
        self._unsent: tuple[list[dict[str, Json]], int] | None = None
        self._batches = 0
        self._second = 0
        self._in_second = 0
        self._timer: asyncio.TimerHandle | None = None
        self._progress: tuple[int, int | None, str] | None = None
        self._progress_timer: asyncio.TimerHandle | None = None
        self._progressed_at: int | None = None
        self._reports = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()

    def log(self, message: str, level: str, fields: Mapping[str, Json]) -> None:
        """Adds a line, from any thread."""
        now = self._clock()
        line: dict[str, Json] = {
            "at": now,
            "level": sanitise(level, 20),
            "message": sanitise(message),
        }
        if fields:
            line["fields"] = plain_fields(fields)
        self._on_loop(self._add, line, now // 1000)

    def progress(self, done: int, of: int | None, note: str) -> None:
        """Notes how far the play is, from any thread."""
        self._on_loop(self._advance, done, of, sanitise(note))

    async def flush(self) -> None:
        """Records the lines that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        async with self._order:
            while self._unsent or self._lines or self._dropped:
                if self.muted:
                    return
                if self._unsent is None:
                    self._unsent = self._take_batch()
                try:
                    await self._port.log(self._ref, self._batches, *self._unsent)
                except Conflict:
                    return  # superseded or too long a run: what comes next says so to the play
                self._unsent = None
                self._batches += 1

    async def close(self) -> None:
        """Records everything said so far, the last progress included."""
        if self._progress_timer is not None:
            self._progress_timer.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.flush()
        await self._record_progress()

    @property
    def busy(self) -> bool:
        """Whether something said is being recorded just now."""
        return bool(self._tasks)

    def _on_loop(self, call: Any, *arguments: Any) -> None:
        if threading.get_ident() == self._thread:
            call(*arguments)
        else:
            self._loop.call_soon_threadsafe(call, *arguments)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _add(self, line: dict[str, Json], second: int) -> None:
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        if self._in_second > LINES_PER_SECOND:
            self._dropped += 1
            return
        size = len(canonical(line))
        self._lines.append((line, size))
        self._bytes += size
        if len(self._lines) >= BATCH_LINES or self._bytes >= BATCH_BYTES:
            self._spawn(self._flush_quietly())
        elif self._timer is None:
            self._timer = self._loop.call_later(BATCH_S, lambda: self._spawn(self._flush_quietly()))

    def _take_batch(self) -> tuple[list[dict[str, Json]], int]:
        lines: list[dict[str, Json]] = []
        room = BATCH_BYTES
        while self._lines and len(lines) < BATCH_LINES and (not lines or self._lines[0][1] <= room):
            line, size = self._lines.popleft()
            lines.append(line)
            room -= size
            self._bytes -= size
        dropped, self._dropped = self._dropped, 0
        return lines, dropped

    async def _flush_quietly(self) -> None:
        try:
            await self.flush()
        except PlayledgerError:
            return  # the log cannot be used now; the instance's end will say so, and wait

    def _advance(self, done: int, of: int | None, note: str) -> None:
        self._progress = (done, of, note)
        now = self._clock()
        if self._progressed_at is None or now - self._progressed_at >= PROGRESS_MS:
            self._progressed_at = now
            self._spawn(self._record_progress())
        elif self._progress_timer is None:  # the last of a second is recorded when it is over
            self._progress_timer = self._loop.call_later(PROGRESS_MS / 1000, self._progress_due)

    def _progress_due(self) -> None:
        self._progress_timer = None
        self._progressed_at = self._clock()
        self._spawn(self._record_progress())

    async def _record_progress(self) -> None:
        if self._progress is None or self.muted:
            return
        (done, of, note), self._progress = self._progress, None
        n = self._reports
        self._reports += 1
        try:
            await self._port.progress(self._ref, n, done, of, note)
        except PlayledgerError:
            return  # superseded, or the log cannot be used now: the next report says more
