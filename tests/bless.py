"""Recorded logs: how they are made, and how their golden states are rewritten.

    python -m tests.bless            rewrite tests/logs/*.golden.json from today's folds
    python -m tests.bless --record   record the logs that are missing, from real runs

A log is recorded once and never edited, and stays for ever, so that upcasters stay honest.  A
deliberate change of policy or fold changes a golden file, and gets a line in CHANGELOG.md.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import orjson
from msgspec.structs import replace

import playledger
import replay
from engines.plays import plays_in
from handlers.commands import Command
from handlers.execute import Answer
from handlers.submit import DEFAULT_POLICY
from ledger import events as e
from ledger.codec import decode
from ledger.errors import RunTerminal
from ledger.export import export, write_export
from ledger.ids import instance_id, run_stream
from ledger.log import Log
from playledger.wiring import open_log
from projections.state import RunState

ROOT = Path(__file__).parents[1]
LOGS = Path(__file__).with_name("logs")
POLICY = replace(DEFAULT_POLICY, backoff_ms=40, cancel_grace_ms=300)


def golden_path(log: Path) -> Path:
    """Returns where the golden states of a log are."""
    return log.with_suffix(".golden.json")


def as_json(states: dict[str, RunState]) -> dict[str, Any]:
    """Returns states as plain values, in the order of their keys."""
    return {
        run_id: {
            "run": msgspec.to_builtins(state.run),
            "instances": {str(n): msgspec.to_builtins(i) for n, i in state.instances.items()},
            "children": {key: msgspec.to_builtins(child) for key, child in state.children.items()},
            "signals": {str(n): msgspec.to_builtins(s) for n, s in state.signals.items()},
            "waits": {key: msgspec.to_builtins(wait) for key, wait in state.waits.items()},
        }
        for run_id, state in states.items()
    }


def bless(log: Path) -> None:
    """Writes the golden states of one log."""
    text = json.dumps(as_json(replay.states(log)), indent=1, sort_keys=True)
    golden_path(log).write_text(text + "\n")


@playledger.play
async def poll(run: playledger.Run) -> str:
    """Waits three times for one key; the first two run out, the third gets the signal."""
    for _ in range(2):
        try:
            return str(await run.signal("go", str, timeout=timedelta(milliseconds=20)))
        except TimeoutError:
            run.log("nobody yet")
    run.progress(2, of=3)
    return str(await run.signal("go", str, timeout=timedelta(days=1)))


@playledger.play
async def wait_for_word(run: playledger.Run, who: str) -> str:
    return f"{who}: {await run.signal('word', str)}"


@playledger.play
async def parent_of_three(run: playledger.Run) -> list[str]:
    children = [run.child(wait_for_word, who, key=who) for who in ("ada", "bob", "cy")]
    return [await child for child in children]


async def record_weather(path: Path) -> None:
    """The demo: a parent, four children, one join."""
    async with playledger.open(path, plays=plays_in(str(ROOT / "examples/weather.py"))) as ledger:
        run = await ledger.submit(
            "weather:yearly_report",
            run_id="weather-demo",
            files=[ROOT / "examples/data/seattle-weather.csv"],
        )
        await run.result()


async def record_refund(path: Path) -> None:
    """An approval, a child that asks for two more attempts, and a signal that came too late."""
    plays = plays_in(str(ROOT / "examples/shop.py"))
    async with playledger.open(path, plays=plays, policy=POLICY) as ledger:
        run = await ledger.submit("shop:refund", "order-7", run_id="refund-7")
        await ledger.signal("refund-7", "note", "nobody waits for this one")
        await _until(ledger, lambda: _waits(ledger, "refund-7"))
        await run.signal("approval", {"approved": True, "by": "ada"})
        await run.result()
        try:
            await run.signal("approval", {"approved": False, "by": "bob"})
        except RunTerminal:
            await _cancel_refused(ledger, "refund-7")


async def record_poll(path: Path) -> None:
    """A signal that comes after two waits for it have timed out."""
    async with playledger.open(path, plays=[poll], policy=POLICY) as ledger:
        run = await ledger.submit(poll, run_id="poll-1")
        await _until(ledger, lambda: _waits_for_ever(ledger, "poll-1"))
        await run.signal("go", "now")
        await run.result()


async def record_cancel(path: Path) -> None:
    """A parent cancelled while its children wait for signals."""
    plays: list[Any] = [parent_of_three, wait_for_word]
    async with playledger.open(path, plays=plays, policy=POLICY) as ledger:
        run = await ledger.submit(parent_of_three, run_id="family-1")
        await _until(ledger, lambda: _children_wait(ledger))
        await run.cancel("not needed any more")
        await _until(ledger, lambda: _all_ended(ledger))


async def record_reset(path: Path) -> None:
    """Platform resets up to the limit, reported by an engine elsewhere: two runs, two ends."""
    log = await open_log(path)
    try:
        for run_id, resets in (("reset-once", 1), ("reset-thrice", 3)):
            await _reset(log, run_id, resets)
    finally:
        await log.close()


async def _reset(log: Log[Command, Any, Answer], run_id: str, resets: int) -> None:
    stream = run_stream(run_id)
    sealed = e.Seal(sd=("qPrqJuVKrK2zuAmgTDbsWxIF8GW5ls7z51-19OOjGIA",), bytes=2)

    async def record(fact: e.RunEvent, cause: str | None = None) -> Answer:
        key = b"k" * 32 if isinstance(fact, e.RunSubmitted) else None
        return await log.transact(
            Command(stream=stream, fact=fact, actor="cli/local", cause=cause, run_key=key)
        )

    def intent(answer: Answer, kind: type[e.RunEvent]) -> str:
        return next(r.id for r in answer.events if isinstance(r.data, kind))

    answer = await record(
        e.RunSubmitted(
            run_id=run_id,
            play_name="crm:enrich",
            engine="cloudflare",
            isolation="task",
            scope="default",
            org_id="acme",
            lineage=e.Lineage(family_key=run_id),
            params=sealed,
            request_digest="O5QXULxrBPeuXz5iZoyEZe89R-fVcbfpFhVLC9O3Ths",
            policy=POLICY,
        )
    )
    for attempt in range(resets + 1):
        instance = instance_id("default", run_id, attempt)
        started = e.InstanceStarted(instance_id=instance, attempt=attempt, start_gap_ms=1)
        if attempt == 1:
            await record(started)  # an engine may report the start before its create is answered
        await record(
            e.InstanceCreated(instance_id=instance, attempt=attempt, already_existed=False),
            intent(answer, e.InstanceCreateRequested),
        )
        if attempt != 1:
            await record(started)
        if attempt == resets:
            break
        answer = await record(
            e.InstanceErrored(
                instance_id=instance,
                attempt=attempt,
                error_class="platform_reset",
                code="RESET",
                error=sealed,
            )
        )
        if not any(isinstance(r.data, e.RetryParamsRequested) for r in answer.events):
            return
        answer = await record(
            e.RetryParamsLoaded(failed_instance_id=instance, bytes=2),
            intent(answer, e.RetryParamsRequested),
        )
    await record(e.InstanceCompleted(instance_id=instance, attempt=resets, result=sealed))


async def _cancel_refused(ledger: playledger.Ledger, run_id: str) -> None:
    try:
        await ledger.cancel(run_id)
    except RunTerminal:
        return


async def _waits(ledger: playledger.Ledger, run_id: str) -> bool:
    return bool((await ledger.status(run_id)).waits)


async def _waits_for_ever(ledger: playledger.Ledger, run_id: str) -> bool:
    return any(wait.ordinal == 2 for wait in (await ledger.status(run_id)).waits)


async def _children_wait(ledger: playledger.Ledger) -> bool:
    return sum(bool(line.waits) for line in await ledger.runs()) == 3


async def _all_ended(ledger: playledger.Ledger) -> bool:
    lines = await ledger.runs()
    outbox = [(await ledger.status(line.run.run_id)).outbox for line in lines]
    return all(line.run.terminal for line in lines) and not any(outbox)


async def _until(ledger: playledger.Ledger, condition: Callable[[], Awaitable[bool]]) -> None:
    """Looks again at every event until something is so; a minute is for ever."""
    async with asyncio.timeout(60):
        async for _ in ledger.events(follow=True):
            if await condition():
                return


RECORDERS = {
    "weather-demo": record_weather,
    "refund": record_refund,
    "poll": record_poll,
    "cancelled-parent": record_cancel,
    "platform-reset": record_reset,
}


def record(name: str) -> None:
    """Records one log from real runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.db"
        asyncio.run(RECORDERS[name](path))
        verdict = replay.verify(path)
        if not verdict.ok:
            raise SystemExit(f"{name}: {verdict}")
        with (LOGS / f"{name}.jsonl").open("wb") as out:
            write_export(export(path), out)


def spoil() -> None:
    """Writes the two logs that must fail: one has lost a line, one has another decision."""
    lines = (LOGS / "platform-reset.jsonl").read_bytes().splitlines()
    (LOGS / "bad" / "fsck.jsonl").write_bytes(b"\n".join(lines[:9] + lines[10:]) + b"\n")
    changed = []
    for line in lines:
        event = orjson.loads(line)
        if event["type"] == "retry.decided" and event["subject"] == "run/reset-thrice":
            event["data"] |= {"limit": 3}
        changed.append(orjson.dumps(event, option=orjson.OPT_SORT_KEYS))
        decode(changed[-1])
    (LOGS / "bad" / "verify.jsonl").write_bytes(b"\n".join(changed) + b"\n")


def main(arguments: list[str]) -> None:
    if "--record" in arguments:
        for name in RECORDERS:
            if not (LOGS / f"{name}.jsonl").exists():
                record(name)
        if not (LOGS / "bad" / "fsck.jsonl").exists():
            spoil()
    for log in sorted(LOGS.glob("*.jsonl")):
        bless(log)
        print(f"blessed {golden_path(log).relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
