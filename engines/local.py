"""The local engine: plays run on this machine, for one node.

Async plays run on a loop thread of their own, plain ones in threads.

A local create is one append of `instance.created` and `instance.started` with this node as host;
whoever gets it in runs the play, a loser does nothing (CONTRACTS A.10).  Only the host judges its
live instances.  After a crash of the host nothing here survives, and nothing has to.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from engines.context import Retry, Run, Superseded
from engines.journal import Journal, sanitise
from engines.plays import Play, Plays
from handlers.acts import instance_ref
from handlers.commands import Command
from handlers.engine import CreateRequest, EngineStatus
from handlers.port import InstanceRef, Port, RunLog, decode_params
from ledger import events as e
from ledger.canonical import Json
from ledger.errors import Conflict, PlayledgerError, RunTerminal, Unavailable
from ledger.failpoint import failpoint
from ledger.ids import run_stream
from ledger.seal import BlobRef
from ledger.vault import ValueGone
from ledger.writer import Clock

T = TypeVar("T")
MAX_INSTANCES: Final = 64
STACK_LINES: Final = 12
ERROR_CHARS: Final = 4000
log = structlog.get_logger("engines.local")


class LocalInstance:
    """One running attempt; owned by the loop thread."""

    def __init__(self, ref: InstanceRef, request: CreateRequest) -> None:
        self.ref = ref
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.asked: e.TerminateReason | None = None
        self.silent = False
        self.waits = 0
        self.has_slot = True


class LocalEngine:
    """Runs plays for one node.  Its methods are called from the node's event loop."""

    name = "local"

    def __init__(
        self,
        run_log: RunLog,
        host: str,
        plays: Plays,
        clock: Clock,
        *,
        max_instances: int = MAX_INSTANCES,
    ) -> None:
        self._log = run_log
        self._host = host
        self._plays = plays
        self._clock = clock
        self._max_instances = max_instances
        self._instances: dict[str, LocalInstance] = {}
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(max_instances)
        self._files_dir: Path | None = None
        self._port = Port(run_log)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="plays", daemon=True)
        self._thread.start()
        self._ready.wait()

    def offers(self, play_name: str) -> bool:
        """Says whether a play of this name is loaded here."""
        return self._plays.get(play_name) is not None

    async def create(self, request: CreateRequest) -> None:
        """Waits for a slot, records the instance with this host, and runs its play."""
        await self._over_there(self._create(request))

    async def status(self, instance_id: str) -> EngineStatus:
        """Says whether the instance runs in this process."""
        return "running" if instance_id in self._instances else "unknown"

    async def terminate(self, instance_id: str, reason: e.TerminateReason) -> bool:
        """Cancels the instance's task; it reports its end when it has unwound."""
        return await self._over_there(self._terminate(instance_id, reason))

    @property
    def running(self) -> int:
        """How many instances run here, waiting ones included."""
        return len(self._instances)

    def lose_everything(self, host: str) -> None:
        """Stops every instance without a word, others have ended them; the next get a new host."""

        def stop() -> None:
            self._host = host
            for instance in list(self._instances.values()):
                instance.silent = True
                if instance.task is not None:
                    instance.task.cancel()

        self._loop.call_soon_threadsafe(stop)

    def kill(self, instance_id: str) -> None:
        """Loses one instance as if its process had died (for tests of plays)."""

        def stop() -> None:
            instance = self._instances.get(instance_id)
            if instance is not None and instance.task is not None:
                instance.silent = True
                instance.task.cancel()
                self._loop.create_task(
                    self._report(lambda: self._port.lost(instance.ref, "instance_lost", "killed"))
                )

        self._loop.call_soon_threadsafe(stop)

    async def shut_down(self, grace_s: float) -> bool:
        """Waits for what runs, ends the rest as `coordinator_shutdown`; says if it was clean."""
        return await self._over_there(self._shut_down(grace_s))

    async def close(self) -> None:
        """Ends the loop thread."""
        await self._over_there(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        if self._files_dir is not None:
            shutil.rmtree(self._files_dir, ignore_errors=True)

    # --- on the loop thread -----------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def begin() -> None:
            self._port.open()
            self._ready.set()

        self._loop.run_until_complete(begin())
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _over_there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _create(self, request: CreateRequest) -> None:
        if request.instance_id in self._instances:
            return
        await self._slots.acquire()
        ref = instance_ref(request.run, request.instance_id, request.attempt, self._host)
        try:
            answer = await self._port.created(ref, request.intent_id)
        except BaseException:
            self._slots.release()
            raise
        if answer.replayed and not self._ours(answer.recorded, request.instance_id):
            self._slots.release()
            return
        failpoint("before_play")
        instance = LocalInstance(ref, request)
        self._instances[request.instance_id] = instance
        instance.task = self._loop.create_task(self._live(instance))

    def _ours(self, recorded: Any, instance_id: str) -> bool:
        """A create of ours whose answer was lost is begun now; another host's is left alone."""
        if recorded is None or instance_id in self._instances:
            return False
        return bool(recorded.data.host == self._host)

    async def _terminate(self, instance_id: str, reason: e.TerminateReason) -> bool:
        instance = self._instances.get(instance_id)
        if instance is None or instance.task is None:
            return False
        instance.asked = reason
        instance.task.cancel()
        return True

    async def _live(self, instance: LocalInstance) -> None:
        """Runs one instance from its start to its recorded end."""
        try:
            report = await self._run_play(instance)
            if report is not None and not instance.silent:
                failpoint("before_end_report")
                await self._report(report)
                failpoint("after_end_report")
        except asyncio.CancelledError:
            if not instance.silent:
                raise
        finally:
            if self._instances.get(instance.ref.instance_id) is instance:
                del self._instances[instance.ref.instance_id]
            if instance.has_slot:
                self._slots.release()

    async def _run_play(self, instance: LocalInstance) -> Callable[[], Awaitable[object]] | None:
        """Runs the play, and returns how to report what came of it."""
        ref, port = instance.ref, self._port
        journal: Journal | None = None
        try:
            play = self._plays.get(instance.request.run.play_name)
            if play is None:
                return self._error(ref, "artifact_missing", "PLAY_NOT_FOUND", None)
            key = await self._log.vault.run_key(ref.run_id)
            if key is None:
                return self._error(ref, "artifact_missing", "KEY_MISSING", None)
            journal = Journal(ref, port, key, self._clock)
            params = decode_params(instance.request.params)
            files = await self._materialise(params.get("files", []))
            context = self._context(instance, journal, files)
            value = await self._call(play, context, params.get("input"))
            result = play.write_result(value)
            await journal.settle()
            await journal.close()
        except Superseded:
            return None
        except asyncio.CancelledError as error:
            if instance.silent:
                raise
            return await self._cancelled(instance, journal, error)
        except ValueGone as error:
            return self._error(ref, "artifact_missing", error.code, error)
        except Retry as error:
            await self._last_words(journal)
            after = None if error.after is None else round(error.after.total_seconds() * 1000)
            return self._error(ref, "play_retry", "PLAY_RETRY", error, after)
        except PlayledgerError as error:
            await self._last_words(journal)
            return self._error(ref, "user_error", error.code, error)
        except Exception as error:  # noqa: BLE001 - whatever a play raises ends it, recorded
            await self._last_words(journal)
            return self._error(ref, "user_error", type(error).__name__, error)
        return self._result(ref, result)

    async def _call(self, play: Play, context: Run, value: Json) -> Any:
        arguments: tuple[Any, ...] = (context,)
        if play.takes_input:
            arguments = (context, play.read_input(value))
        if play.is_async:
            return await play.function(*arguments)
        # A thread cannot be killed: a cancelled one is fenced and left to run out.
        return await self._loop.run_in_executor(None, play.function, *arguments)

    def _context(self, instance: LocalInstance, journal: Journal, files: dict[str, Path]) -> Run:
        return Run(
            instance.request.run,
            instance.ref,
            self._port,
            journal,
            files,
            self._plays.get,
            self._plays.add,
            self._cancel_run,
            lambda: self._without_slot(instance),
            self._clock,
        )

    @asynccontextmanager
    async def _without_slot(self, instance: LocalInstance) -> AsyncIterator[None]:
        """A waiting instance holds no slot, so parents never starve their children."""
        instance.waits += 1
        if instance.waits == 1 and instance.has_slot:
            instance.has_slot = False
            self._slots.release()
        try:
            yield
        finally:
            instance.waits -= 1
            if instance.waits == 0 and not instance.has_slot:
                await self._slots.acquire()
                instance.has_slot = True

    async def _cancelled(
        self, instance: LocalInstance, journal: Journal | None, error: BaseException
    ) -> Callable[[], Awaitable[object]] | None:
        await self._last_words(journal)
        match instance.asked:
            case "timeout":
                return self._error(instance.ref, "engine_timeout", "ENGINE_TIMEOUT", None)
            case None:
                return self._error(instance.ref, "user_error", "CancelledError", error)
            case _:
                return self._error(instance.ref, "cancelled", "CANCELLED", None)

    async def _last_words(self, journal: Journal | None) -> None:
        if journal is None:
            return
        try:
            await journal.close()
        except PlayledgerError as error:
            log.warning("log lines could not be recorded", error=error.message)

    def _result(self, ref: InstanceRef, result: bytes) -> Callable[[], Awaitable[object]]:
        async def report() -> object:
            try:
                return await self._port.completed(ref, result)
            except PlayledgerError as error:
                if isinstance(error, Unavailable | Conflict):
                    raise
                return await self._error(ref, "user_error", error.code, error)()

        return report

    def _error(
        self,
        ref: InstanceRef,
        error_class: e.ErrorClass,
        code: str,
        error: BaseException | None,
        retry_after_ms: int | None = None,
    ) -> Callable[[], Awaitable[object]]:
        told = describe_error(error, code)
        return lambda: self._port.errored(ref, error_class, code[:200], told, retry_after_ms)

    async def _report(self, report: Callable[[], Awaitable[object]]) -> None:
        """Records an end; while the log cannot be used it is said again, and lands once."""
        pause = 0.1
        while True:
            try:
                await report()
            except Conflict:
                return  # another attempt is the current one: this end was refused and recorded
            except Unavailable as error:
                log.warning("an end waits for the log", error=error.message)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)
            except PlayledgerError as error:
                log.warning("an end could not be recorded", error=error.message)
                return
            else:
                return

    async def _cancel_run(self, run_id: str, reason: str) -> None:
        del reason  # a person's words need the child's own key; the request itself is enough
        request = Command(
            stream=run_stream(run_id),
            fact=e.RunCancelRequested(request_id="parent"),
            actor="node/" + self._host,
        )
        try:
            await self._log.transact(request)
        except RunTerminal:
            return

    async def _materialise(self, files: list[dict[str, Any]]) -> dict[str, Path]:
        """Writes staged files where a play can open them, once per process, and checks them."""
        found: dict[str, Path] = {}
        for item in files:
            if self._files_dir is None:
                self._files_dir = Path(tempfile.mkdtemp(prefix="playledger-files-"))
            ref = BlobRef(blob=item["blob"], bytes=item["bytes"], sha256=item["sha256"])
            folder = self._files_dir / ref.blob
            path = folder / Path(str(item["name"])).name
            if not path.exists():
                content = await self._log.vault.read_file(ref)
                folder.mkdir(exist_ok=True)
                fresh = folder / f".{threading.get_ident()}"
                fresh.write_bytes(content)
                fresh.chmod(0o444)
                fresh.replace(path)
            found[str(item["name"])] = path
        return found

    async def _shut_down(self, grace_s: float) -> bool:
        tasks = [i.task for i in self._instances.values() if i.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        left = list(self._instances.values())
        for instance in left:
            instance.silent = True
            if instance.task is not None:
                instance.task.cancel()
        await asyncio.gather(
            *(
                self._report(
                    lambda ref=instance.ref: self._port.lost(  # type: ignore[misc]
                        ref, "coordinator_shutdown", "the coordinator stopped"
                    )
                )
                for instance in left
            )
        )
        return not left

    async def _end(self) -> None:
        self._port.close()
        tasks = [i.task for i in self._instances.values() if i.task is not None]
        for instance in list(self._instances.values()):
            instance.silent = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def describe_error(error: BaseException | None, code: str) -> Json:
    """Returns what is kept of an error, sealed: its text and the last lines of its stack."""
    if error is None:
        return {"message": code}
    stack = traceback.format_exception(type(error), error, error.__traceback__)
    lines = "".join(stack).splitlines()[-STACK_LINES:]
    return {
        "message": sanitise(str(error), ERROR_CHARS),
        "stack": [sanitise(line, 400) for line in lines],
        "type": type(error).__name__,
    }
