"""Given / when / then for the rules, and a log on disk to hold the writer to them.

`given` lists facts as they came; what the rules chose on each stands behind it, as the writer would
have appended it.  So a test says what happened, and not what the code under test made of it.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

from handlers.commands import Command, Reporter, fact_id, wait_id
from handlers.decide import decide
from handlers.decision import Decision, Rejected
from handlers.port import RunLog
from handlers.react import react
from handlers.submit import DEFAULT_POLICY
from ledger import events as e
from ledger.codec import Recorded, decode, format_time, wire_name
from ledger.errors import PlayledgerError
from ledger.events import SCHEMA_VERSIONS, Event, RunEvent, Seal
from ledger.ids import child_run_id, event_id, instance_id, run_stream
from ledger.log import system_clock
from ledger.writer import Clock
from playledger.wiring import open_log
from projections.load import load
from projections.run import evolve
from projections.state import RunState

RUN: Final = "r1"
HOST: Final = "n-1"
T0: Final = 1_796_112_000_000
KEY: Final = bytes(range(32))
POLICY: Final = DEFAULT_POLICY
SECOND: Final = 1000
DAY: Final = 24 * 3600 * SECOND


def sealed(text: str = "value") -> Seal:
    """Returns a seal that differs where its text does."""
    return Seal(sd=((event_id("seal", text) * 2)[:43],), bytes=len(text))


# --- facts, short ---------------------------------------------------------------------------------


def submitted(
    run: str = RUN, *, parent: str | None = None, key: str = "k", digest: str = "d", **policy: Any
) -> e.RunSubmitted:
    """A request to run `shop:refund`; keywords change the policy it freezes."""
    lineage = e.Lineage(family_key=run)
    if parent is not None:
        lineage = e.Lineage(family_key=parent, parent_run_id=parent, child_key=key)
    return e.RunSubmitted(
        run_id=run,
        play_name="shop:refund",
        engine="local",
        isolation="task",
        scope="default",
        org_id="local",
        lineage=lineage,
        params=sealed("params"),
        request_digest=digest,
        policy=replace(POLICY, **policy),
    )


def instance(attempt: int = 0, run: str = RUN) -> str:
    """Returns the id of an attempt's instance."""
    return instance_id("default", run, attempt)


def created(attempt: int = 0, host: str | None = HOST, run: str = RUN) -> e.InstanceCreated:
    """A local instance (with a host: created and started in one), or one of another engine."""
    return e.InstanceCreated(
        instance_id=instance(attempt, run), attempt=attempt, host=host, already_existed=False
    )


def started(attempt: int = 0, run: str = RUN) -> e.InstanceStarted:
    return e.InstanceStarted(instance_id=instance(attempt, run), attempt=attempt, start_gap_ms=0)


def create_failed(
    kind: e.CreateFailure = "transient", tries: int = 1, attempt: int = 0, code: str = "ENGINE_DOWN"
) -> e.InstanceCreateFailed:
    return e.InstanceCreateFailed(
        instance_id=instance(attempt), attempt=attempt, kind=kind, try_number=tries, code=code
    )


def completed(attempt: int = 0, run: str = RUN) -> e.InstanceCompleted:
    return e.InstanceCompleted(
        instance_id=instance(attempt, run), attempt=attempt, result=sealed("result")
    )


def errored(
    error_class: e.ErrorClass = "user_error", attempt: int = 0, again_in: int | None = None
) -> e.InstanceErrored:
    return e.InstanceErrored(
        instance_id=instance(attempt),
        attempt=attempt,
        error_class=error_class,
        code="BOOM",
        error=sealed("boom"),
        retry_after_ms=again_in,
    )


def lost(error_class: e.ErrorClass = "instance_lost", attempt: int = 0) -> e.InstanceLost:
    return e.InstanceLost(
        instance_id=instance(attempt), attempt=attempt, error_class=error_class, evidence="gone"
    )


def terminated(attempt: int = 0) -> e.InstanceTerminated:
    return e.InstanceTerminated(instance_id=instance(attempt), attempt=attempt, found=False)


def loaded(attempt: int = 0) -> e.RetryParamsLoaded:
    return e.RetryParamsLoaded(failed_instance_id=instance(attempt), bytes=6)


def unreadable(code: str, attempt: int = 0) -> e.RetryParamsFailed:
    return e.RetryParamsFailed(failed_instance_id=instance(attempt), code=code)


def cancel(request: str = "c1") -> e.RunCancelRequested:
    return e.RunCancelRequested(request_id=request)


def signal(n: int = 1, name: str = "go", key: str | None = None) -> e.SignalReceived:
    return e.SignalReceived(
        signal_id=f"s{n}", signal=name, event_key=key, event_type=name, data=sealed(f"s{n}")
    )


def wait(
    key: str = "go", ordinal: int = 0, until: int | None = None, kind: e.WaitKind = "signal"
) -> e.RunWaitStarted:
    return e.RunWaitStarted(
        wait_id=wait_id(kind, key, ordinal), kind=kind, key=key, ordinal=ordinal, until_at=until
    )


def child(
    key: str = "k", on_parent_end: e.OnParentEnd = "cancel", input: str = "input", run: str = RUN
) -> e.ChildRequested:
    return e.ChildRequested(
        child_key=key,
        child_run_id=child_run_id("shop:pack", run, key),
        play_name="shop:pack",
        input=sealed(input),
        on_parent_end=on_parent_end,
    )


def child_ended(key: str = "k", status: e.RunEnd = "completed") -> e.ChildTerminalSet:
    return e.ChildTerminalSet(
        event_key=key,
        child_run_id=child_run_id("shop:pack", RUN, key),
        status=status,
        result=sealed("child") if status == "completed" else None,
        source="child",
    )


def fired(purpose: e.TimerPurpose) -> e.TimerFired:
    """The time of the last event that armed such a timer has come."""
    return e.TimerFired(purpose=purpose, armed_by="")


class Later(Struct, frozen=True):
    """A fact that comes `ms` behind the one before it, where others come one millisecond behind."""

    ms: int
    fact: RunEvent


class Said(Struct, frozen=True):
    """A fact reported by the instance of an attempt on a host."""

    fact: RunEvent
    attempt: int = 0
    host: str | None = HOST


Fact = RunEvent | Later | Said

# --- a story: a run's stream in memory ------------------------------------------------------------


class Story:
    """The stream of one run, told fact by fact, as the writer would append it."""

    def __init__(self, *facts: Fact, run: str = RUN) -> None:
        self.run_id = run
        self.stream = run_stream(run)
        self.events: list[Recorded[Event]] = []
        self.state: RunState | None = None
        self.at = T0
        for fact in facts:
            self.tell(fact)

    def tell(self, fact: Fact) -> list[Recorded[Event]]:
        """Takes a fact with all that follows from it; a refused one does not belong in a story."""
        command = self.command(fact)
        decision = decide(command, self.state, self.at)
        assert not isinstance(decision, Rejected), decision.error.message
        return self.append(command, decision)

    def command(self, fact: Fact) -> Command:
        """Returns the command that reports a fact now, its cause found in the story."""
        reporter = None
        self.at += fact.ms if isinstance(fact, Later) else 1
        if isinstance(fact, Said):
            reporter = Reporter(instance(fact.attempt, self.run_id), fact.host)
        event = fact.fact if isinstance(fact, Later | Said) else fact
        cause = self.cause(event)
        if isinstance(event, e.TimerFired):
            event = replace(event, armed_by=cause or "")
        return Command(
            stream=self.stream, fact=event, actor="cli/local", cause=cause, reporter=reporter
        )

    def append(self, command: Command, facts: Sequence[RunEvent]) -> list[Recorded[Event]]:
        """Appends facts and the closure of the choices on them, breadth-first."""
        queue = deque(
            (fact, fact_id(command, fact), None if _stands_alone(fact) else command.cause)
            for fact in facts
        )
        first = len(self.events)
        while queue:
            event, identity, cause = queue.popleft()
            recorded = self.add(event, identity, cause)
            assert self.state is not None
            for index, choice in enumerate(react(self.state, recorded)):
                queue.append((choice, event_id(recorded.id, str(index)), recorded.id))
        return self.events[first:]

    def add(self, event: RunEvent, identity: str, cause: str | None) -> Recorded[Event]:
        """Appends one event and moves the state on."""
        n = len(self.events) + 1
        recorded = record(event, n, n, self.stream, self.at, identity, cause)
        self.state = evolve(self.state, recorded)
        self.events.append(recorded)
        return recorded

    def last(self, *kinds: type[Event], **fields: Any) -> Recorded[Event] | None:
        """Returns the last event of these kinds whose data has these fields."""
        for recorded in reversed(self.events):
            if isinstance(recorded.data, kinds) and all(
                getattr(recorded.data, name) == value for name, value in fields.items()
            ):
                return recorded
        return None

    def cause(self, fact: RunEvent) -> str | None:
        """Returns the intent that a fact is the outcome of."""
        found: Recorded[Event] | None = None
        match fact:
            case e.InstanceCreated(attempt=n) | e.InstanceCreateFailed(attempt=n):
                found = self.last(e.InstanceCreateRequested, attempt=n)
            case e.InstanceTerminated(attempt=n):
                found = self.last(e.InstanceTerminateRequested, attempt=n)
            case e.RetryParamsLoaded() | e.RetryParamsFailed():
                found = self.last(
                    e.RetryParamsRequested, failed_instance_id=fact.failed_instance_id
                )
            case e.ChildSubmitFailed():
                found = self.last(e.ChildRequested, child_key=fact.child_key)
            case e.ChildCancelDelivered():
                found = self.last(e.ChildCancelRequested, child_key=fact.child_key)
            case e.TimerFired():
                found = self.last(_ARMED_BY[fact.purpose])
            case e.ChildTerminalSet(event_key=key):
                return event_id("run/" + child_run_id("shop:pack", self.run_id, key), "end")
            case e.EffectFailed(intent_id=intent):
                return intent
            case _:
                return None
        return None if found is None else found.id

    @property
    def types(self) -> list[str]:
        return [recorded.type for recorded in self.events]

    def all(self, *kinds: type[Event]) -> list[Any]:
        """Returns the data of the events of these kinds."""
        return [r.data for r in self.events if isinstance(r.data, kinds)]

    @property
    def status(self) -> str:
        assert self.state is not None
        return self.state.run.status


_ARMED_BY: Final[dict[str, type[Event]]] = {
    "wait": e.RunWaitStarted,
    "cancel_grace": e.RunCancelRequested,
    "timeout": e.InstanceStarted,
}


def record(
    event: Event,
    position: int,
    version: int,
    stream: str = "run/r1",
    at: int = T0,
    identity: str = "0" * 32,
    cause: str | None = None,
) -> Recorded[Event]:
    """Returns an event in its envelope."""
    return Recorded(
        actor="cli/local",
        causationid=cause,
        correlationid=stream.removeprefix("run/"),
        data=event,
        id=identity,
        schemaversion=SCHEMA_VERSIONS[type(event)],
        sequence=f"{position:016d}",
        source="//playledger/" + "5f" * 16,
        specversion="1.0",
        streamversion=version,
        subject=stream,
        time=format_time(at),
        type=wire_name(event),
    )


def _stands_alone(fact: RunEvent) -> bool:
    return isinstance(fact, e.InstanceStarted | e.InstanceOutputFenced | e.RunCancelRefused)


# --- given / when / then --------------------------------------------------------------------------


def check_decision(
    *,
    given: Sequence[Fact],
    when: Fact,
    then: Sequence[RunEvent] | type[PlayledgerError],
    keeps: RunEvent | None = None,
    code: str | None = None,
) -> None:
    """Decides on `when` behind `given`: facts, nothing, or an error and what is kept of it."""
    story = Story(*given)
    decision: Decision = decide(story.command(when), story.state, story.at)
    if isinstance(then, type):
        assert isinstance(decision, Rejected), decision
        assert type(decision.error) is then, decision.error
        assert decision.record == keeps
        if code is not None:
            assert decision.error.code == code
        return
    assert not isinstance(decision, Rejected), decision.error.message
    assert list(decision) == list(then)


def check_reaction(*, given: Sequence[Fact], when: Fact, then: Sequence[RunEvent]) -> None:
    """Folds `given` and `when`, reacts to `when` alone, and expects exactly `then`."""
    story = Story(*given)
    command = story.command(when)
    fact = cast("RunEvent", command.fact)
    recorded = story.add(fact, fact_id(command, fact), command.cause)
    assert story.state is not None
    assert list(react(story.state, recorded)) == list(then)


# --- a log on disk --------------------------------------------------------------------------------


class World:
    """A log that a test writes to command by command, and reads back in every way."""

    def __init__(self, log: RunLog) -> None:
        self.log = log

    async def tell(self, *facts: Event, run: str = RUN, **how: Any) -> list[Recorded[Event]]:
        """Commits facts of a run, their causes found in its stream; returns what was appended."""
        out: list[Recorded[Event]] = []
        for fact in facts:
            answer = await self.log.transact(await self.command(fact, run, **how))
            out += answer.events
        return out

    async def command(self, fact: Event, run: str = RUN, **how: Any) -> Command:
        """Returns the command for a fact."""
        story = Story(run=run)
        story.events = await self.events(run)
        event = cast("RunEvent", fact)
        cause = how.pop("cause", None) or story.cause(event)
        if isinstance(event, e.TimerFired) and not event.armed_by:
            event = replace(event, armed_by=cause or "")
        if isinstance(event, e.RunSubmitted):
            how.setdefault("run_key", KEY)
        how.setdefault("actor", "cli/local")
        return Command(stream=run_stream(run), fact=event, cause=cause, **how)

    async def events(self, run: str = RUN) -> list[Recorded[Event]]:
        """Returns a run's stream."""
        return [r async for r in self.log.events(stream=run_stream(run))]

    async def types(self, run: str = RUN) -> list[str]:
        return [r.type for r in await self.events(run)]

    async def status(self, run: str = RUN) -> str:
        state = self.loaded(run)
        assert state is not None
        return state.run.status

    def rows(self, sql: str, *parameters: Any) -> list[Any]:
        """Reads the file from outside."""
        with sqlite3.connect(self.log.path) as connection:
            found = connection.execute(sql, parameters).fetchall()
        connection.close()
        return found

    def loaded(self, run: str = RUN) -> RunState | None:
        """Returns a run's state from its rows."""
        with sqlite3.connect(self.log.path) as connection:
            state = load(connection, run)
        connection.close()
        return state


@asynccontextmanager
async def world(
    folder: Path, *, clock: Clock | None = None, name: str = "t.db", **options: Any
) -> AsyncIterator[World]:
    """Opens a log that nothing drives."""
    log = await open_log(folder / name, clock=clock or system_clock, **options)
    try:
        yield World(log)
    finally:
        await log.close()


def leaves(path: Path) -> list[Recorded[Event]]:
    """Returns every event of a file, in order."""
    with sqlite3.connect(path) as connection:
        found = connection.execute("select leaf from events order by position").fetchall()
    connection.close()
    return [decode(leaf) for (leaf,) in found]


class Ticks:
    """A clock that a test sets, in ms."""

    def __init__(self, now: int = T0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now
