"""Answering what a play asks, through the port; for tasks and processes alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Final, TypeVar

from engines.asks import ChildEnd, ChildRequest, RunFacts, Superseded, WaitEnd
from engines.journal import Journal
from handlers.port import InstanceRef, Port
from handlers.sessions import SessionGrant
from ledger import events as e
from ledger.errors import StaleAttempt, Unavailable
from ledger.writer import Clock
from projections.state import Run as RunRow

T = TypeVar("T")
PAUSE_MAX_S: Final = 5.0
Slot = Callable[[], AbstractAsyncContextManager[None]]


class PortAsks:
    """Answers through the port, for one instance; a waiting instance holds no slot."""

    def __init__(
        self,
        port: Port,
        ref: InstanceRef,
        journal: Journal,
        waiting: Slot,
        cancel_run: Callable[[str, str], Awaitable[None]],
        silent: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._port = port
        self._ref = ref
        self._journal = journal
        self._waiting = waiting
        self._cancel_run = cancel_run
        self._silent = silent
        self._clock = clock
        self.open = 0
        """How many questions are not answered yet."""

    async def child(self, request: ChildRequest) -> str:
        """Asks for a child, or finds it; returns its run id."""
        value = request.input.encode()
        with self._asking():
            return await self._durable(
                lambda: self._port.child(
                    self._ref, request.key, request.play, value, request.on_parent_end
                )
            )

    async def child_end(self, key: str) -> ChildEnd:
        """Waits until a child's terminal stands in this run's stream."""
        with self._asking():
            await self._durable(self._journal.flush)
            async with self._waiting():
                end = await self._durable(lambda: self._port.child_end(self._ref, key))
            return ChildEnd(
                child_run_id=end.child_run_id or "",
                status=end.status,
                code=end.code,
                result=await self._text(end.result),
            )

    async def cancel_child(self, child_run_id: str, reason: str) -> None:
        """Asks a child to end."""
        with self._asking():
            await self._durable(lambda: self._cancel_run(child_run_id, reason))

    async def wait(self, kind: e.WaitKind, key: str, ordinal: int, delay_ms: int | None) -> WaitEnd:
        """Starts a wait, or finds it with its first deadline, and returns when it has ended."""
        until = None if delay_ms is None else self._clock() + delay_ms
        with self._asking():
            await self._durable(self._journal.flush)
            async with self._waiting():
                end = await self._durable(
                    lambda: self._port.wait(self._ref, kind, key, ordinal, until)
                )
            assert end.outcome is not None, "the port returns ended waits"
            return WaitEnd(outcome=end.outcome, data=await self._text(end.data))

    async def session(self, table: str) -> SessionGrant:
        """Opens the run's database session for a table."""
        with self._asking():
            return await self._durable(lambda: self._port.session(self._ref, table, self._clock()))

    def log(self, message: str, level: str, fields: Mapping[str, Any]) -> None:
        """Adds a log line, from any thread."""
        self._journal.log(message, level, fields)

    def progress(self, done: int, of: int | None, note: str) -> None:
        """Says how far the play is, from any thread."""
        self._journal.progress(done, of, note)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def _text(self, value: e.Seal | None) -> str:
        if value is None:
            return "null"
        return (await self._durable(lambda: self._port.reveal_bytes(value))).decode()

    async def _durable(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks again while the log cannot be used: every id is derived, so it lands once."""
        pause = 0.1
        while True:
            if self._silent():
                raise Superseded("this instance was given up")
            try:
                return await ask()
            except StaleAttempt as error:
                raise Superseded(error.message) from error
            except Unavailable as error:
                if not error.retriable:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, PAUSE_MAX_S)


def facts_of(row: RunRow, attempt: int, run_key: bytes) -> RunFacts:
    """Returns what a play may read of a run."""
    return RunFacts(
        id=row.run_id,
        attempt=attempt,
        play=row.play_name,
        parent_id=row.lineage.parent_run_id,
        family=row.lineage.family_key,
        submitted_at=row.submitted_at,
        run_key=run_key,
    )
