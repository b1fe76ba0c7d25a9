"""Staged files as a play opens them: written once per process, read-only, checked."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ledger.seal import BlobRef
from ledger.vault import Vault


class StagedFiles:
    """The files of the runs that this process plays."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._folder: Path | None = None

    async def paths(self, files: Iterable[Mapping[str, Any]]) -> dict[str, Path]:
        """Returns where the files of a run lie, by name; raises ValueGone if one is not whole."""
        found: dict[str, Path] = {}
        for item in files:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="playledger-files-"))
            ref = BlobRef(blob=item["blob"], bytes=item["bytes"], sha256=item["sha256"])
            folder = self._folder / ref.blob
            path = folder / Path(str(item["name"])).name
            if not path.exists():
                content = await self._vault.read_file(ref)
                folder.mkdir(exist_ok=True)
                fresh = folder / f".{threading.get_ident()}"
                fresh.write_bytes(content)
                fresh.chmod(0o444)
                fresh.replace(path)
            found[str(item["name"])] = path
        return found

    def remove(self) -> None:
        """Deletes them all."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
