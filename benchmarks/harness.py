"""How a figure is taken: each side in a process of its own, in turns, medians of the rounds.

Absolute figures drift between machines and hours; the ratio of two sides that took turns in the
same minutes does not.  So a figure is never kept without what it is compared with.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct

ROOT = Path(__file__).parent.parent
CHILD_S = 600.0

Sample = dict[str, Any]
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
}
"""Of the children: an installed program is not compiled again at each start."""


class Setting(Struct, frozen=True):
    """How much is measured: `scale` shrinks the work, in so many rounds each side has its turn."""

    scale: float
    rounds: int
    folder: Path

    def count(self, full: int, least: int = 1) -> int:
        """Returns how much of a thing to do."""
        return max(least, round(full * self.scale))


class Figure(Struct, frozen=True, kw_only=True):
    """One line of `bench.jsonl`; one that could not be taken has no value and has not passed."""

    id: str
    what: str
    value: float | None
    unit: str
    against: str = ""
    ratio: float | None = None
    target: str = ""
    passed: bool | None = None
    note: str = ""

    def line(self) -> bytes:
        """Returns the line."""
        return orjson.dumps(
            {
                "id": self.id,
                "what": self.what,
                "value": _short(self.value),
                "unit": self.unit,
                "against": self.against,
                "ratio": _short(self.ratio),
                "target": self.target,
                "pass": self.passed,
                **({"note": self.note} if self.note else {}),
            }
        )


class Unmeasured(Exception):
    """A side could not be measured on this machine; its figures say so."""


def child(module: str, *arguments: object, timeout: float = CHILD_S) -> Sample:
    """Runs one side in a fresh process and returns the last line it printed, which is JSON."""
    process = start_child(module, *arguments)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Unmeasured(f"{module} took over {timeout:.0f} s") from None
    if process.returncode != 0:
        raise Unmeasured(f"{module} {arguments[0]}: {_last(err)}")
    sample: Sample = orjson.loads(out.splitlines()[-1])
    return sample


def start_child(module: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts one side, to be spoken with over its pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def expect(process: subprocess.Popen[str], word: str) -> str:
    """Reads a child's output up to the line that starts with `word`, and returns the rest of it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line[len(word) :].strip()
    err = process.stderr.read() if process.stderr else ""
    raise Unmeasured(f"{process.args[2:]} ended before it said {word}: {_last(err)}")  # type: ignore[index]


def tell(process: subprocess.Popen[str], word: str) -> None:
    """Says a word to a child that waits for it."""
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def answer(sample: Sample) -> None:
    """Says what a child measured."""
    print(orjson.dumps(sample).decode(), flush=True)


def in_turns(
    rounds: int, sides: dict[str, Callable[[], Sample]]
) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Gives every side its turn in each round, each round starting with another one.

    Returns the samples, and why a side has none.
    """
    names = list(sides)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in failed:
                continue
            gc.collect()
            try:
                samples[name].append(sides[name]())
            except Unmeasured as error:
                failed[name] = str(error)
                samples[name] = []
                print(f"  {name}: {error}", file=sys.stderr, flush=True)
    return samples, failed


def median(samples: Sequence[Sample], key: str) -> float | None:
    """Returns the median of one number over the rounds, or None without any."""
    return statistics.median(sample[key] for sample in samples) if samples else None


def ratios(above: Sequence[Sample], below: Sequence[Sample], key: str) -> float | None:
    """Returns the median over the rounds of the ratio within each round."""
    pairs = [(a[key], b[key]) for a, b in zip(above, below, strict=False)]
    return statistics.median(a / b for a, b in pairs) if pairs else None


def at_least(value: float | None, limit: float) -> bool:
    """Says whether a figure was taken and is large enough."""
    return value is not None and value >= limit


def at_most(value: float | None, limit: float) -> bool:
    """Says whether a figure was taken and is small enough."""
    return value is not None and value <= limit


def median_of(values: Sequence[float]) -> float:
    """Returns the median."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def latencies(seconds: Sequence[float]) -> Sample:
    """Returns what is kept of many latencies, in ms."""
    return {
        "p50": percentile(seconds, 0.5) * 1e3,
        "p99": percentile(seconds, 0.99) * 1e3,
        "max": max(seconds) * 1e3,
    }


def folder_for_bench() -> Path:
    """Returns an empty folder on the disk under test: `BENCH_DIR`, else the temporary folder."""
    base = Path(os.environ.get("BENCH_DIR") or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="playledger-bench-", dir=base))


def fresh(folder: Path) -> Path:
    """Returns an empty folder in which one side has its turn."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def why(failed: dict[str, str], *sides: str) -> str:
    """Says why a figure, or what it is compared with, was not taken."""
    return "; ".join(failed[side] for side in (sides or tuple(failed)) if side in failed)


def versus(value: float | None, other: str, unit: str) -> str:
    """Returns how the other side of a figure is shown."""
    return f"{other}: not measured" if value is None else f"{other}: {shown(value)} {unit}"


def shown(value: float | None) -> str:
    """Returns a number with as many digits as mean something."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "no reason given"
