"""The messages between the coordinator and a play's process: one JSON object a line (NDJSON).

Values of users travel as JSON text inside a message, so that each passes the gate as itself, at its
own depth, and no message can be taken for a value.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from engines.asks import ChildEnd, ChildRequest, RunFacts, WaitEnd
from engines.perform import Done, Failed, Gone, Unwound
from engines.plays import Origin
from handlers.sessions import SessionGrant
from ledger import errors
from ledger import events as e
from ledger.errors import PlayledgerError
from ledger.gate import parse

T = TypeVar("T")
MESSAGE_BYTES_MAX: Final = 80 * 1024 * 1024
"""A result of 32 MiB, escaped as text inside a message, fits."""


class Start(Struct, frozen=True, tag="start"):
    """The first message to a process: which play, and all it has to know."""

    origin: Origin
    sys_path: tuple[str, ...]
    facts: RunFacts
    files: dict[str, str]
    input: str


class Answer(Struct, frozen=True, tag="answer"):
    """What a question is answered with."""

    id: int
    value: str | ChildEnd | WaitEnd | SessionGrant | None


class Refusal(Struct, frozen=True, tag="refusal"):
    """The error a question is answered with; `kind` is its class."""

    id: int
    kind: str
    code: str
    message: str
    hint: str
    details: dict[str, str | int | bool | None]


class Cancel(Struct, frozen=True, tag="cancel"):
    """Asks the play to end."""


class AskChild(Struct, frozen=True, tag="child"):
    id: int
    request: ChildRequest


class AskChildEnd(Struct, frozen=True, tag="child_end"):
    id: int
    key: str


class AskCancelChild(Struct, frozen=True, tag="cancel_child"):
    id: int
    child_run_id: str
    reason: str


class AskWait(Struct, frozen=True, tag="wait"):
    id: int
    kind: e.WaitKind
    key: str
    ordinal: int
    delay_ms: int | None


class AskSession(Struct, frozen=True, tag="session"):
    id: int
    table: str


class Forget(Struct, frozen=True, tag="forget"):
    """Says that nobody waits for an answer any more."""

    id: int


class Say(Struct, frozen=True, tag="log"):
    """A log line; `fields` is a JSON object as text."""

    message: str
    level: str
    fields: str


class Advance(Struct, frozen=True, tag="progress"):
    done: int
    of: int | None
    note: str


Ask = AskChild | AskChildEnd | AskCancelChild | AskWait | AskSession
ToPlay = Start | Answer | Refusal | Cancel
FromPlay = Ask | Forget | Say | Advance | Done | Failed | Unwound | Gone


def write_message(message: ToPlay | FromPlay) -> bytes:
    """Returns a message as one line."""
    return msgspec.json.encode(message) + b"\n"


def read_message(line: bytes, kind: Any) -> Any:
    """Returns a line as a message; raises JsonInvalid, TooLarge or msgspec.ValidationError."""
    value = parse(line, what="message", max_bytes=MESSAGE_BYTES_MAX)
    return msgspec.convert(value, kind)


def refusal(identity: int, error: Exception) -> Refusal:
    """Returns an error as the other side raises it again."""
    if isinstance(error, PlayledgerError):
        return Refusal(
            id=identity,
            kind=type(error).__name__,
            code=error.code,
            message=error.message,
            hint=error.hint,
            details=error.details,
        )
    return Refusal(identity, "PlayledgerError", "INTERNAL", f"{type(error).__name__}", "", {})


def raised(message: Refusal) -> PlayledgerError:
    """Returns the error that a refusal stands for."""
    kind = getattr(errors, message.kind, PlayledgerError)
    if not (isinstance(kind, type) and issubclass(kind, PlayledgerError)):
        kind = PlayledgerError
    return kind(message.message, code=message.code, hint=message.hint, **message.details)
