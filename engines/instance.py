"""One attempt of a run on this machine, and how its end is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import assert_never

import structlog

from engines.journal import Journal
from engines.perform import Done, End, Failed, Gone, Lost, Unwound, failure
from engines.port_asks import PortAsks
from handlers.engine import CreateRequest
from handlers.port import InstanceRef, Port
from ledger import events as e
from ledger.errors import Conflict, PlayledgerError, Unavailable

Report = Callable[[], Awaitable[object]]
log = structlog.get_logger("engines.instance")


class LocalInstance:
    """One attempt from its create to its recorded end; owned by the loop thread once it began."""

    def __init__(self, ref: InstanceRef, request: CreateRequest) -> None:
        self.ref = ref
        self.request = request
        self.life: asyncio.Task[None] | None = None
        self.asks: PortAsks | None = None
        self.journal: Journal | None = None
        self.stop: Callable[[], None] | None = None
        self.kill: Callable[[], None] | None = None
        self.asked: e.TerminateReason | None = None
        self.silent = False
        self.waits = 0
        self.has_slot = True

    def ask_to_end(self, reason: e.TerminateReason) -> None:
        """Cancels the play, at once or as soon as it begins."""
        self.asked = reason
        if self.stop is not None:
            self.stop()

    def give_up(self) -> None:
        """Ends it without a word: nothing it says is taken any more."""
        self.silent = True
        if self.journal is not None:
            self.journal.muted = True
        if self.kill is not None:
            self.kill()

    @property
    def asleep(self) -> bool:
        """Whether it does nothing but wait for facts."""
        return self.waits > 0 and self.journal is not None and not self.journal.busy


def report_of(port: Port, instance: LocalInstance, end: End | Lost) -> Report | None:
    """Returns how to report an end; what was asked of the instance says what it means."""
    ref, asked = instance.ref, instance.asked
    if instance.silent:
        return None
    match end:
        case Done(result=result):
            return lambda: port.completed(ref, result.encode())
        case Gone():  # changes nothing if it is so, and leaves nobody waiting if it is not
            return lambda: port.lost(ref, "instance_lost", "it says that it was superseded")
        case Unwound() | Lost() if asked == "timeout":
            return _failed(port, ref, failure(None, "ENGINE_TIMEOUT", "engine_timeout"))
        case Unwound() | Lost() if asked is not None:
            return _failed(port, ref, failure(None, "CANCELLED", "cancelled"))
        case Unwound(told=told):
            return _failed(port, ref, Failed("user_error", "CancelledError", told))
        case Lost(evidence=evidence):
            return lambda: port.lost(ref, "instance_lost", evidence)
        case Failed():
            return _failed(port, ref, end)
        case _:
            assert_never(end)


async def record(port: Port, ref: InstanceRef, report: Report) -> None:
    """Records an end; while the log cannot be used it is said again, and lands once."""
    pause = 0.1
    refused = False
    while True:
        try:
            await report()
        except Conflict:
            return  # another attempt is the current one: this end was refused and recorded
        except Unavailable as error:
            log.warning("an end waits for the log", run=ref.run_id, error=error.message)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)
        except PlayledgerError as error:
            log.warning("an end could not be recorded", run=ref.run_id, error=error.message)
            if refused:
                return
            # What cannot be stored is reported as that: no run hangs for it (CASES C032).
            refused = True
            report = _failed(port, ref, failure(error, error.code))
        else:
            return


def _failed(port: Port, ref: InstanceRef, end: Failed) -> Report:
    told = end.told.as_json()
    return lambda: port.errored(ref, end.error_class, end.code, told, end.retry_after_ms)
