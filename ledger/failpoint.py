"""Failpoints: named places at which a crash test kills this process, as a power cut would.

`PLAYLEDGER_FAILPOINT="name"` or `"name:n"` kills at the n-th time that place is passed, with
SIGKILL: no handler, no flush, no goodbye.  Without the variable a place costs one look at a
global.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Final

VARIABLE: Final = "PLAYLEDGER_FAILPOINT"


class _Armed:
    """Which place kills, at which pass, and how often each was passed, from any thread."""

    def __init__(self, spec: str) -> None:
        self._name, _, count = spec.partition(":")
        self._at = int(count or "1")
        self._lock = threading.Lock()
        self.passed: Counter[str] = Counter()

    def passing(self, name: str) -> None:
        with self._lock:
            self.passed[name] += 1
            if name == self._name and self.passed[name] == self._at:
                os.kill(os.getpid(), signal.SIGKILL)


def failpoint(name: str) -> None:
    """Marks a place between two durable steps; does nothing unless a crash test armed it."""
    if _armed is not None:
        _armed.passing(name)


def arm(spec: str | None) -> None:
    """Chooses the place that kills this process, or none; counting starts anew."""
    global _armed  # noqa: PLW0603 - read by every failpoint, so nothing stands between
    _armed = _Armed(spec) if spec else None


def passed() -> dict[str, int]:
    """Returns how often each place was passed since `arm`."""
    return dict(_armed.passed) if _armed is not None else {}


_armed: _Armed | None = None
arm(os.environ.get(VARIABLE))
