"""The scenarios of the crash tests: plays, what a client does, and the one right end.

A client script may be started again at any point: its ids are fixed, so that what was recorded is
found.  A play appends one line per attempt to an effects file, as a program with a real effect
would; the line of one attempt must never stand there twice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

import playledger
from engines.plays import as_play
from engines.port_asks import PortAsks
from handlers.session_crypto import seal_for_token
from handlers.submit import DEFAULT_POLICY, StagedFile, Submission
from ledger import events as e
from ledger.canonical import Json
from ledger.failpoint import failpoint
from ledger.ids import child_run_id, run_stream
from playledger import play

EFFECTS_VARIABLE: Final = "PLAYLEDGER_CRASH_EFFECTS"
BIG: Final = "x" * 3000
POLICY: Final = replace(
    DEFAULT_POLICY,
    restart_limit=1000,
    retry_limit=1000,
    backoff_ms=10,
    cancel_grace_ms=5_000,
    externalize_after_bytes=2000,
)
"""Small limits, so that a small value takes the way of a large one and no retry waits long."""


class End(Struct, frozen=True):
    """How a run must have ended, however often it was killed."""

    status: str
    result: Json = None
    code: str | None = None


Acknowledge = Callable[[str, str], None]
"""Called with a kind and an id after an answer, which then must never be lost."""

Client = Callable[[playledger.Ledger, Acknowledge], Awaitable[None]]


class Scenario(Struct, frozen=True):
    """What a client does on one log, and how each of its runs must have ended."""

    client: Client
    ends: dict[str, End]


def effect(run: playledger.Run) -> None:
    """Does something to the world that can be counted."""
    effect_line(run.id, run.attempt)


def effect_line(run_id: str, attempt: int) -> None:
    """Appends what an attempt did to the file that the test counts."""
    descriptor = os.open(os.environ[EFFECTS_VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{run_id} {attempt}\n".encode())
    os.close(descriptor)


# --- plays ----------------------------------------------------------------------------------------


@play
async def double(run: playledger.Run, text: str) -> str:
    """Has an input, a file and a result that are stored as blobs."""
    effect(run)
    return run.file("words.txt").read_text() + text


@play
async def square(run: playledger.Run, number: int) -> int:
    effect(run)
    if number < 0:
        raise ValueError("a negative number")
    return number * number


@play
async def family(run: playledger.Run, numbers: list[int]) -> int:
    """Starts its children at once, and counts one that fails as nothing."""
    effect(run)
    children = [run.child(square, number, key=f"n{number}") for number in numbers]
    total = 0
    for child in children:
        try:
            total += await child
        except playledger.ChildFailed:
            continue
    return total


@play
async def reset_once(run: playledger.Run) -> str:
    """Is told by its platform that its first instance is gone."""
    effect(run)
    if run.attempt == 0:
        asks = cast("PortAsks", run._asks)
        await asks._port.errored(asks._ref, "platform_reset", "RESET", {"message": "deployed"})
        raise playledger.Superseded
    return "done"


@play(retries=1)
async def ask_again(run: playledger.Run) -> str:
    effect(run)
    if run.attempt == 0:
        raise playledger.Retry("not yet", after=timedelta(milliseconds=20))
    return "done"


@play(timeout=timedelta(milliseconds=60))
async def too_slow(run: playledger.Run) -> None:
    effect(run)
    await asyncio.Event().wait()


@play
async def collect(run: playledger.Run) -> list[Json]:
    """Takes two signals of one key, in the order in which they came."""
    effect(run)
    return [await run.signal("part"), await run.signal("part")]


@play
async def outside_child(run: playledger.Run) -> int:
    """Has a child that somebody else tells the end of, before it has one of its own."""
    effect(run)
    result: int = await run.child("tests.crash.scenarios:endless", key="outside")
    return result


@play
async def patient(run: playledger.Run) -> str:
    """Gives a signal half a second, counted from the first time it was waited for."""
    effect(run)
    try:
        return f"signal {await run.signal('go', timeout=timedelta(milliseconds=500))}"
    except TimeoutError:
        return "timed out"


@play
async def frozen(run: playledger.Run) -> str:
    """Takes long the first time, while its process is stopped."""
    effect(run)
    if run.attempt == 0:
        await asyncio.sleep(0.5)
    return f"attempt {run.attempt}"


@play
async def timed(run: playledger.Run) -> str:
    effect(run)
    await run.sleep("nap", timedelta(milliseconds=40))
    try:
        await run.signal("never", timeout=timedelta(milliseconds=40))
    except TimeoutError:
        return "timed out"
    return "signalled"


@play
async def endless(run: playledger.Run) -> Any:
    effect(run)
    return await run.signal("never")


@play
async def endless_family(run: playledger.Run) -> None:
    effect(run)
    children = [run.child(endless, key=key) for key in ("a", "b")]
    for child in children:
        await child


SESSION_TOKEN: Final = "the-token-of-the-session-scenario"
SESSION: Final[dict[str, Json]] = {
    "expiresAt": 4_000_000_000_000,
    "operations": ["select"],
    "playName": "query",
    "target": {"logicalTable": "leads", "orgId": "local", "tableNamespace": "crm"},
}


@play
async def query(run: playledger.Run) -> str:
    """Opens the database session that came with its request."""
    effect(run)
    async with run.session("crm.leads") as session:
        return session.url.get_secret_value()


PLAYS: Final = (
    query,
    double,
    square,
    family,
    reset_once,
    ask_again,
    too_slow,
    collect,
    outside_child,
    patient,
    frozen,
    timed,
    endless,
    endless_family,
)


# --- clients --------------------------------------------------------------------------------------


async def _submit(
    ledger: playledger.Ledger, acknowledge: Acknowledge, function: Any, run_id: str, **more: Any
) -> None:
    await ledger.submit(function, run_id=run_id, **more)
    acknowledge("submit", run_id)
    failpoint("submit_acknowledged")


async def _launch(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    staged = StagedFile(name="words.txt", content=b"words " * 500)
    await _submit(ledger, acknowledge, double, "launch", input=BIG, files=[staged])


async def _many(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    await asyncio.gather(
        *(_submit(ledger, acknowledge, square, f"many-{n}", input=n) for n in range(4))
    )


async def _family(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    await _submit(ledger, acknowledge, family, "family", input=[2, 3, -1])


def _one(function: Any, run_id: str) -> Client:
    async def client(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
        await _submit(ledger, acknowledge, function, run_id)

    return client


async def _signals_early(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    await _submit(ledger, acknowledge, collect, "early")
    await _signal(ledger, acknowledge, "early", 1)
    await _signal(ledger, acknowledge, "early", 2)


async def _signals_late(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    await _submit(ledger, acknowledge, collect, "late")
    for number in (1, 2):
        await recorded(ledger, "late", e.RunWaitStarted, number)
        await _signal(ledger, acknowledge, "late", number)


async def _signal(
    ledger: playledger.Ledger, acknowledge: Acknowledge, run_id: str, number: int
) -> None:
    await signal_once(ledger, run_id, "part", number, f"s{number}")
    acknowledge("signal", f"{run_id}/s{number}")
    failpoint("signal_acknowledged")


OUTSIDE_CHILD: Final = child_run_id("tests.crash.scenarios:endless", "outside", "outside")


async def _outside_child(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    """Tells the end of a child, early or late, and lets the child end only then."""
    await _submit(ledger, acknowledge, outside_child, "outside")
    try:
        await ledger.signal("outside", "outside", 7, signal="integration_event", signal_id="end")
        acknowledge("signal", "outside/end")
    except playledger.RunTerminal:
        pass
    await recorded(ledger, None, (e.RunSubmitted, e.ChildSubmitFailed), 2)
    await ledger.wait_for_end("outside")
    try:
        await ledger.cancel(OUTSIDE_CHILD, request_id="c1")
    except (playledger.RunNotFound, playledger.RunTerminal):
        return


async def signal_once(
    ledger: playledger.Ledger, run_id: str, key: str, data: Json, signal_id: str
) -> None:
    """Sends a signal, again if it is not known whether it got there; an ended run has taken it."""
    try:
        await ledger.signal(run_id, key, data, signal_id=signal_id)
    except playledger.RunTerminal:
        return


async def _cancel(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    await _cancelled(ledger, acknowledge, endless, "cancel", waits=1)


async def _cancel_family(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    await _cancelled(ledger, acknowledge, endless_family, "cancel-family", waits=2)


async def _cancelled(
    ledger: playledger.Ledger, acknowledge: Acknowledge, function: Any, run_id: str, *, waits: int
) -> None:
    """Cancels a run when it, or its children, wait for what never comes."""
    await _submit(ledger, acknowledge, function, run_id)
    await recorded(ledger, None, e.RunWaitStarted, waits)
    await ledger.cancel(run_id, "no longer wanted", request_id="c1")
    acknowledge("cancel", f"{run_id}/c1")
    failpoint("cancel_acknowledged")


async def recorded(
    ledger: playledger.Ledger, run_id: str | None, kind: type | tuple[type, ...], count: int
) -> None:
    """Waits until a run's stream, or the whole log, holds `count` events of a kind."""
    stream = None if run_id is None else run_stream(run_id)
    async for event in ledger.events(stream=stream, follow=True):
        count -= isinstance(event.data, kind)
        if count <= 0:
            return


async def _outside_engine(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    await ledger.submitter.submit(
        Submission(
            run_id="service",
            play_name=as_play(endless).name,
            input=None,
            actor="library/local",
            policy=POLICY,
            engine="outside",
        )
    )
    acknowledge("submit", "service")


async def _sessions(ledger: playledger.Ledger, acknowledge: Acknowledge) -> None:
    sealed = seal_for_token("postgresql://db.example/crm", SESSION, SESSION_TOKEN)
    await ledger.submitter.submit(
        Submission(
            run_id="sessions",
            play_name=as_play(query).name,
            input=None,
            actor="library/local",
            policy=POLICY,
            secrets={"executorToken": SESSION_TOKEN},
            sessions=({**SESSION, "encryptedPostgresUrl": sealed},),
            sessions_ttl_ms=3_600_000,
        )
    )
    acknowledge("submit", "sessions")
    await recorded(ledger, "sessions", e.SessionRevoked, 1)


CANCELLED: Final = End("cancelled")
SCENARIOS: Final = {
    "launch": Scenario(_launch, {"launch": End("completed", "words " * 500 + BIG)}),
    "many": Scenario(_many, {f"many-{n}": End("completed", n * n) for n in range(4)}),
    "family": Scenario(_family, {"family": End("completed", 13)}),
    "reset": Scenario(_one(reset_once, "reset"), {"reset": End("completed", "done")}),
    "again": Scenario(_one(ask_again, "again"), {"again": End("completed", "done")}),
    "timeout": Scenario(
        _one(too_slow, "timeout"), {"timeout": End("failed", code="ENGINE_TIMEOUT")}
    ),
    "early": Scenario(_signals_early, {"early": End("completed", [1, 2])}),
    "late": Scenario(_signals_late, {"late": End("completed", [1, 2])}),
    "outside": Scenario(_outside_child, {"outside": End("completed", 7)}),
    "timers": Scenario(_one(timed, "timers"), {"timers": End("completed", "timed out")}),
    "cancel": Scenario(_cancel, {"cancel": CANCELLED}),
    "cancel-family": Scenario(_cancel_family, {"cancel-family": CANCELLED}),
    "sessions": Scenario(_sessions, {"sessions": End("completed", "postgresql://db.example/crm")}),
}

MORE: Final = {
    "patient": Scenario(_one(patient, "patient"), {"patient": End("completed", "timed out")}),
    "frozen": Scenario(_one(frozen, "frozen"), {"frozen": End("completed", "attempt 1")}),
    "service": Scenario(_outside_engine, {"service": End("completed", "from outside")}),
}
"""What single tests kill at places of their own."""
