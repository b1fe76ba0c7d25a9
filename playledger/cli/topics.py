"""`playledger help TOPIC` and `playledger config`."""

from __future__ import annotations

import difflib
from typing import Final

from ledger.errors import Refused
from ledger.ids import quote
from playledger.cli.console import Console
from playledger.render import columns, visible
from playledger.settings import Setting, show

EXIT_CODES: Final = """\
Exit codes of every command:
  0    done; for `run`, the run completed
  1    the run failed, or a check found a difference
  2    what you typed cannot be used: an option, JSON, a file, a play, a path
  3    the run was cancelled
  4    the log has no such run
  5    conflict: the run is in another state, or exists with another request
  6    the log cannot be used now: locked, full, damaged, of a newer release
  130  Ctrl-C; what is recorded is kept, and the same command carries on
  141  whoever read the output went away
`run`, and `status` and `tail` with --exit-status, exit with the run's end; else
looking at a failed run is 0."""

JSON: Final = """\
With --json stdout is JSON alone, even while progress shows on stderr.
  a command that lists      one object a line (runs, tail, config)
  a command that answers    one object (status, why, signal, db fsck)
  tail, export              the stored bytes, one event a line
  run                       the run's status at its end, as status prints it
  an error                  {"error": {code, message, phase, runId, retriable,
                            hint, details}}, on stderr
Names are camelCase.  ...At is ms since 1970 UTC, ...Ms a length in ms.  What is
absent is null, never missing.
Piped without --json: fields between tabs, no colour, nothing cut, RFC 3339."""

ENVIRONMENT: Final = """\
NO_COLOR      no colour         FORCE_COLOR   colour, in a pipe too
PLAYLEDGER_   and a setting's name in upper case, `.` as `__`:"""

TOPICS: Final = ("environment", "exit-codes", "json")


def show_topic(console: Console, topic: str) -> int:
    """Prints a page of help that belongs to no one command."""
    match topic:
        case "exit-codes":
            console.answer(EXIT_CODES)
        case "json":
            console.answer(JSON)
        case "environment":
            rows = [
                ("  PLAYLEDGER_" + s.key.replace(".", "__").upper(), show(s.default))
                for s in console.settings().rows()
            ]
            console.answer(ENVIRONMENT, *columns(rows, console.out))
        case _:
            near = difflib.get_close_matches(topic, TOPICS, 1)
            raise Refused(
                f"there is no help on {quote(topic)}",
                code="USAGE",
                hint=(f"did you mean {near[0]}? " if near else "")
                + f"playledger help {' | '.join(TOPICS)}",
            )
    return 0


def show_config(console: Console, *, changed: bool) -> int:
    """Prints each setting, its value, and where that came from."""
    found = console.settings().rows()
    shown = [row for row in found if row.changed or not changed]
    if console.json:
        for row in shown:
            console.answer_json(
                {
                    "key": row.key,
                    "value": None if row.value is None else show(row.value),
                    "default": None if row.default is None else show(row.default),
                    "from": row.origin or None,
                }
            )
        return 0
    cells = [(row.key, _value(row), visible(row.origin) or "default") for row in shown]
    console.answer(*columns(cells, console.out))
    rest = len(found) - len(shown)
    more = f"{rest} more at their defaults: --all. " if rest else ""
    console.say(f"{more}Secrets are never shown, only where from.")
    return 0


def _value(row: Setting) -> str:
    text = visible(show(row.value))
    if row.key in ("token_file", "tokens_file") and row.value is not None:
        return f"{text}, {_readable(str(row.value))}"
    if row.changed and row.default is not None and row.value != row.default and row.key != "db":
        return f"{text} (default {show(row.default)})"
    return text


def _readable(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - only whether it opens
            file.read(1)
    except OSError as error:
        return (error.strerror or "unreadable").lower()
    return "readable"
