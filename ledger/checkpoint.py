"""Copies the WAL back beside the writer, so that no commit has to stall for all of it."""

from __future__ import annotations

import sqlite3
import threading
from typing import Final

import structlog
from sqlalchemy import Engine

from ledger.database import driver_connection

CHECKPOINT_S: Final = 0.1
log = structlog.get_logger("ledger.checkpoint")


class Checkpointer:
    """A thread with a connection of its own that works a moment after something was written."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wrote = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpointer", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """Says that something was written."""
        self._wrote.set()

    def close(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._wrote.set()
        self._thread.join()

    def _run(self) -> None:
        connection = driver_connection(self._engine)
        try:
            while not self._stopped.is_set():
                self._wrote.wait()
                self._wrote.clear()
                self._stopped.wait(CHECKPOINT_S)
                try:
                    connection.execute("pragma wal_checkpoint(passive)").fetchall()
                except sqlite3.Error as error:
                    log.warning("checkpoint failed", error=str(error))
        finally:
            connection.close()
