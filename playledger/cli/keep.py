"""replay, export, projections and db: thin faces over what reads and checks the log."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

from ledger.checker import Finding
from ledger.database import check_file, database_path, reading
from ledger.errors import Refused, RunNotFound
from ledger.export import export, write_export
from ledger.fsck import fsck
from ledger.log import prepare, system_clock
from ledger.transaction import read_head
from playledger.cli.console import FAILED, Console, PipeClosed, shell_word
from playledger.cli.missing import not_found
from playledger.render import visible
from playledger.wiring import DEFAULT_SCOPE, SCHEMA

FINDINGS_SHOWN: Final = 20


def replay_tape(console: Console, arguments: Sequence[str]) -> int:
    """Hands over to `replay.py`, which is a program of its own."""
    import replay

    given = list(arguments)
    if console.json:
        given.append("--json")
    if console.common.db is not None:
        given += ["--db", console.common.db]
    elif "--db" not in given:
        os.environ["PLAYLEDGER_DB"] = str(console.db)  # it knows no settings files
    return replay.main(given, prog="playledger replay")


def export_log(console: Console, run_id: str | None, output: str | None, *, family: bool) -> int:
    """Writes the stored bytes of the log, of a run, or of a run and all that it started."""
    path = console.db
    found = export(path, run=None if family else run_id, family=run_id if family else None)
    try:
        if output is None:
            count = _to_stdout(found)
        else:
            with _replacing(Path(output)) as file:
                count = write_export(found, file, _counting(console, "exported"))
    except RunNotFound:
        with reading(path) as connection:
            raise not_found(connection, path, str(run_id)) from None
    if output is not None:
        if console.json:
            console.answer_json({"events": count, "file": output})
        else:
            console.answer(f"{console.out.mark('completed')} {count} events in {visible(output)}")
        console.then(f"playledger replay verify {shell_word(output)}")
    return 0


def verify_projections(console: Console) -> int:
    """Compares every read model with a refold."""
    from projections.verify import verify

    told = verify(console.db, _steps(console, "folded"))
    lines = [difference.text for difference in told.differences] + list(told.corrupt)
    if console.json:
        console.answer_json(
            {
                "ok": not lines,
                "readModels": told.tables,
                "rows": told.rows,
                "differences": lines,
                "asOfPosition": told.position,
            }
        )
        return FAILED if lines else 0
    if not lines:
        mark = console.out.mark("completed")
        text = f"{told.tables} read models, {told.rows} rows, equal to a refold at"
        console.answer(f"{mark} {text} @{told.position}")
        return 0
    mark = console.out.mark("failed")
    console.answer(*(f"{mark} {visible(line)}" for line in lines))
    console.then(f"playledger projections rebuild{console.db_option}")
    return FAILED


def rebuild_projections(console: Console) -> int:
    """Derives every read model again and swaps it in."""
    from projections.rebuild import rebuild

    told = rebuild(console.db, _steps(console, "folded"))
    if console.json:
        console.answer_json(
            {
                "ok": not told.corrupt,
                "rows": told.rows,
                "differed": told.differed,
                "corrupt": list(told.corrupt),
                "asOfPosition": told.position,
            }
        )
    else:
        mark = console.out.mark("failed" if told.corrupt else "completed")
        text = f"{told.rows} rows rebuilt, {told.differed} of them differed"
        console.answer(f"{mark} {text}, as of @{told.position}")
        console.answer(*(f"{mark} {visible(line)}" for line in told.corrupt))
    console.then(f"playledger projections verify{console.db_option}")
    return FAILED if told.corrupt else 0


def create_db(console: Console, path: str | None) -> int:
    """Makes a log, or finds that there is one."""
    target = _path(console, path)
    there = target.exists() and target.stat().st_size > 0
    if not target.parent.is_dir():
        raise Refused(
            f"{target.parent} is no folder", code="FILE_UNUSABLE", hint=f"mkdir -p {target.parent}"
        )
    prepare(target, SCHEMA, scope=DEFAULT_SCOPE, clock=system_clock)
    with reading(target) as connection:
        head = read_head(connection)
    if console.json:
        console.answer_json({"path": str(target), "created": not there, "logId": head.log_id})
    else:
        what = f"is a log already, with {head.position} events" if there else "is a new, empty log"
        console.answer(f"{console.out.mark('completed')} {target} {what}")
    return 0


def migrate_db(console: Console, path: str | None) -> int:
    """Brings an older log to today's schema; one that has it is left as it is."""
    target = _path(console, path)
    before = _revision(target)
    prepare(target, SCHEMA, scope=DEFAULT_SCOPE, clock=system_clock)
    after = _revision(target)
    if console.json:
        console.answer_json({"path": str(target), "from": before, "to": after})
    else:
        what = (
            f"has schema {after} already" if before == after else f"went from {before} to {after}"
        )
        console.answer(f"{console.out.mark('completed')} {target} {what}")
    return 0


def fsck_db(console: Console, path: str | None) -> int:
    """Checks a database or an exported file from its bytes up."""
    target = _path(console, path)
    findings = fsck(target)
    shown = list(islice(findings, FINDINGS_SHOWN))
    more = sum(1 for _ in findings)
    count = _count_events(target)
    if console.json:
        console.answer_json(
            {
                "ok": not shown,
                "events": count,
                "findings": [
                    {"what": f.what, "message": f.message, "position": f.position} for f in shown
                ],
                "more": more,
            }
        )
    elif not shown:
        text = "dense, leaves and head agree; guards in place"
        console.answer(f"{console.out.mark('completed')} {target}: {count} events, {text}")
    else:
        for finding in shown:
            place = "" if finding.position is None else f"  @{finding.position}"
            console.answer(f"{console.out.mark('failed')} {visible(finding.message)}{place}")
        if more:
            console.say(f"{more} more")
    return FAILED if shown else 0


def backup_db(console: Console, paths: Sequence[str]) -> int:
    """Copies a log while it is written, opens the copy, and proves that it is a whole log (C022).

    One read transaction is one position of the log, whatever is appended meanwhile.  The copy has
    its name only after it was proved.
    """
    if len(paths) > 2:
        raise Refused(
            f"db backup takes [SOURCE] DEST, got {len(paths)} paths",
            code="USAGE",
            hint="playledger db backup demo.db copy.db",
        )
    source = console.db if len(paths) == 1 else database_path(paths[0])
    target = Path(paths[-1])
    if target.exists():
        raise Refused(f"{target} exists", code="FILE_EXISTS", hint="a backup overwrites nothing")
    check_file(source)
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    try:
        with reading(source) as connection:
            read_head(connection)
            connection.execute("pragma query_only=off")  # it writes another file, not this one
            connection.execute("vacuum main into ?", (str(part),))
        position, root = prove(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
        _sync_folder(target)
    finally:
        part.unlink(missing_ok=True)
    if console.json:
        console.answer_json(
            {"path": str(target), "events": position, "asOfPosition": position, "head": root}
        )
    else:
        text = f"{target}: {position} events, head @{position} {root[:8]}, opened and checked"
        console.answer(f"{console.out.mark('completed')} {text}")
    console.then(f"playledger replay verify {shell_word(str(target))}")
    return 0


def prove(path: Path) -> tuple[int, str]:
    """Returns position and head hash of a copy that is whole; raises LogDamaged for another.

    SQLite's own check proves nothing about a log (C022): the leaves must hash to the head.
    """
    finding: Finding | None = next(fsck(path), None)
    if finding is not None:
        raise finding.error(path)
    with reading(path) as connection:
        head = read_head(connection)
    return head.position, head.range[-32:].hex()


def _to_stdout(found: Iterator[bytes]) -> int:
    try:
        sys.stdout.flush()
        return write_export(found, sys.stdout.buffer)
    except BrokenPipeError:
        raise PipeClosed from None


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Gives a file that has its name only when it is whole."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _path(console: Console, path: str | None) -> Path:
    return console.db if path is None else database_path(path)


def _revision(path: Path) -> str:
    with reading(path) as connection:
        row = connection.execute(
            "select 1 from sqlite_master where name = 'alembic_version'"
        ).fetchone()
        if row is None:
            return "none"
        return str(connection.execute("select version_num from alembic_version").fetchone()[0])


def _count_events(path: Path) -> int:
    from ledger.export import is_database, read_export

    if not is_database(path):
        return sum(1 for _ in read_export(path))
    with reading(path) as connection:
        return int(connection.execute("select count(*) from events").fetchone()[0])


def _counting(console: Console, verb: str) -> Callable[[int], None] | None:
    if not console.err.terminal or console.json or console.common.quiet:
        return None

    def show(count: int) -> None:
        if count % 100_000 == 0:
            console.say(f"{count} events {verb}")

    return show


def _steps(console: Console, verb: str) -> Callable[[int, int], None] | None:
    """Shows how far a long fold is, on a terminal, on one line that is taken away at the end."""
    if not console.err.terminal or console.json or console.common.quiet:
        return None

    def show(done: int, of: int) -> None:
        text = f"{done} of {of} events {verb}"
        sys.stderr.write(f"\r{text}" if done < of else "\r" + " " * len(text) + "\r")
        sys.stderr.flush()

    return show
