"""Calling the command line: in this process, in a pipe, and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec import Struct

from playledger.cli import main

ROOT = Path(__file__).resolve().parents[1]
PLAYS = ROOT / "tests" / "cli_plays.py"
WEATHER = ROOT / "examples" / "weather.py"
CSV = ROOT / "examples" / "data" / "seattle-weather.csv"
CLI = (sys.executable, "-c", "import sys; from playledger.cli import main; sys.exit(main())")


class Said(Struct, frozen=True):
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> list[str]:
        """The lines of an error, without their labels; empty if there is none."""
        lines = self.err.splitlines()
        return [
            line.removeprefix("error: ").removeprefix("hint: ")
            for line in lines
            if line.startswith(("error: ", "hint: "))
        ]


def environment(**more: str) -> dict[str, str]:
    """Returns this environment without what changes a command's looks or settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PLAYLEDGER_") and name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    }
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def start(*arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Starts a command between pipes, in a process of its own."""
    return subprocess.Popen(
        [*CLI, *arguments],
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def call(*arguments: str, cwd: Path, **more: str) -> Said:
    """Runs a command between pipes, in a process of its own."""
    with start(*arguments, cwd=cwd, **more) as process:
        out, err = process.communicate(timeout=60)
        return Said(process.returncode, out, err)


@contextmanager
def running(*arguments: str, cwd: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Keeps a command running for a block, and kills what is left of it."""
    process = start(*arguments, cwd=cwd, **more)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def call_in_terminal(
    *arguments: str, cwd: Path, encoding: str = "utf-8", **more: str
) -> tuple[int, bytes]:
    """Runs a command in this process on a terminal; returns its exit code and the bytes sent."""
    screen, line = pty.openpty()
    sent = bytearray()

    def read() -> None:
        with suppress(OSError):
            while piece := os.read(screen, 65_536):
                sent.extend(piece)

    reader = Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(line, "w", encoding=encoding) as stream:
        for name in os.environ.keys() - environment().keys():
            patch.delenv(name)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", **more}.items():
            patch.setenv(name, value)
        patch.chdir(cwd)
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        code = main(arguments)
    reader.join(timeout=30)
    os.close(screen)
    return code, bytes(sent)


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Reads a command's stderr up to a line that holds a text."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was not said: {''.join(seen)}")


class Caller:
    """Calls the command line in this process, in a folder and an environment of its own."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capture = capture

    def __call__(self, *arguments: str) -> Said:
        self._capture.readouterr()
        code = main(arguments)
        out, err = self._capture.readouterr()
        return Said(code, out, err)

    def json(self, *arguments: str) -> Any:
        """Calls a command with --json and returns what it answered."""
        said = self(*arguments, "--json")
        assert said.code == 0, said.err
        return json.loads(said.out)


@pytest.fixture
def cli(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Caller:
    """A caller on `demo.db` in a fresh folder."""
    for name in list(os.environ):
        if name.startswith("PLAYLEDGER_") or name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PLAYLEDGER_DB", "demo.db")
    monkeypatch.chdir(tmp_path)
    return Caller(tmp_path, capsys)
