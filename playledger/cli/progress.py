"""How a run goes on, while it does: three lines redrawn in place, or one line a change in a pipe.

The same three lines for 4 or 40 000 children.  What is shown is read from the read models, at most
ten times a second; events only say that it is worth looking, and what the children say.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import OrderedDict
from types import TracebackType
from typing import Any, Final, Protocol, Self

from ledger import events as e
from ledger.codec import Recorded
from ledger.errors import PlayledgerError
from ledger.events import Event
from ledger.ids import quote
from ledger.log import system_clock
from ledger.writer import Committed
from playledger.cli.console import Console
from playledger.embed import Ledger
from playledger.render import Look, clip, json_text, length, moment, visible
from projections.load import RunView, view_query

EVERY_S: Final = 0.1
NOW_SHOWN: Final = 2
BAR: Final = 34


class Display(Protocol):
    """Where the three lines, or the changes, go."""

    def show(self, view: RunView, now: list[tuple[str, str]]) -> None:
        """Shows how things stand; `now` are the latest children and what they say."""

    def close(self) -> None:
        """Leaves no trace of what was redrawn."""


def progress_of(console: Console) -> Display:
    """Returns the display that stderr takes."""
    if console.common.quiet:
        return Silent()
    if console.err.terminal:
        return Redrawn(console.err)
    return Lines(console)


class Progress:
    """Watches a family while the block runs, and shows it."""

    def __init__(self, console: Console, ledger: Ledger, run_id: str, display: Display) -> None:
        self._console = console
        self._ledger = ledger
        self._run_id = run_id
        self._display = display
        self._news = asyncio.Event()
        self._children: dict[str, str] = {}
        self._said: OrderedDict[str, Recorded[Event]] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._stop = self._ledger.log.writer.subscribe(loop, self._notice)
        self._task = loop.create_task(self._keep_showing())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if kind is None:
            await self._show()
        self._display.close()

    def _notice(self, committed: Committed) -> None:
        for recorded in committed.events:
            if recorded.correlationid != self._run_id:
                continue
            self._news.set()
            match recorded.data:
                case e.ChildRequested(child_run_id=child, child_key=key):
                    self._children[child] = key
                case e.InstanceStarted() | e.RunLog() | e.RunWaitStarted() | e.RetryClaimed():
                    self._said[recorded.subject] = recorded
                    self._said.move_to_end(recorded.subject)
                case e.RunCompleted() | e.RunFailed() | e.RunCancelled():
                    self._said.pop(recorded.subject, None)
                    self._children.pop(recorded.subject.removeprefix("run/"), None)

    async def _keep_showing(self) -> None:
        while True:
            self._news.clear()
            await self._show()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # the elapsed time moves too
                    await self._news.wait()
            await asyncio.sleep(EVERY_S)

    async def _show(self) -> None:
        try:
            view = await self._ledger.log.reader.ask(view_query(self._run_id))
            now = [await self._latest(item) for item in self._shown()]
        except PlayledgerError:
            return  # a display that cannot read stops no run
        if view is not None:
            self._display.show(view, now)

    def _shown(self) -> list[Recorded[Event]]:
        own = "run/" + self._run_id
        children = [item for item in self._said.values() if item.subject != own]
        return (children or list(self._said.values()))[-NOW_SHOWN:]

    async def _latest(self, recorded: Recorded[Event]) -> tuple[str, str]:
        run_id = recorded.subject.removeprefix("run/")
        name = self._children.get(run_id, "" if run_id == self._run_id else run_id)
        match recorded.data:
            case e.RunLog(lines=lines):
                said: Any = await self._ledger.reveal(lines)
                return name, _log_line(said[-1])
            case e.RunWaitStarted(kind=kind, key=key):
                return name, f"waits for {kind} {quote(key)}"
            case e.RetryClaimed(attempt=attempt):
                return name, f"retry {attempt}"
            case _:
                return name, "started"


def _log_line(line: dict[str, Any]) -> str:
    fields = line.get("fields") or {}
    rest = "".join(
        f" {key}={value if isinstance(value, str) else json_text(value)}"
        for key, value in fields.items()
    )
    return f"{line.get('message', '')}{rest}"


class Redrawn:
    """Three lines, redrawn in place on a terminal, which give way to the end."""

    def __init__(self, look: Look) -> None:
        from rich.console import Console as Terminal
        from rich.live import Live

        self._look = look
        self._live = Live(
            console=Terminal(file=sys.stderr, highlight=False, markup=False, emoji=False),
            auto_refresh=False,
            transient=True,
        )
        self._live.start()

    def show(self, view: RunView, now: list[tuple[str, str]]) -> None:
        """Draws the three lines."""
        from rich.text import Text

        lines = three_lines(view, now, self._look, system_clock())
        text = Text.from_ansi("\n".join(lines), no_wrap=True, overflow="crop")
        with contextlib.suppress(OSError):
            self._live.update(text, refresh=True)

    def close(self) -> None:
        """Takes the lines away."""
        with contextlib.suppress(OSError):
            self._live.stop()


class Lines:
    """One line for each change, for a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[str, ...] = ()

    def show(self, view: RunView, now: list[tuple[str, str]]) -> None:
        """Writes what has changed."""
        del now
        run, counts = view.run, view.run.children
        lines = [f"{run.run_id} {run.status}"]
        if run.retry is not None:
            lines.append(f"{run.run_id} retry {run.retry.attempt} {run.retry.reason}")
        if counts.total:
            lines.append(f"{run.run_id} children {counts.total - counts.running}/{counts.total}")
        lines += [f"{run.run_id} waits for {w.kind} {quote(w.key)}" for w in view.waits]
        if run.progress is not None:
            of = "" if run.progress.of is None else f"/{run.progress.of}"
            lines.append(f"{run.run_id} progress {run.progress.done}{of}")
        self._console.say(
            *(f"{line} @{view.as_of_position}" for line in lines if line not in self._shown)
        )
        self._shown = tuple(lines)

    def close(self) -> None:
        """Has nothing to take away."""


class Silent:
    """Shows nothing: --quiet."""

    def show(self, view: RunView, now: list[tuple[str, str]]) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Has nothing to take away."""


def three_lines(view: RunView, now: list[tuple[str, str]], look: Look, at: int) -> list[str]:
    """Returns the run, its children or what it waits for, and what its latest children say."""
    run, width = view.run, min(look.width, 100) - 1
    waits = [f"{wait.kind} {quote(wait.key)}{_until(wait.until_at)}" for wait in view.waits]
    place = f"{length(at - run.submitted_at):>9}  @{view.as_of_position}"
    retry = "" if run.retry is None else f"  retry {run.retry.attempt}"
    head = clip(f"{run.run_id}  {visible(run.play_name)}  {run.status}{retry}", width - 12)
    first = f"{look.mark(run.status, waits=bool(waits))} {head:<{width - len(place) - 3}} {place}"
    return [first, "  " + _second(view, waits, look, width), "  " + _third(now, width)]


def _second(view: RunView, waits: list[str], look: Look, width: int) -> str:
    run = view.run
    counts = run.children
    if counts.total:
        done = counts.total - counts.running
        filled = BAR * done // counts.total
        bar = look.plain("█" * filled + "░" * (BAR - filled))
        failed = counts.failed + counts.cancelled
        words = f"{done} of {counts.total} done, {counts.running} running, {failed} failed"
        return f"children  {bar}  {words}"
    if waits:
        return clip(f"waits for {', '.join(waits)}", width - 2)
    if run.progress is not None:
        of = "" if run.progress.of is None else f" of {run.progress.of}"
        return f"progress  {run.progress.done}{of}"
    return f"attempt   {max(run.attempt, 0)}"


def _third(now: list[tuple[str, str]], width: int) -> str:
    if not now:
        return ""
    room = (width - 12) // len(now) - 2
    cells = [clip("  ".join(filter(None, (visible(n), visible(s)))), room) for n, s in now]
    return "now       " + "  ".join(f"{cell:<{room}}" for cell in cells).rstrip()


def _until(at: int | None) -> str:
    return "" if at is None else f" until {moment(at)}"
