"""fsck names every way in which stored bytes can contradict themselves, and where."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from ledger.checker import Finding
from ledger.errors import LogDamaged, LogMissing
from ledger.export import read_export
from ledger.fsck import fsck
from ledger.tables import GUARDS
from tests.bless import LOGS, record_reset

EXPORT = LOGS / "platform-reset.jsonl"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of two runs on disk."""
    path = tmp_path / "log.db"
    asyncio.run(record_reset(path))
    return path


def spoil(path: Path, *statements: str) -> None:
    """Does to a database what its guards refuse, and puts them back."""
    connection = sqlite3.connect(path, isolation_level=None)
    for guard in GUARDS:
        connection.execute(f"drop trigger {guard.split()[2]}")
    connection.create_function("edit", 3, _edit)
    for statement in statements:
        connection.execute(statement)
    for guard in GUARDS:
        connection.execute(guard)
    connection.close()


def _edit(leaf: bytes, was: str, now: str) -> bytes:
    assert was.encode() in leaf
    return leaf.replace(was.encode(), now.encode())


def messages(path: Path) -> list[str]:
    """Returns what is found."""
    return [finding.message for finding in fsck(path)]


def test_a_log_as_it_was_written_has_nothing_wrong(log: Path) -> None:
    """No false alarm."""
    assert messages(log) == []


def test_an_edited_leaf_does_not_hash_to_the_head(log: Path) -> None:
    """UX error 26: which leaves, both hashes; an edit in canonical form shows in nothing else."""
    spoil(log, "update events set leaf = edit(leaf, 'crm:enrich', 'crm:enrage') where position = 2")
    found = list(fsck(log))
    assert [f.what for f in found] == ["hash"]
    assert found[0].message.startswith("leaves @1 to @32 hash to ")
    error = found[0].error("demo.db")
    assert isinstance(error, LogDamaged)
    assert error.message.startswith("demo.db is damaged: leaves @1 to @32 hash to ")
    assert ", the head needs " in error.message
    assert error.hint == "no writes before docs/how-to/restore.md; reads still work"


def test_the_last_leaf_of_an_odd_log_is_named_alone(log: Path) -> None:
    """The compact range narrows it down as far as it can."""
    with sqlite3.connect(log) as connection:
        (last,) = connection.execute("select max(position) from events").fetchone()
    connection.close()
    assert last % 2 == 1
    spoil(
        log,
        f'update events set leaf = edit(leaf, \'"code":"RESET"\', \'"code":"RESEX"\')'
        f" where position = {last}",
    )
    assert any(text.startswith(f"leaf @{last} hashes to ") for text in messages(log))


COLUMNS = [
    ("id = 'x'", 'column id of @5 is "x", its leaf says'),
    ("version = 77", 'column version of @5 is "77", its leaf says "4"'),
    ("type_id = 1", 'column type of @5 is "log.created", its leaf says "instance.created"'),
    ("type_id = 999", 'the type of @5, "instance.created", has no row in its table of names'),
    ("stream_id = 999", 'the stream of @5, "run/reset-once", has no row in its table of names'),
]


@pytest.mark.parametrize(("change", "message"), COLUMNS, ids=[c[0] for c in COLUMNS])
def test_a_column_that_does_not_repeat_its_leaf_is_named(
    log: Path, change: str, message: str
) -> None:
    """The columns are an index; what is true stands in the leaf."""
    spoil(log, f"update events set {change} where position = 5")
    assert any(text.startswith(message) for text in messages(log))


def test_a_missing_event_is_a_gap(log: Path) -> None:
    """Positions are dense: what is missing is named, not only that hashes differ."""
    spoil(log, "delete from events where position in (7, 8)")
    found = messages(log)
    assert "@7 to @8 are missing" in found
    assert any(text.startswith("@9 is v8 of its stream, v6 is next") for text in found)


def test_C049_a_log_with_its_end_cut_off_differs_from_its_head(log: Path) -> None:
    """Truncation shows, because the head says how far the log goes."""
    with sqlite3.connect(log) as connection:
        (last,) = connection.execute("select max(position) from events").fetchone()
    connection.close()
    spoil(log, f"delete from events where position > {last - 3}")
    assert f"the log ends @{last - 3}, the head is @{last}" in messages(log)


def test_events_beyond_the_head_are_found(log: Path) -> None:
    """A head that was set back is not the end of the log."""
    spoil(log, "update log_head set position = position - 1")
    assert any("the log ends @" in text for text in messages(log))


def test_a_guard_that_is_missing_or_changed_is_named(log: Path) -> None:
    """Append-only is kept by triggers, and fsck looks whether they are all there."""
    with sqlite3.connect(log) as connection:
        connection.execute("drop trigger events_no_update")
        connection.execute("drop trigger log_head_once")
        connection.execute(
            "create trigger log_head_once before insert on log_head begin select 1; end"
        )
        connection.execute("create trigger sneaky after insert on events begin select 1; end")
    connection.close()
    assert messages(log) == [
        "the guard events_no_update is missing",
        "the guard log_head_once was changed",
        "there is a trigger on the log that is not ours: sneaky",
    ]


def test_a_damaged_page_is_a_finding_not_a_traceback(log: Path) -> None:
    """Bytes that SQLite itself cannot follow end the check with its words."""
    connection = sqlite3.connect(log)
    connection.execute("pragma wal_checkpoint(truncate)")
    (page,) = connection.execute(
        "select rootpage from sqlite_master where name = 'events'"
    ).fetchone()
    (size,) = connection.execute("pragma page_size").fetchone()
    connection.close()
    with log.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    assert any(finding.what == "pages" for finding in fsck(log))


Change = Callable[[list[bytes]], list[bytes]]


def changed(place: int, **changes: object) -> Change:
    """Returns what changes the envelope of one line, in canonical form."""

    def apply(leaves: list[bytes]) -> list[bytes]:
        event = orjson.loads(leaves[place]) | changes
        leaves[place] = orjson.dumps(event, option=orjson.OPT_SORT_KEYS)
        return leaves

    return apply


FILES: list[tuple[str, Change, str]] = [
    ("other log", changed(9, source="//playledger/" + "0" * 32), 'leaf @10 is of "//playledger/0'),
    ("older", changed(9, time="2020-01-01T00:00:00.000Z"), "leaf @10 is of 2020-01-01T00"),
    ("odd time", changed(9, time="2036-12-01T00:00:00Z"), 'leaf @10 has time "2036-12-01T00'),
    ("odd sequence", changed(9, sequence="10"), 'leaf @10 has sequence "10"'),
    ("id twice", lambda all_: [*all_[:9], _with_id(all_[9], all_[4]), *all_[10:]], "@10 has the"),
    ("version", changed(9, streamversion=3), "@10 is v3 of run/reset-once, v9 is next"),
    ("unknown type", changed(9, type="run.teleported"), 'leaf @10: event type "run.teleported"'),
    ("newer schema", changed(9, schemaversion=9), "leaf @10: "),
    ("spaces", lambda all_: [*all_[:9], all_[9].replace(b'":', b'": ', 1), *all_[10:]], "leaf @10"),
    ("no event", lambda all_: [*all_[:9], b'{"a":1}', *all_[10:]], "leaf @10 is no event"),
    ("empty line", lambda all_: [*all_[:9], b"", *all_[10:]], "leaf @10 is no event"),
    ("order", lambda all_: [*all_[:8], all_[9], all_[8], *all_[10:]], "@9 is missing"),
    ("foreign stream", changed(9, subject="gun/reset-once"), "leaf @10: "),
    ("two logs", lambda all_: [*all_, all_[0]], 'sequence "0000000000000001" follows @43'),
]


@pytest.mark.parametrize(("name", "change", "message"), FILES, ids=[case[0] for case in FILES])
def test_a_spoiled_export_names_the_place(
    tmp_path: Path, name: str, change: Change, message: str
) -> None:
    """Without a head, a file must still agree with itself."""
    path = tmp_path / f"{name}.jsonl"
    leaves = change(list(read_export(EXPORT)))
    path.write_bytes(b"".join(leaf + b"\n" for leaf in leaves))
    found = messages(path)
    assert any(text.startswith(message) for text in found), found


def _with_id(leaf: bytes, other: bytes) -> bytes:
    event = orjson.loads(leaf) | {"id": orjson.loads(other)["id"]}
    return orjson.dumps(event, option=orjson.OPT_SORT_KEYS)


def test_an_export_cut_inside_a_line_says_so(tmp_path: Path) -> None:
    """The last line has no line feed, so nobody takes it for an event."""
    path = tmp_path / "cut.jsonl"
    path.write_bytes(EXPORT.read_bytes()[:-40])
    assert list(fsck(path)) == [Finding("line", "line 43 is cut")]


def test_a_file_without_lines_costs_no_memory(tmp_path: Path) -> None:
    """Junk that begins like an export is refused at its first line."""
    path = tmp_path / "junk.jsonl"
    path.write_bytes(b"{" * 5_000_000)
    assert messages(path) == ["line 1 is over 16384 bytes"]


@pytest.mark.parametrize("content", [b"", b"\x8f\x1e\x04 junk"])
def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """UX error 24."""
    path = tmp_path / "junk.db"
    path.write_bytes(content)
    with pytest.raises(LogMissing, match="is not a playledger log"):
        list(fsck(path))
