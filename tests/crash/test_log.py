"""The log under power cuts, full disks and damage (SPEC 6.1, 6.9)."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

import playledger
from handlers.port import RunLog
from ledger import events as e
from ledger.database import reading
from ledger.errors import LogDamaged, LogFull, Unavailable
from ledger.failpoint import VARIABLE, arm
from ledger.fsck import fsck
from ledger.log import system_clock
from ledger.seal import blob_ref
from playledger.embed import Ledger
from playledger.wiring import driving, open_log, plays_of
from tests.crash.checks import check_log
from tests.crash.conftest import KILLED, ROOT, Crasher
from tests.crash.driver import Job
from tests.crash.scenarios import EFFECTS_VARIABLE, PLAYS, POLICY, square, timed
from tests.crash.test_recovery import of

WAL_HEADER: Final = 32
FRAME_HEADER: Final = 24
HOUR_MS: Final = 3_600_000


def wal_of(path: Path) -> Path:
    """Returns the file in which a commit lies before it is copied back."""
    return path.with_name(path.name + "-wal")


def commits(wal: bytes) -> list[int]:
    """Returns where each commit of a write-ahead log ends, in bytes."""
    page = int.from_bytes(wal[8:12], "big")
    salts, ends, at = wal[16:24], [], WAL_HEADER
    while at + FRAME_HEADER + page <= len(wal) and wal[at + 8 : at + 16] == salts:
        committed = wal[at + 4 : at + 8] != bytes(4)
        at += FRAME_HEADER + page
        if committed:
            ends.append(at)
    return ends


def seen(path: Path) -> tuple[int, int, int]:
    """Returns head, number of events and number of runs, as a reader sees them."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        sql = (
            "select (select position from log_head), (select count(*) from events),"
            " (select count(*) from runs)"
        )
        head, events, runs = connection.execute(sql).fetchone()
        return head, events, runs


@pytest.fixture
def last_commit(crasher: Crasher, log_path: Path) -> tuple[Path, int, int]:
    """A log as a kill right behind a submit left it, and where its last commit lies in the -wal."""
    assert crasher.run(Job("early", str(log_path), "after_submit")) == KILLED
    assert len(of(check_log(log_path), e.RunSubmitted)) == 1
    ends = commits(wal_of(log_path).read_bytes())
    return log_path, ends[-2], ends[-1]


def test_INV_83_a_cut_at_any_byte_of_the_last_commit_leaves_all_of_it_or_nothing(
    last_commit: tuple[Path, int, int],
) -> None:
    """Every byte of its last frame, and both sides of every other frame's edges."""
    path, start, end = last_commit
    wal = wal_of(path)
    whole = seen(path)
    page = int.from_bytes(wal.read_bytes()[8:12], "big")
    edges = range(start, end, FRAME_HEADER + page)
    cuts = {edge + near for edge in edges for near in (-1, 0, 1, FRAME_HEADER, page)}
    cuts |= set(range(end - FRAME_HEADER - page, end))
    found = set()
    for cut in sorted(cut for cut in cuts if start <= cut < end)[::-1]:
        os.truncate(wal, cut)
        found.add(seen(path))
        if cut in edges:
            events = check_log(path)
            assert of(events, e.RunSubmitted) == []
    head, events_before, runs = found.pop()
    assert found == set()
    assert (head, events_before, runs) == (whole[0] - 3, whole[1] - 3, 0)


@pytest.mark.parametrize("filler", [b"\x00", b"\xff"], ids=["zeros", "ones"])
def test_L1_a_torn_last_commit_is_found_by_its_checksum(
    last_commit: tuple[Path, int, int], filler: bytes
) -> None:
    """The length is there, the bytes are not: the log ends before it, and takes new commands."""
    path, start, end = last_commit
    wal = bytearray(wal_of(path).read_bytes())
    for torn in range(end - 1, start, -509):
        wal[torn:end] = filler * (end - torn)
        wal_of(path).write_bytes(wal)
        assert of(check_log(path), e.RunSubmitted) == []

    async def more() -> None:
        async with playledger.open(path, plays=PLAYS) as ledger:
            ledger.log.writer.before_flush = None
            await ledger.submit(square, -1, run_id="again")

    asyncio.run(more())
    assert [run.run_id for run in of(check_log(path), e.RunSubmitted)] == ["again"]


@pytest.mark.parametrize(("was", "now"), [(b'"runId"', b"'runId'"), (b"many-2", b"many-3")])
def test_L2_a_damaged_event_is_found_and_others_are_still_read(
    crasher: Crasher, log_path: Path, was: bytes, now: bytes
) -> None:
    """What is no event any more is named by its position, another text by the tree over all."""
    crasher.finish(log_path, "many")
    with closing(sqlite3.connect(log_path)) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
        leaf = "select position, leaf from events where instr(cast(leaf as text), 'run/many-2')"
        position, stored = connection.execute(leaf + " order by position limit 1").fetchone()
    content = log_path.read_bytes()
    assert content.count(stored) == 1
    log_path.write_bytes(content.replace(stored, stored.replace(was, now)))
    found = {finding.position for finding in fsck(log_path)}
    assert found & {position, 1} != set()
    with reading(log_path) as connection:
        assert connection.execute("select count(*) from events").fetchone()[0] > position


def test_L2_a_damaged_page_is_refused_with_what_to_do(crasher: Crasher, log_path: Path) -> None:
    """Not a traceback of the driver, and nothing is written on top."""
    crasher.finish(log_path, "many")
    with closing(sqlite3.connect(log_path)) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
        root = "select rootpage from sqlite_master where name = 'log_head'"
        page = connection.execute(root).fetchone()[0]
    with log_path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xa5" * 4096)

    async def write() -> None:
        async with playledger.open(log_path, plays=PLAYS) as ledger:
            await ledger.submit(square, 1, run_id="more")

    with pytest.raises(LogDamaged) as refused:
        asyncio.run(write())
    assert "damaged" in refused.value.message


@contextmanager
def no_file_may_grow_over(size: int) -> Iterator[None]:
    """Makes the kernel refuse to write behind `size` bytes of a file, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_L3_a_full_disk_refuses_the_whole_append_and_reads_go_on(log_path: Path) -> None:
    """The frames of the commit do not fit: 503, nothing of it is there, later it works."""

    async def main() -> None:
        log, plays = await open_log(log_path), plays_of(PLAYS)
        ledger = Ledger(log, plays, policy=POLICY)
        await ledger.submit(square, 1, run_id="before")
        with no_file_may_grow_over(wal_of(log_path).stat().st_size + 5000):
            with pytest.raises(Unavailable):
                await ledger.submit(square, 2, run_id="during")
            assert [line.run.run_id for line in await ledger.runs()] == ["before"]
        await ledger.submit(square, 3, run_id="after")
        await log.close()

    asyncio.run(main())
    assert [run.run_id for run in of(check_log(log_path), e.RunSubmitted)] == ["before", "after"]


def test_L3_a_full_database_says_so(log_path: Path) -> None:
    """SQLite's own limit: the error names the file and what to do, and goes away with its cause."""

    async def main() -> None:
        log, plays = await open_log(log_path), plays_of(PLAYS)
        ledger = Ledger(log, plays, policy=POLICY)
        await _limit(log, 1)
        with pytest.raises(LogFull):
            await asyncio.gather(
                *(ledger.submit(square, number, run_id=f"r{number}") for number in range(50))
            )
        await _limit(log, 1_000_000)
        await ledger.submit(square, 1, run_id="after")
        await log.close()

    asyncio.run(main())
    assert of(check_log(log_path), e.RunSubmitted)[-1].run_id == "after"


async def _limit(log: RunLog, pages: int) -> None:
    await log.run_job(lambda connection, _: connection.execute(f"pragma max_page_count={pages}"))


@pytest.mark.parametrize("place", ["before_flush", "before_commit", "after_commit"])
def test_L4_after_an_error_of_the_disk_the_writer_answers_by_what_is_there(
    log_path: Path, place: str
) -> None:
    """Behind COMMIT it is unknown: the log is opened again and asked; before it nothing stands."""
    raised: list[str] = []

    def broken(name: str) -> None:
        if name == place and armed and not raised:
            raised.append(name)
            raise sqlite3.OperationalError("disk I/O error")

    armed: list[bool] = []

    async def main() -> None:
        log, plays = await open_log(log_path, failpoint=broken), plays_of(PLAYS)
        ledger = Ledger(log, plays, policy=POLICY)
        armed.append(True)
        before = log.writer._connection
        if place == "after_commit":
            await ledger.submit(square, 1, run_id="r")
            assert log.writer._connection is not before
        else:
            with pytest.raises(Unavailable):
                await ledger.submit(square, 1, run_id="r")
            assert [line.run.run_id for line in await ledger.runs()] == []
        answer = (await ledger.submit(square, 1, run_id="r")).answer
        assert answer is not None
        assert answer.replayed == (place == "after_commit")
        await log.close()

    asyncio.run(main())
    assert raised == [place]
    assert len(of(check_log(log_path), e.RunSubmitted)) == 1


@pytest.mark.parametrize(
    "place", ["after_blob_read_back:2", "before_submit", "before_flush:3", "before_commit:3"]
)
def test_INV_03_S9_a_kill_before_the_append_leaves_no_key_no_value_and_no_run(
    crasher: Crasher, log_path: Path, place: str
) -> None:
    """Launch state, key and value become durable together with `run.submitted`, or not at all."""
    assert crasher.run(Job("launch", str(log_path), place)) == KILLED
    assert of(check_log(log_path), e.RunSubmitted) == []  # keys and values are counted in there
    crasher.finish(log_path, "launch")


@pytest.mark.parametrize("place", ["after_commit:5", "after_submit"])
def test_INV_03_a_kill_behind_the_append_leaves_all_of_it(
    crasher: Crasher, log_path: Path, place: str
) -> None:
    """The run, its launch state, its create request, its key and its value."""
    assert crasher.run(Job("launch", str(log_path), place)) == KILLED
    assert len(of(check_log(log_path), e.RunSubmitted)) == 1


def test_S7_the_blob_of_a_submit_that_never_came_is_deleted_after_a_day(
    crasher: Crasher, log_path: Path
) -> None:
    """By the clock: not an hour before, and never one that an event refers to."""
    assert crasher.run(Job("launch", str(log_path), "before_submit")) == KILLED
    orphans = _blobs(log_path)
    assert len(orphans) == 2
    _drive_once(log_path, 23)
    assert _blobs(log_path) == orphans
    crasher.finish(log_path, "launch")
    used = _blobs(log_path) - orphans
    _drive_once(log_path, 25)
    assert _blobs(log_path) == used
    check_log(log_path)


def test_S7_a_blob_that_is_put_again_lives_another_day(log_path: Path) -> None:
    """Else it could expire between the second put and the append that refers to it."""
    late = [0]
    ref = blob_ref(b"k" * 32, b"content")

    async def main() -> None:
        log = await open_log(log_path, clock=lambda: system_clock() + late[0])
        await log.vault.store_blob("run/r", ref, b"content")
        late[0] = 23 * HOUR_MS
        await log.vault.store_blob("run/r", ref, b"content")
        await log.close()

    asyncio.run(main())
    _drive_once(log_path, 25)
    assert _blobs(log_path) == {ref.blob}
    _drive_once(log_path, 48)
    assert _blobs(log_path) == set()


def test_T3_a_clock_that_was_set_back_holds_up_nothing_and_shortens_no_sleep(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's time does not go back: what it calls due is done, what it lets sleep sleeps."""
    monkeypatch.setenv(EFFECTS_VARIABLE, str(log_path.with_name("effects")))
    _drive_once(log_path, 1)

    async def main() -> None:
        log, plays = await open_log(log_path), plays_of(PLAYS)
        ledger = Ledger(log, plays, policy=POLICY)
        async with asyncio.timeout(20), driving(log, plays, ledger.submitter):
            assert await (await ledger.submit(square, 3, run_id="now")).result() == 9
            await ledger.submit(timed, run_id="sleeper")
            async for recorded in ledger.events(follow=True):
                if isinstance(recorded.data, e.RunWaitStarted):
                    assert recorded.data.until_at is not None
                    assert recorded.data.until_at >= recorded.at + 40
                    break
            assert (await ledger.status("sleeper")).waits != ()
        await log.close()

    asyncio.run(main())


def _blobs(path: Path) -> set[str]:
    with reading(path) as connection:
        return {key for (key,) in connection.execute("select key from blobs")}


def _drive_once(path: Path, hours: int) -> None:
    """Starts a node whose clock is some hours ahead, and stops it."""

    def clock() -> int:
        return system_clock() + hours * HOUR_MS

    async def main() -> None:
        log, plays = await open_log(path, clock=clock), plays_of([])
        ledger = Ledger(log, plays, clock=clock)
        async with driving(log, plays, ledger.submitter, clock=clock):
            pass
        await log.close()

    asyncio.run(main())


def test_a_failpoint_in_the_environment_kills_a_process_of_its_own() -> None:
    """The variable is read once, when the first of our modules is imported."""
    import subprocess
    import sys

    script = "from ledger.failpoint import failpoint; failpoint('x'); failpoint('x'); print('on')"
    for spec, status in (("x", KILLED), ("x:2", KILLED), ("x:3", 0), ("y", 0)):
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, VARIABLE: spec},
            capture_output=True,
            check=False,
        )
        assert done.returncode == status


def test_without_the_variable_a_failpoint_is_nothing() -> None:
    """Nothing is counted, and arming with nothing disarms."""
    from ledger.failpoint import failpoint, passed

    arm(None)
    failpoint("x")
    assert passed() == {}
