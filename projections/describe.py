"""Events and states in words: one line for each, the same in every face.

Nothing here decides anything.  Text that comes from runs is escaped, never interpreted; a sealed
value is shown where `reveal` has it, and by its size where not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import orjson

from ledger import events as e
from ledger.canonical import Json
from ledger.codec import Recorded, format_time
from ledger.errors import NotFound
from ledger.events import Event, Seal
from ledger.ids import quote

Reveal = Callable[[Seal], Json]
VALUE_CHARS: Final = 60
_PLAIN: Final = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:~/-@+#="
)


def sealed(_seal: Seal) -> Json:
    """Reveals nothing: what an exported file can show."""
    raise NotFound("the vault is not here")


def describe(recorded: Recorded[Event], reveal: Reveal = sealed) -> str:
    """Returns one line on what an event says, without its type."""
    event = recorded.data
    match event:
        case e.RunSubmitted():
            return _submitted(event, reveal)
        case e.RunLaunchStatePut():
            where = "in a blob" if event.externalized else "inline"
            return f"{event.params_bytes} bytes {where}"
        case e.RunCompleted() | e.InstanceCompleted():
            rows = "" if event.output_rows is None else f", {event.output_rows} rows"
            return _attempt(event.attempt) + _value(event.result, reveal) + rows
        case e.RunFailed() | e.InstanceErrored():
            return f"{_attempt(event.attempt)}{event.error_class} {plain(event.code)}" + _error(
                event.error, reveal
            )
        case e.RunCancelled():
            return "" if event.refused is None else f"its instance said {plain(event.refused)}"
        case e.RunCancelRequested():
            reason = "" if event.reason is None else ", " + _value(event.reason, reveal)
            return f"request {plain(event.request_id)}{reason}"
        case e.RunCancelRefused():
            return f"the run is {event.status}"
        case e.RunWaitStarted():
            until = "" if event.until_at is None else f" until {format_time(event.until_at)}"
            return f"{event.kind} {plain(event.key)}{until}"
        case e.RunWaitEnded():
            return f"{plain(event.wait_id)} by {event.outcome}"
        case e.RunLog():
            dropped = f", {event.dropped} dropped" if event.dropped else ""
            return _log(event, reveal) + dropped
        case e.RunProgress():
            of = "" if event.of is None else f" of {event.of}"
            note = "" if event.note is None else ", " + _value(event.note, reveal)
            return f"{event.done}{of}{note}"
        case e.ChildRequested():
            return f"key {plain(event.child_key)}, {plain(event.play_name)}"
        case e.ChildSubmitFailed():
            return f"key {plain(event.child_key)}, {plain(event.code)}"
        case e.ChildTerminalSet():
            status = "done" if event.status in (None, "completed") else event.status
            return f"key {plain(event.event_key)} {status}"
        case e.ChildTerminalConflict():
            return f"key {plain(event.event_key)} had its end before"
        case e.ChildCancelRequested():
            return f"key {plain(event.child_key)}, {event.reason.replace('_', ' ')}"
        case e.ChildCancelDelivered():
            return f"key {plain(event.child_key)} is {plain(event.answer)}"
        case e.SignalReceived():
            key = "" if event.event_key is None else f" {plain(event.event_key)}"
            return f"{plain(event.signal)}{key}, {_value(event.data, reveal)}"
        case e.TimerFired():
            return event.purpose.replace("_", " ")
        case e.EffectFailed():
            code = plain(event.code)
            return f"{event.kind} try {event.try_number}, {event.error_class} {code}"
        case e.EffectParked():
            return f"after {event.tries} tries"
        case e.EffectResumed():
            return f"intent {event.intent_id[:8]}"
        case e.LogCreated():
            return f"log {event.log_id[:8]} by {plain(event.version)}"
        case e.NodeStarted():
            return f"{plain(event.node_id)}, {event.plays} plays"
        case e.NodeStopped():
            return f"{plain(event.node_id)}{'' if event.clean else ', not clean'}"
        case _:
            return _of_an_instance(event)


def _of_an_instance(event: Event) -> str:
    match event:
        case e.InstanceCreateRequested():
            after = (
                ""
                if event.not_before_at is None
                else f", not before {format_time(event.not_before_at)}"
            )
            return f"attempt {event.attempt}, engine {plain(event.engine)}{after}"
        case e.InstanceCreated():
            host = "" if event.host is None else f" on {plain(event.host)}"
            return f"attempt {event.attempt}{host}"
        case e.InstanceCreateFailed():
            return f"attempt {event.attempt}, {event.kind} {plain(event.code)}"
        case e.InstanceStarted():
            return f"attempt {event.attempt}, gap {event.start_gap_ms} ms"
        case e.InstanceLost():
            return f"attempt {event.attempt}, {event.error_class}"
        case e.InstanceTerminateRequested():
            return f"attempt {event.attempt}, {event.reason}"
        case e.InstanceTerminated():
            return f"attempt {event.attempt}{'' if event.found else ', not found'}"
        case e.InstanceOutputFenced():
            what = plain(event.what)
            return f"{what} of attempt {event.attempt} refused, attempt {event.current_attempt} is"
        case e.InstanceMapped():
            return f"attempt {event.attempt} runs elsewhere as {plain(event.mapped_id)}"
        case e.RetryClaimRequested():
            return f"attempt {event.failed_attempt} died, at most {event.max_attempts} retries"
        case e.SessionRevokeRequested() | e.SessionRevoked():
            return f"{event.session_count} database sessions"
        case e.SessionStored():
            until = format_time(event.expires_at)
            return f"{event.session_count} database sessions, encrypted, until {until}"
        case e.RetryDecided():
            if not event.retry:
                return f"no retry: {event.reason}" + _budget(event)
            return f"retry after {event.reason}" + _budget(event)
        case e.RetryParamsRequested():
            return ""
        case e.RetryParamsLoaded():
            return f"{event.bytes} bytes"
        case e.RetryParamsFailed():
            return plain(event.code)
        case e.RetryClaimed():
            return f"attempt {event.attempt} after {event.reason}"
        case e.RetryStarted():
            return f"attempt {event.attempt}"
        case e.RetryDenied():
            return event.reason
        case e.RetryAbandoned():
            return f"attempt {event.attempt}, {event.reason}"
        case _:
            raise AssertionError(type(event).__name__)


def describe_value(value: Json) -> str:
    """Returns a value on one short line: itself if it fits, else what it is."""
    text = safe_json(orjson.dumps(value).decode())
    if len(text) <= VALUE_CHARS:
        return text
    match value:
        case list():
            return f"list of {len(value)}"
        case dict():
            return f"object of {len(value)}"
        case str():
            return f"text of {len(value)} characters"
        case _:
            return text[:VALUE_CHARS]


def describe_seal(seal: Seal | None, reveal: Reveal = sealed) -> str:
    """Returns what a sealed value is, and its size; nothing of it where it cannot be revealed."""
    return "none" if seal is None else _value(seal, reveal)


def plain(text: str) -> str:
    """Returns an id as it is where that is harmless, else in quotes with escapes."""
    return text if text and _PLAIN.issuperset(text) else quote(text)


def visible(text: str) -> str:
    """Returns text with everything that a terminal would obey or hide shown as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(ord(c)) for c in text)


def safe_json(text: str) -> str:
    """Returns the same JSON without a character that a terminal would obey or hide."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def span(ms: int) -> str:
    """Returns a length of time as people read it."""
    if ms < 10_000:
        return f"{ms} ms"
    seconds = ms // 1000
    parts = (
        (seconds // 86_400, "d"),
        (seconds // 3_600 % 24, "h"),
        (seconds // 60 % 60, "m"),
        (seconds % 60, "s"),
    )
    shown = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(shown[:2])


def _submitted(event: e.RunSubmitted, reveal: Reveal) -> str:
    name = plain(event.play_name)
    try:
        params = reveal(event.params)
    except NotFound:
        return f"{name}, sealed, {event.params.bytes} bytes"
    if not isinstance(params, dict):
        return name
    files = params.get("files")
    count = len(files) if isinstance(files, list) else 0
    if count:
        return f"{name}, {count} file{'' if count == 1 else 's'}"
    return f"{name}, input {describe_value(params.get('input'))}"


def _log(event: e.RunLog, reveal: Reveal) -> str:
    try:
        lines = reveal(event.lines)
    except NotFound:
        return f"{event.count} line{'' if event.count == 1 else 's'}, sealed"
    if event.count == 1 and isinstance(lines, list) and isinstance(lines[0], dict):
        return describe_value(lines[0].get("message"))
    return f"{event.count} lines"


def _value(seal: Seal | None, reveal: Reveal) -> str:
    if seal is None:
        return "none"
    try:
        return f"{describe_value(reveal(seal))}, {seal.bytes} bytes"
    except NotFound:
        return f"sealed, {seal.bytes} bytes"


def _error(seal: Seal | None, reveal: Reveal) -> str:
    if seal is None:
        return ""
    try:
        error = reveal(seal)
    except NotFound:
        return ""
    message = error.get("message") if isinstance(error, dict) else error
    return "" if message is None else ", " + visible(str(message))[:VALUE_CHARS]


def _attempt(attempt: int) -> str:
    return f"attempt {attempt}, " if attempt else ""


def _budget(event: e.RetryDecided) -> str:
    if event.budget == "none":
        return ""
    return f", {event.used} of {event.limit} used before"


def _escape(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
