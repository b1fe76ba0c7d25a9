"""An export is the stored bytes up to one position, and comes back as a log."""

from __future__ import annotations

import asyncio
import io
import sqlite3
from pathlib import Path

import pytest

from handlers.commands import Command
from ledger import events as e
from ledger.codec import decode
from ledger.errors import LogDamaged, LogMissing, RunNotFound
from ledger.export import PAGE, export, is_database, read_export, write_export
from ledger.ids import run_stream
from playledger.wiring import open_log
from tests.bless import record_cancel, record_reset


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of two runs on disk."""
    path = tmp_path / "log.db"
    asyncio.run(record_reset(path))
    return path


def stored(path: Path) -> list[bytes]:
    """Returns the leaves as the database holds them."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute("select leaf from events order by position").fetchall()
    connection.close()
    return [leaf for (leaf,) in rows]


def test_an_export_is_exactly_the_stored_bytes(log: Path) -> None:
    """No header, no trailer, one line feed behind each leaf."""
    out = io.BytesIO()
    assert write_export(export(log), out) == len(stored(log))
    assert out.getvalue() == b"".join(leaf + b"\n" for leaf in stored(log))


def test_C050_every_reader_of_lines_sees_the_same_lines(log: Path) -> None:
    """No leaf holds what any reader takes for the end of a line."""
    text = b"".join(leaf + b"\n" for leaf in export(log)).decode()
    assert text.splitlines() == text.split("\n")[:-1]


def test_an_export_comes_back_as_it_went(log: Path, tmp_path: Path) -> None:
    """What was written is read again, byte for byte."""
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        write_export(export(log), file)
    assert list(read_export(path)) == stored(log)
    assert not is_database(path)
    assert is_database(log)


def test_one_run_is_its_stream_in_order(log: Path) -> None:
    """Versions from 1, nothing of another run."""
    events = [decode(leaf) for leaf in export(log, run="reset-thrice")]
    assert {event.subject for event in events} == {run_stream("reset-thrice")}
    assert [event.version for event in events] == list(range(1, len(events) + 1))


def test_a_family_is_the_run_and_all_that_it_started(tmp_path: Path) -> None:
    """In the log's order, without the events of nobody's run."""
    path = tmp_path / "family.db"
    asyncio.run(record_cancel(path))
    expected = [leaf for leaf in stored(path) if decode(leaf).correlationid == "family-1"]
    assert list(export(path, family="family-1")) == expected
    assert len({decode(leaf).subject for leaf in expected}) == 4


def test_C053_an_export_ends_at_the_head_it_began_with(log: Path) -> None:
    """What is appended meanwhile belongs to the next one; the reader holds no lock."""
    before = stored(log)
    reading = export(log)
    first = next(reading)

    asyncio.run(_grow(log))
    assert [first, *reading] == before
    assert len(stored(log)) > len(before)


async def _grow(path: Path, count: int = 1) -> None:
    log = await open_log(path)
    try:
        commands = (
            Command(
                stream="system",
                fact=e.NodeStarted(node_id=f"n-{n}", version="0", plays=0),
                actor="node/n",
            )
            for n in range(count)
        )
        await asyncio.gather(*(log.transact(command) for command in commands))
    finally:
        await log.close()


def test_pages_do_not_lose_what_lies_on_their_edges(tmp_path: Path) -> None:
    """More than two pages, whole and of one run, come out once each and in order."""
    path = tmp_path / "long.db"
    count = 2 * PAGE + 3

    asyncio.run(_grow(path, count))
    positions = [decode(leaf).position for leaf in export(path)]
    assert positions == list(range(1, count + 2))


def test_a_run_that_is_not_there_is_said(log: Path) -> None:
    """Nothing is written for a name that was mistyped."""
    with pytest.raises(RunNotFound):
        list(export(log, run="reset-onc"))
    with pytest.raises(RunNotFound):
        list(export(log, family="reset-onc"))


def test_a_missing_log_and_a_cut_export_are_errors(log: Path, tmp_path: Path) -> None:
    """A cut export is recognisable: its last line has no end."""
    with pytest.raises(LogMissing):
        list(export(tmp_path / "none.db"))
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(leaf + b"\n" for leaf in export(log))[:-1])
    with pytest.raises(LogDamaged, match="is cut"):
        list(read_export(cut))
