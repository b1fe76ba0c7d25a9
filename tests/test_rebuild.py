"""Read models can be deleted and built again, while the log goes on and readers read."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import replay
from handlers.commands import Command
from ledger import events as e
from ledger.errors import Conflict, LogLocked
from ledger.ids import run_stream
from ledger.lock import WriteLock
from playledger.wiring import open_log
from projections.rebuild import rebuild
from projections.tables import PROJECTION_VERSION, READ_MODELS
from projections.verify import verify
from tests.bless import POLICY, record_cancel, record_refund, record_reset

SEAL = e.Seal(sd=("qPrqJuVKrK2zuAmgTDbsWxIF8GW5ls7z51-19OOjGIA",), bytes=2)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of two runs on disk."""
    path = tmp_path / "log.db"
    asyncio.run(record_reset(path))
    return path


def tables(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Returns every row of every read model, in key order."""
    with sqlite3.connect(path) as connection:
        found = {
            t.name: connection.execute(
                f"select * from {t.name} order by {', '.join(c.name for c in t.primary_key)}"
            ).fetchall()
            for t in READ_MODELS
        }
    connection.close()
    return found


def change(path: Path, *statements: str) -> None:
    """Runs statements on the file."""
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


async def send_signal(path: Path, run_id: str, signal_id: str) -> None:
    """Appends one more signal to a run that has not ended."""
    log = await open_log(path)
    try:
        fact = e.SignalReceived(signal_id=signal_id, signal="go", event_type="go", data=SEAL)
        await log.transact(Command(stream=run_stream(run_id), fact=fact, actor="cli/local"))
    finally:
        await log.close()


async def submit(path: Path, run_id: str) -> None:
    """Appends a run that nothing drives."""
    log = await open_log(path)
    try:
        fact = e.RunSubmitted(
            run_id=run_id,
            play_name="crm:enrich",
            engine="cloudflare",
            isolation="task",
            scope="default",
            org_id="acme",
            lineage=e.Lineage(family_key=run_id),
            params=SEAL,
            request_digest="d",
            policy=POLICY,
        )
        await log.transact(
            Command(stream=run_stream(run_id), fact=fact, actor="cli/local", run_key=b"k" * 32)
        )
    finally:
        await log.close()


@pytest.mark.parametrize("record", [record_reset, record_refund, record_cancel])
def test_a_refold_gives_the_stored_rows(tmp_path: Path, record: object) -> None:
    """Promise 3: what the writer left is what the log gives, value by value."""
    path = tmp_path / "log.db"
    asyncio.run(record(path))  # type: ignore[operator]
    found = verify(path)
    assert (found.differences, found.corrupt) == ((), ())
    assert found.rows > 3


@pytest.mark.parametrize("table", [t.name for t in READ_MODELS])
def test_deleted_rows_come_back_as_they_were(tmp_path: Path, table: str) -> None:
    """Everything but log and vault may be deleted."""
    path = tmp_path / "log.db"
    asyncio.run(record_refund(path))
    asyncio.run(submit(path, "open"))
    before = tables(path)
    assert before[table]
    change(path, f"delete from {table}")
    assert verify(path).differences[0].table == table
    assert rebuild(path).differed == len(before[table])
    assert tables(path) == before
    assert verify(path).differences == ()


def test_every_kind_of_wrong_row_is_named_and_mended(log: Path) -> None:
    """A changed value, a row too few, a row too many: the first one by table, key and column."""
    asyncio.run(submit(log, "open"))
    before = tables(log)
    change(
        log,
        "update runs set status = 'completed' where run_id = 'reset-thrice'",
        "delete from instances where run_id = 'reset-once' and attempt = 1",
        "insert into leases values ('x', 'y')",
        "insert into outbox values ('x', 1, 'run/x', 'timer', null, null, 0, 0, 0)",
    )
    found = [difference.text for difference in verify(log).differences]
    assert found == [
        'status of "reset-thrice" in runs is completed, a refold gives failed',
        'row "reset-once, 1" of instances is missing',
        'row "x" of outbox should not be there',
    ]
    assert rebuild(log).differed == 3
    assert tables(log) == before
    with sqlite3.connect(log) as connection:
        assert connection.execute("select * from projections").fetchall()[0][1] == (
            PROJECTION_VERSION
        )
        assert connection.execute("select * from leases").fetchall() == [("x", "y")]
    connection.close()


def test_a_rebuild_of_right_rows_changes_nothing(log: Path) -> None:
    """Twice in a row is once: no row differs, none is written."""
    before = tables(log)
    assert rebuild(log).differed == 0
    assert rebuild(log).differed == 0
    assert tables(log) == before


def test_names_that_are_missing_are_taken_from_the_leaves(log: Path) -> None:
    """The integers of the index columns get their names back."""
    with sqlite3.connect(log) as connection:
        names = connection.execute("select * from streams order by 1").fetchall()
        types = connection.execute("select * from event_types order by 1").fetchall()
    connection.close()
    change(log, "delete from streams", "delete from event_types where type_id in (3, 4)")
    assert not replay.verify(log).ok
    assert rebuild(log).names == len(names) + 2
    with sqlite3.connect(log) as connection:
        assert connection.execute("select * from streams order by 1").fetchall() == names
        assert connection.execute("select * from event_types order by 1").fetchall() == types
    connection.close()
    assert replay.verify(log).ok


def test_C035_what_is_appended_meanwhile_is_in_the_rows(log: Path) -> None:
    """Events between the fold and the swap are folded under the lock; nothing is passed over."""
    asyncio.run(submit(log, "open"))
    change(log, "delete from runs", "delete from signals")

    def meanwhile() -> None:
        asyncio.run(submit(log, "new"))
        change(log, "update runs set status = 'x' where run_id = 'new'")

    rebuilt = rebuild(log, before_swap=meanwhile)
    found = tables(log)
    assert [row[0] for row in found["runs"]] == ["new", "open", "reset-once", "reset-thrice"]
    assert verify(log).differences == ()
    assert rebuilt.position == verify(log).position


def test_C035_readers_see_the_old_rows_until_they_see_the_new_ones(log: Path) -> None:
    """The list is never empty: before the swap what was there serves, right or wrong."""
    change(log, "update runs set status = 'wrong'")
    seen: list[list[str]] = []

    def look() -> None:
        seen.append([str(row[3]) for row in tables(log)["runs"]])

    rebuild(log, before_swap=look)
    look()
    assert seen == [["wrong", "wrong"], ["completed", "failed"]]


def test_C035_a_second_rebuild_is_refused_while_one_runs(log: Path) -> None:
    """Two at once would each undo the other's catching up."""
    refused: list[Conflict] = []

    def again() -> None:
        try:
            rebuild(log)
        except Conflict as error:
            refused.append(error)

    rebuild(log, before_swap=again)
    assert [error.code for error in refused] == ["REBUILD_RUNNING"]
    assert "is being rebuilt by another process" in refused[0].message
    rebuild(log)


KILLED = """
import os, signal, sys
from pathlib import Path
from projections.rebuild import rebuild
rebuild(Path(sys.argv[1]), before_swap=lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_C035_a_rebuild_that_is_killed_leaves_the_old_rows_serving(log: Path) -> None:
    """Nothing of it is left behind, and the next one is not refused."""
    change(log, "update runs set status = 'wrong'")
    before = tables(log)
    folder = sorted(path.name for path in log.parent.iterdir())
    killed = subprocess.run([sys.executable, "-c", KILLED, str(log)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert tables(log) == before
    after = sorted(path.name for path in log.parent.iterdir())
    assert [name for name in after if name not in folder] in ([], ["log.db.rebuild"])
    assert rebuild(log).differed == 2


def test_a_rebuild_that_cannot_lock_changes_nothing(log: Path) -> None:
    """A writer that holds the lock for too long ends the rebuild, not the log."""
    change(log, "delete from runs")
    lock = WriteLock(log)
    lock.acquire()
    try:
        with pytest.raises(LogLocked):
            rebuild(log, lock_wait_s=0.05)
    finally:
        lock.close()
    assert tables(log)["runs"] == []
    assert rebuild(log).differed == 2


def test_a_running_writer_goes_on_after_a_rebuild(log: Path) -> None:
    """It holds states, not rows, and a fold gives the same ones."""

    async def main() -> None:
        await submit(log, "open")
        writer = await open_log(log)
        try:
            for n in range(3):
                fact = e.SignalReceived(signal_id=f"s{n}", signal="go", event_type="go", data=SEAL)
                command = Command(stream=run_stream("open"), fact=fact, actor="cli/local")
                await writer.transact(command)
                change(log, "delete from signals", "update runs set version = 99")
                await asyncio.to_thread(rebuild, log)
        finally:
            await writer.close()

    asyncio.run(main())
    assert verify(log).differences == ()
    assert replay.verify(log).ok


def test_a_stream_that_the_fold_refuses_stops_alone(log: Path) -> None:
    """Other runs are rebuilt, and the one that stopped is named."""
    asyncio.run(submit(log, "open"))
    with sqlite3.connect(log, isolation_level=None) as connection:
        connection.execute("drop trigger events_no_update")
        leaf = connection.execute("select leaf from events where position = 7").fetchone()[0]
        bad = leaf.replace(b'"attempt":0', b'"attempt":7')
        assert bad != leaf
        connection.execute("update events set leaf = ? where position = 7", (bad,))
    connection.close()
    change(log, "delete from runs")
    found = rebuild(log)
    assert len(found.corrupt) == 1
    assert "attempt 7 was never requested" in found.corrupt[0]
    assert [row[0] for row in tables(log)["runs"]] == ["open", "reset-once", "reset-thrice"]


def test_checks_beside_appends_give_no_false_alarm(log: Path) -> None:
    """The end of the log and the rows it led to are read in one snapshot."""

    async def main() -> None:
        await submit(log, "open")
        writer = await open_log(log)
        stop = asyncio.Event()

        async def append() -> int:
            n = 0
            while not stop.is_set():
                n += 1
                fact = e.SignalReceived(signal_id=f"s{n}", signal="go", event_type="go", data=SEAL)
                await writer.transact(
                    Command(stream=run_stream("open"), fact=fact, actor="cli/local")
                )
            return n

        appending = asyncio.create_task(append())
        try:
            for _ in range(5):
                assert (await asyncio.to_thread(replay.verify, log)).ok
                assert (await asyncio.to_thread(verify, log)).differences == ()
                await asyncio.to_thread(rebuild, log)
        finally:
            stop.set()
            assert await appending > 0
            await writer.close()

    asyncio.run(main())
    assert replay.verify(log).ok
