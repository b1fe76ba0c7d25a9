"""The engine protocol: what the effect loop asks of whatever runs instances (DESIGN section 6).

How an instance speaks back is handlers/port.py, for every engine alike.  An adapter classifies an
end itself; nothing above it matches messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct

from ledger.canonical import Json
from ledger.errors import PlayledgerError
from ledger.events import TerminateReason
from projections.state import Run

EngineStatus = Literal["running", "ended", "unknown"]


class CreateRequest(Struct, frozen=True):
    """What an engine is asked to run: one attempt of a run, and its verified launch parameters."""

    run: Run
    instance_id: str
    attempt: int
    intent_id: str
    params: bytes


class PlayInfo(Struct, frozen=True):
    """What a submit has to know of a play; `check` raises InputInvalid for what it refuses."""

    name: str
    digest: str | None = None
    retries: int = 0
    timeout_ms: int | None = None
    check: Callable[[Json], None] | None = None


class EngineError(PlayledgerError):
    """Says that an engine could not do what it was asked; `transient` says whether to ask again."""

    code = "ENGINE_ERROR"
    transient = False


class EngineTransient(EngineError):
    """Says that asking again may help; for a timeout the outcome is unknown until then."""

    code = "ENGINE_TRANSIENT"
    transient = True


class Engine(Protocol):
    """Runs instances.  Every call may be made twice with the same id and does its thing once."""

    name: str

    def offers(self, play_name: str) -> bool:
        """Says whether this engine can run the play here."""

    async def create(self, request: CreateRequest) -> None:
        """Starts an instance and records that it did: `instance.created`, or why it could not.

        A local engine records it first, with its host, and runs the play only if that got in.
        """

    async def status(self, instance_id: str) -> EngineStatus:
        """Says what the engine knows of an instance."""

    async def terminate(self, instance_id: str, reason: TerminateReason) -> bool:
        """Asks an instance to end; returns whether it was found.  It reports its end itself."""
