"""A run's events as server-sent events: where a client resumes, and what cannot forge a frame."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from engines.lines import sanitise
from playledger import HttpOptions, http_app
from playledger.server import _Server, listen
from tests.http_world import World, code, world

STREAM = {"Accept": "text/event-stream"}
HOSTILE = json.loads(Path(__file__).parent.joinpath("cases", "hostile_log_lines.json").read_text())


class Frame(Struct, frozen=True):
    """One dispatched event, as the WHATWG parser gives it."""

    id: str
    event: str
    data: str


def parse(content: bytes) -> list[Frame]:
    """Reads a stream as WHATWG 9.2.6 says: CR, LF and CRLF end lines, an empty one dispatches.

    What stands behind the last empty line is thrown away, as a cut connection's is.
    """
    frames: list[Frame] = []
    data: list[str] = []
    last, name = "", ""
    text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
    for line in text.split("\n")[:-1]:
        if not line:
            if data:
                frames.append(Frame(last, name, "\n".join(data)))
            data, name = [], ""
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "id":
            last = value
        elif field == "event":
            name = value
    return frames


@asynccontextmanager
async def served(w: World) -> AsyncIterator[httpx.AsyncClient]:
    """Serves a world's app on a real socket: only there a stream comes piece by piece."""
    app = http_app(w.ledger, HttpOptions(insecure_local=True, keep_alive_s=0.02))
    listening = listen("127.0.0.1", 0)
    server = _Server(app)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    await server.ready.wait()
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=base, timeout=20) as http:
            yield http
    finally:
        app.state.drain.begin(0.0)
        server.should_exit = True
        await serving


async def _whole(w: World, run_id: str, **headers: str) -> httpx.Response:
    return await w.http.get(f"/workflow/{run_id}/tail", headers=STREAM | headers)


async def _stored(w: World, run_id: str) -> list[tuple[str, str, Any]]:
    leaves = await w.ledger.log.read_leaves(0, f"run/{run_id}", 1000)
    found = []
    for position, leaf in leaves:
        event = json.loads(leaf)
        found.append((str(position), event["type"], event))
        if event["type"] in ("run.completed", "run.failed", "run.cancelled"):
            break
    return found


def test_a_stream_gives_the_stored_bytes_and_ends_with_the_run(tmp_path: Path) -> None:
    """Ids are positions, names are types, and the terminal event is the last frame."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", waitMs=20_000)
            answer = await _whole(w, "k1")
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.content.startswith(b"retry: 1000\n\n")
            frames = parse(answer.content)
            shown = [(f.id, f.event, json.loads(f.data)) for f in frames]
            assert shown == await _stored(w, "k1")
            assert frames[-1].event == "run.completed"

    asyncio.run(main())


def test_a_reconnect_beyond_the_end_is_204(tmp_path: Path) -> None:
    """EventSource stops on it; one before the end gets the rest."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", waitMs=20_000)
            stored = await _stored(w, "k1")
            beyond = await _whole(w, "k1", **{"Last-Event-ID": stored[-1][0]})
            assert (beyond.status_code, beyond.content) == (204, b"")
            rest = await _whole(w, "k1", **{"Last-Event-ID": stored[-2][0]})
            assert [f.id for f in parse(rest.content)] == [stored[-1][0]]
            wins = await w.http.get(
                "/workflow/k1/tail?after=0", headers=STREAM | {"Last-Event-ID": stored[-2][0]}
            )
            assert len(parse(wins.content)) == 1

    asyncio.run(main())


@pytest.mark.parametrize("given", ["abc", "-1", "", "1000000000000000000", "1e3", "99999"])
def test_C043_a_bad_resume_position_is_400(tmp_path: Path, given: str) -> None:
    """It is never taken for the beginning, nor for the end."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", waitMs=20_000)
            answer = await _whole(w, "k1", **{"Last-Event-ID": given})
            assert (answer.status_code, code(answer)) == (400, "CURSOR_INVALID")

    asyncio.run(main())


def test_C043_a_tail_cut_anywhere_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """At every frame and at random bytes: what was seen and what comes after is the stream."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", waitMs=20_000)
            await w.submit("other", waitMs=20_000)
            content = (await _whole(w, "k1")).content
            whole = parse(content)
            chance = random.Random(43)
            ends = [n + 2 for n in range(len(content)) if content[n : n + 2] == b"\n\n"]
            for cut in (*ends, *(chance.randrange(len(content)) for _ in range(60))):
                seen = parse(content[:cut])
                resume = {"Last-Event-ID": seen[-1].id} if seen else {}
                rest = await _whole(w, "k1", **resume)
                assert seen + parse(rest.content) == whole, cut
            last_of_other = (await _stored(w, "other"))[0][0]
            rest = await _whole(w, "k1", **{"Last-Event-ID": last_of_other})
            assert rest.status_code in (200, 204)  # a position is one of the whole log

    asyncio.run(main())


def test_C043_comments_keep_a_waiting_tail_alive_and_carry_no_id(tmp_path: Path) -> None:
    """A live tail: comments while nothing happens, then the events, each once, then the end."""

    async def main() -> None:
        async with world(tmp_path) as w, served(w) as http:
            await w.submit("k1", "t:gate")
            await w.reach("k1", "run.wait_started")
            content, comments, told = b"", 0, False
            async with http.stream("GET", "/workflow/k1/tail", headers=STREAM) as answer:
                async for piece in answer.aiter_bytes():
                    content += piece
                    comments = sum(line.startswith(b": ") for line in content.splitlines())
                    if comments >= 2 and not told:
                        told = True
                        await w.ledger.signal("k1", "go")
            lines = content.splitlines()
            assert comments >= 2
            assert all(b"id:" not in line for line in lines if line.startswith(b":"))
            assert [(f.id, f.event) for f in parse(content)] == [
                item[:2] for item in await _stored(w, "k1")
            ]

    asyncio.run(main())


def test_C043_idle_tails_leave_reads_alone_and_go_when_their_client_goes(tmp_path: Path) -> None:
    """A hundred tails wait, a status still answers, and none is left once they are closed."""

    async def main() -> None:
        async with world(tmp_path) as w, served(w) as http:
            await w.submit("k1", "t:gate")
            await w.reach("k1", "run.wait_started")

            async def idle(ready: asyncio.Event, done: asyncio.Event) -> None:
                async with http.stream("GET", "/workflow/k1/tail", headers=STREAM) as answer:
                    await anext(answer.aiter_bytes())
                    ready.set()
                    await done.wait()

            done, begun = asyncio.Event(), [asyncio.Event() for _ in range(80)]
            tails = [asyncio.ensure_future(idle(ready, done)) for ready in begun]
            for ready in begun:
                await ready.wait()
            async with asyncio.timeout(5):
                assert (await w.http.get("/workflow/k1")).status_code == 200
            done.set()
            await asyncio.gather(*tails)
            async with asyncio.timeout(10):
                while w.ledger.log.feed()._watchers:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.02)

    asyncio.run(main())


def test_C044_text_cannot_forge_a_frame(tmp_path: Path) -> None:
    """Each hostile text comes back exactly, as one event of the right id and type."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", "t:gate")
            lines = [item for item in HOSTILE["lines"] if "text" in item]
            for n, item in enumerate(lines):
                body = {"eventKey": "note", "signalId": f"s{n}", "data": item["text"]}
                assert (await w.http.post("/workflow/k1/signal", json=body)).status_code == 202
            await w.ledger.signal("k1", "go")
            await w.end("k1")
            for query in ("", "?reveal=true"):
                answer = await w.http.get(f"/workflow/k1/tail{query}", headers=STREAM)
                frames = parse(answer.content)
                stored = await _stored(w, "k1")
                assert [(f.id, f.event) for f in frames] == [item[:2] for item in stored]
            texts = []
            for frame in frames:
                event = json.loads(frame.data)
                if event["type"] == "signal.received" and event["data"]["signal"] == "note":
                    texts.append(event["revealed"][event["data"]["data"]["_sd"][0]])
            assert texts == [item["text"] for item in lines]

    asyncio.run(main())


def test_C044_log_lines_come_back_as_one_event_of_text(tmp_path: Path) -> None:
    """A line of a play is cleaned when it is recorded; what was recorded comes back exactly."""

    async def main() -> None:
        async with world(tmp_path) as w:
            texts = [item.get("text", item.get("repeat", "") * 100) for item in HOSTILE["lines"]]
            await w.submit("k1", "t:say", input=texts, waitMs=20_000)
            pages = {
                "page": (await w.http.get("/workflow/k1/tail?reveal=1")).json()["events"],
                "stream": [
                    json.loads(frame.data)
                    for frame in parse(
                        (await w.http.get("/workflow/k1/tail?reveal=1", headers=STREAM)).content
                    )
                ],
            }
            for events in pages.values():
                found = [
                    line["message"]
                    for event in events
                    if event["type"] == "run.log"
                    for line in event["revealed"][event["data"]["lines"]["_sd"][0]]
                ]
                assert found == [sanitise(text) for text in texts]

    asyncio.run(main())


def test_a_draining_server_gives_tails_a_retry_hint_and_ends_them(tmp_path: Path) -> None:
    """The client comes again where it was, by itself, a second later."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", "t:gate")
            await w.reach("k1", "run.wait_started")
            tail = asyncio.ensure_future(_whole(w, "k1"))
            await w.reach("k1", "run.wait_started")
            w.app.state.drain.begin(1.0)
            content = (await tail).content
            assert content.endswith(b"retry: 1000\n\n")
            assert parse(content)[-1].event == "run.wait_started"

    asyncio.run(main())
