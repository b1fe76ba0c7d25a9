"""A run that only shows that runs work: through the normal submit path, and left out of lists."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from engines.context import Run
from engines.plays import Play, as_play, play
from handlers.submit import Submission
from ledger.errors import PlayledgerError
from projections.load import WARMUP

if TYPE_CHECKING:
    from playledger.embed import Ledger

WAIT: Final = timedelta(seconds=10)


class Warmed(Struct, frozen=True):
    """How a warm-up went: what the submit answered, and how its run ended within ten seconds."""

    run_id: str
    status: str
    terminal: str | None
    ms: int
    code: str | None = None


@play(name=WARMUP)
async def warm_up_play(run: Run) -> str:
    """Does nothing, as a play."""
    return run.id


def warmup_play() -> Play:
    """Returns the play of warm-up runs, for a server to offer beside the others."""
    return as_play(warm_up_play, trusted=True)


async def warm_up(ledger: Ledger, label: str, *, actor: str) -> Warmed:
    """Submits a warm-up run and waits for its end; a failure is an answer, not an error."""
    began = time.monotonic()
    run_id = f"warmup-{secrets.token_hex(8)}"
    terminal: str | None = None
    code: str | None = None
    status = "submitted"
    try:
        await ledger.submitter.submit(
            Submission(
                run_id=run_id, play_name=WARMUP, input=None, actor=actor, policy=ledger.policy
            )
        )
        terminal = (await ledger.wait_for_end(run_id, WAIT)).status
    except TimeoutError:
        code = "WARMUP_NOT_ENDED"
    except PlayledgerError as error:
        status, code = "failed", error.code
    ms = round((time.monotonic() - began) * 1000)
    ledger.log.traces.record(run_id, "coordinator.warmup", ms, label=label, status=status)
    return Warmed(run_id=run_id, status=status, terminal=terminal, ms=ms, code=code)
