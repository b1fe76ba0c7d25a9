"""What a caller who is confined to an organisation, or to one attempt of a run, may reach.

A run of another organisation looks like one that is not there (CASES C047): same status, same code,
and no name of a run that is.
"""

from __future__ import annotations

from ledger.errors import RunConflict, RunNotFound
from ledger.ids import quote
from playledger.http.auth import Caller
from playledger.http.door import Call, Door, Route
from playledger.http.errors import Forbidden
from projections.load import run_query
from projections.state import Run


async def check_scope(door: Door, call: Call, route: Route) -> None:
    """Raises RunNotFound or Forbidden for what is outside of the caller's organisation or run."""
    match route.reach:
        case "nothing" | "list":
            return  # a list asks for the runs of the organisation alone
        case "log":
            raise Forbidden(
                f"{route.phase} shows the runs of every organisation",
                code="ORG_OUT_OF_SCOPE",
                hint="a token without an organisation does this; a run's own: /workflow/RUN/tail",
            )
        case "new_run":
            run = await door.ledger.log.reader.ask(run_query(call.run_id))
            if run is not None:
                check_same_org(call.caller, run)
        case "run":
            run = await door.ledger.log.reader.ask(run_query(call.run_id))
            if run is None or run.org_id != call.caller.org or not _speaks_for(call, run):
                raise RunNotFound(
                    f"run {quote(call.run_id)} is not here for this token", runId=call.run_id
                )
            _check_attempt(call, run, route)


def org_of(call: Call, given: str | None, default: str) -> str:
    """Returns the organisation of a new run: the caller's own, or the one it names.

    Raises Forbidden where a confined caller names another.
    """
    own = call.caller.org
    if own is None:
        return given or default
    if given is not None and given != own:
        raise Forbidden(
            f"this token is of org {quote(own)}, the request is for {quote(given)}",
            code="ORG_OUT_OF_SCOPE",
            hint="leave orgId out, or use a token of that org",
        )
    return own


def check_same_org(caller: Caller, run: Run) -> None:
    """Raises RunConflict if a run id that a confined caller gave is another organisation's."""
    if caller.org is not None and run.org_id != caller.org:
        raise RunConflict(
            f"run id {quote(run.run_id)} is taken", hint="another run id", runId=run.run_id
        )


def _speaks_for(call: Call, run: Run) -> bool:
    executor = call.caller.executor
    return executor is None or executor.run_id == run.run_id


def _check_attempt(call: Call, run: Run, route: Route) -> None:
    """An attempt that has been replaced may still look, and change nothing (INV-30)."""
    executor = call.caller.executor
    if executor is None or route.access == "read" or executor.attempt == run.attempt:
        return
    raise Forbidden(
        f"this token is of attempt {executor.attempt}, {quote(run.run_id)} is at {run.attempt}",
        code="STALE_ATTEMPT",
        hint="another instance has taken over; stop",
        currentAttempt=run.attempt,
    )
