"""A play's process as the coordinator sees it: started by exec, spoken to over pipes.

Never forked: a forked child would inherit the write lock's descriptor and hold it after our death.
What it prints becomes log lines, read as fast as it comes, so it never blocks on a full pipe.  Only
here a play can be killed, and only here a kill is told from an end.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, assert_never

import msgspec

from engines.asks import Asks, ChildRequest, Superseded
from engines.messages import (
    MESSAGE_BYTES_MAX,
    Advance,
    Answer,
    Ask,
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
    read_message,
    refusal,
    write_message,
)
from engines.perform import Done, End, Failed, Gone, Lost, Unwound
from ledger.errors import PlayledgerError
from ledger.gate import parse

EXIT_S: Final = 5.0
OUTPUT_S: Final = 1.0
CHUNK: Final = 65_536
LINE_MAX: Final = 16_384
_ROOT: Final = str(Path(__file__).resolve().parent.parent)


class PlayProcess:
    """One instance in a process of its own; owned by the loop it is used on."""

    def __init__(
        self,
        start: Start,
        asks: Asks,
        offer: Callable[[ChildRequest], None],
        *,
        killable_at_once: bool,
        grace_s: float,
    ) -> None:
        self._start = start
        self._asks = asks
        self._offer = offer
        self._killable_at_once = killable_at_once
        self._grace_s = grace_s
        self._process: asyncio.subprocess.Process | None = None
        self._answers: dict[int, asyncio.Task[None]] = {}
        self._stopping: asyncio.TimerHandle | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def live(self) -> End | Lost:
        """Runs the process from its start until it is gone, and returns how the play ended."""
        try:
            process = await self._exec()
        except OSError as error:
            return Lost(f"its process could not be started: {error.strerror or error}")
        self._process = process
        if self._killed:
            self.kill()
        output = asyncio.create_task(self._read_output(process))
        end: End | None = None
        broken = ""
        try:
            self._send(self._start)
            end = await self._converse(process)
            self._close(process)
            async with asyncio.timeout(EXIT_S):
                await process.wait()
        except TimeoutError:
            broken = f"its process closed its pipe and lived on for {EXIT_S:.0f} s"
        except (PlayledgerError, msgspec.ValidationError, ValueError) as error:
            broken = f"its messages cannot be read: {error}"
        finally:
            self._close(process)
            self.kill()  # what it started may outlive it, but not us
            await process.wait()
            await self._finish_output(output)
        return end or Lost(broken or evidence(process.returncode))

    def stop(self) -> None:
        """Asks the play to end, and kills it after the grace; a plain function is killed now."""
        if self._killable_at_once:
            self.kill()
            return
        self._send(Cancel())
        if self._stopping is None:
            loop = asyncio.get_running_loop()
            self._stopping = loop.call_later(self._grace_s, self.kill)

    def kill(self) -> None:
        """Kills the process and what it started."""
        self._killed = True
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _exec(self) -> asyncio.subprocess.Process:
        path = os.environ.get("PYTHONPATH")
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the working folder is the user's, and may hold any name
            "-m",
            "engines.local_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            close_fds=True,
            start_new_session=True,  # Ctrl-C reaches the coordinator alone, which ends its plays
            limit=MESSAGE_BYTES_MAX,
            env={**os.environ, "PYTHONPATH": _ROOT if not path else _ROOT + os.pathsep + path},
        )

    def _close(self, process: asyncio.subprocess.Process) -> None:
        """Closes its input, by which it ends, and forgets what it asked."""
        if self._stopping is not None:
            self._stopping.cancel()
        for task in self._answers.values():
            task.cancel()
        if process.stdin is not None:
            process.stdin.close()

    def _send(self, message: ToPlay) -> None:
        stream = None if self._process is None else self._process.stdin
        if stream is not None and not stream.is_closing():
            stream.write(write_message(message))

    async def _converse(self, process: asyncio.subprocess.Process) -> End | None:
        """Answers until the play has ended; None if the process went without saying so."""
        assert process.stdout is not None, "it was asked for"
        while True:
            line = await process.stdout.readline()
            if not line.endswith(b"\n"):
                return None
            message: FromPlay = read_message(line, FromPlay)
            match message:
                case Done(result=result):
                    parse(result, what="result")
                    return message
                case Failed() | Unwound() | Gone():
                    return message
                case Say():
                    fields: Any = parse(message.fields, what="log fields")
                    self._asks.log(message.message, message.level, fields)
                case Advance():
                    self._asks.progress(message.done, message.of, message.note)
                case Forget():
                    task = self._answers.get(message.id)
                    if task is not None:
                        task.cancel()
                case AskChild() | AskChildEnd() | AskCancelChild() | AskWait() | AskSession():
                    task = asyncio.create_task(self._answer(message))
                    self._answers[message.id] = task
                case _:
                    assert_never(message)

    async def _answer(self, ask: Ask) -> None:
        reply: ToPlay
        try:
            reply = Answer(ask.id, await self._asked(ask))
        except Superseded as error:
            reply = Refusal(ask.id, "Superseded", "SUPERSEDED", str(error), "", {})
        except Exception as error:  # noqa: BLE001 - the play gets it, as it would in a task
            reply = refusal(ask.id, error)
        finally:
            self._answers.pop(ask.id, None)
        self._send(reply)

    async def _asked(self, ask: Ask) -> Any:
        asks = self._asks
        match ask:
            case AskChild(request=request):
                parse(request.input, what=f"input of child {request.key}")
                self._offer(request)
                return await asks.child(request)
            case AskChildEnd(key=key):
                return await asks.child_end(key)
            case AskCancelChild():
                return await asks.cancel_child(ask.child_run_id, ask.reason)
            case AskWait():
                return await asks.wait(ask.kind, ask.key, ask.ordinal, ask.delay_ms)
            case AskSession(table=table):
                return await asks.session(table)
            case _:
                assert_never(ask)

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        """Turns what the play prints into log lines, bad bytes replaced, characters kept whole."""
        assert process.stderr is not None, "it was asked for"
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest = ""
        try:
            while chunk := await process.stderr.read(CHUNK):
                *lines, rest = (rest + decoder.decode(chunk)).split("\n")
                for line in lines:
                    self._print(line)
                if len(rest) > LINE_MAX:
                    self._print(rest)
                    rest = ""
        finally:
            self._print(rest + decoder.decode(b"", final=True))

    def _print(self, line: str) -> None:
        if line.strip("\r"):
            self._asks.log(line.rstrip("\r"), "info", {"from": "output"})

    async def _finish_output(self, output: asyncio.Task[None]) -> None:
        """Waits for the last lines; what the play started may hold the pipe open for ever."""
        await asyncio.wait([output], timeout=OUTPUT_S)
        output.cancel()
        await asyncio.gather(output, return_exceptions=True)


def evidence(returncode: int | None) -> str:
    """Says how a process ended that said nothing."""
    if returncode is None:
        return "its process is gone"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return f"its process was ended by {name}"
    return f"its process ended with exit code {returncode} and without a word"
