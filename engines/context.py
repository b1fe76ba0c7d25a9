"""The run context: what a play may ask of its run (UX section 1).

Everything durable has a key, because a play that is started again takes its way from the top: its
children, signals and sleeps are found by their keys, not done twice.
"""

from __future__ import annotations

import asyncio
import csv
import hmac
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, overload

import orjson
from pydantic import TypeAdapter

from engines.journal import Journal
from engines.plays import Play, as_play, read_value, write_value
from handlers.port import InstanceRef, Port
from ledger import events as e
from ledger.canonical import Json
from ledger.errors import (
    ChildFailed,
    FileNotStaged,
    InputInvalid,
    PlayledgerError,
    StaleAttempt,
)
from ledger.ids import check_key, quote
from ledger.writer import Clock
from projections.state import Run as RunRow

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741 - the input of a child, as UX section 1 names it
Level = Literal["debug", "info", "warning", "error"]


class Retry(Exception):
    """Asks for another attempt, within the play's budget; `after` says not before when."""

    def __init__(self, message: str = "", *, after: timedelta | None = None) -> None:
        super().__init__(message)
        self.after = after


class Superseded(BaseException):
    """Ends an instance that is no longer the current one; nothing it says is taken any more."""


class SignalInvalid(InputInvalid):
    """Says that a signal's data does not fit what its wait asked for; the next takes the next."""

    code = "SIGNAL_INVALID"


Slot = Callable[[], AbstractAsyncContextManager[None]]


class Child(Generic[T]):
    """A child that has been asked for; await it for its result.

    Awaiting raises ChildFailed if it failed or was cancelled, ChildKeyConflict if its key is taken
    by another child, InputInvalid if its input does not fit.
    """

    def __init__(self, run: Run, key: str, play: Play | None, asked: Future[str]) -> None:
        self._run = run
        self._play = play
        self._asked = asked
        self.key = key

    def __await__(self) -> Generator[Any, None, T]:
        return self._result().__await__()

    async def id(self) -> str:
        """Returns the child's run id, once it is recorded."""
        return await asyncio.wrap_future(self._asked)

    async def cancel(self, reason: str = "") -> None:
        """Asks the child to end."""
        await self._run._cancel_child(await self.id(), reason)  # noqa: SLF001

    async def _result(self) -> T:
        run = self._run
        await run._durable(asyncio.wrap_future(self._asked))  # noqa: SLF001
        end = await run._wait_for(run._port.child_end(run._ref, self.key))  # noqa: SLF001
        if end.status != "completed":
            why = end.code or end.status
            raise ChildFailed(
                f"child {quote(self.key)} ({end.child_run_id}) is {end.status}: {why}",
                hint=f"playledger why {end.child_run_id}",
                childRunId=end.child_run_id,
                childKey=self.key,
                status=end.status,
            )
        value = None if end.result is None else await run._port.reveal(end.result)  # noqa: SLF001
        return cast("T", value if self._play is None else self._play.read_result(value))


class Run:
    """The run a play belongs to.  A plain play, in its thread, uses `wait` as its one bridge."""

    def __init__(
        self,
        row: RunRow,
        ref: InstanceRef,
        port: Port,
        journal: Journal,
        files: dict[str, Path],
        lookup: Callable[[str], Play | None],
        offer: Callable[[Play], None],
        cancel_run: Callable[[str, str], Awaitable[None]],
        waiting: Slot,
        clock: Clock,
    ) -> None:
        self.id = row.run_id
        self.attempt = ref.attempt
        self.play = row.play_name
        self.parent_id = row.lineage.parent_run_id
        self.family = row.lineage.family_key
        self.submitted_at = datetime.fromtimestamp(row.submitted_at / 1000, UTC)
        self._ref = ref
        self._port = port
        self._journal = journal
        self._files = files
        self._lookup = lookup
        self._offer = offer
        self._cancel_child = cancel_run
        self._waiting = waiting
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._ordinals: Counter[tuple[str, str]] = Counter()
        self._occurrences: Counter[tuple[str, bytes]] = Counter()

    @overload
    def child(
        self,
        play: Callable[[Run, I], Awaitable[T]],
        input: I,
        *,
        key: str | None = None,
        on_parent_end: e.OnParentEnd = "cancel",
    ) -> Child[T]: ...
    @overload
    def child(
        self,
        play: Callable[[Run], Awaitable[T]],
        *,
        key: str | None = None,
        on_parent_end: e.OnParentEnd = "cancel",
    ) -> Child[T]: ...
    @overload
    def child(
        self,
        play: Callable[[Run, I], T],
        input: I,
        *,
        key: str | None = None,
        on_parent_end: e.OnParentEnd = "cancel",
    ) -> Child[T]: ...
    @overload
    def child(
        self,
        play: Callable[[Run], T],
        *,
        key: str | None = None,
        on_parent_end: e.OnParentEnd = "cancel",
    ) -> Child[T]: ...
    @overload
    def child(
        self,
        play: str,
        input: Any = None,
        *,
        key: str | None = None,
        on_parent_end: e.OnParentEnd = "cancel",
    ) -> Child[Any]: ...
    def child(
        self,
        play: Any,
        input: Any = None,
        *,
        key: str | None = None,
        on_parent_end: e.OnParentEnd = "cancel",
    ) -> Child[Any]:
        """Starts a child run at once, or finds the one this run has under the key.

        Without a key it is derived from play, input and occurrence; in loops give one.
        """
        if isinstance(play, str):
            name, item = play, self._lookup(play)
        else:
            item = as_play(play, trusted=True)
            self._offer(item)
            name = item.name
        value = write_value(input)
        if item is not None:
            item.check_input(orjson.loads(value))
        if key is not None:
            check_key(key, "child key")
        occurrence = self._occurrences[name, value]
        self._occurrences[name, value] += 1
        handle_key = key
        if handle_key is None:
            handle_key = f"{name}-{_digest(self._journal.run_key, value)}-{occurrence}"
        asked = self._start(self._port.child(self._ref, handle_key, name, value, on_parent_end))
        return Child(self, handle_key, item, asked)

    @overload
    async def signal(self, key: str, into: type[T], *, timeout: timedelta | None = None) -> T: ...
    @overload
    async def signal(
        self, key: str, into: None = None, *, timeout: timedelta | None = None
    ) -> Json: ...
    async def signal(
        self, key: str, into: type[T] | None = None, *, timeout: timedelta | None = None
    ) -> T | Json:
        """Waits for the oldest signal of this key that no wait has taken.

        Raises TimeoutError from the deadline recorded at the first wait, SignalInvalid if the data
        does not fit `into`.
        """
        check_key(key, "signal")
        until = None if timeout is None else self._clock() + _ms(timeout)
        ended = await self._wait("signal", key, until)
        if ended.outcome == "timeout":
            raise TimeoutError(f"no signal {quote(key)} came in time")
        data = None if ended.data is None else await self._port.reveal(ended.data)
        if into is None:
            return data
        try:
            return cast("T", read_value(TypeAdapter(into), data, f"signal {quote(key)}"))
        except InputInvalid as error:
            raise SignalInvalid(error.message, hint=error.hint) from error

    async def sleep(self, key: str, delay: timedelta) -> None:
        """Sleeps until a time that is recorded once, however often the play is started again."""
        check_key(key, "sleep key")
        await self._wait("sleep", key, self._clock() + _ms(delay))

    def log(self, message: str, *, level: Level = "info", **fields: Json) -> None:
        """Adds a line to the run's log; sealed, batched, at most 500 a second."""
        self._journal.log(message, level, fields)

    def progress(self, done: int, of: int | None = None, note: str = "") -> None:
        """Says how far the play is; recorded at most once a second, and the last one always."""
        self._journal.progress(done, of, note)

    def file(self, name: str | None = None) -> Path:
        """Returns a staged file, read-only, its digest checked; raises FileNotStaged."""
        if name is None and len(self._files) == 1:
            return next(iter(self._files.values()))
        if name is None or name not in self._files:
            staged = ", ".join(quote(known) for known in self._files) or "none"
            raise FileNotStaged(
                f"run.file({quote(name) if name else ''}): staged are {staged}",
                hint=f"stage it: --input @{name or 'FILE'}",
            )
        return self._files[name]

    def csv(self, name: str | None = None) -> Iterator[dict[str, str]]:
        """Streams the rows of a staged CSV file, by the names in its first line."""
        path = self.file(name)

        def rows() -> Iterator[dict[str, str]]:
            with path.open(newline="", encoding="utf-8-sig") as lines:
                yield from csv.DictReader(lines)

        return rows()

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Waits, from a plain play's thread, for what an async play would await."""
        if threading.get_ident() == self._thread:
            raise RuntimeError("run.wait is for plain plays; an async play awaits")

        async def bridge() -> T:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(bridge(), self._loop).result()

    async def _wait(self, kind: e.WaitKind, key: str, until: int | None) -> Any:
        ordinal = self._ordinals[kind, key]
        self._ordinals[kind, key] += 1
        return await self._wait_for(self._port.wait(self._ref, kind, key, ordinal, until))

    async def _wait_for(self, work: Awaitable[T]) -> T:
        """Awaits something durable without holding a slot."""
        await self._journal.flush()
        async with self._waiting():
            return await self._durable(work)

    async def _durable(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except StaleAttempt as error:
            raise Superseded(error.message) from error

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins something at once, from the play's loop or from its thread."""
        result: Future[T] = Future()

        async def run() -> None:
            try:
                value = await work
            except BaseException as error:  # noqa: BLE001 - whoever awaits the handle gets it
                if not result.cancelled():
                    result.set_exception(error)
            else:
                if not result.cancelled():
                    result.set_result(value)

        if threading.get_ident() == self._thread:
            self._journal.spawn(run())
        else:
            self._loop.call_soon_threadsafe(self._journal.spawn, run())
        return result


def _digest(run_key: bytes, value: bytes) -> str:
    """Names an input in a key without giving a stranger anything to guess against."""
    return hmac.digest(run_key, value, "sha256").hex()[:12]


def _ms(length: timedelta) -> int:
    return round(length.total_seconds() * 1000)


__all__ = ["Child", "PlayledgerError", "Retry", "Run", "SignalInvalid", "Superseded"]
