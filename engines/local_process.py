"""A play in a process of its own: what `python -m engines.local_process` does.

Started by exec, it inherits nothing but three pipes.  Messages come on standard input and go out on
what was standard output; both are moved away first, and what the play prints becomes log lines.  It
ends when its input does, even if the play blocks: a coordinator that was killed leaves nobody.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import orjson

from engines.asks import ChildEnd, ChildRequest, Superseded, WaitEnd
from engines.context import Run
from engines.lines import plain_fields, sanitise
from engines.messages import (
    MESSAGE_BYTES_MAX,
    Advance,
    Answer,
    AskCancelChild,
    AskChild,
    AskChildEnd,
    AskSession,
    AskWait,
    Cancel,
    Forget,
    FromPlay,
    Refusal,
    Say,
    Start,
    ToPlay,
    raised,
    read_message,
    write_message,
)
from engines.perform import End, Unwound, failure, perform, tell
from engines.plays import Play, load_origin, plays_beside
from handlers.sessions import SessionGrant
from ledger import events as e
from ledger.canonical import canonical
from ledger.errors import PlayledgerError, PlayNotFound


class Channel:
    """The pipes to the coordinator; written from any thread."""

    def __init__(self, source: BufferedReader, sink: int) -> None:
        self.source = source
        self._sink = sink
        self._lock = threading.Lock()

    def send(self, message: FromPlay) -> None:
        """Writes one message whole."""
        written = write_message(message)
        if len(written) > MESSAGE_BYTES_MAX:
            written = write_message(failure(None, "RESULT_TOO_LARGE"))
        data = memoryview(written)
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._sink, data) :]
            except OSError:
                leave()  # nobody listens any more

    def receive(self) -> ToPlay | None:
        """Returns the next message, or None at the end of the input."""
        line = self.source.readline()
        return read_message(line, ToPlay) if line.endswith(b"\n") else None


class PipeAsks:
    """Asks the coordinator; owned by the loop that the play runs on."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def child(self, request: ChildRequest) -> str:
        """Asks for a child, or finds it; returns its run id."""
        answer = await self._ask(lambda n: AskChild(n, request))
        return str(answer)

    async def child_end(self, key: str) -> ChildEnd:
        """Waits until a child has ended."""
        answer = await self._ask(lambda n: AskChildEnd(n, key))
        assert isinstance(answer, ChildEnd), "a child's end is answered by one"
        return answer

    async def cancel_child(self, child_run_id: str, reason: str) -> None:
        """Asks a child to end."""
        await self._ask(lambda n: AskCancelChild(n, child_run_id, reason))

    async def wait(self, kind: e.WaitKind, key: str, ordinal: int, delay_ms: int | None) -> WaitEnd:
        """Starts a wait, or finds it, and returns when it has ended."""
        answer = await self._ask(lambda n: AskWait(n, kind, key, ordinal, delay_ms))
        assert isinstance(answer, WaitEnd), "a wait's end is answered by one"
        return answer

    async def session(self, table: str) -> SessionGrant:
        """Opens the run's database session for a table."""
        answer = await self._ask(lambda n: AskSession(n, table))
        assert isinstance(answer, SessionGrant), "a session is answered by one"
        return answer

    def log(self, message: str, level: str, fields: Mapping[str, Any]) -> None:
        """Sends a log line, from any thread."""
        said = canonical(plain_fields(fields)).decode()
        self._channel.send(Say(sanitise(message), str(level), said))

    def progress(self, done: int, of: int | None, note: str) -> None:
        """Says how far the play is, from any thread."""
        self._channel.send(Advance(done, of, sanitise(note)))

    def take(self, message: Answer | Refusal) -> None:
        """Answers whoever asked."""
        future = self._open.pop(message.id, None)
        if future is None or future.done():
            return
        if isinstance(message, Answer):
            future.set_result(message.value)
        elif message.kind == "Superseded":
            future.set_exception(Superseded(message.message))
        else:
            future.set_exception(raised(message))

    async def _ask(self, make: Any) -> Any:
        self._asked += 1
        identity = self._asked
        future = self._loop.create_future()
        self._open[identity] = future
        self._channel.send(make(identity))
        try:
            return await future
        except asyncio.CancelledError:
            self._channel.send(Forget(identity))
            raise
        finally:
            self._open.pop(identity, None)


def main() -> NoReturn:
    """Reads what to play, plays it, says how it ended, and leaves."""
    channel = take_over_pipes()
    start = channel.receive()
    if not isinstance(start, Start):
        leave()
    asyncio.run(live(channel, start))
    leave()


def take_over_pipes() -> Channel:
    """Moves the two protocol pipes away from where a play, or what it starts, finds them."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")
    return Channel(source, sink)


async def live(channel: Channel, start: Start) -> NoReturn:
    """Plays, with a thread that reads what comes in and ends the process when nothing can."""
    loop = asyncio.get_running_loop()
    asks = PipeAsks(channel)
    task = loop.create_task(play(asks, start))

    def listen() -> None:
        try:
            while (message := channel.receive()) is not None:
                if isinstance(message, Cancel):
                    loop.call_soon_threadsafe(task.cancel)
                elif not isinstance(message, Start):
                    loop.call_soon_threadsafe(asks.take, message)
        except (PlayledgerError, msgspec.ValidationError, RuntimeError, OSError) as error:
            print(f"the coordinator cannot be understood: {error}", file=sys.stderr)  # noqa: T201
        leave()

    threading.Thread(target=listen, name="coordinator", daemon=True).start()
    await asyncio.wait([task])
    if task.cancelled():  # before its first step
        channel.send(Unwound(tell(None, "CancelledError")))
    else:
        channel.send(task.result())
    leave()


async def play(asks: PipeAsks, start: Start) -> End:
    """Loads the play and performs it."""
    sys.path.extend(path for path in start.sys_path if path not in sys.path)
    try:
        found = load_origin(start.origin, start.facts.play)
    except PlayNotFound as error:
        return failure(error, error.code, "artifact_missing")
    except Exception as error:  # noqa: BLE001 - whatever its file raises when it is loaded
        return failure(error, type(error).__name__)
    files = {name: Path(path) for name, path in start.files.items()}
    beside = plays_beside(found)

    def offer(item: Play) -> None:
        """Leaves it to the coordinator, who is told where the play stands."""

    run = Run(start.facts, asks, files, beside.get, offer)
    return await perform(found, run, orjson.loads(start.input))


def leave() -> NoReturn:
    """Ends this process at once, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(0)


if __name__ == "__main__":
    main()
