"""runs, status, why: read-only, and answered from the read models as of one position."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, cast

from handlers.port import decode_params
from ledger.errors import NotFound, Refused
from ledger.ids import quote
from ledger.log import system_clock
from playledger.cli.console import END_CODES, Console
from playledger.embed import Ledger
from playledger.embed import open as open_ledger
from playledger.render import (
    Look,
    age,
    byte_size,
    columns,
    json_text,
    length,
    moment,
    rfc3339,
    visible,
)
from playledger.views import run_lines, status_view
from projections.describe import describe_value
from projections.load import RunView

T = TypeVar("T")
STATUSES: Final = ("submitted", "running", "cancelling", "completed", "failed", "cancelled")
LINE: Final = 78


def reading(console: Console, read: Callable[[Ledger], Coroutine[Any, Any, T]]) -> T:
    """Opens the log read-only, which creates nothing, and returns what is read."""

    async def opened() -> T:
        async with open_ledger(console.db, read_only=True) as ledger:
            return await read(ledger)

    return asyncio.run(opened())


def list_runs(
    console: Console,
    *,
    status: str | None,
    play: str | None,
    waiting_on: str | None,
    limit: int,
    before: str | None,
) -> int:
    """Lists runs, newest first; JSON lines with --json."""
    if status is not None and status not in STATUSES:
        raise Refused(
            f"--status: {quote(status)} is no status", code="USAGE", hint=" | ".join(STATUSES)
        )
    edge = None if before is None else position_of(before, "--before")

    async def read(ledger: Ledger) -> tuple[list[dict[str, Any]], int]:
        found = await ledger.runs(
            status=status, play=play, waiting_on=waiting_on, limit=limit + 1, before=edge
        )
        more = found[limit - 1].run.submitted_position if len(found) > limit else 0
        return await run_lines(ledger, found[:limit]) if found else [], more

    lines, more = reading(console, read)
    if console.json:
        for line in lines:
            console.answer_json(line)
    elif console.out.terminal:
        _table(console, lines)
    else:
        console.answer(*columns([_row(line, console.out) for line in lines], console.out))
    if more:
        console.say(f"{len(lines)} shown; older: --before @{more}")
    elif not lines:
        console.say("no run yet" if edge is None else f"no run before @{edge}")
        console.then("playledger run examples/hello.py:hello --input '\"world\"'")
    return 0


def show_status(console: Console, run_id: str, *, reveal: bool, exit_status: bool) -> int:
    """Shows one run as it is."""

    async def read(ledger: Ledger) -> tuple[dict[str, Any], RunView, Any]:
        view = await ledger.status(run_id)
        shown = cast("dict[str, Any]", await status_view(ledger, view))
        params = await _params(ledger, view) if reveal else None
        if params is not None:
            shown["input"] = params.get("input")
            shown["files"] = [item["name"] for item in params.get("files", ())]
        return shown, view, params

    shown, view, params = reading(console, read)
    if console.json:
        console.answer_json(shown)
    else:
        facts = _facts(shown, view, params, reveal=reveal)
        if console.out.terminal:
            _status_lines(console, shown, facts)
        else:
            head = [("run", shown["runId"], ""), ("play", visible(shown["playName"]), ""),
                    ("status", shown["status"], f"@{shown['asOfPosition']}")]  # fmt: skip
            console.answer(*("\t".join(row).rstrip("\t") for row in (*head, *facts)))
        _next_of(console, shown)
    return END_CODES.get(shown["status"], 0) if exit_status else 0


def explain_run(console: Console, run_id: str, at: str | None) -> int:
    """Explains in sentences, each with its positions, why a run is or was where it is."""
    from playledger.why import Why, explain

    place = None if at is None else position_of(at, "--at")

    async def read(ledger: Ledger) -> Why:
        return await explain(ledger, run_id, at=place)

    told = reading(console, read)
    if console.json:
        console.answer_json(told.to_json())
        return 0
    for number, sentence in enumerate(told.sentences):
        places = " ".join(f"@{position}" for position in sentence.positions)
        text = ("" if number == 0 else "  ") + visible(sentence.text)
        console.answer(placed(console.out, text, places))
    if told.movement:
        console.answer(visible(told.movement) + (":" if told.commands else "."))
    for command in told.commands:
        console.answer(f"  {visible(command)}{console.db_option}")
    return 0


def position_of(text: str, option: str) -> int:
    """Returns a position, written `58` or `@58`."""
    digits = text.removeprefix("@")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 16:
        raise Refused(f"{option}: {quote(text)} is no position", code="USAGE", hint=f"{option} @58")
    return int(digits)


def placed(look: Look, text: str, places: str, width: int = LINE) -> str:
    """Returns a line with its evidence at the right; piped, behind a tab."""
    if not look.terminal:
        return f"{text}\t{places}" if places else text
    if not places:
        return text
    if len(text) + len(places) + 2 > width:
        return f"{text}  {look.dim(places)}"
    return f"{text:<{width - len(places)}}{look.dim(places)}"


# --- a list -----------------------------------------------------------------------------------


def _table(console: Console, lines: list[dict[str, Any]]) -> None:
    if not lines:
        return
    look = console.out
    rows = [["RUN", "PLAY", "STATUS", "RETRY", "WAITS FOR", "AGE"]]
    rows += [_row(line, look) for line in lines]
    head, *body = columns(rows, look, right=(5,))
    console.answer("  " + look.bold(head))
    for line, text in zip(lines, body, strict=True):
        mark = look.mark(line["status"], waits=bool(line["waitingOn"]))
        console.answer(f"{mark} {text}")


def _row(line: dict[str, Any], look: Look) -> list[str]:
    retry = line["retry"]
    tries = "" if retry is None else str(retry["attempt"])
    if retry is not None and retry["limit"] is not None:
        tries = f"{retry['used']} of {retry['limit']}"
    waits = line["waitingOn"]
    first = "" if not waits else f"{waits[0]['kind']} {visible(str(waits[0]['key']))}".strip()
    more = f" +{len(waits) - 1}" if len(waits) > 1 else ""
    at = line["submittedAt"]
    return [
        line["runId"],
        visible(line["playName"]),
        line["status"],
        tries,
        "parked" if line["parked"] and not waits else first + more,
        age(system_clock() - at) if look.terminal else rfc3339(at),
    ]


# --- one run ----------------------------------------------------------------------------------


def _facts(
    shown: dict[str, Any], view: RunView, params: dict[str, Any] | None, *, reveal: bool
) -> list[tuple[str, str, str]]:
    """Returns what is to be said of a run: a name, words, and the position they rest on."""
    run = view.run
    rows = []
    for wait in shown["waitingOn"]:
        until = "" if wait["untilAt"] is None else f" until {moment(wait['untilAt'])}"
        text = f"{wait['kind']} {quote(str(wait['key']))}{until}"
        rows.append(("waits for", text, f"@{wait['position']}"))
    for item in shown["parked"]:
        text = f"{item['kind']} after {item['tries']} tries"
        rows.append(("parked", text, f"@{item['position']}"))
    if shown["retry"] is not None:
        retry = shown["retry"]
        of = "" if retry["limit"] is None else f", {retry['used']} of {retry['limit']} used"
        rows.append(("retry", f"attempt {retry['attempt']} after {retry['reason']}{of}", ""))
    if shown["error"] is not None:
        error = shown["error"]
        rows.append(("error", f"{error['class']} {visible(str(error['message']))}", ""))
    if shown["progress"] is not None:
        done = shown["progress"]
        of = "" if done["of"] is None else f" of {done['of']}"
        note = "" if done["note"] is None else f", {visible(str(done['note']))}"
        rows.append(("progress", f"{done['done']}{of}{note}", f"@{done['position']}"))
    rows.append(
        ("instance", f"{shown['instanceId']} on {run.engine}, attempt {shown['attempt']}", "")
    )
    if shown["parentRunId"] is not None:
        rows.append(("parent", shown["parentRunId"], ""))
    counts = shown["children"]
    kinds = ("completed", "running", "failed", "cancelled")
    each = ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind])
    rows.append(("children", f"{counts['total']}: {each}" if counts["total"] else "none", ""))
    rows.append(("input", _input(run.params.bytes, params, reveal=reveal), ""))
    if run.result is not None:
        rows.append(("result", _result(shown, run.result.bytes, reveal=reveal), ""))
    return rows


def _input(size: int, params: dict[str, Any] | None, *, reveal: bool) -> str:
    if params is None:
        return f"sealed, {byte_size(size)}" + (
            ", no longer in the vault" if reveal else " (--reveal)"
        )
    return json_text(params.get("input"))


def _result(shown: dict[str, Any], size: int, *, reveal: bool) -> str:
    if shown["resultRef"] is not None:
        gone = shown["resultRef"].get("gone")
        return f"sealed, {byte_size(size)}" + (f", {gone}" if gone else "")
    if reveal:
        return json_text(shown["result"])
    return f"{describe_value(shown['result'])}, {byte_size(size)}"


def _status_lines(
    console: Console, shown: dict[str, Any], facts: list[tuple[str, str, str]]
) -> None:
    look, now = console.out, system_clock()
    end = shown["endedAt"]
    since = (end or now) - shown["submittedAt"]
    word = {"completed": "in", "failed": "after", "cancelled": "after"}.get(shown["status"], "for")
    text = (
        f"{shown['runId']}  {visible(shown['playName'])}  {shown['status']} {word} {length(since)}"
    )
    mark = look.mark(shown["status"], waits=bool(shown["waitingOn"]))
    place = f"v{shown['version']}  @{shown['asOfPosition']}"
    console.answer(f"{mark} {placed(look, text, place, LINE - 2)}")
    for name, words, where in facts:
        line = f"  {name:<11} {words}"
        console.answer(placed(look, line, where) if name != "error" else look.red(line))


def _next_of(console: Console, shown: dict[str, Any]) -> None:
    run_id, db = shown["runId"], console.db_option
    for wait in shown["waitingOn"]:
        if wait["kind"] == "signal":
            from playledger.cli.console import shell_word

            key = shell_word(str(wait["key"]))
            console.then(f"playledger signal {run_id} {key} --data '{{...}}'{db}")
            return
        if wait["kind"] in ("backoff", "parked"):
            console.then(f"playledger retry {run_id}{db}")
            return
    console.then(f"playledger why {run_id}{db}")


async def _params(ledger: Ledger, view: RunView) -> dict[str, Any] | None:
    try:
        return decode_params(await ledger.log.vault.reveal_bytes(view.run.params))
    except NotFound:
        return None
