"""Any schedule of commands, through the real writer: what has to hold after each of them.

One log for all examples, each with runs of its own, so an example costs its commits.  What a
schedule says is read against what the log holds then, as nodes and callers would: outcomes
of open intents, reports of instances current and old, signals, waits, children, cancels, and time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from handlers.commands import Command, Reporter
from handlers.react import react
from handlers.rechoose import Rechooser
from ledger import events as e
from ledger.codec import Recorded
from ledger.errors import PlayledgerError, Unavailable
from ledger.events import Event, RunEvent
from ledger.ids import child_run_id, event_id, instance_id, run_stream
from playledger.wiring import open_log
from projections.load import OutboxRow
from projections.run import evolve, fold
from projections.state import RunState
from replay import verify
from tests.given import HOST, KEY, Ticks, World, sealed, signal, submitted, wait

KEYS: Final = ("a", "b", "c")
CLASSES: Final[tuple[e.ErrorClass, ...]] = (
    "platform_reset",
    "user_error",
    "play_retry",
    "unknown",
)
LOSSES: Final[tuple[e.ErrorClass, ...]] = (
    "instance_lost",
    "coordinator_restart",
    "coordinator_shutdown",
)
ACTIONS: Final = (
    "settle", "settle", "settle", "settle", "complete", "error", "lose", "start", "log", "signal",
    "signal", "wait", "wait", "child", "child", "cancel", "tick", "again", "resubmit",
    "fail", "resume",
)  # fmt: skip
Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11), st.integers(0, 11)),
    min_size=8,
    max_size=30,
)
POLICIES = st.fixed_dictionaries(
    {
        "retry_limit": st.integers(0, 2),
        "lost_limit": st.integers(0, 1),
        "restart_limit": st.integers(0, 2),
        "play_retries": st.integers(0, 1),
        "timeout_ms": st.sampled_from([None, 50]),
        "create_window_ms": st.sampled_from([5, 600_000]),
        "on_parent_end": st.sampled_from(["cancel", "abandon"]),
    }
)


class Shared:
    """The log of all examples, on an event loop that outlives each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Ticks()
        self.runner = asyncio.Runner()
        self.world = World(self.runner.run(open_log(path, clock=self.clock)))
        self.examples = 0

    def close(self) -> None:
        self.runner.run(self.world.log.close())
        self.runner.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """The log; at the end all of it verifies."""
    made = Shared(tmp_path_factory.mktemp("model") / "model.db")
    yield made
    made.close()
    verdict = verify(made.path)
    assert verdict.ok, verdict


class Example:
    """One schedule on runs of its own, and what is checked after every step."""

    def __init__(self, shared: Shared, policy: dict[str, Any]) -> None:
        shared.examples += 1
        self.world = shared.world
        self.clock = shared.clock
        self.root = f"x{shared.examples}"
        self.policy = policy
        self.runs = [self.root]
        self.last: Command | None = None
        self.ended: dict[str, tuple[Any, ...]] = {}

    # --- saying ---

    async def say(self, run: str, fact: RunEvent, **how: Any) -> None:
        """Sends a command, and the same once more: it is answered, refused, and appends nothing."""
        if isinstance(fact, e.RunSubmitted):
            how.setdefault("run_key", KEY)
        command = Command(stream=run_stream(run), fact=fact, actor="cli/local", **how)
        self.last = command
        await self.send(command)
        position = await self.world.log.position()
        answer = await self.send(command)
        assert answer is None or answer.replayed
        assert await self.world.log.position() == position
        await self.check(run)

    async def send(self, command: Command) -> Any:
        """Sends a command; what is not a typed refusal fails the example."""
        try:
            return await self.world.log.transact(command)
        except Unavailable:
            raise  # a batch that failed is never an answer to a command
        except PlayledgerError:
            return None

    # --- acting ---

    async def act(self, step: Step) -> None:
        action, one, two = step
        run = self.runs[one % len(self.runs)]
        state = self.world.loaded(run)
        attempt = max(0, (state.run.attempt if state else 0) - (two % 3 == 2))
        ident = instance_id("default", run, attempt)
        said = {"reporter": Reporter(ident, HOST if two % 4 else "n-2")}
        match action:
            case "settle":
                rows = self.open_rows()
                if rows:
                    await self.settle(rows[one % len(rows)], two)
            case "complete":
                done = e.InstanceCompleted(
                    instance_id=ident, attempt=attempt, result=sealed(f"r{two}")
                )
                await self.say(run, done, **said)
            case "error":
                ended = e.InstanceErrored(
                    instance_id=ident,
                    attempt=attempt,
                    error_class=CLASSES[two % 4],
                    code="BOOM",
                    retry_after_ms=None if two % 2 else 7,
                )
                await self.say(run, ended, **said)
            case "lose":
                gone = e.InstanceLost(
                    instance_id=ident, attempt=attempt, error_class=LOSSES[two % 3], evidence="x"
                )
                await self.say(run, gone)
            case "start":
                begun = e.InstanceStarted(instance_id=ident, attempt=attempt, start_gap_ms=0)
                await self.say(run, begun)
            case "log":
                lines = e.RunLog(
                    instance_id=ident, attempt=attempt, n=two, count=1, dropped=0, lines=sealed()
                )
                await self.say(run, lines, **said)
            case "signal":
                name = ("go", "integration_event")[two % 2]
                await self.say(run, signal(two, name, KEYS[two % 3] if two % 4 else None))
            case "wait":
                kind: e.WaitKind = "sleep" if two % 5 == 4 else "signal"
                until = (None, self.clock.now + 20, self.clock.now - 1)[one % 3]
                await self.say(run, wait(("go", *KEYS)[two % 4], two // 4, until, kind), **said)
            case "child":
                await self.say(run, self.child(run, KEYS[two % 3], two), **said)
            case "cancel":
                await self.say(run, e.RunCancelRequested(request_id=f"c{two}"))
            case "tick":
                self.clock.now += (1, 30, 6_000, 10_001)[two % 4]
            case "again" if self.last is not None:
                await self.send(self.last)
            case "resubmit":
                await self.say(run, submitted(run, digest="other"))
            case "fail" | "resume":
                rows = self.open_rows()
                if rows:
                    await self.fail(rows[one % len(rows)], action, two)

    def child(self, run: str, key: str, two: int) -> e.ChildRequested:
        return e.ChildRequested(
            child_key=key,
            child_run_id=child_run_id("shop:pack", run, key),
            play_name="shop:pack",
            input=sealed(f"input{two // 9}"),
            on_parent_end=cast("e.OnParentEnd", self.policy.get("on_parent_end", "cancel")),
        )

    async def fail(self, row: OutboxRow, action: str, two: int) -> None:
        """A try of an intent fails, or somebody resumes it."""
        run = row.stream.removeprefix("run/")
        if action == "resume":
            resumed = e.EffectResumed(intent_id=row.intent_id)
            await self.say(run, resumed, request=str(two))
            return
        failed = e.EffectFailed(
            intent_id=row.intent_id,
            kind=row.kind,
            try_number=row.tries + 1,
            code="X",
            error_class="transient" if two % 3 else "permanent",
        )
        await self.send(
            Command(stream=row.stream, fact=failed, actor="node/n-1", cause=row.intent_id)
        )
        now = next((r for r in self.open_rows() if r.intent_id == row.intent_id), None)
        assert now is None or now.tries == row.tries + 1, "a failed try has to be counted"
        await self.check(run)

    def open_rows(self) -> list[OutboxRow]:
        """Returns the unsettled intents of this example's runs, oldest first."""
        found = self.world.rows(
            "select intent_id, position, stream_id, kind, lane, host, due_at, tries, parked"
            " from outbox where stream_id in (select value from json_each(json_array("
            + ",".join("?" * len(self.runs))
            + "))) order by position",
            *(run_stream(run) for run in self.runs),
        )
        return [OutboxRow(*row) for row in found]

    async def settle(self, row: OutboxRow, how: int) -> None:
        """Does an intent as a node would, and records what came of it."""
        if row.kind in ("terminate", "child_cancel"):
            earlier = [r for r in self.open_rows() if r.lane == row.lane and r is not row]
            row = min([row, *earlier], key=lambda r: r.position)  # a lane goes in order
        run = row.stream.removeprefix("run/")
        (intent,) = [r for r in await self.world.events(run) if r.id == row.intent_id]
        state = self.world.loaded(run)
        assert state is not None
        outcome: RunEvent
        match intent.data:
            case e.InstanceCreateRequested(instance_id=ident, attempt=attempt):
                if state.run.terminal or how % 6 == 5:
                    outcome = e.InstanceCreateFailed(
                        instance_id=ident,
                        attempt=attempt,
                        kind="permanent" if state.run.terminal or how == 5 else "transient",
                        try_number=row.tries + 1,
                        code="RUN_TERMINAL" if state.run.terminal else "ENGINE",
                    )
                else:
                    outcome = e.InstanceCreated(
                        instance_id=ident,
                        attempt=attempt,
                        host=HOST if how % 3 else None,
                        already_existed=False,
                    )
            case e.InstanceTerminateRequested(instance_id=ident, attempt=attempt):
                outcome = e.InstanceTerminated(instance_id=ident, attempt=attempt, found=False)
            case e.RetryParamsRequested(failed_instance_id=ident):
                outcome = (
                    e.RetryParamsLoaded(failed_instance_id=ident, bytes=6)
                    if how % 5
                    else e.RetryParamsFailed(failed_instance_id=ident, code="MISSING")
                )
            case e.ChildRequested() as asked:
                return await self.submit_child(run, state, intent, asked, how)
            case e.ChildCancelRequested(child_key=key, child_run_id=kid):
                await self.say(kid, e.RunCancelRequested(request_id=intent.id))
                outcome = e.ChildCancelDelivered(child_key=key, answer="asked")
            case e.RunCompleted() | e.RunFailed() | e.RunCancelled() as end:
                assert end.parent is not None
                terminal = e.ChildTerminalSet(
                    event_key=end.parent.child_key,
                    child_run_id=run,
                    status=cast("e.RunEnd", state.run.status),
                    source="child",
                )
                return await self.say(end.parent.run_id, terminal, cause=intent.id)
            case armed:
                if how % 4:
                    self.clock.now = max(self.clock.now, row.due_at)
                purpose: e.TimerPurpose = "timeout"
                if isinstance(armed, e.RunWaitStarted):
                    purpose = "wait"
                elif isinstance(armed, e.RunCancelRequested):
                    purpose = "cancel_grace"
                outcome = e.TimerFired(purpose=purpose, armed_by=intent.id)
        await self.say(run, outcome, cause=intent.id)
        return None

    async def submit_child(
        self, run: str, state: RunState, intent: Recorded[Event], asked: e.ChildRequested, how: int
    ) -> None:
        if state.run.status == "cancelled" or how % 5 == 4:
            failed = e.ChildSubmitFailed(
                child_key=asked.child_key, child_run_id=asked.child_run_id, code="PARENT_TERMINAL"
            )
            return await self.say(run, failed, cause=intent.id)
        if asked.child_run_id not in self.runs:
            self.runs.append(asked.child_run_id)
        kid = submitted(asked.child_run_id, parent=run, key=asked.child_key, **self.policy)
        await self.say(asked.child_run_id, kid, cause=intent.id)
        return None

    # --- checking ---

    async def check(self, run: str) -> None:
        """What holds for a run after any command."""
        events = await self.world.events(run)
        state = self.world.loaded(run)
        assert fold(events) == state  # INV-89
        if state is None:
            return
        assert [r.version for r in events] == list(range(1, len(events) + 1))  # INV-69
        self.check_end(run, state, events)
        self.check_attempts(events)
        self.check_choices(events)
        self.check_intents(run, events)

    def check_end(self, run: str, state: RunState, events: list[Recorded[Event]]) -> None:
        """Terminal is final, and there is one end (INV-31, C011)."""
        ends = [
            r for r in events if isinstance(r.data, e.RunCompleted | e.RunFailed | e.RunCancelled)
        ]
        assert len(ends) == state.run.terminal
        if state.run.terminal:
            end = (state.run.status, state.run.ended_at, state.run.result, state.run.attempt)
            assert self.ended.setdefault(run, end) == end
        if state.run.cancel is not None and state.run.terminal:
            assert state.run.status == "cancelled"

    def check_attempts(self, events: list[Recorded[Event]]) -> None:
        """Contiguous (INV-15), one claim per failure (INV-27), within the budgets (INV-26)."""
        attempts = [r.data.attempt for r in events if isinstance(r.data, e.InstanceCreateRequested)]
        assert attempts == list(range(len(attempts)))
        claims = [r.data.failed_instance_id for r in events if isinstance(r.data, e.RetryClaimed)]
        assert len(claims) == len(set(claims)) == max(0, len(attempts) - 1)
        decided = [r.data for r in events if isinstance(r.data, e.RetryDecided)]
        assert len(decided) == len({d.failed_instance_id for d in decided})
        for said in decided:
            assert not (said.retry and said.budget != "none" and said.used >= said.limit)
        created = [r.data.attempt for r in events if isinstance(r.data, e.InstanceCreated)]
        assert len(created) == len(set(created))  # INV-14

    def check_choices(self, events: list[Recorded[Event]]) -> None:
        """Every choice is made again by today's rules, and no other is there (CONTRACTS A.13)."""
        by_id = {r.id: r for r in events}
        state: RunState | None = None
        made = Rechooser()
        for recorded in events:
            before, state = state, evolve(state, recorded)
            found = made.take(recorded, before, state)
            assert not found, found
            for index, choice in enumerate(react(state, recorded)):
                assert by_id[event_id(recorded.id, str(index))].data == choice
        assert not made.end()

    def check_intents(self, run: str, events: list[Recorded[Event]]) -> None:
        """An open row is an intent without its outcome, wherever that would stand."""
        ids = {r.id for r in events}
        for row in self.open_rows():
            if row.stream != run_stream(run):
                continue
            assert row.intent_id in ids
            done = self.world.rows(
                "select 1 from events where id = ?", event_id(row.intent_id, "done")
            )
            assert not done, row

    async def come_to_rest(self) -> None:
        """Cancels what lives and does what is open: everything ends, and nothing stays to do."""
        for _ in range(40):
            for run in list(self.runs):
                state = self.world.loaded(run)
                if state is not None and not state.run.terminal and state.run.cancel is None:
                    await self.say(run, e.RunCancelRequested(request_id="rest"))
            rows = self.open_rows()
            if not rows:
                break
            for row in rows:
                if row.intent_id in {r.intent_id for r in self.open_rows()}:
                    await self.settle(row, 1)
        assert self.open_rows() == []
        for run in self.runs:
            state = self.world.loaded(run)
            assert state is None or state.run.terminal


async def play(shared: Shared, policy: dict[str, Any], steps: list[Step]) -> None:
    example = Example(shared, policy)
    await example.say(example.root, submitted(example.root, **policy))
    for step in steps:
        await example.act(step)
    await example.come_to_rest()


@given(policy=POLICIES, steps=STEPS)
@settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_INV_15_INV_27_INV_31_INV_89_any_schedule_keeps_every_rule(
    shared: Shared, policy: dict[str, Any], steps: list[Step]
) -> None:
    """Fold equals rows, ends are final, attempts contiguous, choices made again, and all rests."""
    shared.runner.run(play(shared, policy, steps))


BATCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=6),
    min_size=1,
    max_size=8,
)


@given(batches=BATCHES)
@settings(
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_INV_10_commands_of_one_batch_see_each_other(
    shared: Shared, batches: list[list[tuple[int, int]]]
) -> None:
    """Sent together they fit one commit, and each decides on what the one before it left."""

    async def main() -> None:
        example = Example(shared, {})
        root = example.root
        facts: list[RunEvent] = [
            submitted(root),
            e.InstanceCreated(
                instance_id=instance_id("default", root, 0),
                attempt=0,
                host=HOST,
                already_existed=False,
            ),
            signal(1),
            signal(2),
            wait("go", 0),
            wait("go", 1),
            example.child(root, "a", 0),
            e.InstanceCompleted(
                instance_id=instance_id("default", root, 0), attempt=0, result=sealed()
            ),
            e.RunCancelRequested(request_id="c"),
        ]
        create = event_id(event_id(run_stream(root), "submit"), "1")
        for batch in batches:
            commands = [
                Command(
                    stream=run_stream(root),
                    fact=facts[which],
                    actor="cli/local",
                    cause=create if which == 1 else None,
                    run_key=KEY if which == 0 else None,
                )
                for which, _ in batch
            ]
            await asyncio.gather(*(example.send(command) for command in commands))
            await example.check(root)

    shared.runner.run(main())


def test_the_model_is_not_deaf(shared: Shared) -> None:
    """A row that stays behind is noticed: the check of the end is a check."""

    async def main() -> None:
        example = Example(shared, {})
        await example.say(example.root, submitted(example.root))
        state = example.world.loaded(example.root)
        assert state is not None
        with pytest.raises(AssertionError):
            example.check_end(
                example.root, replace(state, run=replace(state.run, status="failed")), []
            )

    shared.runner.run(main())
