"""The schema's revisions: they build what `create_schema` builds, and run by themselves."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

import ledger.log
import ledger.migrations
import playledger
import replay
from ledger.database import create_schema, stored_revision
from ledger.errors import PlayledgerError, SchemaNewer
from ledger.migrations import FOLDERS, REVISIONS, upgrade
from ledger.tables import METADATA
from playledger.version import VERSION
from playledger.wiring import open_log

NEXT = """
from alembic import op
revision = "9999"
down_revision = "{last}"

def upgrade():
    op.execute("create table added_later (one integer)")
    {then}
"""


def schema(connection: sqlite3.Connection) -> dict[str, str]:
    """Returns what the database consists of, its statements without line breaks."""
    rows = connection.execute(
        "select name, sql from sqlite_master where sql is not null and name <> 'alembic_version'"
    )
    return {name: re.sub(r"\s+", " ", sql).replace("( ", "(").strip() for name, sql in rows}


def test_the_revisions_build_the_schema_that_a_new_file_gets(tmp_path: Path) -> None:
    """Literal DDL and today's tables agree, so an old file and a new one are the same."""
    upgrade(tmp_path / "old.db")
    with (
        sqlite3.connect(tmp_path / "old.db") as old,
        sqlite3.connect(":memory:", isolation_level=None) as new,
    ):
        create_schema(new, METADATA, REVISIONS[-1])
        assert schema(old) == schema(new)
        assert stored_revision(old) == REVISIONS[-1]
    old.close()
    new.close()


def test_the_files_are_the_revisions_that_are_known() -> None:
    """REVISIONS is read without Alembic, so it must not drift from the folder."""
    config = Config()
    config.set_main_option("script_location", str(Path(FOLDERS[0]).parent))
    scripts = ScriptDirectory.from_config(config).walk_revisions()
    assert tuple(script.revision for script in reversed(list(scripts))) == REVISIONS


def add_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str = "") -> None:
    """Makes this release one that has a revision more."""
    folder = tmp_path / "versions"
    folder.mkdir()
    (folder / "9999.py").write_text(NEXT.format(last=REVISIONS[-1], then=then))
    monkeypatch.setattr(ledger.migrations, "FOLDERS", [*FOLDERS, str(folder)])
    monkeypatch.setattr(ledger.log, "REVISIONS", (*REVISIONS, "9999"))


def make_log(path: Path) -> None:
    """Makes a log with nothing in it."""

    async def main() -> None:
        async with playledger.open(path):
            pass

    asyncio.run(main())


def test_an_older_file_is_migrated_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedded log needs no step of its own after an upgrade; the log is as it was."""
    path = tmp_path / "old.db"
    make_log(path)
    before = [recorded.id for recorded in replay.read(path)]
    add_revision(tmp_path, monkeypatch)
    make_log(path)
    with sqlite3.connect(path) as connection:
        assert stored_revision(connection) == "9999"
        assert "added_later" in schema(connection)
    connection.close()
    assert [recorded.id for recorded in replay.read(path)] == before
    assert replay.verify(path).ok


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All revisions run in one transaction: half of one is never there."""
    path = tmp_path / "old.db"
    make_log(path)
    add_revision(tmp_path, monkeypatch, then='raise ValueError("half-way")')
    with pytest.raises(ValueError, match="half-way"):
        asyncio.run(open_log(path))
    with sqlite3.connect(path) as connection:
        assert stored_revision(connection) == REVISIONS[-1]
        assert "added_later" not in schema(connection)
    connection.close()


def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    """UX error 25: nothing was changed, and what to do is said."""
    path = tmp_path / "new.db"
    make_log(path)
    with sqlite3.connect(path) as connection:
        connection.execute("update alembic_version set version_num = '9'")
    connection.close()
    with pytest.raises(PlayledgerError) as caught:
        make_log(path)
    assert isinstance(caught.value, SchemaNewer)
    assert f"has schema 9, playledger {VERSION} knows up to" in caught.value.message
