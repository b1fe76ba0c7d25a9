"""Plays for tests of processes: at the top of a module, where another process finds them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from playledger import Retry, Run, play


class Yes(BaseModel):
    by: str


@play
async def one(run: Run, name: str) -> str:
    """Says its own process, so that a test can tell it from the coordinator's."""
    run.log("here", pid=os.getpid(), attempt=run.attempt)
    return f"hello, {name}"


@play
async def everything(run: Run, name: str) -> dict[str, Any]:
    """Uses all of the run context."""
    run.progress(1, of=3, note="began")
    rows = list(run.csv("rows.csv"))
    yes = await run.signal("go", Yes)
    try:
        await run.signal("never", timeout=timedelta(milliseconds=1))
    except TimeoutError:
        run.log("nothing came", level="warning")
    await run.sleep("nap", timedelta(milliseconds=1))
    first, second = await asyncio.gather(run.child(one, "a", key="a"), run.child(one, "b", key="b"))
    run.progress(3, of=3)
    return {
        "by": yes.by,
        "children": [first, second],
        "file": run.file("rows.csv").read_text(),
        "id": run.id,
        "rows": len(rows),
        "name": name,
        "pid": os.getpid(),
    }


@play
def plain(run: Run, name: str) -> str:
    """A plain function, in a thread of its process."""
    yes = run.wait(run.signal("go", Yes))
    child = run.wait(run.child(one, name, key="one"))
    return f"{child} by {yes.by}"


@play
async def raises(_run: Run) -> None:
    raise ValueError("no such order")


@play
async def die_once(run: Run, how: str) -> str:
    """Its process ends without a word, in the first attempt."""
    if run.attempt == 0:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    return f"attempt {run.attempt}"


@play(retries=1)
async def again(run: Run) -> int:
    if run.attempt == 0:
        raise Retry("once more")
    return run.attempt


@play
async def noisy(run: Run) -> str:
    """Prints what no reader likes, and then more than a pipe holds."""
    run.log("before")
    out = sys.stdout.buffer
    out.write(b"bad \x97 byte\n")
    out.flush()
    out.write("price 5 €".encode()[:-1])
    out.flush()
    out.write("€".encode()[-1:] + b"\n")
    out.write("wide".encode("utf-16") + b"\n")
    out.flush()
    for n in range(20_000):
        print(f"line {n}")
    print("to stderr", file=sys.stderr)
    os.write(1, b"without an end")
    return "done"


@play
async def nan(_run: Run) -> dict[str, float]:
    return {"loss": float("nan")}


@play
async def too_large(_run: Run) -> str:
    return "x" * (33 * 1024 * 1024)


@play
async def deep(_run: Run) -> Any:
    value: Any = 0
    for _ in range(64):
        value = [value]
    return value


def mark(run: Run, marker: str) -> None:
    """Leaves this process's id where a test finds it, and says so in the log."""
    Path(marker).write_text(str(os.getpid()))
    run.log("marked")


@play
async def patient(run: Run, marker: str) -> str:
    """Writes its process id, and waits; on cancel it writes that too."""
    mark(run, marker)
    try:
        await run.signal("never")
    except asyncio.CancelledError:
        run.log("cleaned up")
        raise
    return "?"


@play
async def stubborn(run: Run, marker: str) -> str:
    """Blocks its loop for ever: only a kill ends it."""
    mark(run, marker)
    while True:
        time.sleep(3600)  # noqa: ASYNC251


@play
def blocks(run: Run, marker: str) -> str:
    """A plain function that nothing but a kill ends."""
    mark(run, marker)
    threading.Event().wait()
    return "?"


@play
async def descriptors(_run: Run) -> list[str]:
    """Lists what this process has open."""
    return open_files()


def open_files() -> list[str]:
    """Returns what every descriptor of this process leads to."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            names.append(str(link.readlink()))
    return sorted(names)


@play
async def query(run: Run, table: str) -> dict[str, Any]:
    """Opens a database session, and says of its URL only whom it leads to."""
    async with run.session(table) as session:
        url = session.url.get_secret_value()
        return {"host": url.rpartition("@")[2], "operations": list(session.operations)}


@play
def plain_query(run: Run, table: str) -> str:
    async def ask() -> str:
        async with run.session(table) as session:
            return session.url.get_secret_value().rpartition("@")[2]

    return run.wait(ask())
