"""submit, signal, cancel, retry, rerun: one command through the writer of this process.

A running server on the same log notices it within milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from handlers.execute import Answer
from handlers.port import decode_params
from handlers.submit import PlayInfo, StagedFile, Submission
from ledger.ids import quote
from ledger.log import system_clock
from ledger.seal import BlobRef
from playledger.cli.console import Console
from playledger.cli.inputs import load_play, read_inputs, read_json
from playledger.cli.opening import ACTOR, opened
from playledger.embed import Ledger, RunHandle, new_run_id
from playledger.render import count_of, visible
from projections.load import run_query
from projections.state import Run


def submit_play(
    console: Console,
    reference: str,
    arguments: Sequence[str],
    run_id: str | None,
    isolation: str | None,
) -> int:
    """Records a run and prints its id; a server that offers its play runs it."""
    settings = console.settings({"engine.isolation": ("--isolation", isolation)}).values
    inputs = read_inputs(arguments, settings)
    item, plays = load_play(reference)

    async def act() -> RunHandle[object]:
        async with opened(console, plays, create=True) as ledger:
            return await ledger.submit(item.name, inputs.value, run_id=run_id, files=inputs.files)

    handle = asyncio.run(act())
    return _submitted(console, handle.id, handle.answer)


def rerun_run(
    console: Console,
    run_id: str,
    arguments: Sequence[str],
    new_id: str | None,
    isolation: str | None,
) -> int:
    """Submits the play of an old run with its input and files, or with others, as a new run."""
    settings = console.settings({"engine.isolation": ("--isolation", isolation)}).values
    inputs = read_inputs(arguments, settings)

    async def act() -> tuple[str, Answer]:
        known: dict[str, PlayInfo] = {}
        async with opened(console, find=known.get) as ledger:
            old = await _run(ledger, run_id)
            known[old.play_name] = PlayInfo(
                old.play_name,
                old.play_digest,
                old.policy.play_retries,
                old.policy.timeout_ms,
            )
            params = decode_params(await ledger.log.vault.reveal_bytes(old.params))
            files = inputs.files
            value = inputs.value
            if not arguments:
                value = params.get("input")
                files = tuple([await _again(ledger, item) for item in params.get("files", ())])
            elif not inputs.given and len(files) == 1:
                value = {"file": files[0].name}
            identity = new_id or new_run_id(old.play_name, system_clock())
            answer = await ledger.submitter.submit(
                Submission(
                    run_id=identity,
                    play_name=old.play_name,
                    input=value,
                    actor=ACTOR,
                    policy=ledger.policy,
                    org_id=old.org_id,
                    staged=files,
                    options=params.get("options", {}),
                )
            )
            return identity, answer

    return _submitted(console, *asyncio.run(act()))


def signal_run(
    console: Console, run_id: str, key: str, data: str | None, signal_id: str | None
) -> int:
    """Records a signal, early or late."""
    settings = console.settings().values
    value = None if data is None else read_json(data, "--data", settings)

    async def act() -> Answer:
        async with opened(console) as ledger:
            return await ledger.signal(run_id, key, value, signal_id=signal_id)

    answer = asyncio.run(act())
    already = "was recorded already" if answer.replayed else "recorded"
    _done(console, run_id, f"signal {quote(key)} {already} for {run_id}", answer)
    console.then(f"playledger why {run_id}{console.db_option}")
    return 0


def cancel_run(console: Console, run_id: str, reason: str) -> int:
    """Records that a run shall end; asking again gives the same answer."""

    async def act() -> Answer:
        async with opened(console) as ledger:
            return await ledger.cancel(run_id, reason)

    answer = asyncio.run(act())
    run = _run_of(answer)
    if answer.replayed:
        state = "cancelled already" if run.terminal else "being cancelled already"
        _done(console, run_id, f"{run_id} is {state}", answer)
        return 0
    if run.terminal:
        _done(console, run_id, f"{run_id} is cancelled; no instance of it ran", answer)
        return 0
    _done(console, run_id, f"cancel of {run_id} recorded; {_children(run)}", answer)
    if not console.json:
        grace = run.policy.cancel_grace_ms / 1000
        console.say(
            f"It has {grace:g} s of grace to clean up: "
            f"playledger tail {run_id} --follow{console.db_option}"
        )
    return 0


def retry_run(console: Console, run_id: str) -> int:
    """Resumes what waits: backoffs and parked items."""

    async def act() -> tuple[list[dict[str, object]], int]:
        async with opened(console) as ledger:
            rows = await ledger.retry(run_id)
            found: list[dict[str, object]] = [
                {"intentId": row.intent_id, "kind": row.kind, "parked": bool(row.parked)}
                for row in rows
            ]
            return found, await ledger.log.position()

    resumed, position = asyncio.run(act())
    if console.json:
        console.answer_json({"runId": run_id, "resumed": resumed, "asOfPosition": position})
        return 0
    if not resumed:
        console.answer(f"nothing of {run_id} waits for a backoff or is parked")
    else:
        kinds = ", ".join(str(item["kind"]) for item in resumed)
        what = f"{count_of(len(resumed), 'item')} of {run_id} tried now: {kinds}"
        console.answer(f"{console.out.mark('completed')} {what}")
    console.then(f"playledger why {run_id}{console.db_option}")
    return 0


def _submitted(console: Console, run_id: str, answer: Answer | None) -> int:
    if answer is None:
        raise RuntimeError("a submit has an answer")
    run = _run_of(answer)
    if console.json:
        current = None if answer.state is None else answer.state.current
        console.answer_json(
            {
                "runId": run_id,
                "status": run.status,
                "instanceId": None if current is None else current.instance_id,
                "attempt": max(0, run.attempt),
                "version": run.version,
                "position": answer.position,
                "replayed": answer.replayed,
            }
        )
        return 0
    text = f"{run_id} is submitted, {visible(run.play_name)}"
    if answer.replayed:
        text = f"{run_id} was submitted already; it is {run.status}"
    _done(console, run_id, text, answer)
    console.then(
        f"playledger tail {run_id} --follow{console.db_option}",
        f"playledger why {run_id}{console.db_option}",
    )
    return 0


def _done(console: Console, run_id: str, text: str, answer: Answer) -> None:
    """Says what was recorded and where; piped, run, words and position between tabs."""
    run = _run_of(answer)
    if console.json:
        console.answer_json(
            {
                "runId": run_id,
                "status": run.status,
                "version": run.version,
                "position": answer.position,
                "replayed": answer.replayed,
            }
        )
    elif console.out.terminal:
        place = console.out.dim(f"@{answer.position}")
        console.answer(f"{console.out.mark('completed')} {text:<73} {place}")
    else:
        console.answer(f"{run_id}\t{text}\t@{answer.position}")


def _children(run: Run) -> str:
    if not run.children.total:
        return "no children"
    return (
        f"{run.children.running} of {count_of(run.children.total, 'child', 'children')} asked too"
    )


async def _run(ledger: Ledger, run_id: str) -> Run:
    run = await ledger.log.reader.ask(run_query(run_id))
    if run is None:
        raise await ledger.not_found(run_id)
    return run


def _run_of(answer: Answer) -> Run:
    if answer.state is None:
        raise RuntimeError("a command about a run leads to its state")
    return answer.state.run


async def _again(ledger: Ledger, item: dict[str, object]) -> StagedFile:
    """Reads a file of the old run, so that the new one has its own copy to keep or to erase."""
    ref = BlobRef(blob=str(item["blob"]), bytes=int(str(item["bytes"])), sha256=str(item["sha256"]))
    return StagedFile(name=str(item["name"]), content=await ledger.log.vault.read_file(ref))
