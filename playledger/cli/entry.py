"""Where the command line begins and ends: the common options, and what becomes of errors.

Only light modules are imported here, because `--help` answers within 0.2 s (NUMBERS T8).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from playledger.cli.console import Common, Console, PipeClosed
from playledger.cli.verbs import top_help

FLAGS: Final = {"--json": "json", "--quiet": "quiet", "-q": "quiet", "--ascii": "ascii",
                "--traceback": "traceback"}  # fmt: skip
VALUES: Final = {"--db": "db", "--config": "config"}
PASSES_ON: Final = "replay"  # its arguments are its own


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (`playledger help exit-codes`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    console = Console(Common(), "")
    try:
        common, rest = split(arguments)
        console = Console(common, next((a for a in rest if not a.startswith("-")), ""))
        if rest in ([], ["--help"]):
            console.answer(top_help())
            code = 0
        else:
            code = _invoke(console, rest)
        sys.stdout.flush()
    except (PipeClosed, BrokenPipeError):
        _silence()
        return 141  # as a shell reports a reader that went away
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the last place where one can be shown
        return console.fail(error)
    return code


def split(arguments: Sequence[str]) -> tuple[Common, list[str]]:
    """Takes the options that every command has out of the arguments, wherever they stand."""
    found: dict[str, Any] = {}
    rest: list[str] = []
    left = iter(arguments)
    for argument in left:
        if argument == "--" or (rest and rest[0] == PASSES_ON):
            rest += [argument, *left]
            break
        name, equals, value = argument.partition("=")
        if argument in FLAGS:
            found[FLAGS[argument]] = True
        elif name in VALUES:
            if not equals:
                value = next(left, "")
            if not value or (not equals and value.startswith("--")):
                from ledger.errors import Refused

                raise Refused(
                    f"{name} needs a value", code="USAGE", hint=f"{name} {name[2:].upper()}"
                )
            found[VALUES[name]] = value
        else:
            rest.append(argument)
    return Common(**found), rest


def _invoke(console: Console, arguments: list[str]) -> int:
    import typer

    from playledger.cli.app import app

    command = typer.main.get_command(app)
    answer = command.main(arguments, prog_name="playledger", standalone_mode=False, obj=console)
    return answer if isinstance(answer, int) else 0


def _silence() -> None:
    """Lets the interpreter's last flush go nowhere, instead of complaining."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                continue
            os.dup2(nowhere, stream.fileno())
