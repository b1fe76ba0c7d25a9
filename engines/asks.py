"""What a play may ask of its run, as a seam: in this process, or over the pipes of another.

`engines/context.py` is what a play sees.  Everything durable in it ends in one of these calls, so a
play in a process of its own means the same as one in a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from msgspec import Struct

from engines.plays import Origin
from handlers.sessions import SessionGrant
from ledger import events as e
from ledger.errors import InputInvalid


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


class RunFacts(Struct, frozen=True):
    """What a play may read of its run; `run_key` names inputs in derived child keys."""

    id: str
    attempt: int
    play: str
    parent_id: str | None
    family: str
    submitted_at: int
    run_key: bytes


class ChildRequest(Struct, frozen=True):
    """A child, its input as canonical JSON; `origin` is where its play can be loaded from."""

    key: str
    play: str
    origin: Origin | None
    input: str
    on_parent_end: e.OnParentEnd


class ChildEnd(Struct, frozen=True, tag="child_end"):
    """How a child ended; `result` is JSON text."""

    child_run_id: str
    status: str
    code: str | None
    result: str


class WaitEnd(Struct, frozen=True, tag="wait_end"):
    """How a wait ended; `data` is the signal's, as JSON text."""

    outcome: e.WaitOutcome
    data: str


class Asks(Protocol):
    """The questions; each may raise Superseded, and what the log refuses them with."""

    async def child(self, request: ChildRequest) -> str:
        """Asks for a child, or finds it; returns its run id."""

    async def child_end(self, key: str) -> ChildEnd:
        """Waits until a child has ended."""

    async def cancel_child(self, child_run_id: str, reason: str) -> None:
        """Asks a child to end."""

    async def wait(self, kind: e.WaitKind, key: str, ordinal: int, delay_ms: int | None) -> WaitEnd:
        """Starts a wait, or finds it with its first deadline, and returns when it has ended."""

    async def session(self, table: str) -> SessionGrant:
        """Opens the run's database session for a table."""

    def log(self, message: str, level: str, fields: Mapping[str, Any]) -> None:
        """Adds a log line, from any thread."""

    def progress(self, done: int, of: int | None, note: str) -> None:
        """Says how far the play is, from any thread."""
