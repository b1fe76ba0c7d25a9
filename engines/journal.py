"""What an instance says while it runs: log lines and progress, sanitised, batched, in order.

One per instance, on the loop its play runs on; a plain play's thread may call `log` and `progress`
too.  Lines go in batches of 250 ms, 100 lines or 64 KiB, one sealed value each; what is over 500 a
second is dropped and counted (INV-70).
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from engines.plays import write_value
from handlers.port import InstanceRef, Port
from ledger.canonical import Json
from ledger.errors import Conflict, PlayledgerError
from ledger.writer import Clock

BATCH_S: Final = 0.25
BATCH_LINES: Final = 100
BATCH_BYTES: Final = 65_536
LINES_PER_SECOND: Final = 500
LINE_CHARS: Final = 8192
PROGRESS_MS: Final = 1000

_ANSI: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.?)", re.DOTALL)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_URL_USER: Final = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s:@]+:[^/\s@]+@")
_BEARER: Final = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}")


class Journal:
    """Collects what one instance says and records it through the port."""

    def __init__(self, ref: InstanceRef, port: Port, run_key: bytes, clock: Clock) -> None:
        self.run_key = run_key
        self._ref = ref
        self._port = port
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lines: list[dict[str, Json]] = []
        self._bytes = 0
        self._dropped = 0
        self._batches = 0
        self._second = 0
        self._in_second = 0
        self._timer: asyncio.TimerHandle | None = None
        self._progress: tuple[int, int | None, str] | None = None
        self._progressed_at: int | None = None
        self._reports = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()

    def log(self, message: str, level: str, fields: Mapping[str, Json]) -> None:
        """Adds a line, from any thread."""
        now = self._clock()
        line: dict[str, Json] = {"at": now, "level": level, "message": sanitise(str(message))}
        if fields:
            line["fields"] = {
                str(key): sanitise(value) if isinstance(value, str) else _plain(value)
                for key, value in fields.items()
            }
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
            while self._lines or self._dropped:
                lines, dropped = self._lines[:BATCH_LINES], self._dropped
                del self._lines[:BATCH_LINES]
                self._dropped = 0
                self._bytes = 0
                n = self._batches
                self._batches += 1
                try:
                    await self._port.log(self._ref, n, lines, dropped)
                except Conflict:
                    return  # superseded or too long a run: what comes next says so to the play

    async def close(self) -> None:
        """Records everything said so far, the last progress included."""
        await self.flush()
        await self._record_progress()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Keeps a task of this instance until it ends."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Waits for the tasks of this instance, so that nothing it began is left half asked."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_loop(self, call: Any, *arguments: Any) -> None:
        if threading.get_ident() == self._thread:
            call(*arguments)
        else:
            self._loop.call_soon_threadsafe(call, *arguments)

    def _add(self, line: dict[str, Json], second: int) -> None:
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        if self._in_second > LINES_PER_SECOND:
            self._dropped += 1
            return
        self._lines.append(line)
        self._bytes += len(str(line["message"]))
        if len(self._lines) >= BATCH_LINES or self._bytes >= BATCH_BYTES:
            self.spawn(self._flush_quietly())
        elif self._timer is None:
            self._timer = self._loop.call_later(BATCH_S, lambda: self.spawn(self._flush_quietly()))

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
            self.spawn(self._record_progress())

    async def _record_progress(self) -> None:
        if self._progress is None:
            return
        (done, of, note), self._progress = self._progress, None
        n = self._reports
        self._reports += 1
        try:
            await self._port.progress(self._ref, n, done, of, note)
        except Conflict:
            return


def sanitise(text: str, limit: int = LINE_CHARS) -> str:
    """Returns text without control characters and escape sequences, secrets in URLs masked.

    Cut between characters; halves of characters become U+FFFD (CASES C026).
    """
    if len(text) > limit:
        text = text[:limit] + f"... {len(text) - limit} more"
    text = text.encode("utf-8", "replace").decode() if not text.isascii() else text
    text = _CONTROL.sub("\ufffd", _ANSI.sub("", text))
    return _BEARER.sub(r"\1***", _URL_USER.sub(r"\1***@", text))


def _plain(value: Any) -> Json:
    """Returns a log field as JSON; what has no JSON form is shown as text."""
    try:
        write_value(value)
    except PlayledgerError:
        return sanitise(repr(value))
    return value  # type: ignore[no-any-return]
