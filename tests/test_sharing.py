"""Several processes on one file: one order, one winner, nobody misses anything."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from handlers.commands import Command, Reporter
from handlers.outbox import Scope, release, take, unleased_query
from ledger import events as e
from ledger.database import check_file, reading
from ledger.errors import Conflict, RunTerminal, StaleAttempt
from ledger.export import is_database
from ledger.ids import run_stream
from playledger.embed import Ledger
from playledger.wiring import plays_of
from replay import verify
from tests.given import (
    HOST,
    RUN,
    T0,
    Ticks,
    World,
    cancel,
    completed,
    created,
    errored,
    instance,
    leaves,
    loaded,
    lost,
    signal,
    submitted,
    world,
)
from tests.sharing_worker import greet

ROOT = Path(__file__).parents[1]
OURS = Scope(plays=frozenset({"shop:refund"}))


class Workers:
    """Processes that do one job each on a file, all begun before any of them may go on."""

    def __init__(self, path: Path, jobs: Sequence[Sequence[object]]) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.sharing_worker", str(path), *map(str, job)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for job in jobs
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def go(self) -> None:
        """Lets them begin."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    async def answers(self) -> list[object]:
        """Waits for all and returns what each said at its end."""
        loop = asyncio.get_running_loop()
        said = await asyncio.gather(
            *(loop.run_in_executor(None, process.communicate) for process in self._processes)
        )
        assert [process.returncode for process in self._processes] == [0] * len(self._processes)
        return [json.loads(out) for out, _ in said]


# --- one order ------------------------------------------------------------------------------------


def test_C017_C020_every_reader_gets_every_event_once_in_one_order(tmp_path: Path) -> None:
    """Four processes of 200 appends each; a follower, a reader of another handle, and a poller."""

    async def main() -> None:
        writers, each = 4, 200
        total = 1 + writers * (3 + each)
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(world(tmp_path))
            other = await stack.enter_async_context(world(tmp_path, read_only=True))

            async def follow(given: World) -> list[int]:
                out: list[int] = []
                async for recorded in given.log.events(follow=True):
                    out.append(recorded.position)
                    if recorded.position == total:
                        break
                return out

            async def poll(given: World) -> list[int]:
                out = [0]
                while out[-1] < total:
                    out += [r.position for r in await given.log.read(out[-1], limit=7)]
                return out[1:]

            workers = Workers(one.log.path, [("append", f"w{n}", each) for n in range(writers)])
            readers = asyncio.gather(follow(one), follow(other), poll(one))
            workers.go()
            assert await workers.answers() == [each] * writers
            async with asyncio.timeout(60):
                assert list(await readers) == [list(range(1, total + 1))] * 3

    asyncio.run(main())
    events = leaves(tmp_path / "t.db")
    for n in range(4):  # each caller's own appends stand in its own order
        ids = [r.data.signal_id for r in events if isinstance(r.data, e.SignalReceived)
               and r.subject == f"run/w{n}"]  # fmt: skip
        assert ids == [f"w{n}-{i}" for i in range(200)]
    assert verify(tmp_path / "t.db").ok


def test_a_commit_of_another_process_is_noticed_at_once(tmp_path: Path) -> None:
    """By the file's own counter, looked at every 5 ms; far below a second on a busy machine too."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            workers = Workers(given.log.path, [("one", RUN)])
            watching = asyncio.ensure_future(anext(aiter(given.log.events(4, follow=True))))
            await asyncio.sleep(0)
            workers.go()
            recorded = await asyncio.wait_for(watching, 30)
            assert recorded.type == "signal.received"
            (committed_at,) = await workers.answers()
            assert isinstance(committed_at, float)
            assert time.time() - committed_at < 1.0

    asyncio.run(main())


def test_a_look_at_the_file_never_lets_go_of_its_locks(tmp_path: Path) -> None:
    """Closing any descriptor of a file frees all locks of this process on it (POSIX).

    Another process would then take the log for unused when it leaves, and remove the WAL under us:
    what is committed behind that is lost.
    """

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            check_file(given.log.path)
            assert is_database(given.log.path)
            with reading(given.log.path):
                pass
            async with world(tmp_path, read_only=True), world(tmp_path):
                pass
            assert verify(given.log.path).ok
            for n in range(3):
                workers = Workers(given.log.path, [("append", f"w{n}", 5)])
                workers.go()
                await workers.answers()
                await given.tell(signal(n))
                assert await given.log.position() == 4 + (n + 1) * 9
                assert len(await given.log.read(0)) == 4 + (n + 1) * 9

    asyncio.run(main())
    assert verify(tmp_path / "t.db").ok
    assert len(leaves(tmp_path / "t.db")) == 4 + 27


# --- one winner -----------------------------------------------------------------------------------


def test_INV_10_C001_32_submits_of_one_run_make_one_run_and_one_instance(tmp_path: Path) -> None:
    """Eight at once in each of four processes, none knowing of the other."""

    async def main() -> None:
        async with world(tmp_path) as given:
            workers = Workers(given.log.path, [("submit", "same", 8)] * 4)
            workers.go()
            said = await workers.answers()
            fresh = [n for n in said if isinstance(n, int)]
            assert sum(fresh) == 1  # one of 32 made it, 31 found it
            types = await given.types("same")
            assert types.count("run.submitted") == 1
            assert types.count("instance.create_requested") == 1

    asyncio.run(main())
    assert verify(tmp_path / "t.db").ok


def test_INV_10_32_submits_in_one_process_are_one_run(tmp_path: Path) -> None:
    """Each draws a key of its own; whoever comes second seals again under the first one's."""

    async def main() -> None:
        async with world(tmp_path) as given:
            ledger = Ledger(given.log, plays_of([greet]))
            runs = await asyncio.gather(
                *(ledger.submit(greet, "ada", run_id="same") for _ in range(32))
            )
            answers = [run.answer for run in runs if run.answer is not None]
            assert sum(not answer.replayed for answer in answers) == 1
            assert len({a.recorded.id for a in answers if a.recorded is not None}) == 1
            assert len(given.rows("select * from outbox")) == 1

    asyncio.run(main())


@pytest.mark.parametrize("limit", [0, 1, 2, 10])
def test_INV_26_INV_27_fifty_observers_of_one_failure_make_one_claim(
    tmp_path: Path, limit: int
) -> None:
    """Each with its own handle on the file, all reporting the failure and the loaded params."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            handles = [await stack.enter_async_context(world(tmp_path)) for _ in range(3)]
            first = handles[0]
            await first.tell(submitted(retry_limit=limit), created())
            for attempt in range(limit + 1):
                failed = [
                    handles[n % 3].log.transact(
                        await first.command(errored("platform_reset", attempt))
                    )
                    for n in range(50)
                ]
                await asyncio.gather(*failed)
                if await first.status() == "failed":
                    break
                command = await first.command(loaded(attempt))
                await asyncio.gather(*(handles[n % 3].log.transact(command) for n in range(50)))
                create = await first.command(created(attempt + 1))
                creates = await asyncio.gather(
                    *(
                        h.log.transact(replace(create, fact=created(attempt + 1, host=f"n-{n}")))
                        for n, h in enumerate(handles)
                    ),
                    return_exceptions=True,
                )
                assert sum(not getattr(answer, "replayed", True) for answer in creates) == 1
            events = await first.events()
            attempts = [r for r in events if isinstance(r.data, e.InstanceCreateRequested)]
            claims = [r for r in events if isinstance(r.data, e.RetryClaimed)]
            assert (len(attempts), len(claims)) == (limit + 1, limit)
            assert await first.status() == "failed"

    asyncio.run(main())
    assert verify(tmp_path / "t.db").ok


def test_C014_every_intent_is_taken_once(tmp_path: Path) -> None:
    """Four processes taking ten at a time from 300 rows until nothing is left."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await asyncio.gather(
                *(
                    given.log.transact(
                        Command(
                            stream=run_stream(f"r{n}"),
                            fact=submitted(f"r{n}"),
                            actor="cli/local",
                            run_key=bytes(32),
                        )
                    )
                    for n in range(300)
                )
            )
            workers = Workers(given.log.path, [("take", f"n-{n}", 10) for n in range(4)])
            workers.go()
            got = [taken for taken in await workers.answers() if isinstance(taken, list)]
            taken = [intent for mine in got for intent in mine]
            assert len(taken) == len(set(taken)) == 300
            leases = given.rows("select intent_id, node_id from leases")
            assert {(i, f"n-{n}") for n, mine in enumerate(got) for i in mine} == set(leases)

    asyncio.run(main())


# --- leases ---------------------------------------------------------------------------------------


async def leased(given: World, node: str, scope: Scope = OURS) -> list[str]:
    """Takes what nobody holds, as a node does."""
    rows = await given.log.reader.ask(unleased_query(node, scope))
    got: list[str] = await given.log.run_job(take(node, rows))
    return got


def test_a_lease_only_saves_double_work_and_may_be_deleted(tmp_path: Path) -> None:
    """Without it the intent is done twice, and recorded once."""

    async def main() -> None:
        async with world(tmp_path) as one, world(tmp_path) as other:
            await one.tell(submitted())
            assert len(await leased(one, "n-1")) == 1
            assert await leased(other, "n-2") == []
            await one.log.run_job(lambda connection, _: connection.execute("delete from leases"))
            assert len(await leased(other, "n-2")) == 1
            first = await one.log.transact(await one.command(created(host="n-1")))
            second = await other.log.transact(await other.command(created(host="n-2")))
            assert (first.replayed, second.replayed) == (False, True)
            assert second.recorded == first.recorded
        assert verify(tmp_path / "t.db").ok

    asyncio.run(main())


def test_C016_no_clock_judges_a_lease(tmp_path: Path) -> None:
    """Clocks 45 s ahead and behind, then steps of an hour and a sleep of eight: it holds.

    What ends it is its holder's end; and the log's own time never goes back.
    """

    async def main() -> None:
        fast, slow = Ticks(T0 + 45_000), Ticks(T0 - 45_000)
        async with world(tmp_path, clock=fast) as one, world(tmp_path, clock=slow) as other:
            await one.tell(submitted())
            assert len(await leased(one, "n-1")) == 1
            for step in (0, 3_600_000, -7_200_000, 8 * 3_600_000):
                slow.now += step
                fast.now -= step
                assert await leased(other, "n-2") == []
                await other.tell(signal(abs(step)))
            await one.log.run_job(release("n-1"))
            assert len(await leased(other, "n-2")) == 1
        times = [r.at for r in leaves(tmp_path / "t.db")]
        assert times == sorted(times)

    asyncio.run(main())


def test_a_node_takes_only_what_it_can_do(tmp_path: Path) -> None:
    """Its plays or its family, rows of no host or its own, and nothing that is parked."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted())
            assert await leased(given, "n-1", Scope(plays=frozenset({"other:play"}))) == []
            assert await leased(given, "n-1", Scope(plays=frozenset())) == []
            assert await leased(given, "n-1", Scope(frozenset(), family="other")) == []
            await given.tell(created(host=HOST), cancel())
            mine = await leased(given, "n-2")
            kinds = given.rows("select kind, host from outbox order by kind")
            assert kinds == [("terminate", HOST), ("timer", None)]
            assert len(mine) == 1
            assert len(await leased(given, HOST)) == 1

    asyncio.run(main())


# --- two handles on one run -----------------------------------------------------------------------


def test_two_processes_that_take_turns_decide_on_what_the_other_left(tmp_path: Path) -> None:
    """The cached state of a stream goes when another process appended to it, no other does."""

    async def main() -> None:
        async with world(tmp_path) as one, world(tmp_path) as other:
            await one.tell(submitted())
            await one.tell(submitted("r2"), run="r2")
            for n in range(10):
                await (one, other)[n % 2].tell(signal(n))
            await other.tell(signal(99))
            assert "run/r2" in one.log.writer._cache
            state = one.loaded()
            assert state is not None
            assert state.run.signals == 11
            assert [r.version for r in await one.events()] == list(range(1, 15))
            await other.tell(created(), completed())
            with pytest.raises(RunTerminal):
                await one.tell(signal(100))

    asyncio.run(main())
    assert verify(tmp_path / "t.db").ok


def test_C013_C010_an_attempt_that_others_replaced_is_fenced_in_every_process(
    tmp_path: Path,
) -> None:
    """Its node froze; another ended it and started the next; what it says on waking is refused."""

    async def main() -> None:
        async with world(tmp_path) as frozen, world(tmp_path) as finder:
            await frozen.tell(submitted(), created(host="n-a"))
            await finder.tell(lost("coordinator_restart"), loaded(), created(1, host="n-b"))
            stale = Reporter(instance(0), "n-a")
            for report in (
                completed(0),
                e.RunProgress(instance_id=instance(0), attempt=0, n=0, done=1),
                errored("platform_reset", 0),
            ):
                with pytest.raises(StaleAttempt) as caught:
                    await frozen.tell(report, reporter=stale)
                assert caught.value.details["currentAttempt"] == 1
            with pytest.raises(Conflict):
                await frozen.tell(created(1, host="n-a"), cause="e" * 32)
            await finder.tell(completed(1), reporter=Reporter(instance(1), "n-b"))
            with pytest.raises(StaleAttempt):
                await frozen.tell(completed(0), reporter=stale)
            assert await frozen.status() == "completed"
            fenced = [r.data for r in await frozen.events()
                      if isinstance(r.data, e.InstanceOutputFenced)]  # fmt: skip
            assert [f.what for f in fenced] == ["completed", "progress", "errored"]

    asyncio.run(main())
    assert verify(tmp_path / "t.db").ok


def test_C008_three_notices_of_one_loss_use_one_attempt(tmp_path: Path) -> None:
    """Two sweepers and a poll; and one that comes when the next attempt runs changes nothing."""

    async def main() -> None:
        async with world(tmp_path) as one, world(tmp_path) as other:
            await one.tell(submitted(), created())
            notice = await one.command(lost("coordinator_restart"))
            await asyncio.gather(
                one.log.transact(notice), other.log.transact(notice), one.log.transact(notice)
            )
            await other.tell(loaded(), created(1))
            answer = await one.log.transact(notice)
            assert answer.replayed
            state = one.loaded()
            assert state is not None
            assert state.run.used.restart == 1
            assert state.run.attempt == 1
            assert (await one.types()).count("instance.lost") == 1

    asyncio.run(main())
