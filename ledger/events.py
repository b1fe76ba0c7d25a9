"""Every event there is: the stored vocabulary, in one sitting (CONTRACTS A.11).

A *fact* comes from outside the rules: a request, a report of an engine or an instance, the outcome
of an effect, time.  A *choice* is made by `react` alone.  An *intent* opens an outbox row, and an
*outcome* is the one fact that closes it.  Which of these an event is follows from its id.

NOTE: field names (in camelCase), type names and schema numbers are the storage format.  They are
never renamed: a change is a new schema number and an upcaster (ledger/upcast.py).  An optional
field defaults to None and is absent from the leaf then; no other default may be given, because a
default is not written.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct, field

ErrorClass = Literal[
    "platform_reset",
    "platform_internal",
    "instance_lost",
    "coordinator_restart",
    "coordinator_shutdown",
    "play_retry",
    "engine_timeout",
    "user_error",
    "artifact_missing",
    "credentials",
    "cancelled",
    "quota",
    "unknown",
]
Budget = Literal["retry", "lost", "restart", "play", "none"]
RunEnd = Literal["completed", "failed", "cancelled"]
OnParentEnd = Literal["cancel", "abandon"]
Isolation = Literal["task", "process"]
WaitKind = Literal["signal", "sleep", "permit"]
WaitOutcome = Literal["signal", "timeout", "granted"]
TimerPurpose = Literal["wait", "cancel_grace", "timeout"]
TerminateReason = Literal["superseded", "cancelled", "orphan", "timeout"]
CreateFailure = Literal["transient", "permanent", "conflict"]


class Data(
    Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True,
    forbid_unknown_fields=True,
):  # fmt: skip
    """How every payload is stored: frozen, camelCase on the wire, absent instead of null."""


class Seal(Data, frozen=True, rename={"sd": "_sd"}):
    """Stands for a value that lies in the vault: its salted digest, and its size in bytes."""

    sd: tuple[str, ...]
    bytes: int

    @property
    def digest(self) -> str:
        return self.sd[0]


class SecretRef(Data, frozen=True, kw_only=True):
    """Stands for a secret that lies in the vault (SPEC 3.2); `expires_at` in ms since 1970.

    `fingerprint` is the first 16 hex of its HMAC-SHA256 under the log's own key.
    """

    vault_key: str
    fingerprint: str
    expires_at: int | None = None


class Lineage(Data, frozen=True):
    """Says which family a run belongs to (INV-56)."""

    family_key: str
    root_run_id: str | None = None
    parent_run_id: str | None = None
    parent_play_name: str | None = None
    child_key: str | None = None


class Parent(Data, frozen=True):
    """Names the place in the parent's stream that waits for a run's end."""

    run_id: str
    child_key: str


class Policy(Data, frozen=True, kw_only=True):
    """The numbers a run decides by, frozen at submit (INV-38); lengths in ms, sizes in bytes."""

    retry_limit: int
    lost_limit: int
    restart_limit: int
    play_retries: int
    backoff_ms: int
    retry_ttl_ms: int
    create_window_ms: int
    cancel_grace_ms: int
    externalize_after_bytes: int
    max_bytes: int
    on_parent_end: OnParentEnd
    timeout_ms: int | None = None


class SessionOffer(Data, frozen=True):
    """Encrypted database sessions that came with a request; how long they are kept, in ms."""

    sessions: Seal
    count: int
    ttl_ms: int


# --- stream `system` -----------------------------------------------------------------------------


class LogCreated(Data, frozen=True):
    log_id: str
    scope: str
    version: str


class NodeStarted(Data, frozen=True):
    node_id: str
    version: str
    plays: int


class NodeStopped(Data, frozen=True):
    node_id: str
    clean: bool


# --- a run: its request, launch state and end -----------------------------------------------------


class RunSubmitted(Data, frozen=True, kw_only=True):
    """Fact; for a child also the outcome of the parent's `child.requested`."""

    run_id: str
    play_name: str
    play_digest: str | None = None
    engine: str
    isolation: Isolation
    scope: str
    org_id: str
    user_ref: str | None = None
    lineage: Lineage
    params: Seal
    request_digest: str
    policy: Policy
    sessions: SessionOffer | None = None
    executor_token: SecretRef | None = None
    internal_token: SecretRef | None = None


class RunLaunchStatePut(Data, frozen=True):
    """Choice: what is needed to start and restart the run is durable until `expires_at`."""

    params_bytes: int
    externalized: bool
    expires_at: int


class RunCompleted(Data, frozen=True):
    """Choice, and an intent where a parent waits."""

    attempt: int
    instance_id: str | None = None
    result: Seal | None = None
    output_rows: int | None = None
    parent: Parent | None = None


class RunFailed(Data, frozen=True, kw_only=True):
    """Choice, and an intent where a parent waits."""

    attempt: int
    instance_id: str | None = None
    error_class: ErrorClass
    code: str
    error: Seal | None = None
    parent: Parent | None = None


class RunCancelled(Data, frozen=True):
    """Choice, and an intent where a parent waits; `refused` is what the instance said instead."""

    attempt: int
    instance_id: str | None = None
    refused: str | None = None
    parent: Parent | None = None


class RunCancelRequested(Data, frozen=True):
    """Fact that fixes the end, and the intent of the grace timer."""

    request_id: str
    reason: Seal | None = None


class RunCancelRefused(Data, frozen=True):
    """Fact: the first cancel that came after the end (C056)."""

    status: RunEnd


class RunWaitStarted(Data, frozen=True):
    """Fact; an intent (a timer) where `until_at` is given."""

    wait_id: str
    kind: WaitKind
    key: str
    ordinal: int
    until_at: int | None = None


class RunWaitEnded(Data, frozen=True):
    """Choice."""

    wait_id: str
    outcome: WaitOutcome
    signal_id: str | None = None


class RunLog(Data, frozen=True):
    """Fact: a batch of log lines, the n-th of its instance."""

    instance_id: str
    attempt: int
    n: int
    count: int
    dropped: int
    lines: Seal


class RunProgress(Data, frozen=True):
    """Fact: how far the play says it is, the n-th report of its instance."""

    instance_id: str
    attempt: int
    n: int
    done: int
    of: int | None = None
    note: Seal | None = None


# --- instances ------------------------------------------------------------------------------------


class InstanceCreateRequested(Data, frozen=True):
    """Choice and intent."""

    instance_id: str
    attempt: int
    engine: str
    not_before_at: int | None = None


class InstanceCreated(Data, frozen=True, kw_only=True):
    """Outcome; `host` is the node that runs a local instance."""

    instance_id: str
    attempt: int
    host: str | None = None
    already_existed: bool


class InstanceCreateFailed(Data, frozen=True, kw_only=True):
    """Outcome when permanent or conflict, else one failed try of it."""

    instance_id: str
    attempt: int
    kind: CreateFailure = field(name="class")
    try_number: int = field(name="try")
    code: str
    error: Seal | None = None


class InstanceStarted(Data, frozen=True, kw_only=True):
    """Fact; an intent (a timer) where the run's policy has a timeout."""

    instance_id: str
    attempt: int
    host: str | None = None
    start_gap_ms: int


class InstanceMapped(Data, frozen=True):
    """Fact: another coordinator runs this attempt, on its engine under `mapped_id` (SPEC 1.14)."""

    instance_id: str
    attempt: int
    mapped_id: str


class InstanceCompleted(Data, frozen=True):
    instance_id: str
    attempt: int
    result: Seal
    output_rows: int | None = None


class InstanceErrored(Data, frozen=True):
    instance_id: str
    attempt: int
    error_class: ErrorClass
    code: str
    error: Seal | None = None
    retry_after_ms: int | None = None


class InstanceLost(Data, frozen=True):
    """Fact: nothing more can come from the instance; `evidence` says how that is known."""

    instance_id: str
    attempt: int
    error_class: ErrorClass
    evidence: str


class InstanceTerminateRequested(Data, frozen=True):
    """Choice and intent."""

    instance_id: str
    attempt: int
    reason: TerminateReason
    host: str | None = None


class InstanceTerminated(Data, frozen=True):
    """Outcome."""

    instance_id: str
    attempt: int
    found: bool


class InstanceOutputFenced(Data, frozen=True):
    """Fact: an instance that is no longer the current one reported, and was refused."""

    instance_id: str
    attempt: int
    current_attempt: int
    what: str


# --- retries --------------------------------------------------------------------------------------


class RetryClaimRequested(Data, frozen=True):
    """Fact: another coordinator saw an instance die, and asks whether it gets a successor."""

    failed_instance_id: str
    failed_attempt: int
    max_attempts: int


class RetryDecided(Data, frozen=True):
    """Choice: one for each instance that ended without completing."""

    failed_instance_id: str
    failed_attempt: int
    error_class: ErrorClass
    retry: bool
    reason: str
    budget: Budget
    used: int
    limit: int


class RetryParamsRequested(Data, frozen=True):
    """Choice and intent: load the launch state and check it, before anything is claimed."""

    failed_instance_id: str


class RetryParamsLoaded(Data, frozen=True):
    failed_instance_id: str
    bytes: int


class RetryParamsFailed(Data, frozen=True):
    failed_instance_id: str
    code: str


class RetryClaimed(Data, frozen=True):
    """Choice that names the failed instance, so one instance yields at most one claim (INV-27)."""

    failed_instance_id: str
    failed_attempt: int
    attempt: int
    instance_id: str
    budget: Budget
    reason: str


class RetryStarted(Data, frozen=True):
    attempt: int
    instance_id: str


class RetryDenied(Data, frozen=True):
    failed_instance_id: str
    reason: str


class RetryAbandoned(Data, frozen=True):
    attempt: int
    reason: str


# --- children, as the parent sees them ------------------------------------------------------------


class ChildRequested(Data, frozen=True):
    """Fact and intent; its outcome is the child's own `run.submitted`, in the child's stream.

    `options` is what the child's launch parameters hold beside its input, where a manifest came.
    """

    child_key: str
    child_run_id: str
    play_name: str
    input: Seal
    on_parent_end: OnParentEnd
    options: Seal | None = None


class ChildSubmitFailed(Data, frozen=True):
    child_key: str
    child_run_id: str
    code: str


class ChildTerminalSet(Data, frozen=True, kw_only=True):
    """Outcome of the child's end, or a choice on an `integration_event` signal (INV-67)."""

    event_key: str
    child_run_id: str | None = None
    status: RunEnd | None = None
    result: Seal | None = None
    error_class: ErrorClass | None = None
    code: str | None = None
    error: Seal | None = None
    data: Seal | None = None
    source: Literal["child", "signal"]


class ChildTerminalConflict(Data, frozen=True):
    """Choice: a second terminal for a key whose first stays as it is (INV-62)."""

    event_key: str
    child_run_id: str | None = None


class ChildCancelRequested(Data, frozen=True):
    """Choice and intent."""

    child_key: str
    child_run_id: str
    reason: str


class ChildCancelDelivered(Data, frozen=True):
    child_key: str
    answer: str


# --- database sessions ----------------------------------------------------------------------------


class SessionStored(Data, frozen=True):
    """Choice on `run.submitted`, or a fact: encrypted sessions lie in the vault until then."""

    session_count: int
    expires_at: int
    sessions: Seal


class SessionRevokeRequested(Data, frozen=True):
    """Choice and intent: the run has ended, so the ciphertext of its sessions has to go."""

    session_count: int


class SessionRevoked(Data, frozen=True):
    """Outcome: it is in the vault no more; the log stays as it is."""

    session_count: int


# --- signals, timers, effects ---------------------------------------------------------------------


class SignalReceived(Data, frozen=True, kw_only=True):
    signal_id: str
    signal: str
    event_key: str | None = None
    event_type: str
    data: Seal


class TimerFired(Data, frozen=True):
    """Outcome of the event that armed it."""

    purpose: TimerPurpose
    armed_by: str


class EffectFailed(Data, frozen=True):
    """Fact: one try of an intent failed."""

    intent_id: str
    kind: str
    try_number: int = field(name="try")
    code: str
    error_class: CreateFailure
    error: Seal | None = None


class EffectParked(Data, frozen=True):
    """Choice: the intent waits for `effect.resumed`, and its lane with it."""

    intent_id: str
    tries: int


class EffectResumed(Data, frozen=True):
    """Fact: somebody asked to do now what waits or is parked."""

    intent_id: str


RunEvent = (
    RunSubmitted
    | RunLaunchStatePut
    | RunCompleted
    | RunFailed
    | RunCancelled
    | RunCancelRequested
    | RunCancelRefused
    | RunWaitStarted
    | RunWaitEnded
    | RunLog
    | RunProgress
    | InstanceCreateRequested
    | InstanceCreated
    | InstanceCreateFailed
    | InstanceStarted
    | InstanceMapped
    | InstanceCompleted
    | InstanceErrored
    | InstanceLost
    | InstanceTerminateRequested
    | InstanceTerminated
    | InstanceOutputFenced
    | RetryClaimRequested
    | RetryDecided
    | RetryParamsRequested
    | RetryParamsLoaded
    | RetryParamsFailed
    | RetryClaimed
    | RetryStarted
    | RetryDenied
    | RetryAbandoned
    | ChildRequested
    | ChildSubmitFailed
    | ChildTerminalSet
    | ChildTerminalConflict
    | ChildCancelRequested
    | ChildCancelDelivered
    | SessionStored
    | SessionRevokeRequested
    | SessionRevoked
    | SignalReceived
    | TimerFired
    | EffectFailed
    | EffectParked
    | EffectResumed
)
SystemEvent = LogCreated | NodeStarted | NodeStopped
Event = RunEvent | SystemEvent

WIRE_NAMES: Final[dict[type[Event], str]] = {
    LogCreated: "log.created",
    NodeStarted: "node.started",
    NodeStopped: "node.stopped",
    RunSubmitted: "run.submitted",
    RunLaunchStatePut: "run.launch_state_put",
    RunCompleted: "run.completed",
    RunFailed: "run.failed",
    RunCancelled: "run.cancelled",
    RunCancelRequested: "run.cancel_requested",
    RunCancelRefused: "run.cancel_refused",
    RunWaitStarted: "run.wait_started",
    RunWaitEnded: "run.wait_ended",
    RunLog: "run.log",
    RunProgress: "run.progress",
    InstanceCreateRequested: "instance.create_requested",
    InstanceCreated: "instance.created",
    InstanceCreateFailed: "instance.create_failed",
    InstanceStarted: "instance.started",
    InstanceMapped: "instance.mapped",
    InstanceCompleted: "instance.completed",
    InstanceErrored: "instance.errored",
    InstanceLost: "instance.lost",
    InstanceTerminateRequested: "instance.terminate_requested",
    InstanceTerminated: "instance.terminated",
    InstanceOutputFenced: "instance.output_fenced",
    RetryClaimRequested: "retry.claim_requested",
    RetryDecided: "retry.decided",
    RetryParamsRequested: "retry.params_requested",
    RetryParamsLoaded: "retry.params_loaded",
    RetryParamsFailed: "retry.params_failed",
    RetryClaimed: "retry.claimed",
    RetryStarted: "retry.started",
    RetryDenied: "retry.denied",
    RetryAbandoned: "retry.abandoned",
    ChildRequested: "child.requested",
    ChildSubmitFailed: "child.submit_failed",
    ChildTerminalSet: "child.terminal_set",
    ChildTerminalConflict: "child.terminal_conflict",
    ChildCancelRequested: "child.cancel_requested",
    ChildCancelDelivered: "child.cancel_delivered",
    SessionStored: "session.stored",
    SessionRevokeRequested: "session.revoke_requested",
    SessionRevoked: "session.revoked",
    SignalReceived: "signal.received",
    TimerFired: "timer.fired",
    EffectFailed: "effect.failed",
    EffectParked: "effect.parked",
    EffectResumed: "effect.resumed",
}
EVENT_TYPES: Final[dict[str, type[Event]]] = {name: cls for cls, name in WIRE_NAMES.items()}

SCHEMA_VERSIONS: Final[dict[type[Event], int]] = dict.fromkeys(WIRE_NAMES, 1)
"""The schema number each type is written with today; a type that changed is set to more here."""
