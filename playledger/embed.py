"""Embedding: one object over a log (UX section 2).

    async with playledger.open("plays.db", plays=[hello]) as ledger:
        run = await ledger.submit(hello, "world", run_id="hello-1")
        print(await run.result())

Async only.  Leaving the block ends the loops and loses nothing, and so does not leaving it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson

from engines.plays import Play, Plays, as_play
from engines.values import write_value
from handlers.commands import Command
from handlers.execute import Answer
from handlers.port import RunLog
from handlers.submit import DEFAULT_POLICY, PlayInfo, StagedFile, Submission, Submitter
from ledger import events as e
from ledger.canonical import Json, canonical
from ledger.codec import Recorded
from ledger.database import database_path
from ledger.errors import (
    PlayNotFound,
    RunNotFound,
    Unavailable,
    WrongExpectedVersion,
)
from ledger.events import Event
from ledger.ids import check_key, quote, run_stream, slug
from ledger.log import system_clock
from ledger.seal import Sealed, seal
from ledger.writer import Clock
from playledger.children import ChildSubmitted, submit_child
from playledger.handle import RunHandle
from playledger.wiring import driving, look_once, open_log, plays_of, submitter_for
from projections.load import (
    OutboxRow,
    RunLine,
    RunView,
    outbox_query,
    recent_runs_query,
    run_query,
    runs_query,
    view_query,
)
from projections.state import Run

T = TypeVar("T")
SESSION_TTL_MS = 3_600_000
PlayLike = Callable[..., Any] | Play | str


@asynccontextmanager
async def open(  # noqa: A001 - reads as `playledger.open`
    path_or_url: str | Path,
    *,
    plays: Iterable[Callable[..., Any] | Play] = (),
    read_only: bool = False,
    policy: e.Policy = DEFAULT_POLICY,
    actor: str = "library/local",
    clock: Clock = system_clock,
    **options: Any,
) -> AsyncIterator[Ledger]:
    """Opens a log; with `plays` this process drives them too.

    Raises LogMissing, LogLocked, LogReadOnly, SchemaNewer or LogDamaged.
    """
    offered = plays_of(plays)
    log = await open_log(database_path(path_or_url), clock=clock, read_only=read_only, **options)
    ledger = Ledger(log, offered, policy=policy, actor=actor, clock=clock)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(log.close)
        if len(offered):
            await stack.enter_async_context(driving(log, offered, ledger.submitter, clock=clock))
        elif not read_only:
            await look_once(log)
        yield ledger


class Ledger:
    """A log of runs, open in this process."""

    def __init__(
        self,
        log: RunLog,
        plays: Plays,
        *,
        policy: e.Policy = DEFAULT_POLICY,
        actor: str = "library/local",
        clock: Clock = system_clock,
        find: Callable[[str], PlayInfo | None] | None = None,
        isolation: e.Isolation = "task",
    ) -> None:
        self.log = log
        self.plays = plays
        self.policy = policy
        self.actor = actor
        self.submitter: Submitter = submitter_for(log, plays, find=find, isolation=isolation)
        self._clock = clock
        self.session_ttl_ms = SESSION_TTL_MS

    async def submit(
        self,
        play: PlayLike,
        input: Any = None,
        *,
        run_id: str | None = None,
        files: Sequence[str | Path | StagedFile] = (),
        org: str = "local",
        actor: str | None = None,
    ) -> RunHandle[Any]:
        """Records a run and returns when that is durable; the same call again is the same run.

        Raises RunConflict if the run id is taken by another request, InputInvalid, TooLarge,
        PlayNotFound, IdInvalid, or Unavailable.
        """
        name = self._name(play)
        staged = tuple(
            [f if isinstance(f, StagedFile) else await _read_file(Path(f)) for f in files]
        )
        value: Json = orjson.loads(write_value(input))
        if value is None and len(staged) == 1:
            value = {"file": staged[0].name}
        answer = await self.submitter.submit(
            Submission(
                run_id=new_run_id(name, self._clock()) if run_id is None else run_id,
                play_name=name,
                input=value,
                actor=actor or self.actor,
                policy=self.policy,
                org_id=org,
                staged=staged,
            )
        )
        state = answer.state
        if state is None:
            raise RuntimeError("a submit leads to a run")
        return RunHandle(self, state.run.run_id, answer.position, answer)

    def run(self, run_id: str) -> RunHandle[Any]:
        """Returns a handle of a run, without looking whether there is one."""
        return RunHandle(self, run_id)

    async def runs(
        self,
        *,
        status: str | None = None,
        play: str | None = None,
        waiting_on: str | None = None,
        limit: int = 100,
        before: int | None = None,
    ) -> list[RunLine]:
        """Returns runs, newest first, behind a submit position."""
        return await self.log.reader.ask(
            runs_query(status=status, play=play, waiting_on=waiting_on, limit=limit, before=before)
        )

    async def status(
        self, run_id: str, *, min_position: int | None = None, wait_s: float = 30.0
    ) -> RunView:
        """Returns a run as it is, in one indexed read; raises RunNotFound.

        With `min_position` it waits until the log has come that far, so that a caller reads its own
        write from another process; raises Unavailable after `wait_s` seconds.
        """
        until = time.monotonic() + wait_s
        while True:
            view = await self.log.reader.ask(view_query(run_id))
            if min_position is None or (view and view.as_of_position >= min_position):
                break
            if await self.log.position() >= min_position:
                break
            if time.monotonic() >= until:
                raise Unavailable(
                    f"position {min_position} was not reached within {wait_s:.1f} s",
                    code="POSITION_NOT_REACHED",
                    hint="again",
                )
            await asyncio.sleep(0.01)
        if view is None:
            raise await self.not_found(run_id)
        return view

    async def not_found(self, run_id: str) -> RunNotFound:
        """Returns the error for a run that is not there, with the nearest that is."""
        import difflib

        known = await self.log.reader.ask(recent_runs_query())
        near = difflib.get_close_matches(run_id, known, 1)
        hint = f"did you mean {quote(near[0])}? " if near else ""
        return RunNotFound(
            f"run {quote(run_id)} is not in {self.log.path}",
            hint=f"{hint}all: playledger runs --db {self.log.path}",
            runId=run_id,
            head=await self.log.position(),
        )

    async def submit_child(self, parent_run_id: str, body: Json) -> ChildSubmitted:
        """Asks for a child of a run by a manifest, as the HTTP door does (SPEC 1.20)."""
        return await submit_child(self, parent_run_id, body, actor=self.actor)

    async def signal(
        self,
        run_id: str,
        key: str,
        data: Any = None,
        *,
        signal_id: str | None = None,
        signal: str | None = None,
        event_type: str | None = None,
        expected_version: int | None = None,
        actor: str | None = None,
    ) -> Answer:
        """Records a signal for a run, early or late; returned means durable.

        Raises RunNotFound, RunTerminal, or Conflict if the signal id was used with other data.
        """
        check_key(key, "signal")
        name = signal or key
        identity = signal_id or secrets.token_hex(8)
        check_key(identity, "signal id")
        run, key_bytes = await self.run_and_key(run_id)
        sealed = await self._seal(
            run, key_bytes, f"signal.received/signal/{identity}/data", write_value(data)
        )
        fact = e.SignalReceived(
            signal_id=identity,
            signal=name,
            event_key=key if signal is not None else None,
            event_type=event_type or name,
            data=sealed.seal,
        )
        return await self.log.transact(
            Command(
                stream=run_stream(run_id),
                fact=fact,
                actor=actor or self.actor,
                values=(sealed.disclosure,),
                expected_version=expected_version,
            )
        )

    async def cancel(
        self,
        run_id: str,
        reason: str = "",
        *,
        request_id: str | None = None,
        expected_version: int | None = None,
        actor: str | None = None,
    ) -> Answer:
        """Asks a run and its children to end; raises RunTerminal if it ended otherwise."""
        identity = request_id or secrets.token_hex(8)
        run, key = await self.run_and_key(run_id)
        sealed: list[Sealed] = []
        if reason:
            place = f"run.cancel_requested/cancel/{identity}/reason"
            sealed = [await self._seal(run, key, place, canonical(reason))]
        return await self.log.transact(
            Command(
                stream=run_stream(run_id),
                fact=e.RunCancelRequested(
                    request_id=identity, reason=sealed[0].seal if sealed else None
                ),
                actor=actor or self.actor,
                values=tuple(item.disclosure for item in sealed),
                expected_version=expected_version,
            )
        )

    async def retry(
        self, run_id: str, *, expected_version: int | None = None, actor: str | None = None
    ) -> list[OutboxRow]:
        """Does now what waits: skips backoffs, tries parked items again; returns what it resumed.

        It never reopens an ended run.  `expected_version` is of the first command alone: that one
        moves the run on.
        """
        run = await self.log.reader.ask(run_query(run_id))
        if run is None:
            raise await self.not_found(run_id)
        now = self._clock()
        resumed: list[OutboxRow] = []
        for row in await self.log.reader.ask(outbox_query(run_id)):
            if row.kind == "timer" or (not row.parked and row.due_at <= now):
                continue
            await self.log.transact(
                Command(
                    stream=row.stream,
                    fact=e.EffectResumed(intent_id=row.intent_id),
                    actor=actor or self.actor,
                    request=secrets.token_hex(8),
                    expected_version=None if resumed else expected_version,
                )
            )
            resumed.append(row)
        if not resumed and expected_version not in (None, run.version):
            raise WrongExpectedVersion(
                f"stream {run_stream(run_id)}: expected version {expected_version}, "
                f"log is at {run.version}",
                hint="read it again and decide again",
                expected=expected_version,
                actual=run.version,
            )
        return resumed

    def events(
        self,
        after: int = 0,
        *,
        stream: str | None = None,
        types: Iterable[str] | None = None,
        follow: bool = False,
    ) -> AsyncIterator[Recorded[Event]]:
        """Yields events behind a position; a cursor is one integer, nothing is missed."""
        return self.log.events(after, stream=stream, types=types, follow=follow)

    async def reveal(self, value: e.Seal | None) -> Json:
        """Returns a sealed value."""
        return None if value is None else await self.log.vault.reveal(value)

    async def wait_for_end(self, run_id: str, timeout: timedelta | None = None) -> Run:
        """Returns a run's row once it has ended; raises TimeoutError, RunNotFound."""
        limit = None if timeout is None else timeout.total_seconds()
        with self.log.feed().watching(run_stream(run_id), _has_ended) as watcher:
            async with asyncio.timeout(limit):
                while True:
                    watcher.news.clear()
                    state, watcher.state = watcher.state, None
                    run = state.run if state else await self.log.reader.ask(run_query(run_id))
                    if run is None:
                        raise await self.not_found(run_id)
                    if run.terminal:
                        return cast("Run", run)
                    await watcher.news.wait()

    def now(self) -> int:
        """Returns the time that a commit would have now, in ms since 1970."""
        return max(self._clock(), self.log.writer.recorded_at)

    async def run_and_key(self, run_id: str) -> tuple[Run, bytes]:
        """Returns a run's row and the key its values are sealed under; raises RunNotFound."""
        run = await self.log.reader.ask(run_query(run_id))
        key = await self.log.vault.run_key(run_id)
        if run is None or key is None:
            raise await self.not_found(run_id)
        return run, key

    async def _seal(self, run: Run, key: bytes, place: str, value: bytes) -> Sealed:
        sealed = seal(key, run.run_id, place, value, run.policy.externalize_after_bytes)
        await self.log.vault.store_blobs([sealed])
        self.log.vault.learn(sealed, value)
        return sealed

    def _name(self, play: PlayLike) -> str:
        if isinstance(play, str):
            return play
        item = play if isinstance(play, Play) else as_play(play, trusted=True)
        if self.plays.get(item.name) is None:
            raise PlayNotFound(
                f"{item.name} is not offered by this ledger",
                hint="give it to playledger.open(..., plays=[...])",
            )
        return item.name


def new_run_id(play_name: str, now_ms: int) -> str:
    """Returns a run id nobody gave: the play and 16 characters that order by time.

    41 bits of time and 39 drawn ones: two equal ids would silently be one run.
    """
    alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
    number = (now_ms << 39) | secrets.randbits(39)
    letters = "".join(alphabet[(number >> shift) & 31] for shift in range(75, -1, -5))
    return f"{slug(play_name)}-{letters}"


def _has_ended(state: Any) -> bool:
    return bool(state.run.terminal)


async def _read_file(path: Path) -> StagedFile:
    content = await asyncio.to_thread(path.read_bytes)
    return StagedFile(name=path.name, content=content)


__all__ = ["Ledger", "RunHandle", "open"]
