"""Logging, configured once per process: text on a terminal, JSON when piped, always to stderr.

stdout is the answer, so nothing here writes to it.  What comes from runs (error texts) is shown
escaped.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import MutableMapping
from typing import Any, Final, Literal

import structlog

from playledger.render import json_text, visible

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]
_NUMBERS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(level: Level, form: Format | None = None) -> None:
    """Configures structlog; without `form` the stream decides."""
    text = sys.stderr.isatty() if form is None else form == "text"
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _as_text if text else _as_json,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_NUMBERS[level]),
        logger_factory=_Stderr,
        cache_logger_on_first_use=False,  # modules make their loggers before this runs
    )


class _Stderr:
    """Writes lines to whatever stderr is now: a live display puts itself in its place."""

    def __init__(self, *_: object) -> None:
        """Takes a logger's name, and has no use for it."""

    def msg(self, message: str) -> None:
        """Writes a line; a stderr that is gone ends no run."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(message + "\n")
            sys.stderr.flush()

    log = debug = info = warning = warn = error = critical = exception = fatal = msg


def _as_text(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    stack = event.pop("exception", None)
    head = f"{event.pop('timestamp', '')} {event.pop('level', '')}: {event.pop('event', '')}"
    rest = "".join(f" {key}={visible(str(value))}" for key, value in event.items())
    lines = "" if stack is None else "".join("\n  " + visible(s) for s in stack.splitlines())
    return visible(head) + rest + lines


def _as_json(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    return json_text({key: _plain(value) for key, value in event.items()})


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
