"""T20, T21 and T26: after a `kill -9`, and with two processes on one file."""

from __future__ import annotations

from functools import partial

from benchmarks.crash import kill_and_recover
from benchmarks.crossing import reactions, together
from benchmarks.harness import (
    Figure,
    Setting,
    at_least,
    at_most,
    in_turns,
    median,
    ratios,
    versus,
    why,
)


def recoveries(setting: Setting) -> list[Figure]:
    """T20: `kill -9` with many runs in flight."""
    runs = setting.count(1_000, 100)
    sides, failed = in_turns(
        max(1, setting.rounds - 2),
        {
            "ours": lambda: kill_and_recover("crash", runs, setting.folder / "crash" / "log.db"),
            "DBOS": lambda: kill_and_recover("peer_dbos", runs, setting.folder / "crash-dbos"),
        },
    )
    value, opened = median(sides["ours"], "seconds"), median(sides["ours"], "from_start")
    against = versus(median(sides["DBOS"], "seconds"), "DBOS on SQLite, from its launch", "s")
    as_launched = [{"from_start": sample["seconds"]} for sample in sides["DBOS"]]
    return [
        Figure(
            id="T20",
            what=f"{runs:,} runs in flight, kill -9, from ready to all completed",
            value=value,
            unit="s",
            against=against,
            ratio=ratios(sides["ours"], sides["DBOS"], "seconds"),
            target="<= 2 s",
            passed=at_most(value, 2),
            note=why(failed),
        ),
        Figure(
            id="T20",
            what="the same, from before the file is opened",
            value=opened,
            unit="s",
            against=against,
            ratio=ratios(sides["ours"], as_launched, "from_start"),
            note=why(failed),
        ),
    ]


def crossings(setting: Setting) -> list[Figure]:
    """T21: from a commit in one process to the reaction in another."""
    runs = setting.count(300, 60)
    sides, failed = in_turns(
        setting.rounds, {"ours": partial(reactions, runs, setting.folder / "reactions")}
    )
    value = median(sides["ours"], "p50")
    return [
        Figure(
            id="T21",
            what="commit in one process to the play's start in another, p50",
            value=value,
            unit="ms",
            against="limit of 8 ms",
            ratio=None if value is None else value / 8,
            target="<= 8 ms",
            passed=at_most(value, 8),
            note=why(failed),
        )
    ]


def shares(setting: Setting) -> list[Figure]:
    """T26: two processes that append to one file as fast as they can."""
    seconds = max(1.5, 5 * setting.scale)
    folder = setting.folder / "shared"
    sides, failed = in_turns(
        setting.rounds,
        {
            "one": partial(together, 1, 32, seconds, folder),
            "two": partial(together, 2, 32, seconds, folder),
        },
    )
    one, two = sides["one"], sides["two"]
    total, least, longest = ratios(two, one, "rate"), median(two, "least"), median(two, "max")
    note = why(failed)
    return [
        Figure(
            id="T26",
            what="two processes on one file, 32 callers each, together",
            value=median(two, "rate"),
            unit="commands/s",
            against=versus(median(one, "rate"), "one process", "commands/s"),
            ratio=total,
            target=">= 0.8 of one",
            passed=at_least(total, 0.8),
            note=note,
        ),
        Figure(
            id="T26",
            what="share of the one that got less",
            value=least,
            unit="of all",
            against="an even split: 0.5",
            ratio=None if least is None else least / 0.5,
            target=">= 0.4",
            passed=at_least(least, 0.4),
            note=note,
        ),
        Figure(
            id="T26",
            what="longest wait of either",
            value=longest,
            unit="ms",
            against=versus(median(one, "max"), "one process", "ms"),
            ratio=ratios(two, one, "max"),
            target="<= 100 ms",
            passed=at_most(longest, 100),
            note=note,
        ),
    ]
