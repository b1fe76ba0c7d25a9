"""`playledger serve`: the HTTP API over a log, and the node that runs what is submitted."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engines.plays import Plays
from ledger.errors import Refused
from ledger.query import Query
from playledger import server
from playledger.cli.console import Console
from playledger.cli.inputs import load_plays
from playledger.cli.opening import opened
from playledger.http.app import http_app
from playledger.http.auth import is_loopback
from playledger.http.door import HttpOptions
from playledger.render import count_of, length, visible
from playledger.settings import Settings
from playledger.tokens import ControlToken, read_tokens
from playledger.version import VERSION
from playledger.warmup import warmup_play
from playledger.wiring import start_driver

NAMED: Final = 3


def serve_plays(
    console: Console,
    references: Sequence[str],
    options: Mapping[str, tuple[str, Any]],
    *,
    insecure_local: bool,
) -> int:
    """Serves until SIGTERM or Ctrl-C, and loses nothing."""
    began = time.monotonic()
    settings = console.settings(options).values
    tokens = read_tokens(settings)
    _check_door(settings, tokens, insecure_local=insecure_local)
    wanted = [*references] or list(settings.plays)
    if not wanted:
        raise Refused(
            "no play is offered",
            code="USAGE",
            hint="playledger serve FILE.py ..., or plays = [...] in playledger.toml",
        )
    plays = load_plays(wanted)
    plays.add(warmup_play())

    async def serve() -> None:
        async with opened(console, plays, create=True, look=False) as ledger:
            driver = await start_driver(
                ledger.log,
                plays,
                ledger.submitter,
                max_instances=settings.engine.max_instances,
            )
            app = http_app(ledger, HttpOptions(tokens=tokens, insecure_local=insecure_local))
            unfinished = await ledger.log.reader.ask(_UNFINISHED)
            position = await ledger.log.position()

            def ready(port: int) -> None:
                took = round((time.monotonic() - began) * 1000)
                server.settle_memory()
                _say_ready(console, settings, plays, tokens, unfinished, position, port, took)

            await server.serve(
                ledger,
                driver,
                app,
                host=settings.serve.host,
                port=settings.serve.port,
                grace_s=settings.serve.grace.total_seconds(),
                on_ready=ready,
            )

    with contextlib.redirect_stdout(sys.stderr):  # what a play prints is no answer
        server.run(serve())
    return 0


def _check_door(
    settings: Settings, tokens: Mapping[str, ControlToken], *, insecure_local: bool
) -> None:
    host = settings.serve.host
    place = f"{host}:{settings.serve.port}"
    if insecure_local and not is_loopback(host):
        raise Refused(
            f"--insecure-local is for this machine alone: refusing to serve on {place}",
            code="TOKENS_NOT_SET",
            hint="set PLAYLEDGER_TOKENS_FILE, or --host 127.0.0.1",
        )
    if not tokens and not insecure_local:
        raise Refused(
            f"no control token is set: refusing to serve on {place}",
            code="TOKENS_NOT_SET",
            hint="set PLAYLEDGER_TOKENS_FILE, or --insecure-local on 127.0.0.1",
        )


def _say_ready(
    console: Console,
    settings: Settings,
    plays: Plays,
    tokens: Mapping[str, ControlToken],
    unfinished: tuple[int, list[str]],
    position: int,
    port: int,
    took_ms: int,
) -> None:
    host = settings.serve.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    names = sorted(plays.names)
    if console.json:
        console.answer_json(
            {
                "url": url,
                "port": port,
                "version": VERSION,
                "db": str(console.db),
                "plays": names,
                "tokens": len(tokens),
                "unfinished": unfinished[0],
                "asOfPosition": position,
            }
        )
        console.flush()
        return
    count, some = unfinished
    each = "one task each" if settings.engine.isolation == "task" else "one process each"
    origins = console.settings().origins
    sources = [origins[key] for key in ("tokens_file", "token_file") if key in origins]
    auth = f"{count_of(len(tokens), 'token')} from {' and '.join(sources)}; reads need one too"
    more = f", and {count - len(some)} more" if count > len(some) else ""
    resumed = f"{count_of(count, 'run')} in flight: {', '.join(some)}{more}" if count else ""
    rows = [
        (
            f"playledger {VERSION},",
            f"log {console.db} (sqlite, synchronous=FULL), head @{position}",
        ),
        ("plays   ", " ".join(visible(name) for name in names)),
        (
            "engine  ",
            f"{settings.engine.kind}, up to {settings.engine.max_instances} instances, {each}",
        ),
        ("auth    ", auth if tokens else "none: --insecure-local, this machine only"),
        ("resumed ", resumed),
        ("ready   ", f"{url} in {length(took_ms)} (/docs); Ctrl-C loses nothing"),
    ]
    console.answer(*(f"{name} {text}" for name, text in rows if text))
    console.flush()


_UNFINISHED: Final[Query[tuple[int, list[str]]]] = Query(
    "select (select count(*) from runs where ended_at is null), run_id from runs"
    f" where ended_at is null order by position limit {NAMED}",
    (),
    lambda rows: (rows[0][0] if rows else 0, [row[1] for row in rows]),
)
