"""T5 and T6: reading a long log back into run states, and deciding all of it again.

python -m benchmarks.tape build  RUNS FILE     a log by the real rules, 8 events a run
python -m benchmarks.tape states FILE          replay.states
python -m benchmarks.tape loads  FILE          read and orjson.loads, nothing else
python -m benchmarks.tape verify FILE          replay.verify, all of it
python -m benchmarks.tape fold   FILE K N      says READY, waits for GO: the K-th of N parts
python -m benchmarks.tape choose FILE K N      the same, making every choice again
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

import handlers.verify  # noqa: F401 - what `replay` imports when first asked is no part of a figure
import replay
from benchmarks.append import COMMANDS_PER_RUN, drive
from benchmarks.harness import Sample, answer, expect, fresh, start_child, tell
from handlers.rechoose import Rechooser
from ledger.codec import decode
from ledger.database import reading
from ledger.export import PAGE
from ledger.merkle import leaf_hash
from ledger.transaction import read_head
from playledger.wiring import open_log
from projections.run import evolve
from projections.state import RunState

BUILD_CALLERS = 512


async def build(runs: int, path: Path) -> Sample:
    """Writes a log through the writer; it need not survive a crash, so nothing is synced."""
    fresh(path.parent)
    log = await open_log(path)
    log.writer._connection.execute("pragma synchronous=off")  # noqa: SLF001
    took, waits = await drive(log, min(BUILD_CALLERS, runs), runs)
    position = await log.position()
    await log.close()
    return {"events": position, "seconds": took, "commands": len(waits) // COMMANDS_PER_RUN}


def states(path: Path) -> Sample:
    """Measures `replay.states`."""
    events = _head(path)
    begun = time.perf_counter()
    found = replay.states(path)
    took = time.perf_counter() - begun
    return {"rate": events / took, "runs": len(found)}


def loads(path: Path) -> Sample:
    """Measures the limit: the leaves as they are stored, and orjson."""
    events = _head(path)
    gc.disable()
    begun = time.perf_counter()
    for leaf in _leaves(path, 0, 1):
        orjson.loads(leaf)
    return {"rate": events / (time.perf_counter() - begun)}


def verify(path: Path) -> Sample:
    """Measures `replay.verify`: bytes, leaf hashes, root, read models and choices."""
    begun = time.perf_counter()
    verdict = replay.verify(path)
    took = time.perf_counter() - begun
    assert verdict.ok, verdict
    return {"rate": verdict.events / took, "choices": verdict.choices}


def fold(path: Path, part: int, parts: int) -> int:
    """Folds the streams of one part into their states."""
    found: dict[str, RunState] = {}
    count = 0
    for leaf in _leaves(path, part, parts):
        count += 1
        recorded = decode(leaf)
        stream = recorded.subject
        if stream != "system":
            found[stream] = evolve(found.get(stream), recorded)
    return count


def choose(path: Path, part: int, parts: int) -> int:
    """Hashes the leaves of one part, and makes its choices again."""
    found: dict[str, RunState] = {}
    rechooser = Rechooser()
    count = 0
    for leaf in _leaves(path, part, parts):
        count += 1
        leaf_hash(leaf)
        recorded = decode(leaf)
        stream = recorded.subject
        before = found.get(stream)
        after = None if stream == "system" else evolve(before, recorded)
        if after is not None:
            found[stream] = after
        assert not rechooser.take(recorded, before, after)
    assert not rechooser.end()
    return count


def in_parts(verb: str, path: Path, parts: int) -> Sample:
    """Measures a verb on so many processes, from GO to the last one's end (for the parent)."""
    processes = [start_child("tape", verb, path, part, parts) for part in range(parts)]
    for process in processes:
        expect(process, "READY")
    begun = time.perf_counter()
    for process in processes:
        tell(process, "GO")
    events = sum(int(expect(process, "DONE")) for process in processes)
    took = time.perf_counter() - begun
    for process in processes:
        process.communicate()
    return {"rate": events / took}


def _head(path: Path) -> int:
    with reading(path) as connection:
        return read_head(connection).position


def _leaves(path: Path, part: int, parts: int) -> Iterator[bytes]:
    where = "" if parts == 1 else f" and stream_id % {parts} = {part}"
    sql = f"select leaf from events where position > ? and position <= ?{where} order by position"
    with reading(path) as connection:
        for after in range(0, read_head(connection).position, PAGE):
            for (leaf,) in connection.execute(sql, (after, after + PAGE)).fetchall():
                yield leaf


def _on_the_word(work: Callable[[Path, int, int], int], path: Path) -> None:
    part, parts = int(sys.argv[3]), int(sys.argv[4])
    gc.disable()
    print("READY", flush=True)
    sys.stdin.readline()
    print("DONE", work(path, part, parts), flush=True)


def main() -> None:
    what, path = sys.argv[1], Path(sys.argv[-1] if sys.argv[1] == "build" else sys.argv[2])
    match what:
        case "build":
            answer(asyncio.run(build(int(sys.argv[2]), path)))
        case "states":
            answer(states(path))
        case "loads":
            answer(loads(path))
        case "verify":
            answer(verify(path))
        case "fold":
            _on_the_word(fold, path)
        case "choose":
            _on_the_word(choose, path)
        case _:
            raise SystemExit(f"no such side: {what}")


if __name__ == "__main__":
    main()
