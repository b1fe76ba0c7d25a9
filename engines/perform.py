"""Performing a play: calling it, and saying what came of it as a value.

The same in a task of the coordinator and in a process of its own.  A play that raises anything ends
its attempt, recorded; nothing it does ends the loop it runs on.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final, TypeVar

from msgspec import Struct

from engines.asks import Retry, Superseded
from engines.context import Run
from engines.lines import sanitise
from engines.plays import Play
from ledger import events as e
from ledger.canonical import Json
from ledger.errors import PlayledgerError

T = TypeVar("T")
STACK_LINES: Final = 12
ERROR_CHARS: Final = 4000


class Told(Struct, frozen=True):
    """What is kept of an error, sealed: its text, its type and the last lines of its stack."""

    message: str
    type: str = ""
    stack: tuple[str, ...] = ()

    def as_json(self) -> Json:
        """Returns it as it is sealed."""
        if not self.type:
            return {"message": self.message}
        return {"message": self.message, "stack": list(self.stack), "type": self.type}


class Done(Struct, frozen=True, tag="done"):
    """The play returned; `result` is canonical JSON."""

    result: str


class Failed(Struct, frozen=True, tag="failed"):
    """The play raised, or asked for another attempt."""

    error_class: e.ErrorClass
    code: str
    told: Told
    retry_after_ms: int | None = None


class Unwound(Struct, frozen=True, tag="unwound"):
    """The play was cancelled and let itself be."""

    told: Told


class Gone(Struct, frozen=True, tag="gone"):
    """The instance found that it is no longer the current one: there is nothing to report."""


class Lost(Struct, frozen=True):
    """The play's process ended without a word; `evidence` says how that is known."""

    evidence: str


End = Done | Failed | Unwound | Gone
"""How a play can end by itself."""


async def perform(play: Play, run: Run, value: Json) -> End:
    """Calls a play with a JSON input, and returns how it ended; never raises."""
    try:
        arguments: tuple[Any, ...] = (run,)
        if play.takes_input:
            arguments = (run, play.read_input(value))
        if play.is_async:
            returned = await play.function(*arguments)
        else:
            returned = await in_thread(play.function, *arguments)
        result = play.write_result(returned)
        await run._settle()  # noqa: SLF001 - what it began is not left half asked
        return Done(result.decode())
    except Superseded:
        return Gone()
    except asyncio.CancelledError as error:
        return Unwound(tell(error, "CancelledError"))
    except Retry as error:
        after = None if error.after is None else round(error.after.total_seconds() * 1000)
        return Failed("play_retry", "PLAY_RETRY", tell(error, "PLAY_RETRY"), after)
    except PlayledgerError as error:
        return failure(error, error.code)
    except BaseException as error:  # noqa: BLE001 - whatever a play raises ends it, recorded
        return failure(error, type(error).__name__)


def failure(error: BaseException | None, code: str, kind: e.ErrorClass = "user_error") -> Failed:
    """Returns an end by an error."""
    return Failed(kind, code[:200], tell(error, code))


def tell(error: BaseException | None, code: str) -> Told:
    """Returns what is kept of an error."""
    if error is None:
        return Told(code)
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001 - an error that cannot say what it is
        message = f"its text cannot be read: {type(broken).__name__}"
    try:
        lines = "".join(traceback.format_exception(error)).splitlines()[-STACK_LINES:]
    except Exception as broken:  # noqa: BLE001 - Python 3.11 parses source for it, and may fail
        lines = [f"its stack cannot be read: {type(broken).__name__}"]
    return Told(
        message=sanitise(message, ERROR_CHARS),
        type=type(error).__name__,
        stack=tuple(sanitise(line, 400) for line in lines),
    )


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a plain function in a thread of its own, of which there may be any number.

    A thread cannot be killed: a cancelled one is fenced and left to run out, and keeps nobody from
    exiting.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if isinstance(error, StopIteration):
            future.set_exception(RuntimeError("the play raised StopIteration"))
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        result, raised = None, None
        try:
            result = context.run(function, *arguments)
        except BaseException as error:  # noqa: BLE001 - whoever awaits gets it
            raised = error
        try:
            loop.call_soon_threadsafe(settle, result, raised)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=work, name="play", daemon=True).start()
    return await future
