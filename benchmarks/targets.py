"""The targets: which sides take turns for each, and how their samples become figures.

Each function measures one target and returns its lines.  A ratio is the median over the rounds of
the ratio within a round, so a slow minute slows both sides of it.
"""

from __future__ import annotations

from functools import partial

from benchmarks import doors, tape
from benchmarks.crash import kill_and_recover
from benchmarks.crossing import reactions, together
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
                note=_why(failed),
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
                    note=_why(failed),
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
            note=_why(failed),
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
            note=_why(failed),
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
            note=_why(failed),
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
                note=_why(failed, "ours", peer),
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
            note=_why(failed, "ours", "DBOS"),
        )
    )
    return figures


def replays(setting: Setting) -> list[Figure]:
    """T5: from the database to the states of all runs."""
    log = _long_log(setting)
    sides, failed = in_turns(
        setting.rounds,
        {
            "ours": lambda: child("tape", "states", log),
            "loads": lambda: child("tape", "loads", log),
            "peer": lambda: child("peer_eventsourcing", "replay", 1000, setting.folder / "peer"),
            "one": partial(tape.in_parts, "fold", log, 1),
            "two": partial(tape.in_parts, "fold", log, 2),
        },
    )
    value = median(sides["ours"], "rate")
    of_loads = ratios(sides["ours"], sides["loads"], "rate")
    of_peer = ratios(sides["ours"], sides["peer"], "rate")
    of_one = ratios(sides["two"], sides["one"], "rate")
    return [
        Figure(
            id="T5",
            what="replay: database to run states",
            value=value,
            unit="events/s",
            against=versus(median(sides["loads"], "rate"), "read + orjson.loads", "events/s"),
            ratio=of_loads,
            target=">= 0.65 of read + loads",
            passed=at_least(of_loads, 0.65),
            note=_why(failed, "ours", "loads"),
        ),
        Figure(
            id="T5",
            what="replay: database to run states",
            value=value,
            unit="events/s",
            against=versus(
                median(sides["peer"], "rate"), "eventsourcing, 1 000-event stream", "events/s"
            ),
            ratio=of_peer,
            target=">= 7 times eventsourcing",
            passed=at_least(of_peer, 7),
            note=_why(failed, "ours", "peer"),
        ),
        Figure(
            id="T5",
            what="replay split by stream over two processes",
            value=median(sides["two"], "rate"),
            unit="events/s",
            against=versus(median(sides["one"], "rate"), "one process", "events/s"),
            ratio=of_one,
            target=">= 1.6 times one",
            passed=at_least(of_one, 1.6),
            note=_why(failed, "one", "two"),
        ),
    ]


def verifications(setting: Setting) -> list[Figure]:
    """T6: every choice made again and compared, leaf hashes and root included."""
    log = _long_log(setting)
    histories = setting.count(400, 40)
    sides, failed = in_turns(
        setting.rounds,
        {
            "ours": lambda: child("tape", "verify", log),
            "peer": lambda: child("peer_temporal", "replay", histories, setting.folder / "peer"),
            "one": partial(tape.in_parts, "choose", log, 1),
            "two": partial(tape.in_parts, "choose", log, 2),
        },
    )
    of_peer = ratios(sides["ours"], sides["peer"], "rate")
    alone = ratios(sides["one"], sides["peer"], "rate")
    of_one = ratios(sides["two"], sides["one"], "rate")
    against = versus(median(sides["peer"], "rate"), "Temporal's Replayer", "events/s")
    return [
        Figure(
            id="T6",
            what="replay verify: bytes, root, choices and the read models too",
            value=median(sides["ours"], "rate"),
            unit="events/s",
            against=against,
            ratio=of_peer,
            target=">= 15 times Temporal",
            passed=at_least(of_peer, 15),
            note=_why(failed, "ours", "peer"),
        ),
        Figure(
            id="T6",
            what="choices and leaf hashes alone",
            value=median(sides["one"], "rate"),
            unit="events/s",
            against=against,
            ratio=alone,
            note=_why(failed, "one", "peer"),
        ),
        Figure(
            id="T6",
            what="choices and leaf hashes, split by stream over two processes",
            value=median(sides["two"], "rate"),
            unit="events/s",
            against=versus(median(sides["one"], "rate"), "one process", "events/s"),
            ratio=of_one,
            target=">= 1.5 times one",
            passed=at_least(of_one, 1.5),
            note=_why(failed, "one", "two"),
        ),
    ]


def statuses(setting: Setting) -> list[Figure]:
    """T7: the status of one run, among few and among many, and over HTTP."""
    few = setting.folder / "few" / "log.db"
    many = setting.folder / "many" / "log.db"
    among = setting.count(1_000_000, 50_000)
    child("doors", "clone", 1_000, few)
    child("doors", "clone", among, many)
    reads, requests = setting.count(10_000, 1_000), setting.count(20_000, 2_000)
    sides, failed = in_turns(
        setting.rounds,
        {
            "few": lambda: child("doors", "status", reads, few),
            "many": lambda: child("doors", "status", reads, many),
            "http": partial(doors.status_over_http, requests, few),
            "nothing": partial(doors.nothing_over_http, requests),
        },
    )
    fastest = median(sides["few"], "p50")
    flat = ratios(sides["many"], sides["few"], "p50")
    of_nothing = ratios(sides["http"], sides["nothing"], "rate")
    return [
        Figure(
            id="T7",
            what="status of one run in the library, p50",
            value=None if fastest is None else fastest * 1e3,
            unit="us",
            against="limit of 150 us",
            ratio=None if fastest is None else fastest * 1e3 / 150,
            target="<= 150 us",
            passed=at_most(fastest, 0.150),
            note=_why(failed, "few"),
        ),
        Figure(
            id="T7",
            what=f"the same among {among:,} runs",
            value=_times(median(sides["many"], "p50"), 1e3),
            unit="us",
            against=versus(_times(fastest, 1e3), "among 1,000", "us"),
            ratio=flat,
            target="<= 1.2 times",
            passed=at_most(flat, 1.2),
            note=_why(failed, "few", "many"),
        ),
        Figure(
            id="T7",
            what="status over HTTP, 32 clients",
            value=median(sides["http"], "rate"),
            unit="requests/s",
            against=versus(median(sides["nothing"], "rate"), "do-nothing GET", "requests/s"),
            ratio=of_nothing,
            target=">= 0.4 of nothing",
            passed=at_least(of_nothing, 0.4),
            note=_why(failed, "http", "nothing"),
        ),
    ]


def starts(setting: Setting) -> list[Figure]:
    """T8: help, ready, and what an idle server holds."""
    log = _long_log(setting)
    sides, failed = in_turns(
        setting.rounds,
        {"help": doors.help_time, "ready": partial(doors.ready_time, log)},
    )
    helped, ready = median(sides["help"], "seconds"), median(sides["ready"], "seconds")
    rss = median(sides["ready"], "rss")
    events = f"{setting.count(1_000_000, 40_000):,}"
    return [
        Figure(
            id="T8",
            what="playledger --help",
            value=helped,
            unit="s",
            against=versus(median(sides["help"], "empty"), "python -c pass", "s"),
            ratio=ratios(sides["help"], [{"seconds": s["empty"]} for s in sides["help"]], "seconds"),
            target="<= 0.2 s",
            passed=at_most(helped, 0.2),
            note=_why(failed, "help"),
        ),
        Figure(
            id="T8",
            what=f"serve, from its start to ready, {events} events",
            value=ready,
            unit="s",
            against=versus(median(sides["help"], "empty"), "python -c pass", "s"),
            target="<= 1 s",
            passed=at_most(ready, 1),
            note=_why(failed, "ready"),
        ),
        Figure(
            id="T8",
            what="serve, idle, resident memory",
            value=rss,
            unit="MB",
            against="limit of 120 MB",
            ratio=None if rss is None else rss / 120,
            target="<= 120 MB",
            passed=at_most(rss, 120),
            note=_why(failed, "ready"),
        ),
    ]


def recoveries(setting: Setting) -> list[Figure]:
    """T20: `kill -9` with many runs in flight."""
    runs = setting.count(1_000, 100)
    sides, failed = in_turns(
        max(1, setting.rounds - 2),
        {
            "ours": lambda: kill_and_recover(
                "crash", runs, setting.folder / "crash" / "log.db"
            ),
            "DBOS": lambda: kill_and_recover("peer_dbos", runs, setting.folder / "crash-dbos"),
        },
    )
    value = median(sides["ours"], "seconds")
    return [
        Figure(
            id="T20",
            what=f"{runs:,} runs in flight, kill -9, ready to all completed",
            value=value,
            unit="s",
            against=versus(median(sides["DBOS"], "seconds"), "DBOS on SQLite", "s"),
            ratio=ratios(sides["ours"], sides["DBOS"], "seconds"),
            target="<= 2 s",
            passed=at_most(value, 2),
            note=_why(failed),
        )
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
            note=_why(failed),
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
    note = _why(failed)
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


def _long_log(setting: Setting) -> str:
    """Returns a log of a million events, written once and then only read."""
    path = setting.folder / "long" / "log.db"
    if not path.exists():
        child("tape", "build", setting.count(125_000, 5_000), path)
    return str(path)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _why(failed: dict[str, str], *sides: str) -> str:
    """Says why a figure, or what it is compared with, was not taken."""
    return "; ".join(failed[side] for side in (sides or tuple(failed)) if side in failed)
