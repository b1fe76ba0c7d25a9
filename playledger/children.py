"""Submitting a child by its parent's id: what HTTP and the library both do (SPEC 1.22).

The parent's stream takes `child.requested`, as from the parent's own instance; the effect loop
submits the child from there, so a crash in between loses nothing and nothing is done twice.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import Struct

from handlers.child_submit import check_child_submit, check_lineage, child_options
from handlers.commands import Command
from ledger import events as e
from ledger.canonical import Json, canonical, canonical_own
from ledger.ids import child_run_id, derived_child_key, run_stream
from ledger.seal import seal

if TYPE_CHECKING:
    from playledger.embed import Ledger


class ChildSubmitted(Struct, frozen=True):
    """A child that was asked for; `replayed` says that it had been before."""

    run_id: str
    child_key: str
    position: int
    replayed: bool


async def submit_child(
    ledger: Ledger, parent_run_id: str, body: Json, *, actor: str, request_key: str | None = None
) -> ChildSubmitted:
    """Asks for a child of a run.  The same key and input again is the same child (INV-55).

    Without `childKey` the request's own key names it, and without that play and input do: a request
    that was sent twice is one child.  Raises ChildSubmitRefused (SPEC 1.20), RunNotFound,
    RunTerminal, ChildKeyConflict.
    """
    began = time.monotonic()
    asked = check_child_submit(body, parent_run_id)
    parent, run_key = await ledger.run_and_key(parent_run_id)
    check_lineage(asked, parent)
    value = canonical({} if asked.input is None else asked.input)
    key = asked.child_key or request_key or derived_child_key(run_key, asked.play_name, value, 0)
    child_id = child_run_id(asked.play_name, parent_run_id, key)
    options = canonical_own(child_options(asked, child_id))
    limit = parent.policy.externalize_after_bytes
    place = f"child.requested/child/{key}/"
    sealed = [
        seal(run_key, parent_run_id, place + "input", value, limit),
        seal(run_key, parent_run_id, place + "options", options, limit),
    ]
    await ledger.log.vault.store_blobs(sealed)
    done = await ledger.log.transact(
        Command(
            stream=run_stream(parent_run_id),
            fact=e.ChildRequested(
                child_key=key,
                child_run_id=child_id,
                play_name=asked.play_name,
                input=sealed[0].seal,
                on_parent_end=asked.on_parent_end,
                options=sealed[1].seal,
            ),
            actor=actor,
            values=tuple(item.disclosure for item in sealed),
        )
    )
    ledger.log.traces.record(
        parent_run_id, "coordinator.child_submit", (time.monotonic() - began) * 1000
    )
    return ChildSubmitted(child_id, key, done.position, done.replayed)
