"""A play in a process of its own: the same to the log as in a task, but it can be killed."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from handlers.submit import StagedFile
from ledger import events as e
from ledger.lock import WriteLock
from tests import process_plays as plays
from tests.local_node import POLICY, Given, node

ROOT = Path(__file__).resolve().parent.parent
ALL = [value for value in vars(plays).values() if hasattr(value, "__playledger_play__")]


@asynccontextmanager
async def process_node(folder: Path, **options: Any) -> AsyncIterator[Given]:
    async with node(folder, *ALL, isolation="process", **options) as given:
        yield given


async def read_pid(given: Given, marker: Path) -> int:
    """Waits until a play has said that it left its process id, and returns it."""
    await given.seen("r", "run.log")
    return int(marker.read_text())  # noqa: ASYNC240 - a test may wait for a byte of its own disk


def gone(pid: int, timeout_s: float = 20) -> bool:
    """Waits for the end of a process that is nobody's child here."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def test_a_play_runs_in_a_process_of_its_own_with_the_whole_run_context(tmp_path: Path) -> None:
    """Files, signals, waits, sleeps, children, logs and progress work through the pipes."""

    async def main() -> None:
        async with process_node(tmp_path) as given:
            rows = StagedFile(name="rows.csv", content=b"a,b\n1,2\n3,4\n")
            run = await given.ledger.submit(plays.everything, "x", run_id="r", files=[rows])
            await run.signal("go", {"by": "ada"})
            assert await given.end("r") == "completed"
            result = await run.result()
            assert result["pid"] != os.getpid()
            assert result == {
                "by": "ada",
                "children": ["hello, a", "hello, b"],
                "file": "a,b\n1,2\n3,4\n",
                "id": "r",
                "name": "x",
                "pid": result["pid"],
                "rows": 2,
            }
            assert [line["message"] for line in await given.logs("r")] == ["nothing came"]
            steps = await given.events("r", e.RunProgress)
            assert (steps[-1].done, steps[-1].of) == (3, 3)
            waits = [(w.kind, w.key) for w in await given.events("r", e.RunWaitStarted)]
            assert waits == [("signal", "go"), ("signal", "never"), ("sleep", "nap")]

    asyncio.run(main())


def test_a_plain_play_waits_in_its_process_by_run_wait(tmp_path: Path) -> None:
    """The bridge works from the thread of a play whose loop is in another process."""

    async def main() -> None:
        async with process_node(tmp_path) as given:
            run = await given.ledger.submit(plays.plain, "x", run_id="r")
            await run.signal("go", {"by": "ada"})
            assert await given.end("r") == "completed"
            assert await run.result() == "hello, x by ada"

    asyncio.run(main())


def test_an_exception_fails_the_run_once_as_in_a_task(tmp_path: Path) -> None:
    """The class is user_error, its text and stack are kept sealed, and there is no retry."""

    async def main() -> None:
        async with process_node(tmp_path) as given:
            assert await given.run(plays.raises, run_id="r") == "failed"
            view = await given.ledger.status("r")
            assert (view.run.error_class, view.run.code) == ("user_error", "ValueError")
            told: Any = await given.ledger.reveal(view.run.error)
            assert told["message"] == "no such order"
            assert any("process_plays.py" in line for line in told["stack"])
            assert view.run.attempt == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("how", "evidence"),
    [
        ("kill", "its process was ended by SIGKILL"),
        ("exit", "its process ended with exit code 7 and without a word"),
    ],
)
def test_a_process_that_goes_without_a_word_is_lost_and_retried(
    tmp_path: Path, how: str, evidence: str
) -> None:
    """The evidence says by what; lostLimit pays for the next attempt."""

    async def main() -> None:
        async with process_node(tmp_path) as given:
            run = await given.ledger.submit(plays.die_once, how, run_id="r")
            assert await given.end("r") == "completed"
            assert await run.result() == "attempt 1"
            (lost,) = await given.events("r", e.InstanceLost)
            assert (lost.error_class, lost.evidence) == ("instance_lost", evidence)

    asyncio.run(main())


def test_retry_crosses_the_pipe(tmp_path: Path) -> None:
    """`raise Retry` in a process asks for another attempt within the play's budget."""

    async def main() -> None:
        async with process_node(tmp_path) as given:
            run = await given.ledger.submit(plays.again, run_id="r")
            assert await given.end("r") == "completed"
            assert await run.result() == 1

    asyncio.run(main())


def test_C031_what_a_process_prints_never_blocks_it_nor_ends_the_reader(tmp_path: Path) -> None:
    """Bad bytes are replaced, cut characters joined, all later lines counted; the run completes."""

    async def main() -> None:
        async with process_node(tmp_path) as given:
            assert await given.run(plays.noisy, run_id="r") == "completed"
            lines = [line["message"] for line in await given.logs("r")]
            assert lines[:3] == ["before", "bad \ufffd byte", "price 5 €"]
            assert "w" in lines[3]
            dropped = sum(event.dropped for event in await given.events("r", e.RunLog))
            printed = 20_000 + 6  # and one more where UTF-16 holds the byte of a line's end
            assert len(lines) + dropped in (printed, printed + 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("play", "code"),
    [(plays.nan, "JSON_NOT_FINITE"), (plays.too_large, "RESULT_TOO_LARGE")],
)
def test_C025_C032_a_result_that_cannot_be_stored_fails_the_run(
    tmp_path: Path, play: Any, code: str
) -> None:
    """It ends `failed` with its code, it does not hang and is not retried."""

    async def main() -> None:
        async with process_node(tmp_path) as given:
            assert await given.run(play, run_id="r") == "failed"
            view = await given.ledger.status("r")
            assert (view.run.error_class, view.run.code) == ("user_error", code)
            assert view.run.attempt == 0

    asyncio.run(main())


def test_the_deepest_value_json_may_have_crosses_the_pipe(tmp_path: Path) -> None:
    """A message adds no depth to a value, so what a task may return a process may."""

    async def main() -> None:
        async with process_node(tmp_path) as given:
            assert await given.run(plays.deep, run_id="r") == "completed"

    asyncio.run(main())


def test_cancel_reaches_the_play_as_cancelled_error(tmp_path: Path) -> None:
    """It unwinds, says so, and its process is gone."""

    async def main() -> None:
        marker = tmp_path / "pid"
        async with process_node(tmp_path) as given:
            run = await given.ledger.submit(plays.patient, str(marker), run_id="r")
            pid = await read_pid(given, marker)
            await given.seen("r", "run.wait_started")
            await run.cancel()
            assert await given.end("r") == "cancelled"
            assert [line["message"] for line in await given.logs("r")] == ["marked", "cleaned up"]
            assert (await given.events("r", e.InstanceErrored))[0].error_class == "cancelled"
            assert gone(pid)

    asyncio.run(main())


def test_a_play_that_blocks_is_killed_after_the_grace(tmp_path: Path) -> None:
    """No loop turns there any more, so nothing unwinds: after cancelGraceMs comes SIGKILL."""

    async def main() -> None:
        marker = tmp_path / "pid"
        policy = replace(POLICY, cancel_grace_ms=200)
        async with process_node(tmp_path, policy=policy) as given:
            run = await given.ledger.submit(plays.stubborn, str(marker), run_id="r")
            pid = await read_pid(given, marker)
            await run.cancel()
            assert await given.end("r") == "cancelled"
            assert gone(pid)

    asyncio.run(main())


def test_a_plain_play_in_a_process_is_killed_at_once(tmp_path: Path) -> None:
    """A thread cannot be interrupted, but its process can; the run ends long before the grace."""

    async def main() -> None:
        marker = tmp_path / "pid"
        async with process_node(tmp_path, policy=replace(POLICY, cancel_grace_ms=60_000)) as given:
            run = await given.ledger.submit(plays.blocks, str(marker), run_id="r")
            pid = await read_pid(given, marker)
            await run.cancel()
            assert await given.end("r") == "cancelled"
            assert gone(pid)

    asyncio.run(main())


def test_a_process_inherits_no_descriptor_but_its_pipes(tmp_path: Path) -> None:
    """Neither the log, its lock nor the node's file is open in a play's process (AMENDMENTS 10)."""

    async def main() -> None:
        async with process_node(tmp_path) as given:
            run = await given.ledger.submit(plays.descriptors, run_id="r")
            assert await given.end("r") == "completed"
            names = await run.result()
            assert not [name for name in names if str(tmp_path) in name]
            assert sum(name.startswith("pipe:") for name in names) >= 3

    asyncio.run(main())


COORDINATOR = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from tests import process_plays as plays
    from tests.local_node import node

    armed = []

    def failpoint(name):
        if armed and name == "before_commit":
            os.kill(os.getpid(), signal.SIGKILL)

    async def main(folder, play):
        async with node(folder, getattr(plays, play), isolation="process",
                        writer={"failpoint": failpoint}) as given:
            run = await given.ledger.submit(play_name, str(folder / "pid"), run_id="r")
            while not (folder / "pid").exists():
                await asyncio.sleep(0.01)
            armed.append(True)
            await run.signal("anything")

    play_name = "process_plays:" + sys.argv[2]
    if __name__ == "__main__":
        asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.parametrize("play", ["patient", "stubborn", "blocks"])
def test_a_kill_of_the_coordinator_inside_a_commit_frees_the_lock_and_ends_its_processes(
    tmp_path: Path, play: str
) -> None:
    """The kernel frees the lock with the coordinator; a play's process ends with its input."""
    program = textwrap.dedent(COORDINATOR).replace('"process_plays:"', '"tests.process_plays:"')
    killed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), play],
        cwd=ROOT,
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    lock = WriteLock(tmp_path / "t.db")
    lock.acquire(0.5)
    lock.release()
    lock.close()
    assert gone(int((tmp_path / "pid").read_text()))


def test_the_next_coordinator_carries_on_after_such_a_kill(tmp_path: Path) -> None:
    """Its sweep ends the lost instance as coordinator_restart, and the run is played again."""
    program = textwrap.dedent(COORDINATOR).replace('"process_plays:"', '"tests.process_plays:"')
    command = [sys.executable, "-c", program, str(tmp_path), "patient"]
    subprocess.run(command, cwd=ROOT, check=False, capture_output=True, timeout=60)

    async def main() -> None:
        async with process_node(tmp_path) as given:
            await given.seen("r", "instance.started", 2)
            (lost,) = await given.events("r", e.InstanceLost)
            assert lost.error_class == "coordinator_restart"
            await given.ledger.cancel("r")
            assert await given.end("r") == "cancelled"

    asyncio.run(main())


def test_a_play_inside_a_function_cannot_be_found_by_another_process(tmp_path: Path) -> None:
    """It fails as artifact_missing, and says where to put the play."""

    async def hidden(_run: Any) -> None:
        return None

    async def main() -> None:
        async with node(tmp_path, hidden, isolation="process") as given:
            assert await given.run(hidden, run_id="r") == "failed"
            view = await given.ledger.status("r")
            assert (view.run.error_class, view.run.code) == ("artifact_missing", "PLAY_NOT_FOUND")

    asyncio.run(main())
