"""A short soak in every test run; `make soak` runs the long one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.crash.soak import Soak


@pytest.mark.timeout(300)
def test_a_server_that_is_killed_at_random_moments_loses_nothing_and_does_nothing_twice(
    tmp_path: Path,
) -> None:
    """Each time it is started again, it carries on; the seed is printed if anything is wrong."""
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    figures = Soak(tmp_path, kills=8, runs=12, seed=seed).run()
    assert (figures.kills, figures.verified) == (8, 9)
    assert figures.runs >= 12
