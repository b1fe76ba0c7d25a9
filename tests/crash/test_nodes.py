"""Processes that die, freeze and leave: what another one may end, and what it may not."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

import playledger
from handlers.commands import Command
from handlers.node import Node, Watch, nodes_dir
from handlers.outbox import LIVE_HOSTS
from ledger import events as e
from ledger.database import reading
from ledger.ids import run_stream
from ledger.query import ask
from playledger.embed import Ledger
from playledger.wiring import driving, open_log, plays_of
from tests.crash.checks import check_acknowledged, check_log
from tests.crash.conftest import KILLED, Crasher, errors, is_log
from tests.crash.driver import Job, files_of
from tests.crash.scenarios import EFFECTS_VARIABLE, PLAYS, POLICY
from tests.crash.test_recovery import of

FROZEN_S = 0.6


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits until something is seen in a log that other processes write."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def has(path: Path, kind: type, count: int = 1) -> Callable[[], bool]:
    """Returns whether a log holds `count` events of a kind."""
    return lambda: is_log(path) and len(of(check_log(path), kind)) >= count


def test_a_finder_that_dies_half_way_leaves_the_rest_to_the_next(
    crasher: Crasher, log_path: Path
) -> None:
    """The file is gone and nothing recorded: the next finds no file, which is proof enough."""
    assert crasher.run(Job("many", str(log_path), "before_end_report:2")) == KILLED
    with reading(log_path) as connection:
        (host,) = ask(connection, LIVE_HOSTS)
    assert crasher.run(Job("many", str(log_path), "after_node_removed")) == KILLED
    assert not (nodes_dir(log_path) / host).exists()
    assert of(check_log(log_path), e.InstanceLost) == []
    crasher.finish(log_path, "many")
    lost = of(check_log(log_path), e.InstanceLost)
    assert lost != []
    assert {(one.evidence, one.error_class) for one in lost} == {
        (f"host {host} is gone", "coordinator_restart")
    }


def test_a_frozen_node_that_wakes_is_fenced_and_begins_again_under_a_new_name(
    crasher: Crasher, log_path: Path
) -> None:
    """Stopped in the middle of a play: another ends its instance and runs the next attempt."""
    job = Job("frozen", str(log_path), frozen_s=FROZEN_S)
    with ThreadPoolExecutor(1) as pool:
        sleeper = pool.submit(crasher.run, job)
        until(has(log_path, e.InstanceStarted))
        pid = int(files_of(log_path)["pid"].read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            assert crasher.run(job) == 0, errors(log_path)
            (lost,) = of(check_log(log_path), e.InstanceLost)
            assert lost.error_class == "coordinator_restart"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert sleeper.result(timeout=30) == 0, errors(log_path)
    events = check_log(log_path)
    (ended,) = of(events, e.InstanceCompleted)
    assert ended.attempt == 1
    assert [fenced.attempt for fenced in of(events, e.InstanceOutputFenced)] in ([], [0])
    crasher.finish(log_path, "frozen")


def test_a_node_that_is_only_slow_is_never_taken_for_dead(tmp_path: Path) -> None:
    """Its lock is held and its file touched: there is nothing to end, however long it takes."""
    node = Node(tmp_path / "a.db", touch_s=0.02)
    now = [0.0]
    watch = Watch(tmp_path / "a.db", frozen_s=5.0, monotonic=lambda: now[0])
    path = nodes_dir(tmp_path / "a.db") / node.id
    for _ in range(5):
        assert not watch.dead(node.id)
        before = path.stat().st_mtime_ns
        until(lambda seen=before: path.stat().st_mtime_ns != seen)  # type: ignore[misc]
        now[0] += 100.0
    node.close()
    assert watch.dead(node.id)


def test_a_node_that_stands_still_is_dead_after_the_limit_and_a_single_look_does_not_say_so(
    tmp_path: Path,
) -> None:
    """The finder's own clock decides; a command that looks once judges by file and lock alone."""
    node = Node(tmp_path / "a.db", touch_s=3600)
    now = [0.0]
    watch = Watch(tmp_path / "a.db", frozen_s=5.0, monotonic=lambda: now[0])
    once = Watch(tmp_path / "a.db", by_touch=False)
    assert not watch.dead(node.id)
    now[0] = 4.9
    assert not watch.dead(node.id)
    now[0] = 5.0
    assert watch.dead(node.id)
    assert not once.dead(node.id)
    watch.remove(node.id)
    assert (node.lost, once.dead(node.id)) == (True, True)
    node.renew()
    assert (node.lost, once.dead(node.id)) == (False, False)
    node.close()


@playledger.play
async def held(run: playledger.Run) -> str:
    """Ends when the test lets its first attempt go."""
    if run.attempt == 0:
        await asyncio.to_thread(GATE.wait, 15)
    return f"attempt {run.attempt}"


GATE = threading.Event()


def test_INV_22_an_end_reported_after_the_loss_was_recorded_changes_nothing(
    log_path: Path,
) -> None:
    """The first attempt was called lost and still ends: refused, and kept once as fenced."""
    GATE.clear()

    async def main() -> str:
        async with (
            asyncio.timeout(20),
            playledger.open(log_path, plays=[held], policy=POLICY) as ledger,
        ):
            run = await ledger.submit(held, run_id="r")
            (started,) = [
                r.data
                async for r in _first(ledger, e.InstanceStarted)
                if isinstance(r.data, e.InstanceStarted)
            ]
            lost = e.InstanceLost(
                instance_id=started.instance_id,
                attempt=0,
                error_class="coordinator_restart",
                evidence="it looked dead",
            )
            await ledger.log.transact(
                Command(stream=run_stream("r"), fact=lost, actor="node/other")
            )
            result = str(await run.result())
            GATE.set()
            async for _ in _first(ledger, e.InstanceOutputFenced):
                pass
            return result

    assert asyncio.run(main()) == "attempt 1"
    events = check_log(log_path)
    (fenced,) = of(events, e.InstanceOutputFenced)
    assert (fenced.attempt, fenced.current_attempt, fenced.what) == (0, 1, "completed")
    assert [ended.attempt for ended in of(events, e.InstanceCompleted)] == [1]


def test_a_node_whose_file_was_taken_away_ends_what_it_had_and_begins_again(log_path: Path) -> None:
    """Nobody else is there: under its new name it finds its old one dead, and goes on itself."""
    GATE.clear()

    async def main() -> tuple[list[str | None], str]:
        log, plays = await open_log(log_path), plays_of([held])
        ledger = Ledger(log, plays, policy=POLICY)
        async with asyncio.timeout(20), driving(log, plays, ledger.submitter) as driver:
            run = await ledger.submit(held, run_id="r")
            async for _ in _first(ledger, e.InstanceStarted):
                pass
            hosts: list[str | None] = [driver.node.id]
            Watch(log_path).remove(driver.node.id)
            result = str(await run.result())
            hosts.append(driver.node.id)
            GATE.set()
        await log.close()
        return hosts, result

    hosts, result = asyncio.run(main())
    events = check_log(log_path)
    assert result == "attempt 1"
    assert [created.host for created in of(events, e.InstanceCreated)] == hosts
    assert [node.node_id for node in of(events, e.NodeStarted)] == hosts


async def _first(ledger: Ledger, kind: type):  # type: ignore[no-untyped-def]
    async for recorded in ledger.events(follow=True):
        if isinstance(recorded.data, kind):
            yield recorded
            return


@pytest.mark.parametrize("scenario", ["many", "launch"])
def test_a_command_that_leaves_after_writing_its_intent_is_carried_on_by_the_next_node(
    crasher: Crasher, log_path: Path, scenario: str
) -> None:
    """It submits and exits without a word; nobody holds the intent, so any node takes it."""
    assert crasher.run(Job(scenario, str(log_path), drives=False)) == 0, errors(log_path)
    events = check_log(log_path)
    check_acknowledged(events, files_of(log_path)["acks"])
    assert of(events, e.InstanceCreated) == []
    with reading(log_path) as connection:
        assert connection.execute("select count(*) from leases").fetchone() == (0,)
    crasher.finish(log_path, scenario)


def test_a_command_that_leaves_is_noticed_by_a_running_node(
    crasher: Crasher, log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node sees another process's commit and takes what it left."""
    monkeypatch.setenv(EFFECTS_VARIABLE, str(files_of(log_path)["effects"]))

    async def main() -> None:
        async with asyncio.timeout(20), playledger.open(log_path, plays=PLAYS) as ledger:
            job = Job("many", str(log_path), drives=False)
            assert await asyncio.to_thread(crasher.run, job) == 0
            for number in range(4):
                assert await ledger.run(f"many-{number}").result() == number * number

    asyncio.run(main())
    check_log(log_path)


@playledger.play(retries=1)
async def pausing(run: playledger.Run) -> None:
    """Leaves an open wait behind, and a next attempt that is far away."""
    wait = asyncio.create_task(run.signal("go", timeout=timedelta(milliseconds=500)))
    await asyncio.sleep(0.03)
    wait.cancel()
    raise playledger.Retry(after=timedelta(hours=1))


def test_a_timer_that_another_process_made_pointless_is_let_go(log_path: Path) -> None:
    """A cancel from outside closes the wait: the node must not fire at it for ever."""

    async def main() -> None:
        log, plays = await open_log(log_path), plays_of([pausing])
        ledger = Ledger(log, plays, policy=POLICY)
        async with (
            asyncio.timeout(20),
            playledger.open(log_path) as other,
            driving(log, plays, ledger.submitter) as driver,
        ):
            await ledger.submit(pausing, run_id="r")
            async for _ in _first(ledger, e.RetryClaimed):
                pass
            await other.cancel("r")
            assert "timer" in {row.kind for row in driver.loop._held.values()}
            while "timer" in {row.kind for row in driver.loop._held.values()}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            view = await ledger.status("r")
            assert (view.run.status, [row.kind for row in view.outbox]) == ("cancelled", ["create"])
        await log.close()

    asyncio.run(main())
