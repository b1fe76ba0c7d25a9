"""The writer and its file: whole batches, dense positions, true answers, guards that hold."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from handlers.commands import Command
from ledger import events as e
from ledger.codec import Recorded, decode, encode
from ledger.errors import (
    Conflict,
    LogFull,
    LogLocked,
    LogReadOnly,
    Overloaded,
    RunNotFound,
    SchemaNewer,
    Unavailable,
)
from ledger.events import Event
from ledger.ids import run_stream
from ledger.merkle import CompactRange, leaf_hash
from ledger.transaction import read_head
from ledger.writer import Committed
from replay import verify
from tests.given import (
    RUN,
    T0,
    Ticks,
    World,
    completed,
    created,
    leaves,
    record,
    signal,
    submitted,
    world,
)

ROOT = Path(__file__).parents[1]


def dense(path: Path) -> list[Recorded[Event]]:
    """Returns the events of a file, whose positions have to be 1, 2, 3 and whose times not go back.

    The head and its Merkle range have to be those of these very leaves.
    """
    events = leaves(path)
    assert [r.position for r in events] == list(range(1, len(events) + 1))
    assert [r.time for r in events] == sorted(r.time for r in events)
    grown = CompactRange()
    with sqlite3.connect(path) as connection:
        for (leaf,) in connection.execute("select leaf from events order by position"):
            grown.append(leaf_hash(leaf))
        head = read_head(connection)
    connection.close()
    assert (head.position, head.range) == (len(events), grown.dump())
    return events


# --- append-only, whoever asks --------------------------------------------------------------------

FORBIDDEN = [
    "update events set leaf = x'00' where position = 1",
    "update events set version = 9 where position = 1",
    "update or replace events set position = 1 where position = 2",
    "update or ignore events set id = 'x' where position = 2",
    "delete from events where position = 2",
    "delete from events",
    "insert into events select 2, 'x', 1, 99, 1, x'00'",
    "insert or replace into events select 2, 'x', 1, 99, 1, x'00'",
    (
        "insert or replace into events select position, id, stream_id, version, type_id, x'00'"
        " from events where position = 2"
    ),
    (
        "insert or replace into events select 999, id, stream_id, 99, type_id, leaf"
        " from events where position = 2"
    ),
    (
        "insert or ignore into events select 999, id, stream_id, 99, type_id, leaf"
        " from events where position = 2"
    ),
    (
        "insert or replace into events select 999, 'x', stream_id, version, type_id, leaf"
        " from events where position = 2"
    ),
    "replace into events select 1, 'x', 1, 99, 1, x'00'",
    (
        "insert into events select 2, 'x', 1, 99, 1, x'00' where true"
        " on conflict (position) do update set leaf = x'00'"
    ),
    "update log_head set position = position - 1",
    "update log_head set recorded_at = recorded_at - 1",
    "update log_head set log_id = 'other'",
    "update log_head set one = 2",
    "delete from log_head",
    "insert into log_head select 2, log_id, position, recorded_at, range from log_head",
    "insert or replace into log_head select 1, log_id, 0, 0, x'' from log_head",
    "replace into log_head select 1, 'other', position, recorded_at, range from log_head",
]


@pytest.mark.parametrize("sql", FORBIDDEN)
def test_INV_84_the_database_itself_refuses_to_change_history(tmp_path: Path, sql: str) -> None:
    """From any program that opens the file, with foreign keys on or off and recursive triggers."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), completed())

    asyncio.run(main())
    path = tmp_path / "t.db"
    before = path.read_bytes()
    for pragma in ("foreign_keys=off", "recursive_triggers=off", "ignore_check_constraints=on"):
        connection = sqlite3.connect(path)
        connection.execute(f"pragma {pragma}")
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(sql)
        connection.rollback()
        connection.close()
    assert path.read_bytes() == before
    dense(path)


def test_INV_84_a_history_that_was_changed_all_the_same_does_not_verify(tmp_path: Path) -> None:
    """Who removes the guards first is found by the head that does not fit."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), completed())

    asyncio.run(main())
    path = tmp_path / "t.db"
    assert verify(path).ok
    for number, sql in enumerate(
        (
            "update events set leaf = replace(leaf, 'shop', 'shoq') where position = 2",
            "delete from events where position = 4",
            "update events set position = 1000 - position where position in (4, 5)",
        )
    ):
        copy = tmp_path / f"copy{number}.db"
        shutil.copy(path, copy)
        connection = sqlite3.connect(copy)
        guard = connection.execute("select sql from sqlite_master where name like 'events_no_%'")
        guards = [row[0] for row in guard.fetchall()]
        connection.execute("drop trigger events_no_update")
        connection.execute("drop trigger events_no_delete")
        connection.execute(sql.replace("replace(leaf", "replace(cast(leaf as text)"))
        for text in guards:
            connection.execute(text)
        connection.commit()
        connection.close()
        assert not verify(copy).ok, sql


# --- positions ------------------------------------------------------------------------------------


def test_C019_refused_and_rolled_back_commands_burn_no_position(tmp_path: Path) -> None:
    """150 refusals, a batch that fails whole, and one that commits: no hole anywhere."""

    async def main() -> None:
        broken: list[str] = []

        def failpoint(name: str) -> None:
            if broken and name == broken[0]:
                raise sqlite3.OperationalError("disk I/O error")

        async with world(tmp_path, failpoint=failpoint) as given:
            await given.tell(submitted())
            commands = [await given.command(signal(n), expected_version=99) for n in range(150)]
            refused = await asyncio.gather(
                *(given.log.transact(c) for c in commands), return_exceptions=True
            )
            assert all(isinstance(answer, Conflict) for answer in refused)
            for place in ("before_flush", "before_commit"):
                broken[:] = [place]
                with pytest.raises(Unavailable):
                    await given.tell(signal(1))
            broken.clear()
            (last,) = await given.tell(signal(1))
            assert last.position == 5
            assert [r.position async for r in given.log.events(after=4)] == [5]

    asyncio.run(main())
    dense(tmp_path / "t.db")


def test_times_never_go_back_and_are_one_per_commit(tmp_path: Path) -> None:
    """The clock of the machine may: a rule then sees the last time again (T3)."""

    async def main() -> None:
        clock = Ticks()
        async with world(tmp_path, clock=clock) as given:
            await given.tell(submitted())
            clock.now = T0 - 3_600_000
            await given.tell(signal(1))
            clock.now = T0 + 5
            batch = [await given.command(signal(n)) for n in (2, 3)]
            answers = await asyncio.gather(*(given.log.transact(c) for c in batch))
            times = {answer.events[0].time for answer in answers}
            assert len(times) == 1

    asyncio.run(main())
    times = [r.at for r in dense(tmp_path / "t.db")]
    assert times == [T0] * 5 + [T0 + 5] * 2


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "stands"), [("before_flush", 0), ("before_commit", 0), ("after_commit", 1)]
)
def test_C059_an_interrupted_commit_is_answered_by_what_is_there(
    tmp_path: Path, place: str, stands: int
) -> None:
    """Every kind of write, and whoever asks again finds it or makes it: no double, no loss."""

    async def main() -> None:
        hits: list[str] = []
        armed: list[bool] = []

        def failpoint(name: str) -> None:
            if armed and name == place:
                armed.clear()
                hits.append(name)
                raise sqlite3.OperationalError("disk I/O error")

        async with world(tmp_path, failpoint=failpoint) as given:
            for fact in (submitted(), created(), signal(), completed()):
                command = await given.command(fact)
                armed.append(True)
                before = await given.log.position()
                if stands:
                    answer = await given.log.transact(command)
                    assert not answer.replayed
                else:
                    with pytest.raises(Unavailable):
                        await given.log.transact(command)
                    assert await given.log.position() == before
                again = await given.log.transact(command)
                assert again.replayed == bool(stands)
            assert len(hits) == 4
            assert await given.status() == "completed"

    asyncio.run(main())
    dense(tmp_path / "t.db")
    assert verify(tmp_path / "t.db").ok


@pytest.mark.parametrize("place", ["before_commit", "after_commit"])
def test_C059_a_job_is_never_said_to_be_done_when_it_is_not(tmp_path: Path, place: str) -> None:
    """A write that is no event (a lease, a blob) has no id to look up: in doubt it is an error."""

    async def main() -> None:
        armed: list[bool] = []
        clock = Ticks()

        def failpoint(name: str) -> None:
            if armed and name == place:
                armed.clear()
                raise sqlite3.OperationalError("disk I/O error")

        def job(connection: sqlite3.Connection, _at: int) -> str:
            connection.execute("insert or ignore into leases values ('i', 'n')")
            return "done"

        async with world(tmp_path, failpoint=failpoint, clock=clock) as given:
            armed.append(True)
            try:
                said = await given.log.run_job(job)
            except Unavailable:
                said = "unknown"
            there = given.rows("select count(*) from leases") == [(1,)]
            assert not (said == "done" and not there)
            assert await given.log.run_job(job) == "done"

    asyncio.run(main())


def test_a_commit_that_fails_before_it_is_tried_is_rolled_back_by_name(tmp_path: Path) -> None:
    """COMMIT itself refused (a constraint, a full disk): the transaction is gone, all are told."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())

            def poison(connection: sqlite3.Connection, _at: int) -> None:
                connection.execute("pragma defer_foreign_keys=on")

            await given.log.run_job(poison)
            await given.tell(signal())

    asyncio.run(main())
    dense(tmp_path / "t.db")


def test_a_job_that_fails_is_undone_alone(tmp_path: Path) -> None:
    async def main() -> None:
        def bad(connection: sqlite3.Connection, _at: int) -> None:
            connection.execute("insert into leases values ('bad', 'n')")
            raise ValueError("no")

        async with world(tmp_path) as given:
            await given.tell(submitted())
            answers = await asyncio.gather(
                given.log.run_job(bad),
                given.log.transact(await given.command(signal())),
                return_exceptions=True,
            )
            assert isinstance(answers[0], ValueError)
            assert given.rows("select * from leases where intent_id = 'bad'") == []
            assert (await given.types())[-1] == "signal.received"

    asyncio.run(main())


def test_a_full_queue_is_an_error_that_says_when_to_come_again(tmp_path: Path) -> None:
    """Never a drop: what was taken is committed, what was not is told so."""

    async def main() -> None:
        gate = threading.Event()

        def failpoint(name: str) -> None:
            if name == "before_flush":
                assert gate.wait(30)

        gate.set()
        async with world(tmp_path, queue_max=2, failpoint=failpoint) as given:
            await given.tell(submitted())
            commands = [await given.command(signal(n)) for n in range(8)]
            gate.clear()
            first = asyncio.ensure_future(given.log.transact(commands[0]))
            async with asyncio.timeout(10):
                while given.log.writer._queue.qsize() or not first.done():
                    await asyncio.sleep(0)
                    if given.log.writer._queue.qsize() == 0:
                        break
            others = [asyncio.ensure_future(given.log.transact(c)) for c in commands[1:]]
            await asyncio.sleep(0)
            gate.set()
            answers = await asyncio.gather(first, *others, return_exceptions=True)
            refused = [a for a in answers if isinstance(a, BaseException)]
            assert refused
            assert all(isinstance(a, Overloaded) and a.retry_after == 1 for a in refused)
            kept = len(await given.events()) - 3
            assert kept == len(answers) - len(refused)

    asyncio.run(main())


def test_a_batch_holds_at_most_its_limit(tmp_path: Path) -> None:
    async def main() -> None:
        sizes: list[int] = []

        def count(transaction: Any) -> None:
            sizes.append(len(transaction.events))

        async with world(tmp_path, batch_max=4, before_flush=count) as given:
            await given.tell(submitted())
            commands = [await given.command(signal(n)) for n in range(20)]
            await asyncio.gather(*(given.log.transact(c) for c in commands))
        assert sum(sizes[1:]) == 20
        assert max(sizes[1:]) <= 4

    asyncio.run(main())


def test_a_closed_log_refuses_and_what_was_taken_before_is_committed(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            commands = [await given.command(signal(n)) for n in range(50)]
            waiting = [asyncio.ensure_future(given.log.transact(c)) for c in commands]
            await asyncio.sleep(0)
            closing = asyncio.ensure_future(given.log.close())
            answers = await asyncio.gather(*waiting)
            assert all(not answer.replayed for answer in answers)
            await closing
            with pytest.raises(Unavailable) as caught:
                await given.log.transact(commands[0])
            assert caught.value.code == "LOG_CLOSED"

    asyncio.run(main())
    assert len(dense(tmp_path / "t.db")) == 4 + 50


def test_what_comes_while_the_log_closes_is_answered(tmp_path: Path) -> None:
    """Nobody waits for ever: it was committed, or it is told that the log is closed."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            commands = [await given.command(signal(n)) for n in range(400)]
            closing = asyncio.ensure_future(given.log.close())
            answers: list[Any] = []
            async with asyncio.timeout(20):
                for command in commands:
                    try:
                        answers.append(asyncio.ensure_future(given.log.transact(command)))
                    except Unavailable:
                        break
                    await asyncio.sleep(0)
                done = await asyncio.gather(*answers, return_exceptions=True)
            await closing
            for answer in done:
                assert not isinstance(answer, BaseException) or isinstance(answer, Unavailable)

    asyncio.run(main())
    dense(tmp_path / "t.db")


def test_a_batch_is_one_wake_up_with_its_events_rows_and_states(tmp_path: Path) -> None:
    async def main() -> None:
        seen: list[Committed] = []
        async with world(tmp_path) as given:
            stop = given.log.writer.subscribe(asyncio.get_running_loop(), seen.append)
            await given.tell(submitted(), created())
            stop()
            await given.tell(signal())
        assert [[r.type for r in c.events] for c in seen] == [
            ["run.submitted", "run.launch_state_put", "instance.create_requested"],
            ["instance.created", "instance.started"],
        ]
        assert seen[-1].states[run_stream(RUN)].run.status == "running"
        assert seen[-1].rows is not None

    asyncio.run(main())


def test_a_log_opened_for_reading_writes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
        async with world(tmp_path, read_only=True) as given:
            assert len(await given.events()) == 3
            with pytest.raises(LogReadOnly):
                await given.tell(signal())

    asyncio.run(main())


# --- events of a newer release --------------------------------------------------------------------


def append_foreign(path: Path, leaf: bytes, stream: str, version: int) -> None:
    """Appends a leaf as another process would, head and all."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("begin immediate")
    head = read_head(connection)
    grown = CompactRange.load(head.range, head.position)
    grown.append(leaf_hash(leaf))
    (stream_id,) = connection.execute(
        "select stream_id from streams where name = ?", (stream,)
    ).fetchone()
    connection.execute(
        "insert into events select ?, ?, ?, ?, 1, ?",
        (head.position + 1, orjson.loads(leaf)["id"], stream_id, version, leaf),
    )
    connection.execute("update log_head set position = position + 1, range = ?", (grown.dump(),))
    connection.execute("commit")
    connection.close()


def test_INV_90_an_unknown_event_stops_its_own_stream_and_no_other(tmp_path: Path) -> None:
    """A newer release wrote it beside us: other runs are written and read on."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            await given.tell(submitted("r2"), run="r2")
            leaf = encode(record(signal(1), 8, 4, identity="ab" * 16))
            newer = leaf.replace(b'"type":"signal.received"', b'"type":"signal.teleported"')
            append_foreign(given.log.path, newer, run_stream(RUN), 4)
            stopped = Command(stream=run_stream(RUN), fact=signal(2), actor="cli/local")
            other = Command(stream=run_stream("r2"), fact=signal(1), actor="cli/local")
            for again in (False, True):  # in one batch, and again
                answers = await asyncio.gather(
                    given.log.transact(stopped),
                    given.log.transact(other),
                    return_exceptions=True,
                )
                assert isinstance(answers[0], SchemaNewer)
                assert not isinstance(answers[1], BaseException)
                assert answers[1].replayed == again
            with pytest.raises(SchemaNewer):
                await given.events()
            assert len(await given.events("r2")) == 4

    asyncio.run(main())


# --- several on one file --------------------------------------------------------------------------


@contextmanager
def holding(path: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Another program holds SQLite's write lock for a while, as a backup tool would."""
    code = (
        "import sqlite3, sys, time\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('begin immediate')\n"
        "print('held', flush=True)\n"
        "time.sleep(float(sys.argv[2]))\n"
        "c.execute('rollback')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(seconds)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_C020_a_lock_held_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """Three seconds: nobody notices more than the wait, and no append is lost."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            commands = [await given.command(signal(n)) for n in range(20)]
            with holding(given.log.path, 3.0):
                begin = time.monotonic()
                answers = await asyncio.gather(*(given.log.transact(c) for c in commands))
                assert 1.0 < time.monotonic() - begin < 5.0
            assert len({answer.position for answer in answers}) == 20

    asyncio.run(main())
    dense(tmp_path / "t.db")


def test_C020_a_lock_held_for_long_is_503_and_the_same_request_works_later(tmp_path: Path) -> None:
    """Reads go on meanwhile; the refused append is not there until it is sent again."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            command = await given.command(signal())
            with holding(given.log.path, 60.0) as holder:
                waiting = asyncio.ensure_future(given.log.transact(command))
                assert len(await given.events()) == 3
                with pytest.raises(LogLocked) as caught:
                    await waiting
                assert caught.value.code == "LOG_LOCKED"
                assert caught.value.retriable
                assert len(await given.events()) == 3
                holder.kill()
                holder.wait()
                answer = await given.log.transact(command)
                assert not answer.replayed

    asyncio.run(main())
    dense(tmp_path / "t.db")


# --- a disk that is full --------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Gives a file system of its own, or skips where we may not mount one."""
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs the right to mount a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_C023_a_full_disk_is_503_nothing_half_done_and_better_without_a_restart(
    tmp_path: Path,
) -> None:
    """Filled while writing: reads go on, then space comes back and the same request lands once."""

    async def main(disk: Path) -> None:
        async with world(disk) as given:
            await given.tell(submitted())
            ballast = disk / "ballast"
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            ballast.write_bytes(bytes(free - 40_000))
            landed, refused = [], None
            for n in range(400):
                command = await given.command(signal(n))
                try:
                    landed.append(await given.log.transact(command))
                except Unavailable as error:
                    refused = error
                    break
            assert isinstance(refused, LogFull)
            assert refused.retriable
            assert "free space" in refused.hint
            assert len(await given.events()) == 3 + len(landed)
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await given.log.transact(command)
            ballast.unlink()
            answer = await given.log.transact(command)
            assert not answer.replayed
            assert len(await given.events()) == 4 + len(landed)

    with small_disk(tmp_path / "disk", "3m") as disk:
        asyncio.run(main(disk))
        dense(disk / "t.db")
        assert verify(disk / "t.db").ok


def test_C023_a_full_database_leaves_nothing_half_done(tmp_path: Path) -> None:
    """SQLite's own limit stands in for the disk, where no file system can be mounted."""

    async def limit(given: World, pages: int) -> None:
        await given.log.run_job(lambda c, _: c.execute(f"pragma max_page_count={pages}").fetchall())

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            await limit(given, 1)
            landed = 0
            command: Command | None = None
            for n in range(500):
                command = await given.command(signal(n))
                try:
                    await given.log.transact(command)
                except LogFull:
                    break
                landed += 1
            else:
                pytest.fail("never full")
            assert len(await given.events()) == 3 + landed
            await limit(given, 10**6)
            answer = await given.log.transact(command)
            assert not answer.replayed

    asyncio.run(main())
    dense(tmp_path / "t.db")
    assert verify(tmp_path / "t.db").ok


# --- long runs ------------------------------------------------------------------------------------


def test_C052_what_an_append_writes_does_not_grow_with_the_history(tmp_path: Path) -> None:
    """Counted in statements and bytes of state, not in time: 50 events or 1500, it is the same."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            sizes: list[int] = []
            for start in (0, 1500):
                await asyncio.gather(
                    *(
                        given.log.transact(
                            Command(stream=run_stream(RUN), fact=lines(n), actor="x")
                        )
                        for n in range(start, start + 50 + start // 30 * 29)
                    )
                )
                seen: list[Committed] = []
                stop = given.log.writer.subscribe(asyncio.get_running_loop(), seen.append)
                await given.log.transact(
                    Command(stream=run_stream(RUN), fact=lines(start + 10_000), actor="x")
                )
                stop()
                rows = seen[0].rows
                assert rows is not None
                assert {name: len(r) for name, r in rows.items() if r} == {"runs": 1}
                sizes.append(len(str(rows["runs"])))
            assert abs(sizes[1] - sizes[0]) < 20

    asyncio.run(main())


def lines(n: int) -> e.RunLog:
    return e.RunLog(
        instance_id=created().instance_id,
        attempt=0,
        n=n,
        count=1,
        dropped=0,
        lines=e.Seal(sd=("x" * 43,), bytes=2),
    )


def test_a_stored_leaf_is_what_was_decoded(tmp_path: Path) -> None:
    """Written once: what a reader decodes encodes to the bytes that were hashed."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), completed())
            for (leaf,) in given.rows("select leaf from events"):
                assert encode(decode(leaf)) == leaf
            with pytest.raises(RunNotFound):
                await given.tell(signal(), run="nobody")

    asyncio.run(main())
