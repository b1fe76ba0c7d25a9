"""T1 to T3: durable commands through the public log, against the same statements run raw.

One run is four commands and eight events: a submit (three events), a local create (two), a
progress report (one) and a result (two); its parameters and its result are sealed.  The raw side
runs, on a copy of the same empty log and through plain `sqlite3`, exactly the statements with
exactly the parameters that the writer ran, in the same transactions.

    python -m benchmarks.append record  CALLERS RUNS FOLDER
    python -m benchmarks.append ours    CALLERS RUNS FOLDER
    python -m benchmarks.append raw     CALLERS RUNS FOLDER
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import Sample, answer, fresh, latencies
from handlers.commands import Command, Reporter
from handlers.port import RunLog
from handlers.submit import DEFAULT_POLICY, PARAMS_PLACE
from ledger import events as e
from ledger.canonical import canonical
from ledger.database import CHECKPOINT_PAGES
from ledger.ids import event_id, instance_id, run_stream
from ledger.log import prepare, system_clock
from ledger.seal import request_digest, seal
from playledger.server import run, settle_memory
from playledger.wiring import DEFAULT_SCOPE, SCHEMA, open_log

HOST = "n-bench"
COMMANDS_PER_RUN = 4
EVENTS_PER_RUN = 8
WARM_UP_RUNS = 3

Statement = tuple[str, Any, bool]


class Journey:
    """The commands of one run, and how long each took."""

    def __init__(self, log: RunLog, waits: list[float]) -> None:
        self._log = log
        self._waits = waits

    async def go(self, number: int, caller: int) -> None:
        """Takes one run from its submit to its end."""
        run_id = f"bench-{number:08d}-{caller:04d}"
        stream = run_stream(run_id)
        key = hashlib.sha256(run_id.encode()).digest()
        params = canonical(
            {"files": [], "input": {"name": f"customer {number}", "n": number}, "options": {}}
        )
        sealed = seal(key, run_id, PARAMS_PLACE, params, 65_536)
        answered = await self._timed(
            Command(
                stream=stream,
                fact=_submitted(run_id, sealed.seal),
                actor="api/bench",
                values=(sealed.disclosure,),
                run_key=key,
            )
        )
        intent = next(ev for ev in answered.events if ev.type == "instance.create_requested")
        identity = instance_id(DEFAULT_SCOPE, run_id, 0)
        assert intent.id == event_id(answered.events[0].id, "1")
        await self._timed(
            Command(
                stream=stream,
                fact=e.InstanceCreated(
                    instance_id=identity, attempt=0, host=HOST, already_existed=False
                ),
                actor="node/" + HOST,
                cause=intent.id,
            )
        )
        reporter = Reporter(instance_id=identity, host=HOST)
        await self._timed(
            Command(
                stream=stream,
                fact=e.RunProgress(instance_id=identity, attempt=0, n=0, done=1, of=2),
                actor="instance/" + identity,
                reporter=reporter,
            )
        )
        place = f"instance.completed/ended/{identity}/result"
        result = seal(key, run_id, place, canonical({"rows": number, "ok": True}), 65_536)
        await self._timed(
            Command(
                stream=stream,
                fact=e.InstanceCompleted(instance_id=identity, attempt=0, result=result.seal),
                actor="instance/" + identity,
                reporter=reporter,
                values=(result.disclosure,),
            )
        )

    async def _timed(self, command: Command) -> Any:
        begun = time.perf_counter()
        answered = await self._log.transact(command)
        self._waits.append(time.perf_counter() - begun)
        return answered


def _submitted(run_id: str, params: e.Seal) -> e.RunSubmitted:
    digest = request_digest({"params": params.digest, "playName": "bench:noop", "runId": run_id})
    return e.RunSubmitted(
        run_id=run_id,
        play_name="bench:noop",
        engine="local",
        isolation="task",
        scope=DEFAULT_SCOPE,
        org_id="local",
        lineage=e.Lineage(family_key=run_id),
        params=params,
        request_digest=digest,
        policy=DEFAULT_POLICY,
    )


class Recorder:
    """Stands before the writer's connection and keeps what passes, transaction by transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.transactions: list[list[Statement]] = []
        self._open: list[Statement] | None = None

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        if sql == "begin immediate":
            self._open = []
        elif sql == "commit" and self._open is not None:
            self.transactions.append(self._open)
            self._open = None
        elif self._open is not None:
            self._open.append((sql, parameters, False))
        return self._connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any]) -> sqlite3.Cursor:
        rows = list(parameters)
        if self._open is not None:
            self._open.append((sql, rows, True))
        return self._connection.executemany(sql, rows)

    def close(self) -> None:
        self._connection.close()


async def drive(log: RunLog, callers: int, runs: int) -> tuple[float, list[float]]:
    """Has each caller take its share of runs, and returns the seconds and the latencies."""
    waits: list[float] = []

    async def caller(number: int, share: int, first: int) -> None:
        journey = Journey(log, waits)
        for index in range(first, first + share):
            await journey.go(index, number)

    share = max(1, runs // callers)
    await asyncio.gather(*(caller(n, WARM_UP_RUNS, 0) for n in range(callers)))
    waits.clear()
    settle_memory()
    begun = time.perf_counter()
    await asyncio.gather(*(caller(n, share, WARM_UP_RUNS) for n in range(callers)))
    return time.perf_counter() - begun, waits


async def record(callers: int, runs: int, folder: Path) -> Sample:
    """Makes the empty log that every round starts from, and what the raw side will run on it."""
    empty = fresh(folder) / "empty.db"
    prepare(empty, SCHEMA, scope=DEFAULT_SCOPE, clock=system_clock)
    shutil.copy(empty, folder / "recorded.db")
    log = await open_log(folder / "recorded.db")
    recorder = Recorder(log.writer._connection)  # noqa: SLF001 - to stand before it
    log.writer._connection = recorder  # type: ignore[assignment]  # noqa: SLF001
    await drive(log, callers, runs)
    await log.close()
    with (folder / "statements").open("wb") as file:
        pickle.dump(recorder.transactions, file)
    return {"transactions": len(recorder.transactions)}


async def ours(callers: int, runs: int, folder: Path) -> Sample:
    """Measures the log."""
    path = _from_empty(folder, "ours")
    log = await open_log(path)
    took, waits = await drive(log, callers, runs)
    await log.close()
    return {"rate": len(waits) / took, **latencies(waits)}


def raw(callers: int, folder: Path) -> Sample:
    """Measures the same statements through `sqlite3`, with the writer's pragmas."""
    path = _from_empty(folder, "raw")
    with (folder / "statements").open("rb") as file:
        transactions = pickle.load(file)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("pragma synchronous=full")
    connection.execute(f"pragma wal_autocheckpoint={CHECKPOINT_PAGES}")
    connection.execute("pragma temp_store=memory")
    connection.execute("pragma cache_size=-65536")
    heads = [_head(transaction) for transaction in transactions]
    start = next(
        i for i, head in enumerate(heads) if head >= WARM_UP_RUNS * callers * EVENTS_PER_RUN
    )
    waits = []
    begun = time.perf_counter()
    for number, transaction in enumerate(transactions):
        if number == start + 1:
            begun = time.perf_counter()
            waits.clear()
        since = time.perf_counter()
        connection.execute("begin immediate")
        for sql, parameters, many in transaction:
            if many:
                connection.executemany(sql, parameters)
            else:
                connection.execute(sql, parameters).fetchall()
        connection.execute("commit")
        waits.append(time.perf_counter() - since)
    took = time.perf_counter() - begun
    connection.close()
    commands = (heads[-1] - heads[start]) * COMMANDS_PER_RUN / EVENTS_PER_RUN
    return {"rate": commands / took, "batch": commands / len(waits), **latencies(waits)}


def _head(transaction: list[Statement]) -> int:
    """Returns the position that a transaction took the head to."""
    for sql, parameters, _ in reversed(transaction):
        if sql.startswith("update log_head"):
            return int(parameters[0])
    raise AssertionError("a transaction that moves no head")


def _from_empty(folder: Path, name: str) -> Path:
    path = fresh(folder / name) / "log.db"
    shutil.copy(folder / "empty.db", path)
    return path


def main() -> None:
    side, callers, runs, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    match side:
        case "record":
            answer(asyncio.run(record(callers, runs, Path(folder))))
        case "ours":
            answer(run(ours(callers, runs, Path(folder))))  # on the loop that `serve` runs on
        case "raw":
            answer(raw(callers, Path(folder)))
        case _:
            raise SystemExit(f"no such side: {side}")


if __name__ == "__main__":
    main()
