"""An engine that does what a test says, and counts what it is asked; its clock is virtual.

It stands for an engine elsewhere: its instances have no host, `created` and `started` are two
reports, and what it does not answer stays unanswered.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from handlers.acts import instance_ref
from handlers.engine import CreateRequest, EngineError, EngineStatus, EngineTransient
from handlers.port import InstanceRef, Port, RunLog
from ledger import events as e
from ledger.canonical import Json, canonical
from ledger.errors import Conflict

Creation = Literal["created", "exists", "transient", "permanent", "silent"]


class Outcome(Struct, frozen=True, kw_only=True):
    """What becomes of one attempt.

    `fails` is how many creates fail first, in the way `creation` names; `end` is how the instance
    ends, None if it never does; `after` is waited for before it ends.
    """

    creation: Creation = "created"
    fails: int = 0
    end: Literal["complete", "error", "lost"] | None = "complete"
    result: Json = None
    error_class: e.ErrorClass = "user_error"
    code: str = "SCRIPTED"
    retry_after_ms: int | None = None
    after: asyncio.Event | None = None
    unwinds: bool = True


def complete(result: Json = None, **how: Any) -> Outcome:
    """An attempt that completes."""
    return Outcome(result=result, **how)


def error(error_class: e.ErrorClass, code: str = "SCRIPTED", **how: Any) -> Outcome:
    """An attempt that ends by an error."""
    return Outcome(end="error", error_class=error_class, code=code, **how)


def lost(error_class: e.ErrorClass = "instance_lost", **how: Any) -> Outcome:
    """An attempt that is lost."""
    return Outcome(end="lost", error_class=error_class, **how)


def never(**how: Any) -> Outcome:
    """An attempt that starts and never ends."""
    return Outcome(end=None, **how)


def in_turn(*outcomes: Outcome) -> Callable[[CreateRequest], Outcome]:
    """Gives the n-th attempt of any run the n-th outcome, and the last one from then on."""
    return lambda request: outcomes[min(request.attempt, len(outcomes) - 1)]


class ScriptedEngine:
    """Runs no play: `script` says for each attempt what becomes of it."""

    def __init__(
        self,
        log: RunLog,
        script: Callable[[CreateRequest], Outcome],
        *,
        name: str = "scripted",
    ) -> None:
        self.name = name
        self.creates: Counter[str] = Counter()
        self.terminates: list[tuple[str, e.TerminateReason]] = []
        self.running: dict[str, asyncio.Task[None]] = {}
        self.unfinished: set[str] = set()
        self._known: set[str] = set()
        self._script = script
        self._port = Port(log)
        self._closed = False

    def offers(self, play_name: str) -> bool:
        """Every play is offered."""
        return bool(play_name)

    async def create(self, request: CreateRequest) -> None:
        """Starts an attempt once, however often it is asked to."""
        outcome = self._script(request)
        self.creates[request.instance_id] += 1
        ref = instance_ref(request.run, request.instance_id, request.attempt, None)
        if self.creates[request.instance_id] <= outcome.fails or outcome.creation == "permanent":
            raise self._refusal(outcome)
        if outcome.creation == "silent":
            await asyncio.Event().wait()
        exists = outcome.creation == "exists" or request.instance_id in self._known
        self._known.add(request.instance_id)
        await self._port.created(ref, request.intent_id, already_existed=exists)
        if request.instance_id not in self.running:
            self.running[request.instance_id] = asyncio.create_task(self._run(ref, outcome))

    async def status(self, instance_id: str) -> EngineStatus:
        """Says what it knows of an instance."""
        if instance_id not in self._known:
            return "unknown"
        return "running" if instance_id in self.unfinished else "ended"

    async def terminate(self, instance_id: str, reason: e.TerminateReason) -> bool:
        """Ends an instance that is running; it reports that it was cancelled, if it unwinds."""
        self.terminates.append((instance_id, reason))
        if instance_id not in self.unfinished:
            return False
        self.running[instance_id].cancel()
        return True

    async def close(self) -> None:
        """Ends what runs, without a report."""
        self._closed = True
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)

    def _refusal(self, outcome: Outcome) -> EngineError:
        if outcome.creation == "permanent":
            return EngineError("the script refuses", code=outcome.code)
        return EngineTransient("the script fails for now", code=outcome.code)

    async def _run(self, ref: InstanceRef, outcome: Outcome) -> None:
        self.unfinished.add(ref.instance_id)
        try:
            await self._port.started(ref)
            if outcome.after is not None:
                await outcome.after.wait()
            if outcome.end is None:
                await asyncio.Event().wait()
            await self._end(ref, outcome)
        except Conflict:
            return  # refused: it is no longer the current one
        except asyncio.CancelledError:
            if outcome.unwinds and not self._closed:
                await self._report_cancelled(ref)
        finally:
            self.unfinished.discard(ref.instance_id)

    async def _end(self, ref: InstanceRef, outcome: Outcome) -> None:
        match outcome.end:
            case "complete":
                await self._port.completed(ref, canonical(outcome.result))
            case "error":
                told: Json = {"message": outcome.code}
                await self._port.errored(
                    ref, outcome.error_class, outcome.code, told, outcome.retry_after_ms
                )
            case "lost":
                await self._port.lost(ref, outcome.error_class, outcome.code)
            case None:
                return

    async def _report_cancelled(self, ref: InstanceRef) -> None:
        try:
            await self._port.errored(ref, "cancelled", "CANCELLED", {"message": "CANCELLED"})
        except Conflict:
            return


class VirtualClock:
    """A clock that stands still until it is moved, and never over work in flight."""

    def __init__(self, now: int = 1_800_000_000_000) -> None:
        self.now = now
        self._busy: list[Callable[[], bool]] = []

    def __call__(self) -> int:
        return self.now

    def guard(self, busy: Callable[[], bool]) -> None:
        """Refuses to move while `busy` says so."""
        self._busy.append(busy)

    def advance_to(self, at: int) -> None:
        """Moves on; raises if that is back, or over work in flight."""
        if at < self.now:
            raise ValueError(f"the clock is at {self.now} and cannot go back to {at}")
        if any(busy() for busy in self._busy):
            raise RuntimeError(f"the clock cannot go on to {at}: work is in flight")
        self.now = at

    def advance(self, length_ms: int) -> None:
        """Moves on by a length."""
        self.advance_to(self.now + length_ms)
