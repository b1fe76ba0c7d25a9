"""The demo: it ends with its table, and a kill half-way changes nothing (issue 2, section 6)."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

from ledger.export import export
from tests.cli_world import CSV, PLAYS, WEATHER, Caller, cli, read_until, running

__all__ = ["cli"]
YEARS = [
    {"days": 366, "rain_mm": 1226.0, "year": "2012"},
    {"days": 365, "rain_mm": 828.0, "year": "2013"},
    {"days": 365, "rain_mm": 1232.8, "year": "2014"},
    {"days": 365, "rain_mm": 1139.2, "year": "2015"},
]
SLOW = ("run", f"{PLAYS}:slow_report", "--input", f"@{CSV}", "--run-id", "weather-demo")


def test_the_demo_gives_four_years_of_seattle(cli: Caller) -> None:
    """On the real record, and `replay verify` agrees."""
    said = cli("run", f"{WEATHER}:yearly_report", "--input", f"@{CSV}", "--run-id", "weather-demo")
    assert said.code == 0
    assert json.loads(said.out) == YEARS
    assert re.search(r"completed in .+: 4 children, no retry, \d+ events", said.err)
    assert cli("replay", "verify", "demo.db").code == 0


def test_the_demo_killed_half_way_carries_on_to_the_same_result(cli: Caller) -> None:
    """SIGKILL with some years done; the same command again finds them, and counts none twice."""
    with running(*SLOW, "--db", "demo.db", cwd=cli.folder) as process:
        read_until(process, "children 2/4")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    done = [
        json.loads(leaf)["subject"]
        for leaf in export(Path("demo.db"))
        if b'"type":"run.completed"' in leaf
    ]
    assert len(done) in (2, 3)
    head = len(list(export(Path("demo.db"))))
    again = cli(*SLOW)
    assert again.code == 0
    assert json.loads(again.out) == YEARS
    found = re.search(
        r"● weather-demo was interrupted at @(\d+); carrying on, (\d) of 4 children are done",
        again.err,
    )
    assert found
    assert int(found[1]) <= head
    assert int(found[2]) == len(done)
    events = [json.loads(leaf) for leaf in export(Path("demo.db"))]
    ended = [event["subject"] for event in events if event["type"] == "run.completed"]
    assert len(ended) == len(set(ended)) == 5
    children = [event for event in events if event["type"] == "child.requested"]
    assert len(children) == 4
    lost = [event["data"]["errorClass"] for event in events if event["type"] == "instance.lost"]
    assert set(lost) == {"coordinator_restart"}
    verified = cli("replay", "verify", "demo.db")
    assert verified.code == 0, verified.out
    third = cli(*SLOW)
    assert json.loads(third.out) == YEARS
    assert "was already completed" in third.err
