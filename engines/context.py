"""The run context: what a play may ask of its run (UX section 1).

Everything durable has a key, because a play that is started again takes its way from the top: its
children, signals and sleeps are found by their keys, not done twice.
"""

from __future__ import annotations

import asyncio
import csv
import threading
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, overload

import orjson
from msgspec import Struct
from pydantic import SecretStr, TypeAdapter

from engines.asks import Asks, ChildRequest, Retry, RunFacts, SignalInvalid, Superseded, WaitEnd
from engines.plays import Play, as_play
from engines.values import read_value, write_value
from ledger import events as e
from ledger.canonical import Json
from ledger.errors import ChildFailed, FileNotStaged, InputInvalid, PlayledgerError
from ledger.ids import check_key, derived_child_key, quote

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741 - the input of a child, as UX section 1 names it
Level = Literal["debug", "info", "warning", "error"]


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
        await self._run._asks.cancel_child(await self.id(), reason)  # noqa: SLF001

    async def _result(self) -> T:
        await asyncio.wrap_future(self._asked)
        end = await self._run._asks.child_end(self.key)  # noqa: SLF001
        if end.status != "completed":
            why = end.code or end.status
            raise ChildFailed(
                f"child {quote(self.key)} ({end.child_run_id}) is {end.status}: {why}",
                hint=f"playledger why {end.child_run_id}",
                childRunId=end.child_run_id,
                childKey=self.key,
                status=end.status,
            )
        value: Json = orjson.loads(end.result)
        return cast("T", value if self._play is None else self._play.read_result(value))


class Session(Struct, frozen=True):
    """A least-privilege database session: `url.get_secret_value()` is what to connect with."""

    table: str
    url: SecretStr
    operations: tuple[str, ...]
    expires_at: datetime


class Run:
    """The run a play belongs to.  A plain play, in its thread, uses `wait` as its one bridge."""

    def __init__(
        self,
        facts: RunFacts,
        asks: Asks,
        files: Mapping[str, Path],
        lookup: Callable[[str], Play | None],
        offer: Callable[[Play], None],
    ) -> None:
        self.id = facts.id
        self.attempt = facts.attempt
        self.play = facts.play
        self.parent_id = facts.parent_id
        self.family = facts.family
        self.submitted_at = datetime.fromtimestamp(facts.submitted_at / 1000, UTC)
        self._run_key = facts.run_key
        self._asks = asks
        self._files = files
        self._lookup = lookup
        self._offer = offer
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._ordinals: Counter[tuple[str, str]] = Counter()
        self._given_up: defaultdict[tuple[str, str, bool], list[int]] = defaultdict(list)
        self._occurrences: Counter[tuple[str, bytes]] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

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

        Without a key it is derived from play, input and occurrence; in loops give one.  The result
        of a play given by its name is plain JSON.
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
            handle_key = derived_child_key(self._run_key, name, value, occurrence)
        request = ChildRequest(
            key=handle_key,
            play=name,
            origin=None if item is None else item.origin,
            input=value.decode(),
            on_parent_end=on_parent_end,
        )
        asked = self._start(self._asks.child(request))
        return Child(self, handle_key, None if isinstance(play, str) else item, asked)

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
        ended = await self._wait("signal", key, timeout)
        if ended.outcome == "timeout":
            raise TimeoutError(f"no signal {quote(key)} came in time")
        data: Json = orjson.loads(ended.data)
        if into is None:
            return data
        try:
            return cast("T", read_value(TypeAdapter(into), data, f"signal {quote(key)}"))
        except InputInvalid as error:
            raise SignalInvalid(error.message, hint=error.hint) from error

    async def sleep(self, key: str, delay: timedelta) -> None:
        """Sleeps until a time that is recorded once, however often the play is started again."""
        check_key(key, "sleep key")
        await self._wait("sleep", key, delay)

    @asynccontextmanager
    async def session(self, table: str) -> AsyncIterator[Session]:
        """Gives the database session for a table, `namespace.table`.

        Raises SessionNotPlanned for a table that the run has none for, SessionExpired for one that
        is about to expire.
        """
        grant = await self._asks.session(table)
        yield Session(
            table=grant.table,
            url=SecretStr(grant.url),
            operations=grant.operations,
            expires_at=datetime.fromtimestamp(grant.expires_at / 1000, UTC),
        )

    def log(self, message: str, *, level: Level = "info", **fields: Json) -> None:
        """Adds a line to the run's log; sealed, batched, at most 500 a second."""
        self._asks.log(str(message), level, fields)

    def progress(self, done: int, of: int | None = None, note: str = "") -> None:
        """Says how far the play is; recorded at most once a second, and the last one always."""
        self._asks.progress(done, of, note)

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

    async def _wait(self, kind: e.WaitKind, key: str, length: timedelta | None) -> WaitEnd:
        """Waits under the next ordinal of the key, or under one whose wait was given up.

        A wait that was cancelled here (by `asyncio.timeout`, say) is still open in the log: whoever
        waits next for the same takes it over, else it would take a signal that nobody hears of.
        """
        given_up = self._given_up[kind, key, length is None]
        ordinal = given_up.pop() if given_up else self._next_ordinal(kind, key)
        delay = None if length is None else max(0, round(length.total_seconds() * 1000))
        try:
            return await self._asks.wait(kind, key, ordinal, delay)
        except asyncio.CancelledError:
            given_up.append(ordinal)
            given_up.sort(reverse=True)
            raise

    def _next_ordinal(self, kind: e.WaitKind, key: str) -> int:
        ordinal = self._ordinals[kind, key]
        self._ordinals[kind, key] += 1
        return ordinal

    async def _settle(self) -> None:
        """Waits for what was begun and not awaited, so that nothing is left half asked."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

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

        def spawn() -> None:
            task = self._loop.create_task(run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        if threading.get_ident() == self._thread:
            spawn()
        else:
            self._loop.call_soon_threadsafe(spawn)
        return result


__all__ = ["Child", "PlayledgerError", "Retry", "Run", "SignalInvalid", "Superseded"]
