"""Schema revisions of the database, oldest first; the last is the one this release writes.

A new file is made whole by `create_schema`, with no migration.  An older one is brought up by
Alembic in one transaction, so a kill half-way leaves it as it was.  Each revision holds literal
DDL: it says what was done then, whatever the tables look like now.  The log itself is never
migrated: what events mean today is the upcasters' work, on read (ledger/upcast.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

REVISIONS: Final = ("0001", "0002")
FOLDERS: Final = [str(Path(__file__).with_name("versions"))]


def upgrade(path: Path) -> None:
    """Runs every migration that the file lacks; the caller holds the write lock."""
    from alembic import command  # noqa: PLC0415 - only an older file needs it (NUMBERS T8)
    from alembic.config import Config  # noqa: PLC0415
    from sqlalchemy import event  # noqa: PLC0415

    from ledger.database import explaining, writer_engine  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(FOLDERS))
    engine = writer_engine(path)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("begin immediate"))
    with explaining(path), engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
