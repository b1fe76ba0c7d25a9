"""Measures what is asked for, prints a table and writes `bench.jsonl`.

python -m benchmarks [IDS...] [--quick] [--check] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import reading, surviving, writing
from benchmarks.harness import ROOT, Figure, Setting, Unmeasured, folder_for_bench, shown

MEASURED: tuple[tuple[str, Callable[[Setting], list[Figure]]], ...] = (
    ("T1", writing.appends),
    ("T2", writing.one_caller),
    ("T3", writing.against_eventsourcing),
    ("T4", writing.families),
    ("T5", reading.replays),
    ("T6", reading.verifications),
    ("T7", reading.statuses),
    ("T8", reading.starts),
    ("T20", surviving.recoveries),
    ("T21", surviving.crossings),
    ("T26", surviving.shares),
)
COLUMNS = ("id", "what", "value", "against", "ratio", "target", "")


def main() -> int:
    """Runs the program; exit 0 unless `--check` was given and a target was missed."""
    asked = _arguments()
    setting = Setting(
        scale=0.04 if asked.quick else 1.0,
        rounds=asked.rounds or (2 if asked.quick else 5),
        folder=folder_for_bench(),
    )
    print(_machine(setting), file=sys.stderr)
    figures: list[Figure] = []
    try:
        for name, measure in MEASURED:
            if asked.ids and name not in asked.ids:
                continue
            begun = time.monotonic()
            print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
            figures += _measured(name, measure, setting)
            print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    finally:
        shutil.rmtree(setting.folder, ignore_errors=True)
    asked.out.write_bytes(b"".join(figure.line() + b"\n" for figure in figures))
    _print_table(figures)
    missed = [figure for figure in figures if figure.passed is False]
    held = sum(figure.passed is True for figure in figures)
    print(f"\n{held} targets held, {len(missed)} missed; {asked.out}")
    if asked.quick:
        print("--quick: too little work for the figures to mean much")
    return 1 if missed and asked.check else 0


def _measured(
    name: str, measure: Callable[[Setting], list[Figure]], setting: Setting
) -> list[Figure]:
    """Returns the figures of a target; one that could not be prepared is missed, and says so."""
    try:
        return measure(setting)
    except (Unmeasured, AssertionError, OSError) as error:
        print(f"not measured: {error}", end=" ", file=sys.stderr)
        return [
            Figure(
                id=name,
                what=(measure.__doc__ or "").removeprefix(f"{name}: "),
                value=None,
                unit="",
                passed=False,
                note=str(error),
            )
        ]


def _arguments() -> argparse.Namespace:
    names = [name for name, _ in MEASURED]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help=f"of {', '.join(names)}; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="little work: does it all run?")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--rounds", type=int, help="how often each side has its turn")
    parser.add_argument("--out", type=Path, default=ROOT / "bench.jsonl", help="where the lines go")
    asked = parser.parse_args()
    for name in asked.ids:
        if name not in names:
            parser.error(f"{name} is not one of {', '.join(names)}")
    return asked


def _machine(setting: Setting) -> str:
    return (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}, load {os.getloadavg()[0]:.1f}, {setting.rounds} rounds, "
        f"files in {setting.folder.parent}"
    )


def _print_table(figures: list[Figure]) -> None:
    rows = [COLUMNS]
    for figure in figures:
        value = "not measured" if figure.value is None else f"{shown(figure.value)} {figure.unit}"
        verdict = {True: "ok", False: "MISSED", None: ""}[figure.passed]
        rows.append(
            (
                figure.id,
                figure.what,
                value,
                figure.against,
                shown(figure.ratio),
                figure.target,
                verdict,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    sys.exit(main())
