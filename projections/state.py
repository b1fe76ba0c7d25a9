"""The state of one run, as frozen values: what `decide` and `react` look at.

`Run` has bounded size and is the run's row.  Instances and children are kept whole; of signals only
those that no wait has taken, of waits only the open ones: the others are rows that no rule needs.
"""

from __future__ import annotations

from typing import Final, Literal

from immutables import Map
from msgspec import Struct

from ledger.events import (
    ErrorClass,
    Isolation,
    Lineage,
    OnParentEnd,
    Policy,
    Seal,
    SecretRef,
    TerminateReason,
    WaitKind,
    WaitOutcome,
)

Status = Literal["submitted", "running", "cancelling", "completed", "failed", "cancelled"]
Phase = Literal[
    "requested", "created", "started", "completed", "errored", "lost", "terminated", "failed"
]
ChildStatus = Literal["requested", "completed", "failed", "cancelled"]

TERMINAL: Final = frozenset({"completed", "failed", "cancelled"})
ENDED_PHASES: Final = frozenset({"completed", "errored", "lost", "terminated", "failed"})


class Value(Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """How every part of a state is kept."""


class LaunchState(Value, frozen=True):
    params_bytes: int
    externalized: bool
    expires_at: int


class Used(Value, frozen=True):
    """How often each budget was charged; `restart` starts anew after a child end or a signal."""

    retry: int = 0
    lost: int = 0
    restart: int = 0
    play: int = 0


class Retry(Value, frozen=True):
    attempt: int
    reason: str


EDGE: Final = "edge"
"""The engine of runs that another coordinator drives: nothing here creates or ends instances."""


class Sessions(Value, frozen=True):
    """The encrypted database sessions of a run, where it has any."""

    count: int
    expires_at: int
    sessions: Seal


class Cancel(Value, frozen=True):
    """The request that fixed the end; `intent_id` is its grace timer."""

    request_id: str
    at: int
    position: int
    intent_id: str
    reason: Seal | None = None


class Progress(Value, frozen=True):
    done: int
    of: int | None
    note: Seal | None
    at: int
    position: int


class Counts(Value, frozen=True):
    """Of children; `cancels_open` are those asked to end that have not answered."""

    total: int = 0
    running: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    cancels_open: int = 0


class Run(Value, frozen=True):
    """What is true of a run itself."""

    run_id: str
    version: int
    position: int
    status: Status
    play_name: str
    engine: str
    isolation: Isolation
    scope: str
    org_id: str
    lineage: Lineage
    params: Seal
    request_digest: str
    policy: Policy
    submitted_at: int
    submitted_position: int
    attempt: int = -1
    play_digest: str | None = None
    launch: LaunchState | None = None
    started_at: int | None = None
    ended_at: int | None = None
    ended_position: int | None = None
    retry: Retry | None = None
    used: Used = Used()
    cancel: Cancel | None = None
    cancel_refused: bool = False
    result: Seal | None = None
    output_rows: int | None = None
    error_class: ErrorClass | None = None
    code: str | None = None
    error: Seal | None = None
    refused: str | None = None
    children: Counts = Counts()
    signals: int = 0
    log_lines: int = 0
    progress: Progress | None = None
    sessions: Sessions | None = None
    executor_token: SecretRef | None = None
    internal_token: SecretRef | None = None

    @property
    def terminal(self) -> bool:
        return self.status in TERMINAL


class Instance(Value, frozen=True):
    """One attempt; `terminate_intent` and `timer_intent` are its outbox rows while open."""

    instance_id: str
    attempt: int
    phase: Phase
    requested_at: int
    requested_position: int
    not_before_at: int | None = None
    created: bool = False
    started: bool = False
    host: str | None = None
    started_at: int | None = None
    ended_at: int | None = None
    error_class: ErrorClass | None = None
    code: str | None = None
    error: Seal | None = None
    retry_after_ms: int | None = None
    terminate: TerminateReason | None = None
    terminate_intent: str | None = None
    timer_intent: str | None = None
    mapped_id: str | None = None

    @property
    def ended(self) -> bool:
        return self.phase in ENDED_PHASES

    @property
    def live(self) -> bool:
        return self.phase in ("created", "started")


class Child(Value, frozen=True):
    """A child as its parent sees it; without `play_name` its terminal came before its request."""

    child_key: str
    status: ChildStatus
    position: int
    child_run_id: str | None = None
    play_name: str | None = None
    input: Seal | None = None
    on_parent_end: OnParentEnd = "cancel"
    cancel_asked: bool = False
    ended_position: int | None = None
    result: Seal | None = None
    error_class: ErrorClass | None = None
    code: str | None = None
    error: Seal | None = None


class Signal(Value, frozen=True):
    """A received signal; waits match by `key`."""

    n: int
    signal_id: str
    key: str
    signal: str
    event_type: str
    data: Seal
    position: int
    event_key: str | None = None
    taken_by: str | None = None


class Wait(Value, frozen=True):
    """A wait; `intent_id` is its timer, `signal` what it took."""

    wait_id: str
    kind: WaitKind
    key: str
    ordinal: int
    since_at: int
    position: int
    intent_id: str
    until_at: int | None = None
    outcome: WaitOutcome | None = None
    signal_id: str | None = None
    data: Seal | None = None


class RunState(Struct, frozen=True, gc=False):
    """Everything a rule may look at; the maps are persistent, so an old state stays as it was."""

    run: Run
    instances: Map[int, Instance] = Map()
    children: Map[str, Child] = Map()
    signals: Map[int, Signal] = Map()
    waits: Map[str, Wait] = Map()

    @property
    def current(self) -> Instance | None:
        """The instance of the highest attempt."""
        return self.instances.get(self.run.attempt)

    def instance(self, instance_id: str) -> Instance | None:
        """The instance of this id, of whatever attempt."""
        for instance in self.instances.values():
            if instance.instance_id == instance_id:
                return instance
        return None

    def oldest_signal(self, key: str) -> Signal | None:
        """The oldest signal of this key that no wait has taken."""
        return min(
            (signal for signal in self.signals.values() if signal.key == key),
            key=lambda signal: signal.n,
            default=None,
        )

    def open_wait(self, key: str) -> Wait | None:
        """The oldest open wait for a signal of this key."""
        return min(
            (wait for wait in self.waits.values() if wait.kind == "signal" and wait.key == key),
            key=lambda wait: wait.position,
            default=None,
        )
