"""Runs that another coordinator drives, with this log as its run-state store (SPEC 1.10 to 1.14).

Their engine is called `edge`.  Nothing here creates, ends or retries their instances: the other
coordinator does, and what it puts becomes the same events as everywhere.  One thing it asks to be
decided here: whether an instance that died gets a successor (SPEC 1.28), a choice like any other.
Pure.
"""

from __future__ import annotations

import re
from typing import Final

from handlers.decision import NOTHING, Decision, Rejected, run_terminal
from ledger import events as e
from ledger.errors import Conflict
from ledger.ids import quote
from projections.state import EDGE, RunState

_ATTEMPT: Final = re.compile(r"-retry-([1-9][0-9]{0,5})$")


def attempt_of(mapped_id: str) -> int:
    """Returns the attempt that an instance id of another coordinator names: `...-retry-2` is 2."""
    found = _ATTEMPT.search(mapped_id)
    return int(found[1]) if found else 0


def mapped(fact: e.InstanceMapped, state: RunState) -> Decision:
    """An attempt is mapped once; what comes late for an earlier one changes nothing (INV-17)."""
    if state.run.engine != EDGE:
        return _not_edge(state)
    instance = state.instances.get(fact.attempt)
    if instance is None:
        return Rejected(
            Conflict(
                f"attempt {fact.attempt} of {state.run.run_id} was never claimed, "
                f"the last is {state.run.attempt}",
                code="ATTEMPT_NOT_CLAIMED",
                hint="claim it first: run-retry-claim",
                attempt=fact.attempt,
                currentAttempt=state.run.attempt,
            )
        )
    if instance.mapped_id == fact.mapped_id or fact.attempt < state.run.attempt:
        return NOTHING
    if instance.mapped_id is not None:
        return Rejected(
            Conflict(
                f"attempt {fact.attempt} of {state.run.run_id} is instance "
                f"{quote(instance.mapped_id)}, this is {quote(fact.mapped_id)}",
                code="INSTANCE_ID_CONFLICT",
                hint="an attempt has one instance",
            )
        )
    return NOTHING if state.run.terminal else (fact,)


def claim_requested(fact: e.RetryClaimRequested, state: RunState) -> Decision:
    """A claim names the current instance; about an earlier one all is decided (INV-27, INV-28)."""
    if state.run.engine != EDGE:
        return _not_edge(state)
    if state.run.terminal:
        return Rejected(run_terminal(state, "is retried no more"))
    instance = state.instances.get(fact.failed_attempt)
    if instance is None or instance.ended or fact.failed_attempt != state.run.attempt:
        return NOTHING
    return (fact,)


def sessions_put(fact: e.SessionStored, state: RunState) -> Decision:
    """Later sessions take the place of earlier ones; none come behind the end."""
    if state.run.terminal:
        return Rejected(run_terminal(state, "takes no sessions"))
    held = state.run.sessions
    return NOTHING if held is not None and held.sessions == fact.sessions else (fact,)


def refused(state: RunState, what: str) -> Rejected:
    """Refuses what only the coordinator that drives a run can do."""
    return Rejected(
        Conflict(
            f"{state.run.run_id} is driven by another coordinator and {what}",
            code="RUN_DRIVEN_ELSEWHERE",
            hint="this log only keeps its state",
        )
    )


def _not_edge(state: RunState) -> Rejected:
    return Rejected(
        Conflict(
            f"{state.run.run_id} is driven here, by engine {quote(state.run.engine)}",
            code="RUN_DRIVEN_HERE",
            hint="run-state doors are for runs whose launch state came through them",
        )
    )
