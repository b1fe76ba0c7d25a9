"""One command's mouth: the answer to stdout, the talk to stderr, and every error in two lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ledger.errors import (
    Conflict,
    LogMissing,
    NotFound,
    PlayledgerError,
    Refused,
    RunCancelled,
    RunFailed,
)

if TYPE_CHECKING:
    from playledger.render import Look
    from playledger.settings import Loaded

COMPLETED: Final = 0
FAILED: Final = 1
USAGE: Final = 2
CANCELLED: Final = 3
NOT_FOUND: Final = 4
CONFLICT: Final = 5
UNAVAILABLE: Final = 6
END_CODES: Final[Mapping[str, int]] = {
    "completed": COMPLETED,
    "failed": FAILED,
    "cancelled": CANCELLED,
}


class PipeClosed(Exception):
    """Says that whoever read stdout has gone: the command ends without a word."""


class Common:
    """The options that every command has, before or after it."""

    def __init__(
        self,
        db: str | None = None,
        config: str | None = None,
        json: bool = False,
        quiet: bool = False,
        ascii: bool = False,
        traceback: bool = False,
    ) -> None:
        self.db = db
        self.config = config
        self.json = json
        self.quiet = quiet
        self.ascii = ascii
        self.traceback = traceback


class Console:
    """What a command reads its common options from, and speaks through."""

    def __init__(self, common: Common, verb: str) -> None:
        self.common = common
        self.verb = verb
        self._loaded: Loaded | None = None
        self._looks: dict[str, Look] = {}
        self._stdout = sys.stdout  # what a play prints is led elsewhere meanwhile

    # --- speaking -----------------------------------------------------------------------------

    @property
    def json(self) -> bool:
        return self.common.json

    @property
    def out(self) -> Look:
        """How stdout wants it."""
        return self._look("out")

    @property
    def err(self) -> Look:
        """How stderr wants it."""
        return self._look("err")

    def answer(self, *lines: str) -> None:
        """Writes lines to stdout; raises PipeClosed if nobody reads them any more."""
        try:
            for line in lines:
                self._stdout.write(line + "\n")
        except BrokenPipeError:
            raise PipeClosed from None

    def answer_json(self, value: Any) -> None:
        """Writes one value as one line of JSON."""
        from playledger.render import json_text

        self.answer(json_text(value))

    def leaf(self, leaf: bytes) -> None:
        """Writes stored bytes as they are; on a terminal, with what it would obey escaped."""
        from playledger.render import safe_json

        text = leaf.decode()
        self.answer(safe_json(text) if self.out.terminal else text)

    def flush(self) -> None:
        """Hands on what was written; a follower is read as it goes."""
        try:
            self._stdout.flush()
        except BrokenPipeError:
            raise PipeClosed from None

    def say(self, *lines: str) -> None:
        """Writes lines of talk; a stderr that nobody reads stops nothing."""
        if self.common.quiet:
            return
        try:
            for line in lines:
                sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except OSError:
            self.common.quiet = True

    def then(self, *commands: str) -> None:
        """Says which commands come next, filled in."""
        if not self.json:
            heads = ["Next: ", *["      "] * (len(commands) - 1)]
            self.say(*(head + command for head, command in zip(heads, commands, strict=True)))

    def fail(self, error: BaseException) -> int:
        """Shows an error in its two lines, or as the one envelope, and returns the exit code."""
        if self.common.traceback:
            import traceback

            traceback.print_exception(error, file=sys.stderr)
        told = explained(error, self.verb)
        if self.json:
            from playledger.render import json_text

            lines = [json_text(envelope(told, self.verb))]
        else:
            from playledger.render import visible

            lines = [self.err.red("error:") + " " + visible(told.message)]
            if told.hint:
                lines.append(self.err.bold("hint:") + " " + visible(told.hint))
        self.common.quiet = False  # --quiet is about talk; an error is an answer
        self.say(*lines)
        return exit_code(told)

    # --- settings -----------------------------------------------------------------------------

    def settings(self, options: Mapping[str, tuple[str, Any]] | None = None) -> Loaded:
        """Returns the settings, with this command's options on top; configures the logging."""
        if self._loaded is None or options:
            from playledger import logging, settings

            config = None if self.common.config is None else Path(self.common.config)
            given = {"db": ("--db", self.common.db), **(options or {})}
            self._loaded = settings.load(given, config=config)
            table = self._loaded.values.log
            logging.configure("error" if self.common.quiet else table.level, table.format)
        return self._loaded

    @property
    def db(self) -> Path:
        """The log's file."""
        from ledger.database import database_path

        return database_path(self.settings().values.db)

    @property
    def db_option(self) -> str:
        """What a next command has to say to mean the same log."""
        return "" if self.common.db is None else f" --db {shell_word(self.common.db)}"

    def _look(self, which: str) -> Look:
        if which not in self._looks:
            from playledger.render import environment, look_of

            stream = self._stdout if which == "out" else sys.stderr
            self._looks[which] = look_of(
                stream, ascii_only=self.common.ascii, environ=environment()
            )
        return self._looks[which]


def explained(error: BaseException, verb: str) -> PlayledgerError:
    """Returns any exception as an error that says what happened and what to do."""
    if isinstance(error, PlayledgerError):
        return error
    if getattr(error, "exit_code", None) == USAGE and hasattr(error, "format_message"):
        return _usage(str(error.format_message()), verb)
    if isinstance(error, OSError) and error.filename is not None:
        return Refused(
            f"{error.filename}: {(error.strerror or str(error)).lower()}",
            code="FILE_UNUSABLE",
            hint="check the path and its permissions",
        )
    return PlayledgerError(
        f"internal error in {verb or 'playledger'}: {type(error).__name__}: {error}",
        hint="what is recorded is safe; please report it with what --traceback shows",
    )


def exit_code(error: PlayledgerError) -> int:
    """Returns the exit code of an error (UX section 4)."""
    match error:
        case Refused() | LogMissing():
            return USAGE
        case RunFailed():
            return FAILED
        case RunCancelled():
            return CANCELLED
        case NotFound():
            return NOT_FOUND
        case Conflict():
            return CONFLICT
        case _:
            return UNAVAILABLE


def envelope(error: PlayledgerError, phase: str) -> dict[str, Any]:
    """Returns the one envelope that every error has in JSON; absent is null, never missing."""
    details = {key: value for key, value in error.details.items() if key != "runId"}
    return {
        "error": {
            "code": error.code,
            "message": error.message,
            "phase": phase,
            "runId": error.details.get("runId"),
            "retriable": error.retriable,
            "hint": error.hint or None,
            "details": details,
        }
    }


def shell_word(text: str) -> str:
    """Returns a word as a shell takes it."""
    import shlex

    return shlex.quote(text)


def joined(words: Iterable[str]) -> str:
    """Returns words with commas, or `none`."""
    return ", ".join(words) or "none"


def _usage(message: str, verb: str) -> Refused:
    """Turns what the parser says into our two lines."""
    text, _, guess = message.strip().partition(". Did you mean ")
    text = text.rstrip(".").replace("'", '"')
    hint = f"playledger {verb} --help".replace("  ", " ")
    if guess:
        hint = f"did you mean {guess.rstrip('?').replace(chr(39), chr(34))}? all: playledger --help"
    elif text.startswith("No such command"):
        hint = "all: playledger --help"
    return Refused(text[:1].lower() + text[1:], code="USAGE", hint=hint)
