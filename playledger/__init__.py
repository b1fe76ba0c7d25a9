"""playledger: a run coordinator whose only truth is an append-only event log."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.context import Child, Retry, Run, Session, SignalInvalid, Superseded
    from engines.plays import play
    from ledger.errors import (
        ChildFailed,
        ChildKeyConflict,
        Conflict,
        Ended,
        FileNotStaged,
        InputInvalid,
        JsonInvalid,
        LogDamaged,
        LogFull,
        LogLocked,
        NotFound,
        Overloaded,
        PlayledgerError,
        PlayNotFound,
        Refused,
        RunCancelled,
        RunConflict,
        RunFailed,
        RunNotFound,
        RunTerminal,
        SessionExpired,
        SessionNotPlanned,
        TooLarge,
        Unavailable,
        WrongExpectedVersion,
    )
    from playledger.embed import Ledger, RunHandle, open  # noqa: A004 - `playledger.open`
    from playledger.http.app import http_app
    from playledger.http.door import HttpOptions

__all__ = [
    "Child",
    "ChildFailed",
    "ChildKeyConflict",
    "Conflict",
    "Ended",
    "FileNotStaged",
    "HttpOptions",
    "InputInvalid",
    "JsonInvalid",
    "Ledger",
    "LogDamaged",
    "LogFull",
    "LogLocked",
    "NotFound",
    "Overloaded",
    "PlayNotFound",
    "PlayledgerError",
    "Refused",
    "Retry",
    "Run",
    "RunCancelled",
    "RunConflict",
    "RunFailed",
    "RunHandle",
    "RunNotFound",
    "RunTerminal",
    "Session",
    "SessionExpired",
    "SessionNotPlanned",
    "SignalInvalid",
    "Superseded",
    "TooLarge",
    "Unavailable",
    "WrongExpectedVersion",
    "http_app",
    "open",
    "play",
]

# Where a name lies, if it is no error.  A name is loaded when it is first used, because a command
# that only prints its help must not wait a second for the database's libraries (NUMBERS T8).
_HOMES = {
    "Child": "engines.context",
    "HttpOptions": "playledger.http.door",
    "Ledger": "playledger.embed",
    "Retry": "engines.context",
    "Run": "engines.context",
    "RunHandle": "playledger.embed",
    "Session": "engines.context",
    "SignalInvalid": "engines.context",
    "Superseded": "engines.context",
    "http_app": "playledger.http.app",
    "open": "playledger.embed",
    "play": "engines.plays",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "ledger.errors")), name)
    globals()[name] = value
    return value
