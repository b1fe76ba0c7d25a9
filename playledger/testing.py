"""Testing a play in three lines: real log, real rules, a clock that nobody waits for.

    ended = drive(refund, "order-7", signals={"approval": {"approved": False, "by": "ada"}})
    assert ended.status == "completed" and ended.result == "refused by ada"

Time stands still while anything is being done, and jumps to the next due time when every play only
waits: two days pass in no time.  A play that waits for something real (the network, a thread) is
waited for.  Signals are sent when the run, or a child, waits for their key.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from engines.context import Run
from playledger.drive import CancelAt, Drive, Ended, NeverEnds, Request, Waited

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741 - as in the run context


@overload
def drive(
    play: Callable[[Run, I], Awaitable[T]],
    input: I,
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Ended[T]: ...
@overload
def drive(
    play: Callable[[Run], Awaitable[T]],
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Ended[T]: ...
@overload
def drive(
    play: Callable[[Run, I], T],
    input: I,
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Ended[T]: ...
@overload
def drive(
    play: Callable[[Run], T],
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Ended[T]: ...
def drive(
    play: Callable[..., Any],
    input: Any = None,
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Ended[Any]:
    """Runs a play from submit to its recorded end; raises NeverEnds if it comes to none.

    `signals` holds a value by key, or a list for several.  `children` answers by child key instead
    of running; an exception as answer fails the child.  `cancel_at` cancels after a virtual time,
    at a version of the run, or at the first event of a type.
    """
    request = Request(play, input, files, signals, children, cancel_at)
    ended, _ = _run(Drive(request).drive())
    return ended


@overload
def drive_killed_everywhere(
    play: Callable[[Run, I], Awaitable[T]],
    input: I,
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Iterator[Ended[T]]: ...
@overload
def drive_killed_everywhere(
    play: Callable[[Run], Awaitable[T]],
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Iterator[Ended[T]]: ...
@overload
def drive_killed_everywhere(
    play: Callable[[Run, I], T],
    input: I,
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Iterator[Ended[T]]: ...
@overload
def drive_killed_everywhere(
    play: Callable[[Run], T],
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Iterator[Ended[T]]: ...
def drive_killed_everywhere(
    play: Callable[..., Any],
    input: Any = None,
    *,
    files: Sequence[str | Path] = (),
    signals: Mapping[str, Any] = {},
    children: Mapping[str, Any] = {},
    cancel_at: CancelAt = None,
) -> Iterator[Ended[Any]]:
    """Runs a play once per event of its family, an instance killed just after that event.

    It is the instance of the event's run, or the root's if that has none just then.  What was
    recorded stays, what was not is gone; a play that is right ends the same every time.
    """
    request = Request(play, input, files, signals, children, cancel_at)
    _, positions = _run(Drive(request).drive())
    for position in positions:
        ended, _ = _run(Drive(request, kill_at=position).drive())
        yield ended


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also for a caller that runs in an event loop itself."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    results: list[T] = []
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            failures.append(error)

    thread = threading.Thread(target=elsewhere, name="drive")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


__all__ = ["Ended", "NeverEnds", "Waited", "drive", "drive_killed_everywhere"]
