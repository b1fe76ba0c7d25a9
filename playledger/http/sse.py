"""A run's events as they are recorded, as server-sent events (WHATWG HTML 9.2).

Only events carry an id, and it is their position, so no other frame can spoil where a client
resumes (CASES C043).  `data` is the stored bytes: JSON on one line, which no text in it can end
(C044).  A tail holds no connection to the database while it waits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ledger.codec import decode, type_of
from ledger.errors import NotFound
from ledger.events import Seal
from ledger.ids import quote, run_stream
from playledger.embed import Ledger
from playledger.http.bodies import TailQuery
from playledger.http.door import Call, Door
from playledger.http.errors import FieldInvalid
from projections.load import run_query

PAGE: Final = 200
RETRY: Final = b"retry: 1000\n\n"
ENDS: Final = frozenset({"run.completed", "run.failed", "run.cancelled"})
_POSITION: Final = re.compile(r"[0-9]{1,16}")


def wants_stream(request: Request) -> bool:
    """Says whether a caller asked for a stream."""
    return "text/event-stream" in request.headers.get("accept", "")


async def tail_stream(door: Door, call: Call, query: TailQuery) -> Response:
    """Returns a stream from a cursor to the run's end; 204 if it has been seen to its end."""
    log = door.ledger.log
    head = await log.position()  # before the run's row, so that the row knows every end up to it
    run = await log.reader.ask(run_query(call.run_id))
    if run is None:
        raise await door.ledger.not_found(call.run_id)
    after = query.after
    given = call.request.headers.get("last-event-id")
    if given is not None:
        if _POSITION.fullmatch(given) is None:
            raise FieldInvalid(
                f"Last-Event-ID {quote(given)} is no position",
                code="CURSOR_INVALID",
                hint="the id of the last event that was seen",
            )
        after = int(given)
    if after > head:
        raise FieldInvalid(
            f"the cursor {after} is beyond the log's end, {head}",
            code="CURSOR_INVALID",
            hint="it is of another log; begin without one",
            after=after,
            head=head,
        )
    if run.ended_position is not None and after >= run.ended_position:
        return Response(status_code=204, headers={"As-Of-Position": str(head)})
    return EventStream(door, run_stream(call.run_id), after, head, reveal=query.reveal)


class EventStream(Response):
    """Writes a stream's events until the run's end, the caller's leaving or the server's drain."""

    media_type = "text/event-stream"

    def __init__(self, door: Door, stream: str, after: int, head: int, *, reveal: bool) -> None:
        super().__init__(
            headers={"As-Of-Position": str(head)},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._door = door
        self._stream = stream
        self._after = after
        self._reveal = reveal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        gone = asyncio.ensure_future(_left(receive))
        drained = asyncio.ensure_future(self._door.drain.begun.wait())
        try:
            await send({"type": "http.response.body", "body": RETRY, "more_body": True})
            await self._follow(send, gone, drained)
        finally:
            gone.cancel()
            drained.cancel()
            await asyncio.gather(gone, drained, return_exceptions=True)

    async def _follow(
        self, send: Send, gone: asyncio.Future[Any], drained: asyncio.Future[Any]
    ) -> None:
        log = self._door.ledger.log
        with log.feed().watching(self._stream) as watcher:
            while True:
                watcher.news.clear()
                leaves = await log.read_leaves(self._after, self._stream, PAGE)
                for position, leaf in leaves:
                    self._after = position
                    name = type_of(leaf)
                    ends = name in ENDS
                    frame = await self._frame(position, name, leaf)
                    await send({"type": "http.response.body", "body": frame, "more_body": not ends})
                    if ends:
                        return
                if gone.done():
                    return
                if drained.done():
                    await send(
                        {"type": "http.response.body", "body": b": shutting down\n\n" + RETRY}
                    )
                    return
                if len(leaves) == PAGE:
                    continue
                if not await self._wait(watcher.news, gone, drained):
                    comment = b": %d\n\n" % await log.position()
                    await send({"type": "http.response.body", "body": comment, "more_body": True})

    async def _wait(self, news: asyncio.Event, *ends: asyncio.Future[Any]) -> bool:
        """Waits for news or an end; says whether there was any before it was time for a comment."""
        told = asyncio.ensure_future(news.wait())
        try:
            done, _ = await asyncio.wait(
                {told, *ends},
                timeout=self._door.options.keep_alive_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            told.cancel()
        return bool(done)

    async def _frame(self, position: int, name: str, leaf: bytes) -> bytes:
        data = await revealed(self._door.ledger, leaf) if self._reveal else leaf
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (position, name.encode(), data)


async def revealed(ledger: Ledger, leaf: bytes) -> bytes:
    """Returns an event with `revealed`: its sealed values, by digest, as far as they are kept."""
    values: dict[str, Any] = {}
    for seal in _seals(decode(leaf).data):
        try:
            values[seal.digest] = await ledger.reveal(seal)
        except NotFound:
            continue
    return leaf[:-1] + b',"revealed":' + orjson.dumps(values) + b"}"


def _seals(data: msgspec.Struct) -> Iterator[Seal]:
    for field in data.__struct_fields__:
        value = getattr(data, field)
        if isinstance(value, Seal):
            yield value


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
