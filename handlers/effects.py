"""The effect loop: does what the outbox says, and records what came of it.

Intent recorded -> row -> lease -> do -> outcome as a command -> row gone by projection.  A crash
between any two of these leaves the intent, and the next node does it again; every effect is keyed,
so doing it twice is doing it once.  A failed try is an event, pauses grow, and after ten tries the
row is parked visibly while the others go on (CONTRACTS A.9).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, assert_never, cast

import structlog

from handlers.acts import Acts
from handlers.commands import Command
from handlers.engine import Engine, EngineError
from handlers.node import FROZEN_S, Node, Watch
from handlers.outbox import (
    Scope,
    born_leased,
    earlier_query,
    intent_query,
    outbox_row,
    rows_query,
    take,
    unleased_query,
)
from handlers.port import Port, RunLog
from handlers.submit import Submitter
from handlers.sweep import sweep
from ledger import events as e
from ledger.codec import Recorded
from ledger.errors import PlayledgerError, Unavailable
from ledger.events import Event
from ledger.failpoint import failpoint
from ledger.rows import Patch
from ledger.vault import expire_orphans, orphans_query
from ledger.writer import Clock, Committed
from projections.load import OutboxRow, run_query
from projections.rows import IntentKind
from projections.state import Run, RunState

SWEEP_S: Final = 1.0
RETRY_S: Final = 0.5
ASK_AGAIN_S: Final = 2.0
ORPHANS_EVERY: Final = 3600
log = structlog.get_logger("handlers.effects")


class EffectLoop:
    """One per node, on one event loop; owns the rows this node has leased."""

    def __init__(
        self,
        run_log: RunLog,
        node: Node,
        engines: Mapping[str, Engine],
        scope: Scope,
        submitter: Submitter,
        clock: Clock,
        *,
        frozen_s: float = FROZEN_S,
    ) -> None:
        self._log = run_log
        self._node = node
        self._scope = scope
        self._clock = clock
        self._watch = Watch(run_log.path, frozen_s=frozen_s)
        self._port = Port(run_log)
        self._acts = Acts(run_log, self._port, node, engines, submitter, clock)
        self._held: dict[str, OutboxRow] = {}
        self._due: list[tuple[int, int, str]] = []
        self._intents: dict[str, tuple[Recorded[Event], Run]] = {}
        self._busy: set[str] = set()
        self._asked: set[str] = set()
        """Terminates that were done; the instance's own end closes them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._stop_listening: Callable[[], None] | None = None
        self._draining = False
        self._sweeps = 0

    async def start(self) -> int:
        """Begins to lease and to act; returns how many lost instances the first sweep ended."""
        self._log.writer.before_flush = born_leased(self._node.id, self._scope)
        loop = asyncio.get_running_loop()
        self._stop_listening = self._log.writer.subscribe(loop, self._notice)
        await self._record_node(e.NodeStarted(node_id=self._node.id, **self._acts.described()))
        ended = await sweep(self._log, self._watch, self._node.id)
        await self._expire()
        await self._take()
        self._spawn(self._keep_looking())
        self._spawn(self._keep_sweeping())
        return ended

    def drain(self) -> None:
        """Leases and starts nothing more; what is being done goes on."""
        self._draining = True
        self._log.writer.before_flush = born_leased(self._node.id, Scope(frozenset()))

    async def stop(self, *, clean: bool) -> None:
        """Ends the loop, gives up its leases and records that the node stopped."""
        self.drain()
        if self._stop_listening is not None:
            self._stop_listening()
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._acts.release()
            await self._record_node(e.NodeStopped(node_id=self._node.id, clean=clean))
        except PlayledgerError as error:
            log.warning("the node's end could not be recorded", error=error.message)

    @property
    def next_due_at(self) -> int | None:
        """When the next held intent is due that nobody is doing or has done, in ms since 1970."""
        waiting = (
            row.due_at
            for row in self._held.values()
            if not row.parked and row.intent_id not in self._busy | self._asked
        )
        return min(waiting, default=None)

    @property
    def idle(self) -> bool:
        """Whether nothing held is due and nothing is being done."""
        due = self.next_due_at
        return not self._busy and (due is None or due > self._clock())

    def pump(self) -> None:
        """Starts everything that is due."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            due_at, _, intent_id = heapq.heappop(self._due)
            row = self._held.get(intent_id)
            if row is None or row.due_at != due_at or row.parked or intent_id in self._busy:
                continue
            if self._draining and row.kind == "create":
                continue
            self._busy.add(intent_id)
            self._spawn(self._do(row))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            pause = max(0.0, (self._due[0][0] - now) / 1000)
            self._timer = asyncio.get_running_loop().call_later(min(pause, 3600.0), self.pump)

    # --- what is held -----------------------------------------------------------------------------

    def _notice(self, committed: Committed) -> None:
        """Takes over the rows our own commits leased to us; others' commits are looked at soon."""
        if committed.rows is None:
            self._news.set()
            return
        leases = committed.rows["leases"]
        changed = False
        for (intent_id,), row in committed.rows["outbox"].items():
            key = str(intent_id)
            if row is None:
                self._asked.discard(key)
                self._held.pop(key, None)
                self._intents.pop(key, None)
            elif isinstance(row, Patch):
                held = self._held.get(key)
                if held is not None:
                    self._hold(_patched(held, row))
                    changed = True
            elif leases.get((intent_id,)) is not None:
                self._hold(outbox_row(row))
                changed = True
        if changed:
            for recorded in committed.events:
                state = committed.states.get(recorded.subject)
                if recorded.id in self._held and isinstance(state, RunState):
                    self._intents[recorded.id] = (recorded, state.run)
            self.pump()

    def _hold(self, row: OutboxRow) -> None:
        self._held[row.intent_id] = row
        if not row.parked:
            heapq.heappush(self._due, (row.due_at, row.position, row.intent_id))

    async def _take(self) -> None:
        """Leases what nobody holds, and looks again at held rows that others may have changed."""
        while not self._draining:
            rows = await self._log.reader.ask(unleased_query(self._node.id, self._scope))
            if not rows:
                break
            got = set(await self._log.run_job(take(self._node.id, rows)))
            failpoint("after_lease")
            for row in rows:
                if row.intent_id in got:
                    self._hold(row)
            if not got:
                break
        waiting = [r.intent_id for r in self._held.values() if r.tries or r.parked][:500]
        if waiting:
            rows = await self._log.reader.ask(rows_query(waiting))
            for row in rows:
                if self._held.get(row.intent_id) not in (None, row):
                    self._hold(row)
            for gone in set(waiting) - {row.intent_id for row in rows}:
                self._held.pop(gone, None)
        self.pump()

    async def _keep_looking(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._guarded(self._take)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweeps += 1
            if self._node.lost:
                await self._guarded(self._begin_again)
            await self._guarded(self._sweep)

    async def _begin_again(self) -> None:
        """Becomes another node: others took this one for dead, and end what it had (A.10)."""
        lost = self._node.id
        self._node.renew()
        log.warning("this node was taken for dead and begins again", was=lost, now=self._node.id)
        self._acts.lose_everything()
        self._held.clear()
        self._due.clear()
        self._intents.clear()
        if not self._draining:
            self._log.writer.before_flush = born_leased(self._node.id, self._scope)
        await self._record_node(e.NodeStarted(node_id=self._node.id, **self._acts.described()))

    async def _sweep(self) -> None:
        await sweep(self._log, self._watch, self._node.id)
        await self._log.write_traces()
        await self._take()
        if self._sweeps % ORPHANS_EVERY == 0:
            await self._expire()

    async def _expire(self) -> None:
        if await self._log.reader.ask(orphans_query(self._clock())):
            await self._log.run_job(expire_orphans)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """A log that cannot be used now is tried again at the next look, and said once a look."""
        try:
            await work()
        except Unavailable as error:
            log.warning("the log cannot be used now", code=error.code, error=error.message)
        except Exception:  # the looks go on whatever one of them met (INV-88)
            log.exception("a look at the log failed")

    # --- doing ------------------------------------------------------------------------------------

    async def _do(self, row: OutboxRow) -> None:
        again: float | None = None
        try:
            again = await self._act(row)
        except Unavailable as error:
            # Nothing can be recorded, not even that it failed: the row stays as it is.  What no
            # repeat can help (an event that cannot be read) is parked like any error.
            log.warning("intent waits for the log", kind=row.kind, error=error.message)
            again = RETRY_S if error.retriable else await self._failed(row, error)
        except PlayledgerError as error:
            again = await self._failed(row, error)
        except Exception as error:
            log.exception("effect failed", kind=row.kind, stream=row.stream)
            again = await self._failed(
                row, EngineError(f"{type(error).__name__}: {error}", code="EFFECT_FAILED")
            )
        finally:
            self._busy.discard(row.intent_id)
            if again == ASK_AGAIN_S:
                self._asked.add(row.intent_id)
        if again is not None and row.intent_id in self._held:
            await self._guarded(lambda: self._look_again(row.intent_id))
            loop = asyncio.get_running_loop()
            loop.call_later(again, self._retry, row.intent_id)

    async def _look_again(self, intent_id: str) -> None:
        """Lets go of a row that another process closed: it would be tried for ever."""
        if not await self._log.reader.ask(rows_query([intent_id])):
            self._held.pop(intent_id, None)
            self._intents.pop(intent_id, None)

    def _retry(self, intent_id: str) -> None:
        held = self._held.get(intent_id)
        if held is not None and intent_id not in self._busy and not held.parked:
            heapq.heappush(self._due, (held.due_at, held.position, intent_id))
            self.pump()

    async def _act(self, row: OutboxRow) -> float | None:
        """Does one intent; returns after how many seconds to look at it again, if it stays."""
        if row.kind in ("terminate", "child_cancel") and await self._log.reader.ask(
            earlier_query(row)
        ):
            return 0.02
        intent, run = await self._intent(row)
        kind = cast("IntentKind", row.kind)
        match kind:
            case "create":
                await self._acts.create(intent, run, row.tries + 1)
                return RETRY_S
            case "terminate":
                settled = await self._acts.terminate(intent, run)
                return None if settled else ASK_AGAIN_S
            case "params":
                await self._acts.load_params(intent, run)
            case "child_submit":
                await self._acts.submit_child(intent, run)
            case "child_cancel":
                await self._acts.cancel_child(intent)
            case "child_terminal":
                await self._acts.tell_parent(intent)
            case "session_revoke":
                await self._acts.revoke_sessions(intent, run)
            case "timer":
                await self._acts.fire_timer(intent)
            case _:
                assert_never(kind)
        return RETRY_S

    async def _intent(self, row: OutboxRow) -> tuple[Recorded[Event], Run]:
        """Returns the event behind a row, and its run as of that commit or now.

        A state older than the log's is no danger: the writer decides, and refuses what is too late.
        """
        known = self._intents.get(row.intent_id)
        if known is not None and not row.tries:
            return known
        intent = await self._log.reader.ask(intent_query(row.intent_id))
        run = await self._log.reader.ask(run_query(row.stream.removeprefix("run/")))
        if intent is None or run is None:
            raise EngineError(f"intent {row.intent_id} is not in the log", code="INTENT_LOST")
        return intent, run

    async def _failed(self, row: OutboxRow, error: PlayledgerError) -> float | None:
        """Records a failed try; the projection says when the next one is due."""
        transient = isinstance(error, EngineError) and error.transient
        try:
            await self._log.transact(
                Command(
                    stream=row.stream,
                    fact=e.EffectFailed(
                        intent_id=row.intent_id,
                        kind=row.kind,
                        try_number=row.tries + 1,
                        code=error.code,
                        error_class="transient" if transient else "permanent",
                    ),
                    actor="node/" + self._node.id,
                    cause=row.intent_id,
                )
            )
        except PlayledgerError as refusal:
            log.warning("a failed try could not be recorded", error=refusal.message)
            return RETRY_S
        return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record_node(self, fact: e.NodeStarted | e.NodeStopped) -> None:
        await self._log.transact(Command(stream="system", fact=fact, actor="node/" + self._node.id))


def _patched(row: OutboxRow, patch: Patch) -> OutboxRow:
    values = patch.over((row.due_at, row.tries, row.parked))
    due_at, tries, parked = cast("tuple[int, int, int]", values)
    return OutboxRow(
        row.intent_id,
        row.position,
        row.stream,
        row.kind,
        row.lane,
        row.host,
        due_at,
        tries,
        parked,
    )
