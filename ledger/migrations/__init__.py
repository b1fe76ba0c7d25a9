"""Schema revisions of the database, oldest first; the last is the one this release writes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

REVISIONS: Final = ("0001",)


def upgrade(path: Path) -> None:
    """Runs every migration that the file lacks."""
    raise NotImplementedError
