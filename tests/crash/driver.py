"""The process that gets killed: drives one scenario on one log until it ends, or a failpoint kills.

Started once as `python -m tests.crash.driver`, it has everything imported and forks for each job it
reads, so that a crash costs milliseconds.  It has no threads and no open log when it forks.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

import playledger
from ledger import failpoint
from ledger.query import Query, first_value
from playledger.embed import Ledger
from playledger.wiring import driving, look_once, open_log, plays_of
from tests.crash.outside import driving_outside
from tests.crash.scenarios import EFFECTS_VARIABLE, MORE, PLAYS, POLICY, SCENARIOS

PATIENCE_S: Final = 20.0
UNSETTLED: Final[Query[int]] = Query("select count(*) from outbox", (), first_value)


class Job(Struct, frozen=True):
    """What one process shall do: a scenario on a log, with a failpoint armed or none.

    With `drives` False it only speaks to the log and leaves, as a command does.
    """

    scenario: str
    path: str
    failpoint: str | None = None
    drives: bool = True
    frozen_s: float = 15.0


def files_of(path: Path) -> dict[str, Path]:
    """Returns what a job writes beside its log."""
    return {
        name: path.with_name(f"{path.name}.{name}")
        for name in ("acks", "effects", "hits", "errors", "pid")
    }


async def drive(job: Job) -> None:
    """Does what the client of a scenario does, and drives its runs to their ends."""
    scenario, path = {**SCENARIOS, **MORE}[job.scenario], Path(job.path)
    beside = files_of(path)

    def acknowledge(kind: str, identity: str) -> None:
        with beside["acks"].open("a") as acks:
            acks.write(f"{kind} {identity}\n")

    async with asyncio.timeout(PATIENCE_S):
        log = await open_log(path)
        plays = plays_of(PLAYS)
        ledger = Ledger(log, plays, policy=POLICY)
        if not job.drives:
            await look_once(log)
            await scenario.client(ledger, acknowledge)
            os._exit(0)  # a command that leaves without a word
        drives = driving_outside if job.scenario == "service" else driving
        async with drives(log, plays, ledger.submitter, frozen_s=job.frozen_s):
            await scenario.client(ledger, acknowledge)
            await quiet(ledger, list(scenario.ends))
        await log.close()
    beside["hits"].write_bytes(msgspec.json.encode(failpoint.passed()))


async def quiet(ledger: playledger.Ledger, run_ids: list[str]) -> None:
    """Waits until these runs have ended and nothing is left to do for anybody."""
    for run_id in run_ids:
        await ledger.wait_for_end(run_id)
    news = asyncio.Event()
    stop = ledger.log.writer.subscribe(asyncio.get_running_loop(), lambda _: news.set())
    while await ledger.log.reader.ask(UNSETTLED):
        await news.wait()
        news.clear()
    stop()


def work(job: Job) -> None:
    """Is the forked process: does the job, and leaves with 0 unless something was wrong."""
    status = 1
    path = Path(job.path)
    try:
        os.environ[EFFECTS_VARIABLE] = str(files_of(path)["effects"])
        files_of(path)["pid"].write_text(str(os.getpid()))
        said = os.open(files_of(path)["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)  # the pipe is for the exit status alone
        os.dup2(said, 2)
        failpoint.arm(job.failpoint or "nothing")
        asyncio.run(drive(job))
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the test has to see it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Reads jobs, one a line, and answers each with the exit status of a process that did it."""
    read: Any = msgspec.json.Decoder(Job).decode
    gc.collect()
    gc.freeze()  # else the first collection of each fork copies what it shares
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            work(read(line))
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
