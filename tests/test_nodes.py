"""Who is alive, what a finder may end, and that one bad item keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from handlers.commands import Command
from handlers.node import FROZEN_S, Node, Watch, nodes_dir
from handlers.sweep import sweep
from ledger import events as e
from ledger.errors import CorruptStream
from ledger.ids import run_stream
from playledger import Run, play
from replay import verify
from tests.given import (
    RUN,
    World,
    cancel,
    completed,
    created,
    errored,
    lost,
    submitted,
    world,
)
from tests.local_node import node


@contextmanager
def holding(database: Path, host: str) -> Iterator[Path]:
    """A node's file as a live process has it: there, and locked."""
    folder = nodes_dir(database)
    folder.mkdir(exist_ok=True)
    path = folder / host
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        os.close(descriptor)


class Monotonic:
    """A monotonic clock that a test moves; it stands still while the machine sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def watching(path: Path, **options: Any) -> tuple[Watch, Monotonic]:
    clock = Monotonic()
    return Watch(path, monotonic=clock, **options), clock


def touch(path: Path, at: int) -> None:
    """Touches a node's file at a wall time that only has to differ from the last one."""
    os.utime(path, ns=(at, at))


# --- dead or alive --------------------------------------------------------------------------------


def test_a_host_without_a_file_is_dead(tmp_path: Path) -> None:
    watch, _ = watching(tmp_path / "t.db")
    assert watch.dead("n-1")


def test_a_host_whose_lock_is_free_is_dead_at_once(tmp_path: Path) -> None:
    """The kernel frees it with the process, however that ended."""
    database = tmp_path / "t.db"
    watch, _ = watching(database)
    with holding(database, "n-1"):
        assert not watch.dead("n-1")
    assert watch.dead("n-1")


def test_C016_a_host_is_frozen_when_its_touch_stood_still_by_the_finders_clock(
    tmp_path: Path,
) -> None:
    """15 s of the finder's own monotonic clock, counted from when it first saw that touch."""
    database = tmp_path / "t.db"
    watch, clock = watching(database)
    with holding(database, "n-1") as path:
        for _ in range(20):
            clock.now += FROZEN_S - 0.1
            touch(path, int(clock.now))
            assert not watch.dead("n-1")
        clock.now += FROZEN_S - 0.1
        assert not watch.dead("n-1")
        clock.now += 0.2
        assert watch.dead("n-1")


def test_C016_a_machine_that_slept_kills_nobody(tmp_path: Path) -> None:
    """Eight hours of wall time passed; finder and node both stood still."""
    database = tmp_path / "t.db"
    watch, clock = watching(database)
    with holding(database, "n-1") as path:
        touch(path, 1)
        assert not watch.dead("n-1")
        eight_hours = 8 * 3600 * 10**9
        touch(path, eight_hours)  # the node's first touch after waking
        clock.now += 1
        assert not watch.dead("n-1")


def test_C016_touches_of_a_clock_that_jumps_are_touches(tmp_path: Path) -> None:
    """Only whether it moved counts, never where to."""
    database = tmp_path / "t.db"
    watch, clock = watching(database)
    with holding(database, "n-1") as path:
        for at in (10**18, 10**9, 10**18 + 1, 5):
            touch(path, at)
            clock.now += FROZEN_S + 1
            assert not watch.dead("n-1")


def test_a_command_that_looks_once_judges_by_file_and_lock_alone(tmp_path: Path) -> None:
    database = tmp_path / "t.db"
    watch, clock = watching(database, by_touch=False)
    with holding(database, "n-1"):
        for _ in range(3):
            clock.now += 3600
            assert not watch.dead("n-1")


def test_a_node_holds_its_file_touches_it_and_takes_it_along(tmp_path: Path) -> None:
    database = tmp_path / "t.db"
    watch, _ = watching(database)
    one = Node(database)
    first = one.id
    seen = [one.lost, watch.dead(first)]
    watch.remove(first)
    seen.append(one.lost)
    one.renew()
    seen.append(one.lost)
    assert seen == [False, False, True, False]
    assert one.id != first
    assert watch.dead(first)
    one.close()
    assert list(nodes_dir(database).iterdir()) == []


# --- the sweep ------------------------------------------------------------------------------------


async def begin(given: World, run: str, host: str) -> None:
    await given.tell(submitted(run), run=run)
    await given.tell(created(host=host, run=run), run=run)


def test_C010_a_sweep_ends_the_instances_of_dead_hosts_and_of_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            for run, host in (
                ("r1", "n-dead"),
                ("r2", "n-live"),
                ("r3", "n-own"),
                ("r4", "n-dead"),
            ):
                await begin(given, run, host)
            watch, _ = watching(given.log.path)
            with holding(given.log.path, "n-live"):
                assert await sweep(given.log, watch, "n-own") == 2
                assert await sweep(given.log, watch, "n-own") == 0
            for run in ("r1", "r4"):
                ended = [r.data for r in await given.events(run)]
                losses = [one.error_class for one in ended if isinstance(one, e.InstanceLost)]
                assert losses == ["coordinator_restart"]
                assert "retry.params_requested" in await given.types(run)
            for run in ("r2", "r3"):
                assert (await given.types(run))[-1] == "instance.started"

    asyncio.run(main())
    assert verify(tmp_path / "t.db").ok


def test_a_sweep_frees_the_leases_of_dead_holders(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())

            def lease(connection: sqlite3.Connection, _at: int) -> None:
                held = [("a", "n-dead"), ("b", "n-live"), ("c", "n-own")]
                connection.executemany("insert into leases values (?, ?)", held)

            await given.log.run_job(lease)
            watch, _ = watching(given.log.path)
            with holding(given.log.path, "n-live"):
                await sweep(given.log, watch, "n-own")
            assert given.rows("select intent_id from leases order by 1") == [("b",), ("c",)]

    asyncio.run(main())


def test_a_finder_that_died_half_way_leaves_work_that_the_next_finds(tmp_path: Path) -> None:
    """It had removed the file and ended one of two; the other still names its host."""

    async def main() -> None:
        async with world(tmp_path) as given:
            for run in ("r1", "r2"):
                await begin(given, run, "n-dead")
            with holding(given.log.path, "n-dead"):
                pass
            watch, _ = watching(given.log.path)
            watch.remove("n-dead")
            gone = lost("coordinator_restart")
            await given.tell(gone, run=RUN)
            assert await sweep(given.log, watch, "n-own") == 1
            assert (await given.types("r2")).count("instance.lost") == 1

    asyncio.run(main())


def test_C010_c_a_run_that_was_cancelling_on_a_dead_host_ends(tmp_path: Path) -> None:
    """Only that host could end its instance; it is gone with it."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(host="n-dead"), cancel())
            assert await given.status() == "cancelling"
            watch, _ = watching(given.log.path)
            await sweep(given.log, watch, None)
            assert await given.status() == "cancelled"
            assert given.rows("select kind from outbox") == []

    asyncio.run(main())


def test_what_a_dead_host_was_asked_after_the_end_is_settled(tmp_path: Path) -> None:
    """The grace was over before the instance was: its terminate is still open as the host dies."""

    async def main() -> None:
        clock = [1_796_112_000_000]
        async with world(tmp_path, clock=lambda: clock[0]) as given:
            await given.tell(submitted(), created(host="n-dead"), cancel())
            clock[0] += 10_000
            await given.tell(e.TimerFired(purpose="cancel_grace", armed_by=""))
            assert await given.status() == "cancelled"
            watch, _ = watching(given.log.path)
            await sweep(given.log, watch, None)
            assert given.rows("select kind from outbox") == []

    asyncio.run(main())


def test_INV_88_one_run_that_cannot_be_told_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep goes on to the others, and finds it again next time."""

    async def main() -> None:
        async with world(tmp_path) as given:
            for run in ("bad", "good"):
                await begin(given, run, "n-dead")
            real = given.log.transact

            async def transact(command: Command) -> Any:
                if command.stream == "run/bad":
                    raise CorruptStream("run/bad v9 (@9): not allowed")
                return await real(command)

            monkeypatch.setattr(given.log, "transact", transact)
            watch, _ = watching(given.log.path)
            assert await sweep(given.log, watch, None) == 1
            assert (await given.types("good")).count("instance.lost") == 1
            monkeypatch.setattr(given.log, "transact", real)
            assert await sweep(given.log, watch, None) == 1

    asyncio.run(main())


# --- one bad item ---------------------------------------------------------------------------------


@play
async def add_one(run: Run, n: int) -> int:
    run.log("adding")
    return n + 1


def poison(path: Path, run: str, intent: str, leaf: bytes | None) -> None:
    """Puts an intent into the outbox that no node can understand."""
    with sqlite3.connect(path) as connection:
        if leaf is not None:
            connection.execute("drop trigger events_no_update")
            connection.execute("update events set leaf = ? where id = ?", (leaf, intent))
        connection.execute(
            "insert or replace into outbox values (?, 0, ?, 'params', null, null, 0, 0, 0)",
            (intent, run_stream(run)),
        )
    connection.close()


def test_INV_88_a_poison_intent_is_parked_and_the_others_go_on(tmp_path: Path) -> None:
    """An intent that is not in the log cannot be done; it waits visibly, with its reason."""

    async def main() -> None:
        async with node(tmp_path, add_one) as given:
            assert await given.run(add_one, 1, run_id="first") == "completed"
            poison(tmp_path / "t.db", "first", "ab" * 16, None)
            assert await given.run(add_one, 2, run_id="second") == "completed"
            parked = await given.seen("first", "effect.parked")
            assert isinstance(parked.data, e.EffectParked)
            assert parked.data.intent_id == "ab" * 16
            (failed,) = await given.events("first", e.EffectFailed)
            assert (failed.code, failed.error_class) == ("INTENT_LOST", "permanent")
            assert await given.run(add_one, 3, run_id="third") == "completed"
            await given.ledger.log.run_job(
                lambda connection, _: connection.execute("delete from outbox")
            )

    asyncio.run(main())


def test_INV_88_an_intent_that_cannot_be_read_is_parked_too(tmp_path: Path) -> None:
    """Damage does not go away by asking again every half second."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), errored("platform_reset"))
            (intent,) = [r.id for r in await given.events() if r.type == "retry.params_requested"]
        poison(tmp_path / "t.db", RUN, intent, b"not an event")

        @play(name="shop:refund")
        async def refund(run: Run) -> None:
            run.log("never begun")

        from playledger.embed import Ledger
        from playledger.wiring import driving, open_log, plays_of

        log = await open_log(tmp_path / "t.db")
        plays = plays_of([refund])
        ledger = Ledger(log, plays)
        async with driving(log, plays, ledger.submitter), asyncio.timeout(20):
            async for recorded in log.events(after=9, follow=True):
                if recorded.type == "effect.parked":
                    break
        await log.close()

    asyncio.run(main())


def test_a_failed_try_after_a_resume_is_counted_on(tmp_path: Path) -> None:
    """Its number is its key: counted from 1 again it would be found recorded, and never due."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), errored("platform_reset"))
            (intent,) = [r.id for r in await given.events() if r.type == "retry.params_requested"]

            async def fail(tries: int) -> list[str]:
                failed = e.EffectFailed(
                    intent_id=intent, kind="params", try_number=tries, code="X",
                    error_class="transient",
                )  # fmt: skip
                return [r.type for r in await given.tell(failed)]

            async def resume(request: str) -> None:
                await given.tell(e.EffectResumed(intent_id=intent), request=request)

            row = "select tries, parked from outbox"
            for tries in range(1, 11):
                await fail(tries)
            assert given.rows(row) == [(10, 1)]
            await resume("one")
            assert given.rows(row) == [(10, 0)]
            assert await fail(11) == ["effect.failed"]
            await resume("two")
            assert given.rows(row) == [(11, 0)]
            for tries in range(12, 21):
                await fail(tries)
            assert given.rows(row) == [(20, 1)]

    asyncio.run(main())
    assert verify(tmp_path / "t.db").ok


def test_an_end_that_was_reported_before_the_sweep_stands(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(host="n-dead"), completed())
            watch, _ = watching(given.log.path)
            assert await sweep(given.log, watch, None) == 0
            assert await given.status() == "completed"

    asyncio.run(main())
