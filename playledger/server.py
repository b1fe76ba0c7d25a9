"""Serving: uvicorn around the app, and a way out that loses nothing (CASES C058).

    signal -> new runs refused, tails end, nothing more leased -> the grace
           -> what still runs ends as `coordinator_shutdown`, which costs no attempt -> exit 0

The socket stays open through the grace, so that a caller is told 503 and when to come again, and
signals, cancels and reads still answer.  The node touches its file and reports ends until the last
of its instances is gone, so nobody takes it for dead while it drains.  A second signal skips what
is left of the grace.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp

from ledger.errors import Unavailable
from playledger.embed import Ledger
from playledger.http.door import Drain
from playledger.wiring import Driver

T = TypeVar("T")
GC_THRESHOLDS: Final = (50_000, 20, 50)
LOOK_S: Final = 0.05
CLOSE_S: Final = 3
"""How long answers under way may take once the runs have ended."""

log = structlog.get_logger("playledger.server")


class AddressUnusable(Unavailable):
    """Says why the server cannot listen where it was told to."""

    code = "ADDRESS_UNUSABLE"
    retriable = False


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a uvloop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def settle_memory() -> None:
    """Takes what start-up left out of the garbage collector's sight, and makes it look rarely.

    Full collections over many live states would cost tenths of a second.  For a process that
    serves; a library leaves this to its host.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def serve(
    ledger: Ledger,
    driver: Driver | None,
    app: FastAPI,
    *,
    host: str,
    port: int,
    grace_s: float,
    on_ready: Callable[[int], None],
) -> None:
    """Serves until SIGTERM or SIGINT, drains, and returns; `on_ready` is given the port.

    The ledger is closed by whoever opened it, after this.
    """
    drain: Drain = app.state.drain
    listening = listen(host, port)
    asked, hurry = asyncio.Event(), asyncio.Event()
    server = _Server(app)
    with _signals(asked, hurry):
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            await _first(serving, server.ready.wait())
            if not serving.done():
                on_ready(int(listening.getsockname()[1]))
                await _first(serving, asked.wait())
            drain.begin(grace_s)
            if driver is not None:
                await _wind_down(driver, grace_s, hurry)
        finally:
            server.should_exit = True
            await serving
    log.info("stopped", position=await ledger.log.position())


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises AddressUnusable, naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise AddressUnusable(
            f"cannot listen on {host}:{port}: {reason}", hint="another --host or --port"
        ) from error


async def _wind_down(driver: Driver, grace_s: float, hurry: asyncio.Event) -> None:
    """Lets what runs end by itself for the grace, then ends it."""
    driver.loop.drain()
    loop = asyncio.get_running_loop()
    until = loop.time() + grace_s
    running = driver.engine.running
    log.info("draining", running=running, grace_s=grace_s)
    while driver.engine.running and loop.time() < until and not hurry.is_set():
        if await driver.engine.quiet():
            break  # who only waits for facts loses nothing by waiting in the next process
        try:
            async with asyncio.timeout(min(LOOK_S, max(0.0, until - loop.time()))):
                await hurry.wait()
        except TimeoutError:
            continue
    await driver.stop(0.0)


class _Server(uvicorn.Server):
    """A uvicorn that leaves signals to us and says when it is ready."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # the guard believes no header about who calls
                timeout_keep_alive=30,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def _signals(asked: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def notice() -> None:
        (hurry if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, notice)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _first(task: asyncio.Future[Any], other: Coroutine[Any, Any, Any]) -> None:
    """Waits until either has happened."""
    waiting = asyncio.ensure_future(other)
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
