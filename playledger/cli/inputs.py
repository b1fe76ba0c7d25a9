"""What a command is given: JSON through the gate, files to stage, plays by reference."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from engines.plays import Play, Plays, find_play, plays_in
from handlers.submit import StagedFile
from ledger.canonical import Json
from ledger.errors import PlayledgerError, PlayNotFound, Refused, TooLarge
from ledger.gate import parse
from ledger.ids import quote
from ledger.vault import BLOB_BYTES_MAX

if TYPE_CHECKING:
    from playledger.settings import Settings

LAST: Final = -1


class Inputs(Struct, frozen=True):
    """The JSON of a request, if any was given, and the files that come with it."""

    value: Json = None
    given: bool = False
    files: tuple[StagedFile, ...] = ()


def read_inputs(arguments: Sequence[str], settings: Settings) -> Inputs:
    """Reads `--input`: one JSON at most, any number of files.

    Raises Refused, JsonInvalid or TooLarge before anything is opened.
    """
    value: Json = None
    given = False
    files: dict[str, StagedFile] = {}
    for argument in arguments:
        if argument.startswith("@") and not argument.endswith(".json"):
            file = _staged(Path(argument[1:]))
            if file.name in files:
                raise Refused(
                    f"--input: two files are named {quote(file.name)}",
                    code="FILE_NAME_TAKEN",
                    hint="rename one: a play asks for a file by its name",
                )
            files[file.name] = file
            continue
        if given:
            raise Refused(
                f"--input: a second JSON value, {quote(argument, 40)}",
                code="USAGE",
                hint="one JSON value, and any number of @FILE beside it",
            )
        value, given = read_json(argument, "--input", settings), True
    return Inputs(value, given, tuple(files.values()))


def read_json(argument: str, what: str, settings: Settings) -> Json:
    """Returns the JSON of an argument or of an `@file.json`, through the gate."""
    if argument.startswith("@"):
        data = _content(Path(argument[1:]), what)
    else:
        data = argument.encode("utf-8", "surrogateescape")
    limit = settings.policy.max_bytes
    if len(data) > 4 * limit + 1024:  # white space may go; what is left is measured at the submit
        raise TooLarge(
            f"{what[2:]} is {len(data)} bytes, the limit is {limit}",
            code="PARAMS_TOO_LARGE",
            hint="stage it: --input @file reaches the play as run.file()",
            bytes=len(data),
            limit=limit,
        )
    return parse(data, what=what)


def load_play(reference: str) -> tuple[Play, Plays]:
    """Returns the play of a reference, and with it every marked play of its file.

    Raises PlayNotFound, or Refused with what the file raised.
    """
    where = reference.rpartition(":")[0] or reference
    with loading(where):
        item = find_play(reference)
        plays = Plays([item])
        with contextlib.suppress(PlayNotFound):
            for marked in plays_in(where):
                plays.add(marked)
    return item, plays


def load_plays(references: Sequence[str]) -> Plays:
    """Returns the marked plays of files and modules."""
    plays = Plays()
    for reference in references:
        with loading(reference):
            for item in plays_in(reference):
                plays.add(item)
    return plays


@contextlib.contextmanager
def loading(where: str):  # type: ignore[no-untyped-def]
    """Says in one line what a file of plays raised; what it prints goes to stderr."""
    here = str(Path.cwd())
    if not where.endswith(".py") and here not in sys.path:
        sys.path.append(here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (PlayledgerError, KeyboardInterrupt):
        raise
    except BaseException as error:
        line = _line_in(error, where)
        place = where if line is None else f"{where}, line {line}"
        raise Refused(
            f"{place}: {type(error).__name__}: {error}",
            code="PLAY_NOT_LOADED",
            hint=f"python {where} shows the same; --traceback shows all of it",
        ) from error


def _line_in(error: BaseException, where: str) -> int | None:
    """Finds the last line of the file that the error came through."""
    if isinstance(error, SyntaxError):
        return error.lineno
    line: int | None = None
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == str(Path(where).resolve()):
            line = step.tb_lineno
        step = step.tb_next
    return line


def _staged(path: Path) -> StagedFile:
    return StagedFile(name=path.name, content=_content(path, "--input"))


def _content(path: Path, what: str) -> bytes:
    try:
        size = path.stat().st_size
        if size > BLOB_BYTES_MAX:
            raise TooLarge(
                f"{what}: {path} is {size} bytes, the limit is {BLOB_BYTES_MAX}",
                code="BLOB_TOO_LARGE",
                hint="give the play its path or URL instead",
                bytes=size,
                limit=BLOB_BYTES_MAX,
            )
        return path.read_bytes()
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise Refused(
            f"{what}: {path} {reason}" + ("" if "not exist" in reason else f": {error.strerror}"),
            code="FILE_UNUSABLE",
            hint=f"check the path; JSON itself needs no @: {what} '{{\"a\": 1}}'",
        ) from None
