"""The whole check of a log in one reading: bytes, read models, choices (CONTRACTS A.13).

Each leaf is decoded once, checked, folded, and its choices made again.  It needs no engine, no
vault and no clock, changes nothing, and holds the states of the runs that are alive.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from msgspec import Struct

from handlers.rechoose import Divergence, Rechooser, corrupt
from ledger.checker import Checker, Columns, Finding
from ledger.codec import Recorded
from ledger.database import reading
from ledger.errors import CorruptStream, LogDamaged
from ledger.events import Event
from ledger.export import is_database, pages, read_export
from ledger.fsck import COLUMNS, Ids, guards, head_findings, starts_the_log, versions
from ledger.transaction import read_head
from projections.tables import READ_MODELS
from projections.verify import Difference, Refold, quiet_gc

KEPT_MAX: Final = 1_000
"""How many of each kind are kept; all are counted."""

Progress = Callable[[int, int], None]


class Verdict(Struct, frozen=True):
    """What a verification found; a file has no head and no read models to compare with."""

    events: int
    first_position: int
    choices: int
    benign: int
    changed: int
    skipped: int
    runs: int
    root: str | None
    read_models: int | None
    log_wrong: int
    refold_wrong: int
    findings: tuple[Finding, ...]
    differences: tuple[Difference, ...]
    divergences: tuple[Divergence, ...]
    elapsed_ms: int = 0

    @property
    def ok(self) -> bool:
        """Says whether nothing was found."""
        return not (self.log_wrong or self.refold_wrong or self.changed)

    @property
    def same(self) -> int:
        """How many events today's code would give as they are."""
        return max(0, self.events - self.changed - self.benign - self.skipped)


class _Found(Struct):
    """What has been found so far, kept up to a limit and counted beyond it."""

    findings: list[Finding] = []
    differences: list[Difference] = []
    divergences: list[Divergence] = []
    log_wrong: int = 0
    refold_wrong: int = 0
    changed: int = 0
    skipped: int = 0
    runs: int = 0

    def note(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.log_wrong += 1
            if len(self.findings) < KEPT_MAX:
                self.findings.append(finding)

    def differ(self, differences: Iterable[Difference]) -> None:
        for difference in differences:
            self.refold_wrong += 1
            if len(self.differences) < KEPT_MAX:
                self.differences.append(difference)

    def diverge(self, divergences: Iterable[Divergence]) -> None:
        for divergence in divergences:
            self.changed += 1
            if len(self.divergences) < KEPT_MAX:
                self.divergences.append(divergence)


def verify(path: Path, progress: Progress | None = None) -> Verdict:
    """Checks a database or an exported file; raises LogMissing or LogLocked if it cannot."""
    found = _Found()
    database = is_database(path)
    refold, rechooser = Refold(keep_rows=database), Rechooser()
    read_models = len(READ_MODELS) if database else None
    try:
        with quiet_gc():
            if database:
                checker, first = _database(path, found, refold, rechooser, progress)
            else:
                checker, first = _file(path, found, refold, rechooser, progress)
        found.diverge(rechooser.end())
    finally:
        refold.close()
    return Verdict(
        events=checker.count,
        first_position=first,
        choices=rechooser.choices,
        benign=rechooser.moved,
        changed=found.changed,
        skipped=found.skipped,
        runs=found.runs,
        root=checker.range.root().hex() if checker.range.size else None,
        read_models=read_models,
        log_wrong=found.log_wrong,
        refold_wrong=found.refold_wrong,
        findings=tuple(found.findings),
        differences=tuple(found.differences),
        divergences=tuple(found.divergences),
    )


def _database(
    path: Path,
    found: _Found,
    refold: Refold,
    rechooser: Rechooser,
    progress: Progress | None,
) -> tuple[Checker, int]:
    with reading(path) as connection:
        head = read_head(connection)
        checker, columns = Checker(head.log_id), Columns(connection)
        try:
            found.note(guards(connection))

            def read(upto: int) -> None:
                for page in pages(connection, checker.position, upto, COLUMNS):
                    for row in page:
                        recorded = checker.check(row[5], row[0])
                        if recorded is None:
                            found.skipped += 1
                            continue
                        finding = columns.compare(row, recorded)
                        if finding is not None:
                            checker.findings.append(finding)
                        _take(recorded, found, refold, rechooser)
                    if checker.findings:
                        found.note(checker.findings)
                        checker.findings.clear()
                    if progress is not None:
                        progress(checker.position, upto)

            read(head.position)
            connection.execute("begin")  # one snapshot: the end of the log and the rows it led to
            head = read_head(connection)
            read(head.position)
            found.note(head_findings(checker, head))
            found.note(versions(connection, head.position))
            found.differ(refold.differences(connection))
            connection.execute("commit")
        except sqlite3.DatabaseError as error:
            if not str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_CORRUPT"):
                raise
            found.note([Finding("pages", str(error), checker.position + 1)])
        return checker, 1


def _file(
    path: Path,
    found: _Found,
    refold: Refold,
    rechooser: Rechooser,
    progress: Progress | None,
) -> tuple[Checker, int]:
    checker: Checker | None = None
    first = 0
    ids = Ids()
    try:
        for leaf in read_export(path):
            if checker is None:
                checker = Checker(whole=starts_the_log(leaf))
            recorded = checker.check(leaf)
            if recorded is None:
                found.skipped += 1
            else:
                finding = ids.take(recorded)
                if finding is not None:
                    checker.findings.append(finding)
                _take(recorded, found, refold, rechooser)
            if checker.findings:
                found.note(checker.findings)
                checker.findings.clear()
            first = first or checker.position
            if progress is not None and not checker.count % 2_000:
                progress(checker.count, 0)
    except LogDamaged as error:
        found.note([Finding("line", error.message.removeprefix(f"{path} is damaged: "))])
    found.note(ids.repeated(path))
    return checker or Checker(), first


def _take(recorded: Recorded[Event], found: _Found, refold: Refold, rechooser: Rechooser) -> None:
    try:
        before, after = refold.take(recorded)
    except CorruptStream as error:
        found.diverge(rechooser.end())
        found.diverge([corrupt(recorded, error)])
        return
    if after is None and recorded.subject.startswith("run/"):
        found.skipped += 1  # its stream stopped at the event that was refused
        return
    if before is None:
        found.runs += after is not None
    divergences = rechooser.take(recorded, before, after)
    if divergences:
        found.diverge(divergences)
