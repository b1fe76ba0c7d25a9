"""The one port through which instances of every engine speak to the log.

In-process calls, pipes and HTTP all end here.  Values are sealed before the queue; every report
names its instance and host, and the writer refuses those of any other (INV-22).  A port belongs to
one event loop and is woken there by commits, whoever made them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from handlers.commands import Command, Reporter, wait_id
from handlers.execute import Answer, State
from ledger import events as e
from ledger.canonical import Json, canonical
from ledger.errors import TooLarge
from ledger.events import Event, Seal
from ledger.ids import child_run_id, run_stream
from ledger.log import Log
from ledger.seal import Sealed, seal
from ledger.vault import BLOB_BYTES_MAX
from ledger.writer import Committed
from projections.load import child_query, run_query, wait_query
from projections.state import Child, Run, Wait

RunLog = Log[Command, State, Answer]


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
        self._waiting: dict[tuple[str, str, str], set[asyncio.Future[None]]] = {}
        self._stop: Callable[[], None] | None = None

    def open(self) -> None:
        """Begins to be woken by commits, on the running loop."""
        self._stop = self._log.writer.subscribe(asyncio.get_running_loop(), self._notice)

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
        return await self._record(ref.stream, fact, actor, cause=intent_id)

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
        await self._report(ref, fact, [sealed])
        return fact.child_run_id

    async def child_end(self, ref: InstanceRef, child_key: str) -> Child:
        """Waits until a child's terminal stands in the parent's stream, and returns it.

        A query over facts, not a message to someone alive: a terminal that came early, late or to
        another attempt answers at once (CASES C004).
        """
        while True:
            future = self._expect(ref.stream, "child", child_key)
            try:
                child = await self._log.reader.ask(child_query(ref.run_id, child_key))
                if child is not None and child.status != "requested":
                    return child
                await future
            finally:
                self._forget(ref.stream, "child", child_key, future)

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
        future = self._expect(ref.stream, "wait", name)
        try:
            await self._report(ref, fact, [])
        except BaseException:
            self._forget(ref.stream, "wait", name, future)
            raise
        while True:
            try:
                wait = await self._log.reader.ask(wait_query(ref.run_id, name))
                if wait is not None and wait.outcome is not None:
                    return wait
                await future
            finally:
                self._forget(ref.stream, "wait", name, future)
            future = self._expect(ref.stream, "wait", name)

    async def reveal(self, value: Seal) -> Json:
        """Returns a sealed value."""
        return await self._log.vault.reveal(value)

    async def run(self, run_id: str) -> Run | None:
        """Returns a run's row."""
        return await self._log.reader.ask(run_query(run_id))

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

    def _expect(self, stream: str, what: str, key: str) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((stream, what, key), set()).add(future)
        return future

    def _forget(self, stream: str, what: str, key: str, future: asyncio.Future[None]) -> None:
        waiting = self._waiting.get((stream, what, key))
        if waiting is not None:
            waiting.discard(future)
            if not waiting:
                del self._waiting[stream, what, key]

    def _notice(self, committed: Committed) -> None:
        if not self._waiting:
            return
        for recorded in committed.events:
            event: Any = recorded.data
            match event:
                case e.ChildTerminalSet():
                    self._wake(recorded.subject, "child", event.event_key)
                case e.ChildSubmitFailed():
                    self._wake(recorded.subject, "child", event.child_key)
                case e.RunWaitEnded():
                    self._wake(recorded.subject, "wait", event.wait_id)
                case _:
                    continue

    def _wake(self, stream: str, what: str, key: str) -> None:
        for future in self._waiting.get((stream, what, key), ()):
            if not future.done():
                future.set_result(None)


def decode_params(params: bytes) -> dict[str, Any]:
    """Returns launch parameters; raises ValueError unless they are an object."""
    value = msgspec.json.decode(params)
    if not isinstance(value, dict):
        raise TypeError("launch parameters are not an object")
    return value
