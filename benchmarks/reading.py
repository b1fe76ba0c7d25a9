"""T5 to T8: replay, verify, status and start."""

from __future__ import annotations

from functools import partial

from benchmarks import doors, tape
from benchmarks.harness import (
    Figure,
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
            note=why(failed, "ours", "loads"),
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
            note=why(failed, "ours", "peer"),
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
            note=why(failed, "one", "two"),
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
            note=why(failed, "ours", "peer"),
        ),
        Figure(
            id="T6",
            what="choices and leaf hashes alone",
            value=median(sides["one"], "rate"),
            unit="events/s",
            against=against,
            ratio=alone,
            note=why(failed, "one", "peer"),
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
            note=why(failed, "one", "two"),
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
            note=why(failed, "few"),
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
            note=why(failed, "few", "many"),
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
            note=why(failed, "http", "nothing"),
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
            ratio=ratios(
                sides["help"], [{"seconds": s["empty"]} for s in sides["help"]], "seconds"
            ),
            target="<= 0.2 s",
            passed=at_most(helped, 0.2),
            note=why(failed, "help"),
        ),
        Figure(
            id="T8",
            what=f"serve, from its start to ready, {events} events",
            value=ready,
            unit="s",
            against=versus(median(sides["help"], "libraries"), "its libraries, imported", "s"),
            ratio=ratios(
                sides["ready"], [{"seconds": s["libraries"]} for s in sides["help"]], "seconds"
            ),
            target="<= 1 s",
            passed=at_most(ready, 1),
            note=why(failed, "ready"),
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
            note=why(failed, "ready"),
        ),
    ]


def _long_log(setting: Setting) -> str:
    """Returns a log of a million events, written once and then only read."""
    path = setting.folder / "long" / "log.db"
    if not path.exists():
        child("tape", "build", setting.count(125_000, 5_000), path)
    return str(path)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
