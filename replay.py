"""Reading the tape: what happened, as it stood at any position, and whether it would again.

    import replay
    for recorded in replay.read("plays.db"):            # plain iteration, no event loop
        print(recorded.position, recorded.type)
    replay.state("plays.db", "weather-demo", at="@54")
    replay.verify("plays.db").ok

Works on a database or on an exported file, without an engine: nothing here can cause anything.  It
is a program too, `python replay.py VERB`, the same as `playledger replay VERB`.  Only light modules
are imported before a verb is known, so that --help is quick.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from pathlib import Path

    from handlers.verify import Verdict
    from ledger.codec import Recorded
    from ledger.events import Event
    from ledger.tape import Tape
    from projections.history import Change, Line, Snapshot
    from projections.state import RunState

Progress = Callable[[int, int], None]
VALUES: Final = ("--db", "--at", "--from", "--to")
FLAGS: Final = ("--json", "--all", "--quiet", "--ascii", "--traceback", "--help")
_BAR_AFTER_S: Final = 0.5
_SUFFIXES: Final = (".db", ".jsonl", ".sqlite", ".sqlite3")
VERBS: Final = {
    "show": ("[LOG] [RUN]", "Show a run's timeline with causes and waits, or the whole log's."),
    "state": ("[LOG] RUN [--at N]", "Show a run as it was at any position."),
    "diff": ("[LOG] RUN --from A [--to B]", "Show what changed between two positions."),
    "verify": ("[LOG]", "Check the bytes, refold the read models, make every choice again."),
}
HELP: Final = """\
Usage: {prog} VERB [LOG] [RUN] [OPTIONS]

  Read the tape of a database or of an exported file; nothing here causes anything.

{verbs}

  LOG is a file; left out, --db or PLAYLEDGER_DB names it.  A place (N, A, B) is a
  position 58 or @58, a run's version v12, or a time 2026-12-01T08:00:00Z.

  --all       Every event, and every difference, one by one.
  --json      JSON alone on stdout; `show` prints the stored bytes, one event a line.
Everywhere: --db PATH  --json  --quiet  --ascii  --help
Exit: 0 the same, 1 a difference found, 2 usage, 4 no such run, 6 log cannot be read
"""


def read(path: str | Path, *, run: str | None = None, after: int = 0) -> Iterator[Recorded[Event]]:
    """Yields the events of a log, or of one run, in order; raises LogMissing, RunNotFound."""
    from ledger.codec import decode
    from ledger.tape import open_tape

    with open_tape(path) as tape:
        for leaf in tape.leaves(after) if run is None else tape.run_leaves(run):
            recorded = decode(leaf)
            if recorded.position > after:
                yield recorded


def states(path: str | Path, *, upto: int | None = None) -> dict[str, RunState]:
    """Returns the state of every run as the log leaves it, by run id."""
    from ledger.codec import decode
    from ledger.tape import open_tape
    from projections.run import evolve
    from projections.verify import quiet_gc

    found: dict[str, RunState] = {}
    get = found.get
    with open_tape(path) as tape, quiet_gc():
        for leaf in tape.leaves(0, upto):
            recorded = decode(leaf)
            stream = recorded.subject
            if stream != "system":
                found[stream] = evolve(get(stream), recorded)
    return {stream.removeprefix("run/"): state for stream, state in found.items()}


def show(path: str | Path, run: str, *, every: bool = False) -> list[Line]:
    """Returns a run's timeline, its values resolved where the vault has them."""
    from ledger.tape import open_tape
    from projections.history import timeline

    with open_tape(path) as tape:
        return list(
            timeline(lambda: tape.run(run), tape.positions_of, tape.reveal, group=not every)
        )


def state(path: str | Path, run: str, at: str | int | None = None) -> Snapshot:
    """Returns a run as it was at a place (`58`, `@58`, `v12`, a time), else as it is."""
    from ledger.tape import open_tape, parse_place
    from projections.history import snapshot

    with open_tape(path) as tape:
        upto = tape.head() if at is None else parse_place(str(at), tape, run)
        found = snapshot(tape.run(run, upto), tape.positions_of, upto)
        if found is None:
            raise _before_the_start(tape, run, upto)
        return found


def diff(
    path: str | Path, run: str, start: str | int, end: str | int | None = None
) -> tuple[int, int, list[Change]]:
    """Returns two positions, and what changed of a run behind the one up to the other."""
    from ledger.errors import Refused
    from ledger.tape import open_tape, parse_place
    from projections.history import changes

    with open_tape(path) as tape:
        first = parse_place(str(start), tape, run)
        last = tape.head() if end is None else parse_place(str(end), tape, run)
        if last < first:
            raise Refused(
                f"--from @{first} is behind --to @{last}", code="POSITION_INVALID", hint="swap them"
            )
        return first, last, changes(tape.run(run, last), first, tape.reveal)


def verify(path: str | Path, progress: Progress | None = None) -> Verdict:
    """Checks bytes, read models and choices; raises LogMissing or LogLocked, finds all else."""
    import msgspec

    from handlers.verify import verify as verify_log
    from ledger.database import database_path

    begun = time.monotonic()
    verdict = verify_log(database_path(path), progress)
    elapsed_ms = round((time.monotonic() - begun) * 1000)
    return msgspec.structs.replace(verdict, elapsed_ms=elapsed_ms)


# --- the program ----------------------------------------------------------------------------------


class Asked:
    """One command line: the verb, its words, its options."""

    def __init__(self, verb: str, words: list[str], options: dict[str, str]) -> None:
        self.verb = verb
        self.words = words
        self.options = options

    def __contains__(self, option: str) -> bool:
        return option in self.options

    def log_and_run(self) -> tuple[str, str | None]:
        """Tells which word names the log and which the run; raises Refused if both could be."""
        from ledger.errors import Refused

        words = list(self.words)
        log = self.options.get("--db")
        if words and _names_a_log(words[0]):
            if log is not None:
                raise Refused(
                    f"two logs are named: {words[0]} and --db {log}",
                    code="USAGE",
                    hint="give one; to read a run of that name: ./ is no part of a run id",
                )
            log = words.pop(0)
        if len(words) > 1:
            raise Refused(
                f"{self.verb} takes one run, got {len(words)}: {' '.join(words)}",
                code="USAGE",
                hint=f"replay {self.verb} {VERBS[self.verb][0]}; is the log's path right?",
            )
        log = log or os.environ.get("PLAYLEDGER_DB") or "playledger.db"
        return log, words[0] if words else None

    def run(self) -> tuple[str, str]:
        """Returns log and run; raises Refused if no run is named."""
        from ledger.errors import Refused

        log, run = self.log_and_run()
        if run is None:
            raise Refused(
                f"{self.verb} needs a run",
                code="USAGE",
                hint=f"replay {self.verb} {VERBS[self.verb][0]}; all: playledger runs --db {log}",
            )
        return log, run


def main(argv: Sequence[str] | None = None, *, prog: str = "replay.py") -> int:
    """Runs one verb and returns its exit code; never raises, never shows a traceback unasked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        asked = _parse(arguments)
        if asked is None or "--help" in asked:
            print(_help(prog), end="")
            return 0
        code = _run(asked)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the last place where one can be shown
        if "--traceback" in arguments:
            raise
        return _fail(error, arguments)
    return code


def _run(asked: Asked) -> int:
    match asked.verb:
        case "show":
            return _show(asked)
        case "state":
            return _state(asked)
        case "diff":
            return _diff(asked)
        case _:
            return _verify(asked)


def _show(asked: Asked) -> int:
    from ledger.tape import open_tape
    from projections.history import log_lines, timeline
    from projections.tell import timeline_lines

    log, run = asked.log_and_run()
    with open_tape(log) as tape:
        if "--json" in asked:
            leaves = tape.leaves() if run is None else tape.run_leaves(run)
            _out(map(_stored, leaves))
            return 0
        if run is None:
            lines = log_lines(tape.events(), tape.positions_of, tape.reveal)
        else:
            every = "--all" in asked
            lines = timeline(lambda: tape.run(run), tape.positions_of, tape.reveal, group=not every)
        _out(timeline_lines(lines, tape.head(), _look(sys.stdout)))
    return 0


def _state(asked: Asked) -> int:
    from ledger.tape import open_tape
    from projections.tell import snapshot_json, snapshot_lines

    log, run = asked.run()
    found = state(log, run, asked.options.get("--at"))
    with open_tape(log) as tape:
        if "--json" in asked:
            _out([_json(snapshot_json(found, tape.reveal))])
        else:
            _out(snapshot_lines(found, tape.reveal, _look(sys.stdout)))
    return 0


def _diff(asked: Asked) -> int:
    from ledger.errors import Refused
    from projections.tell import change_lines, changes_json

    log, run = asked.run()
    start = asked.options.get("--from")
    if start is None:
        raise Refused("diff needs --from", code="USAGE", hint="--from @1, and --to if not the end")
    first, last, changes = diff(log, run, start, asked.options.get("--to"))
    if "--json" in asked:
        _out([_json(changes_json(run, first, last, changes))])
    else:
        _out(change_lines(changes, _look(sys.stdout)))
    return 0


def _verify(asked: Asked) -> int:
    from handlers.verdict import verdict_json, verdict_lines
    from ledger.errors import Refused

    log, run = asked.log_and_run()
    if run is not None:
        raise Refused(
            f"verify takes a log, and {run} is none",
            code="USAGE",
            hint="a run alone: playledger export RUN -o FILE, then verify FILE",
        )
    with _progress(asked) as progress:
        verdict = verify(log, progress)
    every = "--all" in asked
    if "--json" in asked:
        _out([_json(verdict_json(verdict, every=every))])
    else:
        look = _look(sys.stdout)
        plain = "--ascii" in asked
        _out(verdict_lines(verdict, log, every=every, look=look, ascii_only=plain))
    return 0 if verdict.ok else 1


def _parse(arguments: list[str]) -> Asked | None:
    """Returns what was asked, or None for help; raises Refused for what there is not."""
    from ledger.errors import Refused

    words: list[str] = []
    options: dict[str, str] = {}
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if argument == "--":
            words += left
        elif argument in ("-h", *FLAGS):
            options["--help" if argument == "-h" else argument] = ""
        elif name in VALUES:
            options[name] = value if equals else next(left, "")
            if not options[name]:
                raise Refused(f"{name} needs a value", code="USAGE", hint=f"{name} VALUE")
        elif argument.startswith("-") and len(argument) > 1:
            raise Refused(f"no option {name}", code="USAGE", hint=_nearest(name, [*VALUES, *FLAGS]))
        else:
            words.append(argument)
    if not words:
        return None
    verb, *rest = words
    if verb not in VERBS:
        raise Refused(f"no verb {verb}", code="USAGE", hint=_nearest(verb, list(VERBS)))
    return Asked(verb, rest, options)


def _nearest(word: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else f"there are: {' '.join(known)}"


def _names_a_log(word: str) -> bool:
    return "://" in word or word.endswith(_SUFFIXES) or os.path.isfile(word)  # noqa: PTH113


def _before_the_start(tape: Tape, run: str, upto: int) -> Exception:
    from ledger.errors import Refused

    first = next(tape.run(run), None)
    at = 0 if first is None else first.position
    return Refused(
        f"{run} begins @{at}, and @{upto} is before it", code="POSITION_INVALID", hint=f"--at @{at}"
    )


def _out(lines: Iterator[str] | Sequence[str]) -> None:
    write = sys.stdout.write
    for line in lines:
        write(line + "\n")


def _json(value: Any) -> str:
    import orjson

    from projections.describe import safe_json

    return safe_json(orjson.dumps(value).decode())


def _stored(leaf: bytes) -> str:
    """Returns the stored bytes; on a terminal, with what it would obey escaped."""
    from projections.describe import safe_json

    return safe_json(leaf.decode()) if sys.stdout.isatty() else leaf.decode()


def _look(stream: TextIO) -> Any:
    from projections.tell import Look

    environ = os.environ
    colour = stream.isatty() and environ.get("TERM") != "dumb"
    colour = not environ.get("NO_COLOR") and (colour or bool(environ.get("FORCE_COLOR")))
    return Look(columns=stream.isatty(), colour=colour)


@contextlib.contextmanager
def _progress(asked: Asked) -> Iterator[Progress | None]:
    """Shows a bar on a terminal's stderr while a long log is read."""
    if "--quiet" in asked or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("verify", total=None)
    begun = time.monotonic()

    def show(done: int, total: int) -> None:
        if time.monotonic() - begun > _BAR_AFTER_S:
            bar.start()
        bar.update(task, completed=done, total=total or None)

    try:
        yield show
    finally:
        bar.stop()


def _fail(error: Exception, arguments: list[str]) -> int:
    """Shows an error in two lines, or as one object with --json, and returns its exit code."""
    from projections.tell import error_json, error_lines, exit_code

    if "--json" in arguments:
        print(_json(error_json(error)), file=sys.stderr)
    else:
        print("\n".join(error_lines(error)), file=sys.stderr)
    return exit_code(error)


def _help(prog: str) -> str:
    verbs = "\n".join(f"  {verb:7} {usage:27} {text}" for verb, (usage, text) in VERBS.items())
    return HELP.format(prog=prog, verbs=verbs)


if __name__ == "__main__":
    sys.exit(main())
