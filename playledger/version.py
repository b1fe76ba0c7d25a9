"""The version of this release; pyproject.toml says the same (tested)."""

from typing import Final

VERSION: Final = "0.1.0"
