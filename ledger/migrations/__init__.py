"""Schema revisions of the database, oldest first; the last is the one this release writes."""

from __future__ import annotations

from typing import Final

REVISIONS: Final = ("0001",)
