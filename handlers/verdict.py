"""A verification in words and as JSON: what holds, or the first difference with both values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import orjson

from handlers.rechoose import Divergence, Field
from handlers.verify import Verdict
from ledger.events import Event
from projections.describe import describe, safe_json, visible
from projections.tell import PIPE, PLACE_WIDTH, Look

VALUE_CHARS: Final = 40
_KINDS: Final = {
    "changed": "changed",
    "not_made": "not made today",
    "not_recorded": "not recorded",
    "not_allowed": "not allowed today",
}


def verdict_lines(
    found: Verdict, log: str, *, every: bool = False, look: Look = PIPE, ascii_only: bool = False
) -> Iterator[str]:
    """Yields the three checks, then that all is the same, or what is not."""
    if found.log_wrong == 0:
        yield f"log        {_log(found)}"
    for finding in found.findings if every else found.findings[:1]:
        yield look.red(f"log        damaged: {finding.message}")
    yield from _refold(found, every=every, look=look)
    if not found.changed:
        yield f"re-decide  {found.choices} choices made again: all as recorded"
    if found.ok:
        mark = "+" if ascii_only else "✓"
        seconds = f"{found.elapsed_ms / 1000:.2f} s"
        yield (
            f"{look.green(mark)} {found.same} of {found.events} the same: "
            f"today's code would decide what was decided ({seconds})"
        )
        return
    for divergence in found.divergences if every else found.divergences[:1]:
        yield from divergence_lines(divergence, log, look)
    wrong = [f"{found.log_wrong} damaged"] if found.log_wrong else []
    wrong += [f"{found.refold_wrong} rows not as folded"] if found.refold_wrong else []
    wrong += [f"{found.changed} changed"]
    skipped = f", {found.skipped} behind them not read" if found.skipped else ""
    first = "" if every else "first of "
    hint = "--json for CI" if every else "--all lists them, --json for CI"
    yield (f"{first}{', '.join(wrong)}, {found.benign} benign, {found.same} same{skipped}; {hint}")


def divergence_lines(found: Divergence, log: str, look: Look = PIPE) -> Iterator[str]:
    """Yields one difference: where, what was given, both values underlined, why."""
    run = found.stream.removeprefix("run/")
    yield f"{_KINDS[found.kind]}: {found.type}"
    yield f"  --> {log} @{found.position}, {run} v{found.version}"
    if found.given is not None:
        given = f"  | given     {found.given.type} {describe(found.given)}"
        place = f"@{found.given.position}"
        yield f"{given:{PLACE_WIDTH - len(place)}} {look.dim(place)}"
    was, now = _both(found)
    if found.recorded is None:
        yield "  | recorded  nothing"
        yield f"  | today     {look.green('   '.join(now))}"
    elif found.today is None:
        yield f"  | recorded  {look.red('   '.join(was))}"
        if found.kind == "not_made":
            yield "  | today     nothing"
    else:
        widths = [max(len(a), len(b)) for a, b in zip(was, now, strict=True)]
        yield "  | recorded  " + look.red(_row(was, widths))
        yield "  | today     " + look.green(_row(now, widths))
        yield "  |           " + _row(["^" * len(text) for text in now], widths)
    if found.why:
        yield f"help: {found.why}"


def verdict_json(found: Verdict, *, every: bool = False) -> dict[str, Any]:
    """Returns a verification as one object; what is absent is null."""
    first = found.divergences[0] if found.divergences else None
    shown: dict[str, Any] = {
        "ok": found.ok,
        "events": found.events,
        "same": found.same,
        "benign": found.benign,
        "changed": found.changed,
        "choices": found.choices,
        "skipped": found.skipped,
        "first": None if first is None else divergence_json(first),
        "log": "damaged" if found.log_wrong else "ok",
        "refold": _refold_word(found),
        "findings": [
            {"what": f.what, "message": f.message, "position": f.position}
            for f in (found.findings if every else found.findings[:1])
        ],
        "differences": [
            {
                "table": d.table,
                "key": list(d.key),
                "column": d.column,
                "stored": d.stored,
                "refolded": d.refolded,
            }
            for d in (found.differences if every else found.differences[:1])
        ],
        "root": found.root,
        "elapsedMs": found.elapsed_ms,
    }
    if every:
        shown["divergences"] = [divergence_json(d) for d in found.divergences]
    return shown


def divergence_json(found: Divergence) -> dict[str, Any]:
    """Returns one difference."""
    return {
        "kind": found.kind,
        "position": found.position,
        "stream": found.stream,
        "version": found.version,
        "type": found.type,
        "given": [] if found.given is None else [found.given.position],
        "fields": [
            {"path": field.path, "recorded": field.recorded, "today": field.today}
            for field in found.fields
        ],
        "why": found.why,
    }


def _log(found: Verdict) -> str:
    if found.read_models is not None:
        return f"{found.events} events dense, leaves hash to the head"
    if found.root is not None:
        return f"{found.events} events dense, leaves hash to {found.root[:8]}; a file has no head"
    return f"{found.events} events from @{found.first_position} on, a part of a log"


def _refold(found: Verdict, *, every: bool, look: Look) -> Iterator[str]:
    if found.read_models is None:
        yield f"refold     {found.runs} runs folded; a file has no read models"
    elif not found.refold_wrong:
        yield f"refold     {found.read_models} read models equal byte for byte"
    for difference in found.differences if every else found.differences[:1]:
        yield look.red(f"refold     differs: {visible(difference.text)}")


def _refold_word(found: Verdict) -> str | None:
    if found.read_models is None:
        return None
    return "differs" if found.refold_wrong else "ok"


def _both(found: Divergence) -> tuple[list[str], list[str]]:
    fields = found.fields
    if found.recorded is None or found.today is None:
        event = found.recorded or found.today
        texts = [] if event is None else _all(event)
        return texts, texts
    return [_field(f, f.recorded) for f in fields], [_field(f, f.today) for f in fields]


def _all(event: Event) -> list[str]:
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return [_field(Field(name, value, None), value) for name, value in fields.items()]


def _field(field: Field, value: Any) -> str:
    text = "absent" if value is None else safe_json(orjson.dumps(value).decode())
    return f"{field.path} = {text if len(text) <= VALUE_CHARS else text[:VALUE_CHARS] + '...'}"


def _row(texts: list[str], widths: list[int]) -> str:
    return "   ".join(f"{text:{width}}" for text, width in zip(texts, widths, strict=True)).rstrip()
