"""T1 to T4: recording commands and running plays, against raw SQL and the peers.

A ratio is the median over the rounds of the ratio within a round, so a slow minute slows both
sides of it.
"""

from __future__ import annotations

from benchmarks.harness import (
    Figure,
    Sample,
    Setting,
    at_least,
    at_most,
    child,
    in_turns,
    median,
    ratios,
    versus,
    why,
)


def appends(setting: Setting) -> list[Figure]:
    """T1 to T3: the same commands with one, 32, 128 and 512 callers."""
    figures: list[Figure] = []
    for callers, runs, limit in ((128, 12_000, 0.45), (512, 12_000, 0.4)):
        sides, failed = _against_raw(setting, callers, setting.count(runs, callers * 4))
        ours, raw = sides["ours"], sides["raw"]
        ratio = ratios(ours, raw, "rate")
        figures.append(
            Figure(
                id="T1",
                what=f"durable commands, {callers} callers",
                value=median(ours, "rate"),
                unit="commands/s",
                against=versus(median(raw, "rate"), "same statements raw", "commands/s"),
                ratio=ratio,
                target=f">= {limit} of raw",
                passed=at_least(ratio, limit),
                note=why(failed),
            )
        )
        if callers == 128:
            longest = median(ours, "max")
            figures.append(
                Figure(
                    id="T1",
                    what="slowest append, 128 callers",
                    value=longest,
                    unit="ms",
                    against=versus(median(raw, "max"), "slowest raw transaction", "ms"),
                    ratio=ratios(ours, raw, "max"),
                    target="<= 50 ms",
                    passed=at_most(longest, 50),
                    note=why(failed),
                )
            )
    return figures


def one_caller(setting: Setting) -> list[Figure]:
    """T2: nobody to share a commit with."""
    sides, failed = _against_raw(setting, 1, setting.count(1_000, 60))
    ours, raw = sides["ours"], sides["raw"]
    ratio, tail = ratios(ours, raw, "rate"), ratios(ours, raw, "p99")
    return [
        Figure(
            id="T2",
            what="durable commands, one caller",
            value=median(ours, "rate"),
            unit="commands/s",
            against=versus(median(raw, "rate"), "same statements raw", "commands/s"),
            ratio=ratio,
            target=">= 0.55 of raw",
            passed=at_least(ratio, 0.55),
            note=why(failed),
        ),
        Figure(
            id="T2",
            what="p99 of one caller",
            value=median(ours, "p99"),
            unit="ms",
            against=versus(median(raw, "p99"), "raw", "ms"),
            ratio=tail,
            target="<= 2 times raw",
            passed=at_most(tail, 2),
            note=why(failed),
        ),
    ]


def against_eventsourcing(setting: Setting) -> list[Figure]:
    """T3: 32 callers, counted in commands, against a library that saves one event at a time."""
    folder = setting.folder / "append-32"
    runs, peer_runs = setting.count(8_000, 320), setting.count(600, 40)
    child("append", "record", 32, 32, folder)
    sides, failed = in_turns(
        setting.rounds,
        {
            "ours": lambda: child("append", "ours", 32, runs, folder),
            "peer": lambda: child("peer_eventsourcing", "save", peer_runs, folder),
        },
    )
    ratio = ratios(sides["ours"], sides["peer"], "rate")
    return [
        Figure(
            id="T3",
            what="durable commands, 32 callers",
            value=median(sides["ours"], "rate"),
            unit="commands/s",
            against=versus(
                median(sides["peer"], "rate"), "eventsourcing, one save at a time", "events/s"
            ),
            ratio=ratio,
            target=">= 5 times eventsourcing",
            passed=at_least(ratio, 5),
            note=why(failed),
        )
    ]


def families(setting: Setting) -> list[Figure]:
    """T4: a parent and its child, 32 in flight, from submit to completed."""
    folder = setting.folder / "family"
    sides, failed = in_turns(
        setting.rounds,
        {
            "ours": lambda: child("family", "ours", 32, setting.count(6_400, 320), folder),
            "DBOS": lambda: child("peer_dbos", "family", 32, setting.count(640, 64), folder),
            "Temporal": lambda: child(
                "peer_temporal", "family", 32, setting.count(320, 64), folder
            ),
        },
    )
    ours = sides["ours"]
    figures = []
    for peer, times in (("DBOS", 15), ("Temporal", 60)):
        ratio = ratios(ours, sides[peer], "rate")
        figures.append(
            Figure(
                id="T4",
                what="parent with one child, 32 in flight",
                value=median(ours, "rate"),
                unit="parents/s",
                against=versus(median(sides[peer], "rate"), f"{peer} on SQLite", "parents/s"),
                ratio=ratio,
                target=f">= {times} times {peer}",
                passed=at_least(ratio, times),
                note=why(failed, "ours", peer),
            )
        )
    tail = ratios(ours, sides["DBOS"], "p99")
    figures.append(
        Figure(
            id="T4",
            what="p99 of a parent with one child",
            value=median(ours, "p99"),
            unit="ms",
            against=versus(median(sides["DBOS"], "p99"), "DBOS on SQLite", "ms"),
            ratio=tail,
            target="<= 1/20 of DBOS",
            passed=at_most(tail, 1 / 20),
            note=why(failed, "ours", "DBOS"),
        )
    )
    return figures


def _against_raw(
    setting: Setting, callers: int, runs: int
) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    folder = setting.folder / f"append-{callers}"
    child("append", "record", callers, runs, folder)
    return in_turns(
        setting.rounds,
        {
            "ours": lambda: child("append", "ours", callers, runs, folder),
            "raw": lambda: child("append", "raw", callers, runs, folder),
        },
    )
