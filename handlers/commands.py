"""Commands: requests to record a fact.  They may be refused, and are not stored themselves.

A command carries the fact it wants recorded, so what is asked for and what is remembered have one
shape; `address` says under which derived id the fact stands (CONTRACTS A.4), and so whether it is
recorded already.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ledger import events as e
from ledger.events import Event
from ledger.ids import event_id
from ledger.secrets import SecretRow
from ledger.transaction import Disclosure

CHILDREN_MAX: Final = 10_000
EVENTS_MAX: Final = 100_000


class Reporter(Struct, frozen=True, gc=False):
    """Who says it: an instance and the node that runs it; others' reports are fenced (INV-22)."""

    instance_id: str
    host: str | None = None


class Command(Struct, frozen=True, gc=False, kw_only=True):
    """A request to record `fact` in `stream`, as the outcome of `cause` if that is an intent.

    `values`, `secrets` and `run_key` go to the vault in the same append.  `expected_version` is a
    caller's precondition.  `request` tells repeated requests apart where the fact does not.
    """

    stream: str
    fact: Event
    actor: str
    cause: str | None = None
    reporter: Reporter | None = None
    values: tuple[Disclosure, ...] = ()
    secrets: tuple[SecretRow, ...] = ()
    run_key: bytes | None = None
    expected_version: int | None = None
    request: str = ""


def fact_id(command: Command, fact: Event) -> str:
    """Returns the derived id of a fact of this command."""
    match fact:
        case e.InstanceStarted(instance_id=instance_id):
            return event_id(command.stream, f"started/{instance_id}")
        case e.RunCancelRefused():
            return event_id(command.stream, "cancel-refused")
        case e.InstanceOutputFenced(instance_id=instance_id, what=what):
            return event_id(command.stream, f"fenced/{instance_id}/{what}")
        case e.EffectFailed(intent_id=intent_id, try_number=tries):
            return event_id(intent_id, f"try/{tries}")
        case e.InstanceCreateFailed(kind="transient", try_number=tries) if command.cause:
            return event_id(command.cause, f"try/{tries}")
        case _ if command.cause is not None:
            return event_id(command.cause, "done")
        case e.RunSubmitted():
            return event_id(command.stream, "submit")
        case e.RunCancelRequested(request_id=request_id):
            return event_id(command.stream, f"cancel/{request_id}")
        case e.SignalReceived(signal_id=signal_id):
            return event_id(command.stream, f"signal/{signal_id}")
        case (
            e.InstanceCompleted(instance_id=instance_id)
            | e.InstanceErrored(instance_id=instance_id)
            | e.InstanceLost(instance_id=instance_id)
        ):
            return event_id(command.stream, f"ended/{instance_id}")
        case e.InstanceMapped(instance_id=instance_id):
            return event_id(command.stream, f"mapped/{instance_id}")
        case e.RetryClaimRequested(failed_instance_id=instance_id):
            return event_id(command.stream, f"claim/{instance_id}")
        case e.SessionStored(sessions=sessions):
            return event_id(command.stream, f"sessions/{sessions.digest}")
        case e.ChildRequested(child_key=child_key):
            return event_id(command.stream, f"child/{child_key}")
        case e.RunWaitStarted(wait_id=wait_id):
            return event_id(command.stream, f"wait/{wait_id}")
        case e.RunLog(instance_id=instance_id, n=n):
            return event_id(command.stream, f"log/{instance_id}/{n}")
        case e.RunProgress(instance_id=instance_id, n=n):
            return event_id(command.stream, f"progress/{instance_id}/{n}")
        case e.EffectResumed(intent_id=intent_id):
            return event_id(command.stream, f"resume/{intent_id}/{command.request}")
        case e.LogCreated():
            return event_id(command.stream, "created")
        case e.NodeStarted(node_id=node_id):
            return event_id(command.stream, f"node-started/{node_id}")
        case e.NodeStopped(node_id=node_id):
            return event_id(command.stream, f"node-stopped/{node_id}")
        case _:
            raise AssertionError(f"{type(fact).__name__} is no fact without a cause")


def wait_id(kind: e.WaitKind, key: str, ordinal: int) -> str:
    """Returns the id of the n-th wait for a key; a later attempt asks for the same."""
    return f"{kind}/{key}/{ordinal}"
