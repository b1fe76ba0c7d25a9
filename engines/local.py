"""The local engine: plays run on this machine, for one node.

Async plays run on a loop thread of their own, plain ones in threads, and those of runs with
isolation `process` in processes.

A local create is one append of `instance.created` and `instance.started` with this node as host;
whoever gets it in runs the play, a loser does nothing (CONTRACTS A.10).  Only the host judges its
live instances.  After a crash of the host nothing here survives, and nothing has to.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from engines.asks import ChildRequest
from engines.context import Run
from engines.instance import LocalInstance, record, report_of
from engines.journal import Journal
from engines.messages import Start
from engines.perform import End, Lost, Unwound, failure, perform
from engines.plays import Play, Plays, load_origin
from engines.port_asks import PortAsks, facts_of
from engines.process import PlayProcess
from engines.slots import Slots
from engines.staged import StagedFiles
from handlers.acts import instance_ref
from handlers.commands import Command
from handlers.engine import CreateRequest, EngineStatus
from handlers.port import InstanceRef, Port, RunLog, decode_params
from ledger import events as e
from ledger.canonical import Json, canonical
from ledger.errors import PlayledgerError, RunNotFound, RunTerminal
from ledger.failpoint import failpoint
from ledger.ids import run_stream
from ledger.vault import ValueGone
from ledger.writer import Clock
from projections.state import Run as RunRow

T = TypeVar("T")
MAX_INSTANCES: Final = 64
LOOK_S: Final = 0.05
QUIET_ROUNDS: Final = 25
"""How often the loop goes round before a play that only waits is taken to do nothing else."""

StandIn = Callable[[RunRow], Play | None]
log = structlog.get_logger("engines.local")


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
        stand_in: StandIn | None = None,
    ) -> None:
        self._log = run_log
        self._host = host
        self._plays = plays
        self._clock = clock
        self._stand_in: StandIn = stand_in or (lambda _run: None)
        self._stands_in = stand_in is not None
        self._instances: dict[str, LocalInstance] = {}
        self._slots = Slots(max_instances)
        self._files = StagedFiles(run_log.vault)
        self._port = Port(run_log)
        self._killing: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="plays", daemon=True)
        self._thread.start()
        self._ready.wait()

    def offers(self, play_name: str) -> bool:
        """Says whether a play of this name is loaded here."""
        return self._stands_in or self._plays.get(play_name) is not None

    async def create(self, request: CreateRequest) -> None:
        """Waits for a slot, records the instance with this host, and runs its play."""
        instance_id = request.instance_id
        if instance_id in self._instances:
            return
        instance = self._instances[instance_id] = LocalInstance(self._ref(request), request)
        try:
            await self._slots.acquire()
            ref = instance.ref = self._ref(request)  # the host may have begun again meanwhile
            try:
                answer = await self._port.created(ref, request.intent_id)
            except BaseException:
                self._slots.release()
                raise
        except BaseException:
            self._instances.pop(instance_id, None)
            raise
        recorded: Any = answer.recorded
        if answer.replayed and (recorded is None or recorded.data.host != ref.host):
            self._instances.pop(instance_id, None)  # another node got it in, and runs it
            self._slots.release()
            return
        failpoint("before_play")
        self.loop.call_soon_threadsafe(self._begin, instance)

    async def status(self, instance_id: str) -> EngineStatus:
        """Says whether the instance runs in this process."""
        return "running" if instance_id in self._instances else "unknown"

    async def terminate(self, instance_id: str, reason: e.TerminateReason) -> bool:
        """Asks the play to end; the instance reports its end when it has unwound."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return False
        self.loop.call_soon_threadsafe(instance.ask_to_end, reason)
        return True

    @property
    def running(self) -> int:
        """How many instances run here, waiting ones included."""
        return len(self._instances)

    async def quiet(self) -> bool:
        """Says whether every instance does nothing but wait for facts."""
        return await self._over_there(self._quiet())

    def lose_everything(self, host: str) -> None:
        """Stops every instance without a word, others have ended them; the next get a new host."""

        def stop() -> None:
            self._host = host
            for instance in list(self._instances.values()):
                if instance.life is not None:
                    instance.give_up()

        self.loop.call_soon_threadsafe(stop)

    def kill_run(self, run_id: str) -> bool:
        """Loses a run's instance as if its process had died; says whether there was one.

        For tests of plays, on the loop of the plays: called by a listener to commits it is exact,
        the play sees nothing of that commit.
        """
        alive = [i for i in self._instances.values() if i.ref.run_id == run_id and not i.silent]
        for instance in alive:
            instance.give_up()
            task = self.loop.create_task(self._lose(instance.ref, "instance_lost", "killed"))
            self._killing.add(task)
            task.add_done_callback(self._killing.discard)
        return bool(alive)

    async def shut_down(self, grace_s: float) -> bool:
        """Waits for what runs, ends the rest as `coordinator_shutdown`; says if it was clean."""
        return await self._over_there(self._shut_down(grace_s))

    async def close(self) -> None:
        """Ends the loop thread."""
        await self._over_there(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._files.remove()

    def _ref(self, request: CreateRequest) -> InstanceRef:
        return instance_ref(request.run, request.instance_id, request.attempt, self._host)

    # --- on the loop thread -----------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)

        async def begin() -> None:
            self._port.open()
            self._ready.set()

        self.loop.run_until_complete(begin())
        stopped = False
        while not stopped:
            try:
                self.loop.run_forever()
                stopped = True
            except (SystemExit, KeyboardInterrupt) as error:  # from a task that a play began
                log.warning("a play's task raised what ends a process", error=repr(error))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def _over_there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def _begin(self, instance: LocalInstance) -> None:
        instance.life = self.loop.create_task(self._live(instance))

    async def _live(self, instance: LocalInstance) -> None:
        """Runs one instance from its start to its recorded end."""
        ref = instance.ref
        try:
            if instance.silent:  # killed between its record and its beginning
                await self._lose(ref, "instance_lost", "killed")
                return
            end = await self._play(instance)
            report = report_of(self._port, instance, end)
            if report is not None:
                failpoint("before_end_report")
                await record(self._port, ref, report)
                failpoint("after_end_report")
        except Exception:
            log.exception("an instance could not be brought to its end", run=ref.run_id)
        finally:
            if self._instances.get(ref.instance_id) is instance:
                del self._instances[ref.instance_id]
            self._port.forget(ref)
            if instance.has_slot:
                self._slots.release()

    async def _play(self, instance: LocalInstance) -> End | Lost:
        """Prepares the run context, performs the play, and records its last words."""
        ref, row = instance.ref, instance.request.run
        play = self._stand_in(row) or self._plays.get(row.play_name)
        if play is None:
            return failure(None, "PLAY_NOT_FOUND", "artifact_missing")
        try:
            key = await self._log.vault.run_key(ref.run_id)
            if key is None:
                return failure(None, "KEY_MISSING", "artifact_missing")
            params = decode_params(instance.request.params)
            files = await self._files.paths(params.get("files", []))
        except ValueGone as error:
            return failure(error, error.code, "artifact_missing")
        except (PlayledgerError, OSError, ValueError, TypeError) as error:
            return failure(error, getattr(error, "code", type(error).__name__), "unknown")
        journal = instance.journal = Journal(ref, self._port, self._clock)
        asks = instance.asks = PortAsks(
            self._port,
            ref,
            journal,
            lambda: self._without_slot(instance),
            self._cancel_run,
            lambda: instance.silent,
            self._clock,
        )
        facts = facts_of(row, ref.attempt, key)
        value: Json = params.get("input")
        if row.isolation == "process" and play.origin is not None:
            start = Start(
                origin=play.origin,
                sys_path=tuple(path or str(Path.cwd()) for path in sys.path),
                facts=facts,
                files={name: str(path) for name, path in files.items()},
                input=canonical(value).decode(),
            )
            end = await self._in_process(instance, play, start)
        else:
            run = Run(facts, asks, files, self._plays.get, self._plays.add)
            end = await self._in_task(instance, perform(play, run, value))
        await self._last_words(journal)
        return end

    async def _in_task(self, instance: LocalInstance, work: Coroutine[Any, Any, End]) -> End:
        task = self.loop.create_task(work)

        def cancel() -> None:
            task.cancel()

        instance.stop = instance.kill = cancel
        if instance.asked is not None or instance.silent:
            cancel()
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancel()
            raise
        return Unwound(failure(None, "CancelledError").told) if task.cancelled() else task.result()

    async def _in_process(self, instance: LocalInstance, play: Play, start: Start) -> End | Lost:
        assert instance.asks is not None, "made before"
        process = PlayProcess(
            start,
            instance.asks,
            self._offer,
            killable_at_once=not play.is_async,
            grace_s=instance.request.run.policy.cancel_grace_ms / 1000,
        )
        instance.stop, instance.kill = process.stop, process.kill
        if instance.asked is not None or instance.silent:
            process.kill()
        return await process.live()

    def _offer(self, request: ChildRequest) -> None:
        """Loads the play of a child that a process asks for, if it is not known here yet."""
        if self._plays.get(request.play) is None and request.origin is not None:
            self._plays.add(load_origin(request.origin, request.play))

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
            if instance.waits == 0 and not instance.has_slot and not instance.silent:
                await self._slots.acquire()
                instance.has_slot = True

    async def _last_words(self, journal: Journal) -> None:
        try:
            await journal.close()
        except PlayledgerError as error:
            log.warning("log lines could not be recorded", error=error.message)

    async def _cancel_run(self, run_id: str, reason: str) -> None:
        del reason  # a person's words need the child's own key; the request itself is enough
        request = Command(
            stream=run_stream(run_id),
            fact=e.RunCancelRequested(request_id="parent"),
            actor="node/" + self._host,
        )
        while True:
            try:
                await self._log.transact(request)
            except RunNotFound:
                await asyncio.sleep(0.02)  # asked for, and not submitted yet
            except RunTerminal:
                return
            else:
                return

    async def _quiet(self) -> bool:
        for _ in range(QUIET_ROUNDS):
            instances = list(self._instances.values())
            questions = sum(i.asks.open for i in instances if i.asks is not None)
            if (
                self._killing
                or not self._port.up_to_date
                or not all(instance.asleep for instance in instances)
                or questions != self._port.parked
            ):
                return False
            await asyncio.sleep(0)
        return True

    async def _shut_down(self, grace_s: float) -> bool:
        until = self.loop.time() + grace_s
        while lives := [i.life for i in self._instances.values() if i.life is not None]:
            left_s = until - self.loop.time()
            if left_s <= 0 or await self._quiet():
                break  # who only waits for facts loses nothing by waiting elsewhere
            await asyncio.wait(
                lives, timeout=min(left_s, LOOK_S), return_when=asyncio.FIRST_COMPLETED
            )
        left = [i for i in self._instances.values() if i.life is not None]
        for instance in left:
            instance.give_up()
        why = "the coordinator stopped"
        await asyncio.gather(*(self._lose(i.ref, "coordinator_shutdown", why) for i in left))
        return not left

    async def _lose(self, ref: InstanceRef, error_class: e.ErrorClass, evidence: str) -> None:
        await record(self._port, ref, lambda: self._port.lost(ref, error_class, evidence))

    async def _end(self) -> None:
        self._port.close()
        for instance in list(self._instances.values()):
            instance.give_up()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
