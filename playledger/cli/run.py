"""`playledger run`: submit, drive this run's family in this process, follow it to its end.

The same command again shows the result of a finished run and carries on an interrupted one.  If
another live node drives the run already, this process only follows; what it leaves, this one takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from engines.plays import Play, Plays
from handlers.node import Watch
from ledger.canonical import Json
from ledger.database import check_revision, reading
from ledger.errors import PlayledgerError
from ledger.log import system_clock
from ledger.migrations import REVISIONS
from ledger.query import Query, ask
from playledger.cli.console import END_CODES, Console, shell_word
from playledger.cli.inputs import Inputs, load_play, read_inputs
from playledger.cli.opening import opened
from playledger.cli.progress import Progress, progress_of
from playledger.embed import Ledger
from playledger.render import age, count_of, flat_table, json_text, length, visible
from playledger.version import VERSION
from playledger.views import status_view
from playledger.wiring import Driver, start_driver
from projections.load import run_query, view_query
from projections.state import Run

SETTLE_S = 2.0


class Before(Struct, frozen=True):
    """What there was of the run before this command wrote anything."""

    run: Run
    position: int
    hosts: tuple[str, ...] = ()


class Family(Struct, frozen=True):
    """The figures of a run and all that it started."""

    runs: int
    events: int
    retries: int
    unfinished: int


class Followed:
    """What is known of the run once it is recorded, for whoever is interrupted."""

    run_id: str | None = None


def run_play(
    console: Console,
    reference: str,
    arguments: Sequence[str],
    run_id: str | None,
    isolation: str | None,
    max_instances: int | None,
) -> int:
    """Runs a play to its end, and prints its result."""
    options = {
        "engine.isolation": ("--isolation", isolation),
        "engine.max_instances": ("--max-instances", max_instances),
    }
    settings = console.settings(options).values
    inputs = read_inputs(arguments, settings)
    item, plays = load_play(reference)
    followed = Followed()
    try:
        return asyncio.run(_stoppable(_run(console, item, plays, inputs, run_id, followed)))
    except KeyboardInterrupt:
        return _stopped(console, followed, 128 + signal.SIGINT)
    except asyncio.CancelledError:
        return _stopped(console, followed, 128 + signal.SIGTERM)


async def _stoppable(work: Any) -> int:
    """Lets SIGTERM end the command as Ctrl-C does: instances are ended, nothing is lost."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    code: int = await work
    return code


def _stopped(console: Console, followed: Followed, code: int) -> int:
    if followed.run_id is None:
        console.say("stopped before anything was recorded")
    else:
        console.say(f"stopped watching; {followed.run_id} is kept: the same command carries on")
    return code


async def _run(
    console: Console,
    item: Play,
    plays: Plays,
    inputs: Inputs,
    run_id: str | None,
    followed: Followed,
) -> int:
    before = None if run_id is None else _look_before(console, run_id)
    with contextlib.redirect_stdout(sys.stderr):  # what a play prints is no answer
        async with opened(console, plays, create=True, look=False) as ledger:
            handle = await ledger.submit(item.name, inputs.value, run_id=run_id, files=inputs.files)
            followed.run_id = handle.id
            _say_found(console, handle.id, before)
            family = await ledger.log.reader.ask(_family_query(handle.id))
            if family.unfinished:
                await _drive(console, ledger, plays, handle.id)
            view = await ledger.log.reader.ask(view_query(handle.id))
            if view is None:
                raise await ledger.not_found(handle.id)
            family = await ledger.log.reader.ask(_family_query(handle.id))
            shown = await status_view(ledger, view) if console.json else None
            result: Json = None
            if view.run.status == "completed":
                result = await ledger.reveal(view.run.result)
            error = await _error(ledger, view.run)
    already = before is not None and before.run.terminal
    return _show(console, view.run, family, result, error, shown, already=already)


def _look_before(console: Console, run_id: str) -> Before | None:
    """Reads what a log that exists has of the run: later this process will have changed it."""
    if not console.db.exists() or not console.db.stat().st_size:
        return None
    with reading(console.db) as connection:
        check_revision(connection, console.db, REVISIONS, VERSION)
        run = ask(connection, run_query(run_id))
        if run is None:
            return None
        family = run.lineage.family_key
        position = ask(connection, _last_query(family))
        hosts = ask(connection, _hosts_query(family))
    watch = Watch(console.db, by_touch=False)
    return Before(run, position, tuple(host for host in hosts if not watch.dead(host)))


def _say_found(console: Console, run_id: str, before: Before | None) -> None:
    """Says what the same command found (UX section 3); a fresh run needs no words."""
    if before is None:
        return
    run, mark = before.run, console.err.mark(before.run.status)
    if run.terminal:
        ago = age(system_clock() - (run.ended_at or 0))
        what = f"{run_id} was already {run.status} (@{run.ended_position}, {ago} ago)"
        console.say(f"{mark} {what}{'; its result:' if run.status == 'completed' else ''}")
    elif before.hosts:
        console.say(f"{mark} {run_id} is run by {', '.join(before.hosts)}; following it")
    elif run.started_at is None:
        console.say(f"{mark} {run_id} was submitted @{run.submitted_position}; it starts here")
    else:
        children = run.children
        done = (
            f", {children.total - children.running} of {children.total} children are done"
            if children.total
            else ""
        )
        console.say(f"{mark} {run_id} was interrupted at @{before.position}; carrying on{done}")


async def _drive(console: Console, ledger: Ledger, plays: Plays, run_id: str) -> None:
    """Drives the run's family until the run has ended, and what its end asked for is done."""
    settings = console.settings().values
    driver: Driver | None = None
    try:
        driver = await start_driver(
            ledger.log,
            plays,
            ledger.submitter,
            family=run_id,
            max_instances=settings.engine.max_instances,
        )
        async with Progress(console, ledger, run_id, progress_of(console)):
            run = await ledger.wait_for_end(run_id)
        await _settle(console, ledger, run)
    finally:
        if driver is not None:
            await asyncio.shield(driver.stop(0.0))


async def _settle(console: Console, ledger: Ledger, run: Run) -> None:
    """Waits for the children that the end of their parent cancels; others are left, and named."""
    until = time.monotonic() + run.policy.cancel_grace_ms / 1000 + SETTLE_S
    while True:
        left = await ledger.log.reader.ask(_unfinished_query(run.run_id))
        asked = any(cancelling for _, cancelling in left)
        if not asked or time.monotonic() > until:
            break
        await asyncio.sleep(0.02)
    if left:
        names = ", ".join(name for name, _ in left[:3])
        console.say(f"still unfinished: {names}; the same command carries on with them")


async def _error(ledger: Ledger, run: Run) -> str:
    """Returns why a run failed, in one line."""
    if run.status != "failed":
        return ""
    text = str(run.code)
    if run.error is not None:
        with contextlib.suppress(PlayledgerError):
            told = await ledger.reveal(run.error)
            message = told.get("message") if isinstance(told, dict) else told
            if message and message != text:
                text += f": {message}"
    return f"{run.error_class} {text}"


def _show(
    console: Console,
    run: Run,
    family: Family,
    result: Json,
    error: str,
    shown: dict[str, Any] | None,
    *,
    already: bool,
) -> int:
    """Says how the run ended, prints the result, and what to type next."""
    mark = console.err.mark(run.status)
    took = length((run.ended_at or 0) - run.submitted_at)
    if not already:
        verb = {
            "completed": "completed in",
            "failed": "failed after",
            "cancelled": "cancelled after",
        }
        figures = [
            count_of(run.children.total, "child", "children"),
            count_of(family.retries, "retry", "retries"),
            f"{family.events} events",
        ]
        console.say(f"{mark} {run.run_id} {verb[run.status]} {took}: {', '.join(figures)}")
    if run.status == "failed":
        console.say(f"  {console.err.red(visible(error))}")
    if shown is not None:
        console.answer_json(shown)
    elif run.status == "completed":
        _print_result(console, result)
    console.flush()
    log = shell_word(str(console.db))
    console.then(
        f"playledger why {run.run_id}{console.db_option}",
        f"playledger replay show {log} {run.run_id}",
        f"playledger replay verify {log}",
    )
    return END_CODES[run.status]


def _print_result(console: Console, result: Json) -> None:
    """A list of flat objects is a table for people; else it is JSON, and always so in a pipe."""
    if not console.out.terminal:
        console.answer_json(result)
        return
    table = flat_table(result, console.out)
    if table is None:
        console.answer(json_text(result, indent=True))
        return
    head, *rows = table
    console.answer("  " + console.out.bold(head), *("  " + row for row in rows))


def _family_query(family: str) -> Query[Family]:
    return Query(
        "select count(*), sum(version), sum(max(attempt, 0)), sum(ended_at is null)"
        " from runs where family = ?",
        (family,),
        lambda rows: Family(*(value or 0 for value in rows[0])),
    )


def _last_query(family: str) -> Query[int]:
    return Query(
        "select max(json_extract(state, '$.position')) from runs where family = ?",
        (family,),
        lambda rows: int(rows[0][0]),
    )


def _hosts_query(family: str) -> Query[list[str]]:
    return Query(
        "select distinct i.host from instances i join runs r on r.run_id = i.run_id"
        " where r.family = ? and i.phase in ('created', 'started') and i.host is not null",
        (family,),
        lambda rows: [row[0] for row in rows],
    )


def _unfinished_query(family: str) -> Query[list[tuple[str, bool]]]:
    """Asks for the family's unfinished runs, and which of them are to end."""
    return Query(
        "select r.run_id, r.status = 'cancelling' or exists (select 1 from outbox o"
        " where o.stream_id = 'run/' || r.parent_run_id and o.kind = 'child_cancel'"
        " and o.parked = 0) from runs r where r.family = ? and r.ended_at is null limit 100",
        (family,),
        lambda rows: [(row[0], bool(row[1])) for row in rows],
    )
