"""The soak: `playledger serve` is killed at random moments while runs execute, and started again.

    python -m tests.crash.soak [--kills N] [--runs N] [--seed N] [--dir FOLDER]

A client in its own process holds the runs in flight and notes what was answered to it.  After each
kill the log is verified as it lies there; at the end every acknowledged submit and signal is there,
every run is at its right end, nothing ran twice.  The figures are the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

import replay
from ledger import events as e
from ledger.codec import Recorded
from ledger.database import reading
from ledger.events import Event
from tests.crash.checks import check_acknowledged, check_log
from tests.crash.driver import files_of
from tests.crash.scenarios import EFFECTS_VARIABLE

ROOT: Final = Path(__file__).resolve().parents[2]
PLAYS: Final = "tests.crash.soak_plays"
LIFE_S: Final = (0.3, 2.0)
"""How long a server may live behind its ready line; one in five is killed while it starts."""

END_S: Final = 120.0


class Figures(Struct, frozen=True, kw_only=True):
    """What came of a soak."""

    kills: int
    while_starting: int
    runs: int
    events: int
    attempts: int
    restarts: int
    verified: int
    seed: int
    seconds: float


class Soak:
    """One soak in a folder of its own."""

    def __init__(self, folder: Path, *, kills: int, runs: int, seed: int) -> None:
        self.path = folder / "soak.db"
        self._kills = kills
        self._runs = runs
        self._seed = seed
        self._random = random.Random(seed)
        self._while_starting = 0
        self._verified = 0
        self._begun = 0
        self._environment = {
            **os.environ,
            EFFECTS_VARIABLE: str(files_of(self.path)["effects"]),
            "PYTHONPATH": str(ROOT),
        }

    def run(self) -> Figures:
        """Kills, restarts, lets everything end, and checks it; raises AssertionError."""
        began = time.monotonic()
        server = self._serve()
        self._await_ready(server)
        client = self._client()
        try:
            for number in range(self._kills):
                self._kill_at_some_moment(server)
                self._verify(number + 1)
                server = self._serve()
            self._await_ready(server)
            runs = self._let_end(client)
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0, f"serve ended with {server.returncode}"
        finally:
            for process in (client, server):
                if process.poll() is None:
                    process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()
        return self._check(runs, time.monotonic() - began)

    def _serve(self) -> subprocess.Popen[bytes]:
        self._begun = self._nodes()
        said = files_of(self.path)["errors"].open("ab")
        with said:
            command = "from playledger.cli import main; raise SystemExit(main())"
            return subprocess.Popen(
                [
                    *(sys.executable, "-c", command, "serve", PLAYS),
                    *("--db", str(self.path), "--insecure-local", "--port", "0"),
                ],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    def _client(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.crash.soak_client", str(self.path), str(self._runs)],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _nodes(self) -> int:
        """Returns how many nodes have begun; a new one says that the server works."""
        if not self.path.exists() or not self.path.stat().st_size:
            return 0
        with reading(self.path) as connection:
            try:
                (count,) = connection.execute(
                    "select count(*) from events where type_id ="
                    " (select type_id from event_types where name = 'node.started')"
                ).fetchone()
            except Exception:  # noqa: BLE001 - the schema is not there yet
                return 0
        return int(count)

    def _await_ready(self, server: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + 60
        while self._nodes() <= self._begun:
            assert server.poll() is None, f"serve ended with {server.returncode}"
            assert time.monotonic() < until, "serve did not begin"
            time.sleep(0.02)

    def _kill_at_some_moment(self, server: subprocess.Popen[bytes]) -> None:
        """Sends SIGKILL, most often into the work, sometimes into the start."""
        if self._random.random() < 0.2:
            self._while_starting += 1
            time.sleep(self._random.uniform(0.0, 0.8))
        else:
            self._await_ready(server)
            time.sleep(self._random.uniform(*LIFE_S))
        assert server.poll() is None, f"serve ended by itself with {server.returncode}"
        server.kill()
        server.wait()

    def _verify(self, number: int) -> None:
        verdict = replay.verify(self.path)
        assert verdict.ok, f"after kill {number}: {verdict}"
        self._verified += 1
        if sys.stdout.isatty() or number % 10 == 0:
            print(f"kill {number} of {self._kills}: {verdict.events} events, clean", flush=True)

    def _let_end(self, client: subprocess.Popen[bytes]) -> int:
        """Has the client start nothing more, and waits until it has seen every end."""
        said, _ = client.communicate(b"enough\n", timeout=END_S)
        assert client.returncode == 0, "the client saw something wrong"
        return int(said)

    def _check(self, runs: int, seconds: float) -> Figures:
        """Checks the whole of it."""
        self._verify(self._kills)
        events, beside = check_log(self.path), files_of(self.path)
        check_acknowledged(events, beside["acks"])
        lines = beside["acks"].read_text().splitlines()
        kept = Counter(line.split()[0] for line in lines)
        assert kept == {"submit": runs, "signal": runs, "end": runs}, kept
        _check_everything_ended(self.path, events, runs)
        done = Counter(beside["effects"].read_text().splitlines())
        assert max(done.values()) == 1, "an attempt ran twice"
        created = [r for r in events if isinstance(r.data, e.InstanceCreated)]
        lost = [r for r in events if isinstance(r.data, e.InstanceLost)]
        return Figures(
            kills=self._kills,
            while_starting=self._while_starting,
            runs=runs,
            events=len(events),
            attempts=len(created),
            restarts=len(lost),
            verified=self._verified,
            seed=self._seed,
            seconds=round(seconds, 1),
        )


def _check_everything_ended(path: Path, events: list[Recorded[Event]], runs: int) -> None:
    submitted = Counter(
        "tree" if r.data.lineage.parent_run_id is None else "leaf"
        for r in events
        if isinstance(r.data, e.RunSubmitted)
    )
    assert submitted == {"tree": runs, "leaf": 3 * runs}, submitted
    with reading(path) as connection:
        ends = connection.execute("select status, count(*) from runs group by 1").fetchall()
        assert ends == [("completed", 4 * runs)], ends
        for table in ("outbox", "leases"):
            left = connection.execute(f"select * from {table}").fetchall()
            assert left == [], f"{table}: {left}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a soak and prints its figures as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--runs", type=int, default=40, help="how many are in flight")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--dir", type=Path, help="where to leave the log; else it is removed")
    asked = parser.parse_args(arguments)
    print(f"soak: {asked.kills} kills, {asked.runs} runs in flight, seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="playledger-soak-") as temporary:
        folder = asked.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = Soak(folder, kills=asked.kills, runs=asked.runs, seed=asked.seed).run()
    print(json.dumps({name: getattr(figures, name) for name in figures.__struct_fields__}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
