"""Driving one run to its end on a virtual clock, over a real log in memory (playledger.testing)."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Generic, TypeVar, cast

from engines.context import Run
from engines.local import LocalEngine
from engines.plays import Play, PlayOptions, as_play, plays_beside
from engines.scripted import VirtualClock
from handlers.effects import EffectLoop
from handlers.engine import PlayInfo
from handlers.node import Node
from handlers.outbox import Scope
from handlers.port import RunLog
from ledger import events as e
from ledger.canonical import Json
from ledger.codec import Recorded
from ledger.errors import PlayledgerError, RunTerminal
from ledger.events import Event
from ledger.ids import quote, run_stream
from ledger.log import prepare
from ledger.writer import Committed
from playledger.embed import Ledger
from playledger.wiring import DEFAULT_SCOPE, SCHEMA, Driver, open_log
from projections.load import view_query
from projections.state import Run as RunRow
from projections.state import Status

T = TypeVar("T")
RUN_ID: Final = "drive"
JUMPS_MAX: Final = 10_000
LOOK_S: Final = 0.002
FAST_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - memory, where there is some: no disk to wait for

CancelAt = timedelta | int | str | None


class NeverEnds(PlayledgerError):
    """Says what a run waits for that no time and no given signal brings."""

    code = "NEVER_ENDS"


@dataclass(frozen=True, slots=True)
class Waited:
    """One wait of the run: what it waited for, and how that ended (None if the run ended first)."""

    kind: e.WaitKind
    key: str
    outcome: e.WaitOutcome | None


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """How a run ended: its result as the play returns it, and what its stream holds.

    `result` is None unless the status is `completed`; `error` is the text of what was raised.
    `events`, `types`, `logs` and `waits` are the run's own, in order; its children have theirs.
    """

    status: Status
    result: T
    error: str | None
    error_class: e.ErrorClass | None
    code: str | None
    attempt: int
    events: tuple[Recorded[Event], ...]
    logs: tuple[str, ...]
    waits: tuple[Waited, ...]
    children_started: int
    killed_after: str | None = None

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the run's events, in order."""
        return tuple(recorded.type for recorded in self.events)


@dataclass(frozen=True, slots=True)
class Request:
    play: Callable[..., Any]
    input: Any
    files: Sequence[str | Path]
    signals: Mapping[str, Any]
    children: Mapping[str, Any]
    cancel_at: CancelAt


class Drive:
    """One run in a log of its own, from submit to end; owned by one event loop."""

    def __init__(self, request: Request, kill_at: int | None = None) -> None:
        self._request = request
        self._play = as_play(request.play, trusted=True)
        self._plays = plays_beside(self._play)
        self._clock = VirtualClock()
        self._signals = {
            key: deque(value if isinstance(value, list) else [value])
            for key, value in request.signals.items()
        }
        self._kill_at = kill_at
        self._killed_after: str | None = None
        self._cancel_due: int | None = None
        self._cancelled = request.cancel_at is None
        self._seen = 0
        self._positions: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._news = asyncio.Event()

    async def drive(self) -> tuple[Ended[Any], list[int]]:
        """Returns how the run ended, and at which positions its family's events stand."""
        folder = str(FAST_FOLDER) if os.access(FAST_FOLDER, os.W_OK) else None
        with TemporaryDirectory(prefix="playledger-drive-", dir=folder) as where:
            path = Path(where) / "drive.db"
            path.write_bytes(_empty_log(Path(where) / "empty.db"))
            log = await open_log(path, clock=self._clock)
            try:
                return await self._in(log), self._positions
            finally:
                await log.close()

    async def _in(self, log: RunLog) -> Ended[Any]:
        self._log = log
        self._ledger = Ledger(log, self._plays, clock=self._clock, find=self._find)
        driver = await self._start(log)
        self._clock.guard(lambda: not self._is_idle())
        try:
            if isinstance(self._request.cancel_at, timedelta):
                self._cancel_due = self._clock() + _ms(self._request.cancel_at)
            await self._ledger.submit(
                self._request.play, self._request.input, run_id=RUN_ID, files=self._request.files
            )
            await self._until_ended()
            return await self._ended()
        finally:
            for task in self._tasks:
                task.cancel()
            await driver.stop(0)

    async def _start(self, log: RunLog) -> Driver:
        node = Node(log.path)
        self._engine = LocalEngine(log, node.id, self._plays, self._clock, stand_in=self._stand_in)
        self._effects = EffectLoop(
            log,
            node,
            {self._engine.name: self._engine},
            Scope(frozenset(), family=RUN_ID),
            self._ledger.submitter,
            self._clock,
        )
        driver = Driver(node, self._engine, self._effects)
        if self._kill_at is not None:
            log.writer.subscribe(self._engine.loop, self._kill)
        await self._effects.start()
        self._seen = log.writer.position
        log.writer.subscribe(asyncio.get_running_loop(), self._notice)
        return driver

    async def _until_ended(self) -> None:
        for _ in range(JUMPS_MAX):
            await self._settled()
            view = await self._log.reader.ask(view_query(RUN_ID))
            assert view is not None, "it was submitted"
            if view.run.terminal:
                return
            due = [at for at in (self._effects.next_due_at, self._cancel_due) if at is not None]
            if not due:
                raise _never_ends(", ".join(f"{w.kind} {quote(w.key)}" for w in view.waits))
            self._clock.advance_to(max(self._clock(), min(due)))
            if self._cancel_due is not None and self._cancel_due <= self._clock():
                self._cancel_due = None
                self._cancel()
            self._effects.pump()
        raise _never_ends(f"the {JUMPS_MAX}th time")

    async def _settled(self) -> None:
        """Returns when nothing is being done: no effect, no write, and every play only waits."""
        while True:
            self._news.clear()
            if self._failures:
                raise self._failures[0]
            if self._is_idle() and await self._engine.quiet() and self._is_idle():
                return
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _is_idle(self) -> bool:
        return not self._tasks and self._effects.idle and self._seen == self._log.writer.position

    # --- what is done to the run ------------------------------------------------------------------

    def _notice(self, committed: Committed) -> None:
        """Sees every commit after the effect loop has; answers waits, and cancels."""
        ended = {
            (recorded.subject, recorded.data.wait_id)
            for recorded in committed.events
            if isinstance(recorded.data, e.RunWaitEnded)
        }
        for recorded in committed.events:
            self._seen = max(self._seen, recorded.position)
            if recorded.subject.startswith("run/"):
                self._positions.append(recorded.position)
            event = recorded.data
            if (
                isinstance(event, e.RunWaitStarted)
                and event.kind == "signal"
                and (recorded.subject, event.wait_id) not in ended
                and self._signals.get(event.key)
            ):
                value = self._signals[event.key].popleft()
                self._do(self._send(recorded.subject.removeprefix("run/"), event.key, value))
            if not self._cancelled and self._is_time_to_cancel(recorded):
                self._cancel()
        self._news.set()

    def _is_time_to_cancel(self, recorded: Recorded[Event]) -> bool:
        at = self._request.cancel_at
        if recorded.subject != run_stream(RUN_ID):
            return False
        return at in (recorded.type, recorded.streamversion)

    def _cancel(self) -> None:
        self._cancelled = True
        self._do(self._ask_to_end())

    async def _ask_to_end(self) -> None:
        try:
            await self._ledger.cancel(RUN_ID, request_id="drive")
        except RunTerminal:
            return  # it ended first

    async def _send(self, run_id: str, key: str, value: Any) -> None:
        left = len(self._signals[key])
        try:
            await self._ledger.signal(run_id, key, value, signal_id=f"drive/{key}/{left}")
        except RunTerminal:
            return  # it ended while it waited

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failures.append(cast("BaseException", task.exception()))
        self._news.set()

    def _kill(self, committed: Committed) -> None:
        """Sees every commit on the loop of the plays, before any of them sees its answer."""
        for recorded in committed.events:
            if recorded.position == self._kill_at:
                self._killed_after = recorded.type
                if not self._engine.kill_run(recorded.subject.removeprefix("run/")):
                    self._engine.kill_run(RUN_ID)

    def _find(self, name: str) -> PlayInfo | None:
        found = self._plays.info(name)
        if found is None and self._request.children:
            return PlayInfo(name=name)
        return found

    def _stand_in(self, run: RunRow) -> Play | None:
        key = run.lineage.child_key
        if key is None or key not in self._request.children:
            return None
        value = self._request.children[key]

        async def answer(_run: Run) -> Any:
            if isinstance(value, BaseException):
                raise value
            return value

        return Play(run.play_name, answer, PlayOptions(name=None, retries=0, timeout=None))

    # --- what came of it --------------------------------------------------------------------------

    async def _ended(self) -> Ended[Any]:
        view = await self._log.reader.ask(view_query(RUN_ID))
        assert view is not None, "it was submitted"
        run = view.run
        stream = run_stream(RUN_ID)
        events = [recorded async for recorded in self._log.events(stream=stream)]
        result = None
        if run.status == "completed":
            result = self._play.read_result(await self._ledger.reveal(run.result))
        told = await self._ledger.reveal(run.error)
        return Ended(
            status=run.status,
            result=result,
            error=str(told["message"]) if isinstance(told, dict) else None,
            error_class=run.error_class,
            code=run.code,
            attempt=run.attempt,
            events=tuple(events),
            logs=await self._logs(events),
            waits=_waits(events),
            children_started=sum(isinstance(r.data, e.ChildRequested) for r in events),
            killed_after=self._killed_after,
        )

    async def _logs(self, events: Sequence[Recorded[Event]]) -> tuple[str, ...]:
        messages: list[str] = []
        for recorded in events:
            if isinstance(recorded.data, e.RunLog):
                lines: Json = await self._ledger.reveal(recorded.data.lines)
                assert isinstance(lines, list), "a batch of lines is a list"
                messages += [str(line["message"]) for line in lines if isinstance(line, dict)]
        return tuple(messages)


def _empty_log(path: Path) -> bytes:
    """Returns an empty log as a file, made once per process: most of a short drive is making it."""
    if not _EMPTY:
        prepare(path, SCHEMA, scope=DEFAULT_SCOPE, clock=VirtualClock())
        _EMPTY.append(path.read_bytes())
    return _EMPTY[0]


_EMPTY: Final[list[bytes]] = []


def _waits(events: Sequence[Recorded[Event]]) -> tuple[Waited, ...]:
    outcomes = {
        recorded.data.wait_id: recorded.data.outcome
        for recorded in events
        if isinstance(recorded.data, e.RunWaitEnded)
    }
    return tuple(
        Waited(recorded.data.kind, recorded.data.key, outcomes.get(recorded.data.wait_id))
        for recorded in events
        if isinstance(recorded.data, e.RunWaitStarted)
    )


def _never_ends(what: str) -> NeverEnds:
    return NeverEnds(
        f"the run waits for {what or 'nothing that can come'}, and for ever",
        hint='give what it waits for: drive(..., signals={"key": value})',
    )


def _ms(length: timedelta) -> int:
    return round(length.total_seconds() * 1000)
