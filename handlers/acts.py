"""What each kind of intent means in the world, and which outcome it records.

One function per kind, called by the effect loop only.  Each may be called twice for one intent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypedDict, cast

from handlers.commands import Command
from handlers.engine import CreateRequest, Engine, EngineError
from handlers.node import Node
from handlers.outbox import release
from handlers.port import InstanceRef, Port, RunLog, decode_params
from handlers.session_checks import SessionRefused
from handlers.sessions import hydrate
from handlers.submit import Submission, Submitter
from ledger import events as e
from ledger.canonical import Json
from ledger.codec import Recorded
from ledger.errors import (
    Conflict,
    IntentNotFound,
    PlayledgerError,
    PlayNotFound,
    RunNotFound,
    RunTerminal,
    SessionExpired,
    Unavailable,
)
from ledger.events import Event, RunEvent
from ledger.failpoint import failpoint
from ledger.ids import run_stream
from ledger.log import system_clock
from ledger.vault import ValueGone
from projections.state import Run


class Described(TypedDict):
    """What a node says of itself when it starts."""

    version: str
    plays: int


class Acts:
    """The effects of one node."""

    def __init__(
        self,
        log: RunLog,
        port: Port,
        node: Node,
        engines: Mapping[str, Engine],
        submitter: Submitter,
        now: Callable[[], int] = system_clock,
    ) -> None:
        self._log = log
        self._port = port
        self._node = node
        self._engines = engines
        self._submitter = submitter
        self._now = now

    def described(self) -> Described:
        """Returns what `node.started` says."""
        return {"version": self._submitter.version, "plays": self._submitter.plays}

    def lose_everything(self) -> None:
        """Stops every local instance: another node took this one for dead, it has a new id now."""
        for engine in self._engines.values():
            stop = getattr(engine, "lose_everything", None)
            if stop is not None:
                stop(self._node.id)

    async def release(self) -> None:
        """Gives up this node's leases."""
        await self._log.run_job(release(self._node.id))

    async def create(self, intent: Recorded[Event], run: Run, tries: int) -> None:
        """Has an engine create an instance, unless the run has ended meanwhile."""
        asked = cast("e.InstanceCreateRequested", intent.data)
        ref = instance_ref(run, asked.instance_id, asked.attempt, None)
        if run.terminal:
            await self._create_failed(ref, intent, "permanent", tries, "RUN_TERMINAL")
            return
        engine = self._engines.get(asked.engine)
        if engine is None or not engine.offers(run.play_name):
            await self._create_failed(ref, intent, "permanent", tries, "PLAY_NOT_FOUND")
            return
        try:
            params = await self._log.vault.reveal_bytes(run.params)
            await self._check_sessions(run)
            request = CreateRequest(
                run=run,
                instance_id=asked.instance_id,
                attempt=asked.attempt,
                intent_id=intent.id,
                params=params,
            )
            failpoint("before_create")
            began = time.monotonic()
            await engine.create(request)
            failpoint("after_create")
            self._trace_create(run, asked, (time.monotonic() - began) * 1000)
        except RunTerminal:
            await self._create_failed(ref, intent, "permanent", tries, "RUN_TERMINAL")
        except (ValueGone, SessionExpired, SessionRefused) as error:
            await self._create_failed(ref, intent, "permanent", tries, error.code)
        except EngineError as error:
            kind: e.CreateFailure = "transient" if error.transient else "permanent"
            await self._create_failed(ref, intent, kind, tries, error.code)
        except Conflict:
            return  # somebody else created it, or it has ended: there is nothing left to do

    async def _check_sessions(self, run: Run) -> None:
        """No instance starts on sessions that are not all there, encrypted, and alive (INV-49)."""
        if run.sessions is None:
            return
        began = time.monotonic()
        sessions = await hydrate(self._log.vault, run, self._now())
        self._log.traces.record(
            run.run_id,
            "coordinator.workflow_db_sessions_hydrated",
            (time.monotonic() - began) * 1000,
            refSessionCount=run.sessions.count,
            sessions=len(sessions),
        )

    def _trace_create(self, run: Run, asked: e.InstanceCreateRequested, ms: float) -> None:
        traces, name = self._log.traces, asked.instance_id
        traces.record(run.run_id, "coordinator.workflow_create", ms, instanceId=name)
        traces.record(
            run.run_id,
            "coordinator.dispatch_workflow",
            ms,
            instanceIdRecord="appended",
            startMode="direct_workflow_create",
        )
        if asked.attempt and run.retry is not None:
            traces.record(
                run.run_id,
                "coordinator.platform_deploy_retry",
                ms,
                reason=run.retry.reason,
                retryAttempt=asked.attempt,
                retryInstanceId=name,
            )

    async def terminate(self, intent: Recorded[Event], run: Run) -> bool:
        """Asks an instance to end; returns whether that settled it, or it has to be asked again."""
        asked = cast("e.InstanceTerminateRequested", intent.data)
        engine = self._engines.get(run.engine)
        failpoint("before_terminate")
        found = engine is not None and await engine.terminate(asked.instance_id, asked.reason)
        failpoint("after_terminate")
        if found:
            return False  # its own end closes the row
        await self._outcome(
            intent,
            e.InstanceTerminated(instance_id=asked.instance_id, attempt=asked.attempt, found=False),
        )
        return True

    async def load_params(self, intent: Recorded[Event], run: Run) -> None:
        """Loads the launch state and checks it, before a retry is claimed (INV-29, INV-36)."""
        asked = cast("e.RetryParamsRequested", intent.data)
        fact: RunEvent
        try:
            failpoint("before_params_load")
            params = await self._log.vault.reveal_bytes(run.params, subject=intent.subject)
            failpoint("after_params_load")
            decode_params(params)
            fact = e.RetryParamsLoaded(
                failed_instance_id=asked.failed_instance_id, bytes=len(params)
            )
        except ValueGone as error:
            fact = e.RetryParamsFailed(failed_instance_id=asked.failed_instance_id, code=error.code)
        except (ValueError, TypeError):
            fact = e.RetryParamsFailed(
                failed_instance_id=asked.failed_instance_id, code="NOT_OBJECT"
            )
        await self._outcome(intent, fact)

    async def submit_child(self, intent: Recorded[Event], parent: Run) -> None:
        """Submits a child; its own `run.submitted` is the outcome, in its own stream."""
        asked = cast("e.ChildRequested", intent.data)
        if parent.status == "cancelled" or (parent.terminal and asked.on_parent_end == "cancel"):
            await self._child_failed(intent, asked, "PARENT_TERMINAL")
            return
        params = decode_params(await self._log.vault.reveal_bytes(parent.params))
        options: Mapping[str, Json] = {}
        if asked.options is not None:
            options = decode_params(await self._log.vault.reveal_bytes(asked.options))
        failpoint("before_child_submit")
        began = time.monotonic()
        try:
            answer = await self._submitter.submit(
                Submission(
                    run_id=asked.child_run_id,
                    play_name=asked.play_name,
                    input=await self._log.vault.reveal(asked.input),
                    files=tuple(params.get("files", ())),
                    options=options,
                    actor="node/" + self._node.id,
                    org_id=parent.org_id,
                    lineage=e.Lineage(
                        family_key=parent.lineage.family_key,
                        root_run_id=parent.lineage.root_run_id or parent.run_id,
                        parent_run_id=parent.run_id,
                        parent_play_name=parent.play_name,
                        child_key=asked.child_key,
                    ),
                    policy=parent.policy,
                    on_parent_end=asked.on_parent_end,
                    cause=intent.id,
                )
            )
        except PlayNotFound as error:
            await self._child_failed(intent, asked, error.code)
            return
        except Unavailable:
            raise
        except PlayledgerError as error:
            await self._child_failed(intent, asked, error.code)
            return
        failpoint("after_child_submit")
        self._log.traces.record(
            parent.run_id,
            "coordinator.child_submit_workflow",
            (time.monotonic() - began) * 1000,
            childRunId=asked.child_run_id,
            status="submitted",
        )
        if answer.recorded is not None and answer.recorded.causationid != intent.id:
            await self._child_failed(intent, asked, "RUN_CONFLICT")

    async def cancel_child(self, intent: Recorded[Event]) -> None:
        """Cancels a child as anybody would, and records what it answered."""
        asked = cast("e.ChildCancelRequested", intent.data)
        failpoint("before_child_cancel")
        try:
            answer = await self._log.transact(
                Command(
                    stream=run_stream(asked.child_run_id),
                    fact=e.RunCancelRequested(request_id=intent.id),
                    actor="node/" + self._node.id,
                )
            )
            said: str = answer.state.run.status if answer.state is not None else "unknown"
        except RunTerminal as error:
            said = str(error.details.get("status", "ended"))
        except RunNotFound:
            said = "not_found"
        failpoint("after_child_cancel")
        await self._outcome(intent, e.ChildCancelDelivered(child_key=asked.child_key, answer=said))

    async def tell_parent(self, intent: Recorded[Event]) -> None:
        """Records a run's end in its parent's stream, whatever the parent does now."""
        end = cast("e.RunCompleted | e.RunFailed | e.RunCancelled", intent.data)
        if end.parent is None:
            raise EngineError(f"{intent.subject} has no parent to tell", code="NO_PARENT")
        run_id = intent.subject.removeprefix("run/")
        key = end.parent.child_key
        match end:
            case e.RunCompleted():
                fact = e.ChildTerminalSet(
                    event_key=key,
                    child_run_id=run_id,
                    status="completed",
                    result=end.result,
                    source="child",
                )
            case e.RunFailed():
                fact = e.ChildTerminalSet(
                    event_key=key,
                    child_run_id=run_id,
                    status="failed",
                    error_class=end.error_class,
                    code=end.code,
                    error=end.error,
                    source="child",
                )
            case _:
                fact = e.ChildTerminalSet(
                    event_key=key, child_run_id=run_id, status="cancelled", source="child"
                )
        failpoint("before_child_terminal")
        await self._log.transact(
            Command(
                stream=run_stream(end.parent.run_id),
                fact=fact,
                actor="node/" + self._node.id,
                cause=intent.id,
            )
        )
        failpoint("after_child_terminal")

    async def revoke_sessions(self, intent: Recorded[Event], run: Run) -> None:
        """Deletes the ciphertext of a run's sessions; the log and its proofs stay (INV-48)."""
        asked = cast("e.SessionRevokeRequested", intent.data)
        failpoint("before_session_revoke")
        if run.sessions is not None:
            await self._log.vault.forget(run.sessions.sessions)
        failpoint("after_session_revoke")
        await self._outcome(intent, e.SessionRevoked(session_count=asked.session_count))

    async def fire_timer(self, intent: Recorded[Event]) -> None:
        """Records that a time has come."""
        purpose: e.TimerPurpose
        match intent.data:
            case e.RunWaitStarted():
                purpose = "wait"
            case e.RunCancelRequested():
                purpose = "cancel_grace"
            case e.InstanceStarted():
                purpose = "timeout"
            case _:
                raise EngineError(f"{intent.type} arms no timer", code="NO_TIMER")
        failpoint("before_timer_fired")
        try:
            await self._outcome(intent, e.TimerFired(purpose=purpose, armed_by=intent.id))
            failpoint("after_timer_fired")
        except IntentNotFound:
            return  # not due by the log's clock yet: it is looked at again

    async def _create_failed(
        self,
        ref: InstanceRef,
        intent: Recorded[Event],
        kind: e.CreateFailure,
        tries: int,
        code: str,
    ) -> None:
        await self._port.create_failed(ref, intent.id, kind, tries, code)

    async def _child_failed(
        self, intent: Recorded[Event], asked: e.ChildRequested, code: str
    ) -> None:
        await self._outcome(
            intent,
            e.ChildSubmitFailed(
                child_key=asked.child_key, child_run_id=asked.child_run_id, code=code
            ),
        )

    async def _outcome(self, intent: Recorded[Event], fact: RunEvent) -> None:
        await self._log.transact(
            Command(
                stream=intent.subject,
                fact=fact,
                actor="node/" + self._node.id,
                cause=intent.id,
            )
        )


def instance_ref(run: Run, instance_id: str, attempt: int, host: str | None) -> InstanceRef:
    """Returns how an instance of a run names itself to the port."""
    return InstanceRef(
        run_id=run.run_id,
        instance_id=instance_id,
        attempt=attempt,
        host=host,
        externalize_after_bytes=run.policy.externalize_after_bytes,
    )
