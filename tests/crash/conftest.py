"""The processes that the crash tests kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest

import replay
from ledger.database import reading, stored_revision
from tests.crash.checks import check_acknowledged, check_ends, check_log
from tests.crash.driver import Job, files_of
from tests.crash.scenarios import MORE, SCENARIOS

KILLED = -9
PROCESSES = 2
ROOT = Path(__file__).resolve().parents[2]


class Crasher:
    """Runs jobs in processes of their own, two at a time."""

    def __init__(self) -> None:
        self._drivers: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._all = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.crash.driver"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(PROCESSES)
        ]
        for driver in self._all:
            self._drivers.put(driver)

    def run(self, job: Job) -> int:
        """Does a job, and returns the exit status of its process."""
        driver = self._drivers.get()
        try:
            assert driver.stdin is not None
            assert driver.stdout is not None
            driver.stdin.write(msgspec.json.encode(job) + b"\n")
            driver.stdin.flush()
            return int(driver.stdout.readline())
        finally:
            self._drivers.put(driver)

    def close(self) -> None:
        """Ends the processes."""
        for driver in self._all:
            driver.communicate()

    def crash(self, path: Path, scenario: str, *failpoints: str) -> None:
        """Kills a scenario at each failpoint in turn, carries it on to its end, and checks."""
        for failpoint in failpoints:
            status = self.run(Job(scenario, str(path), failpoint))
            assert status == KILLED, f"{failpoint} did not kill: {status} {errors(path)}"
            if is_log(path):
                check_acknowledged(check_log(path), files_of(path)["acks"])
        self.finish(path, scenario)

    def finish(self, path: Path, scenario: str) -> None:
        """Drives a scenario to its end with nothing armed, and checks what came of it."""
        status = self.run(Job(scenario, str(path)))
        assert status == 0, errors(path)
        events, beside = check_log(path), files_of(path)
        check_acknowledged(events, beside["acks"])
        check_ends(path, events, {**SCENARIOS, **MORE}[scenario].ends, beside["effects"])
        verdict = replay.verify(path)
        assert verdict.ok, verdict

    def passed(self, path: Path, scenario: str) -> dict[str, int]:
        """Runs a scenario unharmed; returns how often it passed each failpoint."""
        self.finish(path, scenario)
        hits: dict[str, int] = json.loads(files_of(path)["hits"].read_bytes())
        return hits

    def together(self, cells: list[tuple[Path, str, tuple[str, ...]]]) -> list[str]:
        """Crashes many logs, two at a time; returns what went wrong, one line each."""

        def one(cell: tuple[Path, str, tuple[str, ...]]) -> str:
            path, scenario, failpoints = cell
            try:
                self.crash(path, scenario, *failpoints)
            except Exception as error:  # noqa: BLE001 - every cell is tried, then all are told
                return f"{scenario} {failpoints}: {type(error).__name__} {error}"
            return ""

        with ThreadPoolExecutor(PROCESSES) as pool:
            return [line for line in pool.map(one, cells) if line]


def is_log(path: Path) -> bool:
    """Says whether a file has come so far that it is a log."""
    if not path.exists() or not path.stat().st_size:
        return False
    with reading(path) as connection:
        return stored_revision(connection) is not None


def errors(path: Path) -> str:
    """Returns what a process said of its failure."""
    said = files_of(path)["errors"]
    return said.read_text() if said.exists() else ""


@pytest.fixture(scope="session")
def crasher() -> Iterator[Crasher]:
    """The processes, started once."""
    started = Crasher()
    yield started
    started.close()


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    """Where a log may be made."""
    os.umask(0o022)
    return tmp_path / "crash.db"
