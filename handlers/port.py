"""The one port through which instances of every engine speak to the log.

In-process calls, pipes and HTTP all end here.  Values are sealed before the queue; every report
names its instance and host, and the writer refuses those of any other (INV-22).  A port belongs to
one event loop and is woken there by commits, whoever made them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from handlers.commands import Command, Reporter, wait_id
from handlers.execute import Answer, State
from handlers.sessions import SessionGrant, open_session
from ledger import events as e
from ledger.canonical import Json, canonical
from ledger.codec import Recorded
from ledger.errors import StaleAttempt, TooLarge
from ledger.events import Event, Seal
from ledger.ids import child_run_id, run_stream
from ledger.log import Log
from ledger.seal import Sealed, seal
from ledger.vault import BLOB_BYTES_MAX
from ledger.writer import Committed
from projections.load import run_query, wait_query
from projections.state import Child, Wait

RunLog = Log[Command, State, Answer]
Expected = dict[tuple[str, str], asyncio.Future[Any]]


class InstanceRef(Struct, frozen=True):
    """Which instance speaks, and for which run."""

    run_id: str
    instance_id: str
    attempt: int
    host: str | None
    externalize_after_bytes: int

    @property
    def stream(self) -> str:
        return run_stream(self.run_id)

    @property
    def actor(self) -> str:
        return "instance/" + self.instance_id

    @property
    def reporter(self) -> Reporter:
        return Reporter(instance_id=self.instance_id, host=self.host)


class Port:
    """Takes reports, and answers what an instance waits for."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._waiting: dict[str, dict[str, Expected]] = {}
        self._parked: Counter[asyncio.Future[Any]] = Counter()
        self._seen = 0
        self._stop: Callable[[], None] | None = None

    @property
    def up_to_date(self) -> bool:
        """Whether every commit of this process has been noticed here."""
        return self._seen == self._log.writer.position

    @property
    def parked(self) -> int:
        """How many questions wait for a fact that has not come."""
        return sum(count for future, count in self._parked.items() if not future.done())

    def open(self) -> None:
        """Begins to be woken by commits, on the running loop."""
        self._stop = self._log.writer.subscribe(asyncio.get_running_loop(), self._notice)
        self._seen = self._log.writer.position

    def close(self) -> None:
        """Ends that."""
        if self._stop is not None:
            self._stop()

    async def created(
        self, ref: InstanceRef, intent_id: str, *, already_existed: bool = False
    ) -> Answer:
        """Records that an instance exists; for a local one (with a host) also that it started."""
        fact = e.InstanceCreated(
            instance_id=ref.instance_id,
            attempt=ref.attempt,
            host=ref.host,
            already_existed=already_existed,
        )
        actor = ref.actor if ref.host is None else "node/" + ref.host
        answer = await self._record(ref.stream, fact, actor, cause=intent_id)
        for recorded in answer.events:
            if isinstance(recorded.data, e.InstanceStarted):
                gap = recorded.data.start_gap_ms
                phase = "coordinator.workflow_start_gap"
                self._log.traces.record(ref.run_id, phase, gap, instanceId=ref.instance_id)
        return answer

    async def started(self, ref: InstanceRef) -> Answer:
        """Records that an instance of another engine runs; it may come before `created` does."""
        fact = e.InstanceStarted(
            instance_id=ref.instance_id, attempt=ref.attempt, host=ref.host, start_gap_ms=0
        )
        return await self._report(ref, fact, [])

    async def create_failed(
        self, ref: InstanceRef, intent_id: str, kind: e.CreateFailure, tries: int, code: str
    ) -> Answer:
        """Records that an instance could not be created."""
        fact = e.InstanceCreateFailed(
            instance_id=ref.instance_id,
            attempt=ref.attempt,
            kind=kind,
            try_number=tries,
            code=code,
        )
        return await self._record(ref.stream, fact, ref.actor, cause=intent_id)

    async def completed(self, ref: InstanceRef, result: bytes, rows: int | None = None) -> Answer:
        """Records an instance's result, given as canonical JSON; raises TooLarge above 32 MiB."""
        if len(result) > BLOB_BYTES_MAX:
            raise TooLarge(
                f"result is {len(result)} bytes, the limit is {BLOB_BYTES_MAX}",
                code="RESULT_TOO_LARGE",
                hint="write it to a file or a table, and return where it is",
            )
        sealed = await self.seal(ref, f"instance.completed/ended/{ref.instance_id}/result", result)
        fact = e.InstanceCompleted(
            instance_id=ref.instance_id,
            attempt=ref.attempt,
            result=sealed.seal,
            output_rows=rows,
        )
        return await self._report(ref, fact, [sealed])

    async def errored(
        self,
        ref: InstanceRef,
        error_class: e.ErrorClass,
        code: str,
        error: Json,
        retry_after_ms: int | None = None,
    ) -> Answer:
        """Records that an instance ended by an error; its text and stack are sealed."""
        sealed = await self.seal(
            ref, f"instance.errored/ended/{ref.instance_id}/error", canonical(error)
        )
        fact = e.InstanceErrored(
            instance_id=ref.instance_id,
            attempt=ref.attempt,
            error_class=error_class,
            code=code,
            error=sealed.seal,
            retry_after_ms=retry_after_ms,
        )
        return await self._report(ref, fact, [sealed])

    async def lost(self, ref: InstanceRef, error_class: e.ErrorClass, evidence: str) -> Answer:
        """Records that nothing more can come from an instance."""
        fact = e.InstanceLost(
            instance_id=ref.instance_id,
            attempt=ref.attempt,
            error_class=error_class,
            evidence=evidence,
        )
        return await self._report(ref, fact, [])

    async def log(
        self, ref: InstanceRef, n: int, lines: Sequence[dict[str, Json]], dropped: int
    ) -> Answer:
        """Records the n-th batch of log lines of an instance."""
        place = f"run.log/log/{ref.instance_id}/{n}/lines"
        sealed = await self.seal(ref, place, canonical(list(lines)))
        fact = e.RunLog(
            instance_id=ref.instance_id,
            attempt=ref.attempt,
            n=n,
            count=len(lines),
            dropped=dropped,
            lines=sealed.seal,
        )
        return await self._report(ref, fact, [sealed])

    async def progress(
        self, ref: InstanceRef, n: int, done: int, of: int | None, note: str
    ) -> Answer:
        """Records how far an instance says it is."""
        sealed = []
        if note:
            place = f"run.progress/progress/{ref.instance_id}/{n}/note"
            sealed = [await self.seal(ref, place, canonical(note))]
        fact = e.RunProgress(
            instance_id=ref.instance_id,
            attempt=ref.attempt,
            n=n,
            done=done,
            of=of,
            note=sealed[0].seal if sealed else None,
        )
        return await self._report(ref, fact, sealed)

    async def child(
        self,
        ref: InstanceRef,
        child_key: str,
        play_name: str,
        value: bytes,
        on_parent_end: e.OnParentEnd,
    ) -> str:
        """Asks for a child, or finds the one that was asked for under this key; returns its id."""
        sealed = await self.seal(ref, f"child.requested/child/{child_key}/input", value)
        fact = e.ChildRequested(
            child_key=child_key,
            child_run_id=child_run_id(play_name, ref.run_id, child_key),
            play_name=play_name,
            input=sealed.seal,
            on_parent_end=on_parent_end,
        )
        self._expect(ref, "child", child_key)
        answer = await self._report(ref, fact, [sealed])
        child = None if answer.state is None else answer.state.children.get(child_key)
        if child is not None and child.status != "requested":
            # It ended long ago, or its end came before this request (SPEC 4.3).
            self._tell(ref.stream, "child", child_key, child)
        return fact.child_run_id

    async def child_end(self, ref: InstanceRef, child_key: str) -> Child:
        """Waits until a child's terminal stands in the parent's stream, and returns it.

        A fact of the log, not a message to someone alive: a terminal that came early, late or to
        another attempt answers at once (CASES C004).
        """
        end: Child = await self._park(self._expect(ref, "child", child_key))
        return end

    async def wait(
        self,
        ref: InstanceRef,
        kind: e.WaitKind,
        key: str,
        ordinal: int,
        until_at: int | None,
    ) -> Wait:
        """Starts a wait, or finds it with its first deadline, and returns it when it has ended."""
        name = wait_id(kind, key, ordinal)
        fact = e.RunWaitStarted(
            wait_id=name, kind=kind, key=key, ordinal=ordinal, until_at=until_at
        )
        ended = self._expect(ref, "wait", name)
        answer = await self._report(ref, fact, [])
        wait = await self._log.reader.ask(wait_query(ref.run_id, name)) if answer.replayed else None
        if wait is None or wait.outcome is None:
            await self._park(ended)
            wait = await self._log.reader.ask(wait_query(ref.run_id, name))
        if wait is None:
            raise LookupError(name)
        return wait

    async def session(self, ref: InstanceRef, table: str, at: int) -> SessionGrant:
        """Opens a database session of the run for its current instance alone."""
        run = await self._log.reader.ask(run_query(ref.run_id))
        if run is None or run.terminal or run.attempt != ref.attempt:
            raise StaleAttempt(
                f"attempt {ref.attempt} of {ref.run_id} is no longer current", hint="stop"
            )
        return await open_session(self._log.vault, run, table, at)

    async def reveal_bytes(self, value: Seal) -> bytes:
        """Returns a sealed value as canonical JSON."""
        return await self._log.vault.reveal_bytes(value)

    async def seal(self, ref: InstanceRef, place: str, value: bytes) -> Sealed:
        """Seals a value under the run's key, and stores it first if it is a blob."""
        key = await self._log.vault.run_key(ref.run_id)
        if key is None:
            raise LookupError(ref.run_id)
        sealed = seal(key, ref.run_id, place, value, ref.externalize_after_bytes)
        await self._log.vault.store_blobs([sealed])
        self._log.vault.learn(sealed, value)
        return sealed

    async def _report(self, ref: InstanceRef, fact: Event, sealed: Sequence[Sealed]) -> Answer:
        return await self._log.transact(
            Command(
                stream=ref.stream,
                fact=fact,
                actor=ref.actor,
                reporter=ref.reporter,
                values=tuple(item.disclosure for item in sealed),
            )
        )

    async def _record(self, stream: str, fact: Event, actor: str, *, cause: str) -> Answer:
        return await self._log.transact(Command(stream=stream, fact=fact, actor=actor, cause=cause))

    def forget(self, ref: InstanceRef) -> None:
        """Drops what an instance waited for; it has ended."""
        instances = self._waiting.get(ref.stream, {})
        for future in instances.pop(ref.instance_id, {}).values():
            future.cancel()
        if not instances:
            self._waiting.pop(ref.stream, None)

    def _expect(self, ref: InstanceRef, what: str, key: str) -> asyncio.Future[Any]:
        """Returns what is done when a thing has ended.

        Asked for before the thing is begun, so that no end can pass between a look and a wait.
        """
        expected = self._waiting.setdefault(ref.stream, {}).setdefault(ref.instance_id, {})
        future = expected.get((what, key))
        if future is None:
            future = expected[what, key] = asyncio.get_running_loop().create_future()
        return future

    async def _park(self, future: asyncio.Future[Any]) -> Any:
        self._parked[future] += 1
        try:
            return await asyncio.shield(future)
        finally:
            self._parked[future] -= 1
            if not self._parked[future]:
                del self._parked[future]

    def _tell(self, stream: str, what: str, key: str, value: object) -> None:
        for expected in self._waiting.get(stream, {}).values():
            future = expected.get((what, key))
            if future is not None and not future.done():
                future.set_result(value)

    def _notice(self, committed: Committed) -> None:
        if committed.events:
            self._seen = committed.events[-1].position
        if not self._waiting:
            return
        for recorded in committed.events:
            if recorded.subject not in self._waiting:
                continue
            event: Any = recorded.data
            if isinstance(event, e.ChildTerminalSet):
                self._tell(recorded.subject, "child", event.event_key, _child_end(event, recorded))
            elif isinstance(event, e.ChildSubmitFailed):
                child = Child(
                    child_key=event.child_key,
                    status="failed",
                    position=recorded.position,
                    child_run_id=event.child_run_id,
                    code=event.code,
                )
                self._tell(recorded.subject, "child", event.child_key, child)
            elif isinstance(event, e.RunWaitEnded):
                self._tell(recorded.subject, "wait", event.wait_id, None)


def _child_end(event: e.ChildTerminalSet, recorded: Recorded[Event]) -> Child:
    """Returns what an awaiting parent needs of a terminal."""
    return Child(
        child_key=event.event_key,
        status=event.status or "completed",
        position=recorded.position,
        child_run_id=event.child_run_id,
        result=event.result if event.source == "child" else event.data,
        error_class=event.error_class,
        code=event.code,
        error=event.error,
    )


def decode_params(params: bytes) -> dict[str, Any]:
    """Returns launch parameters; raises ValueError unless they are an object."""
    value = msgspec.json.decode(params)
    if not isinstance(value, dict):
        raise TypeError("launch parameters are not an object")
    return value
