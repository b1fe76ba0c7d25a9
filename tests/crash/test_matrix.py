"""The matrix: every scenario, killed at every place between two durable steps, ends as it should.

Which places a scenario passes is learned from a run that nobody kills, so a new failpoint is in the
matrix as soon as it is in the code; a cell whose failpoint does not kill fails.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.crash.conftest import ROOT, Crasher
from tests.crash.scenarios import SCENARIOS

COMMIT: Final = ("before_flush", "before_commit", "after_commit")
ONCE: Final = (
    "before_schema",
    "before_schema_commit",
    "after_schema_commit",
    "before_node_file",
    "after_node_file",
)
"""Places before the first command, the same in every scenario."""

RECOVERY: Final = (
    "before_node_file",
    "after_node_file",
    "before_node_removed",
    "after_node_removed",
    "after_losses",
    "before_params_load",
    "after_params_load",
    "before_create",
    "before_play",
    "after_commit:1",
    "before_commit:2",
    "after_commit:3",
    "before_commit:4",
    "after_commit:5",
)
"""Places that a second process passes when it takes over from one that was killed."""

TAKING: Final = ("after_lease", "before_create", "before_play", "before_end_report")
"""Places that it passes when what was left is an intent that nobody acted on."""

Passed = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def passed(crasher: Crasher, tmp_path_factory: pytest.TempPathFactory) -> Passed:
    """How often each scenario passes each place."""
    folder = tmp_path_factory.mktemp("unharmed")
    return {name: crasher.passed(folder / f"{name}.db", name) for name in SCENARIOS}


def cells(scenario: str, passed: dict[str, int]) -> list[str]:
    """Returns the failpoints to kill a scenario at.

    How many commands share a commit depends on the moment, so of those only the first part counts.
    What is on the disk after a commit and before the next is the same: few of those are enough.
    """
    chosen = []
    for name, count in passed.items():
        if name in ONCE and scenario != "launch":
            continue
        if name == "before_flush":
            passes = [1]
        elif name in COMMIT:
            step = 4 if name == "after_commit" else 1 if count < 12 else 2
            passes = list(range(1, count * 6 // 10 + 1, step))
        else:
            passes = [1] if count < 3 else [1, 2]
        chosen += [f"{name}:{number}" for number in passes]
    return chosen


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_INV_86_a_kill_at_any_step_ends_as_no_kill_does(
    crasher: Crasher, passed: Passed, scenario: str, tmp_path: Path
) -> None:
    """Killed at each place in turn, another process carries on; nothing is lost, nothing twice."""
    wrong = crasher.together(
        [
            (tmp_path / f"{number}.db", scenario, (failpoint,))
            for number, failpoint in enumerate(cells(scenario, passed[scenario]))
        ]
    )
    assert wrong == []


@pytest.mark.parametrize("scenario", ["family", "launch", "late"])
def test_INV_86_a_kill_of_the_process_that_takes_over_changes_nothing(
    crasher: Crasher, scenario: str, tmp_path: Path
) -> None:
    """The finder of a dead node dies itself, at each of its steps; the next one goes on."""
    pairs = [("before_end_report", place) for place in RECOVERY]
    pairs += [("after_submit", place) for place in TAKING]
    wrong = crasher.together(
        [(tmp_path / f"{number}.db", scenario, pair) for number, pair in enumerate(pairs)]
    )
    assert wrong == []


def test_every_failpoint_in_the_code_is_one_that_the_matrix_kills_at(passed: Passed) -> None:
    """A place that nothing reaches would be a test that says nothing."""
    written = set()
    for package in ("ledger", "projections", "handlers", "engines", "playledger"):
        for source in (ROOT / package).rglob("*.py"):
            written |= set(re.findall(r'failpoint\("(\w+)"\)', source.read_text()))
    killed = {cell.split(":")[0] for name in SCENARIOS for cell in cells(name, passed[name])}
    killed |= {place.split(":")[0] for place in (*RECOVERY, *TAKING)}
    assert written - killed == set()
