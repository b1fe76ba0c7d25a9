"""What HTTP shows: a run, its result, pages, errors, descriptions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from ledger.ids import run_stream
from tests.http_world import BASE, code, policy, world


def test_status_has_an_etag_and_says_when_nothing_changed(tmp_path: Path) -> None:
    """The tag is the run's version; with it a read that finds nothing new is 304."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", waitMs=20_000)
            first = await w.http.get("/workflow/k1/status")
            assert first.headers["etag"] == f'W/"v{first.json()["version"]}"'
            same = await w.http.get(
                "/workflow/k1", headers={"If-None-Match": first.headers["etag"]}
            )
            assert (same.status_code, same.content) == (304, b"")
            assert same.headers["as-of-position"] == str(first.json()["asOfPosition"])

    asyncio.run(main())


def test_min_position_waits_and_gives_up_with_retry_after(tmp_path: Path) -> None:
    """A reader sees its own write; a position that does not come is 503, not a stale answer."""

    async def main() -> None:
        async with world(tmp_path) as w:
            done = await w.submit("k1", "t:gate")
            seen = await w.http.get(f"/workflow/k1?minPosition={done.json()['position']}")
            assert seen.json()["asOfPosition"] >= done.json()["position"]
            never = await w.http.get("/workflow/k1?minPosition=99999&waitMs=20")
            assert (never.status_code, code(never)) == (503, "POSITION_NOT_REACHED")
            assert int(never.headers["retry-after"]) >= 1

    asyncio.run(main())


def test_result_is_given_when_there_is_one(tmp_path: Path) -> None:
    """Not ended, failed and cancelled are each told apart; a large result comes whole."""

    async def main() -> None:
        async with world(tmp_path, policy=policy(externalize_after_bytes=1024)) as w:
            large = "x" * 5000
            await w.submit("k1", input=large, waitMs=20_000)
            shown = (await w.http.get("/workflow/k1")).json()
            assert (shown["result"], shown["resultRef"]["bytes"]) == (None, 5002)
            assert (await w.http.get("/workflow/k1/result")).json()["result"] == large
            await w.submit("k2", "t:gate")
            early = await w.http.get("/workflow/k2/result?waitMs=10")
            assert (early.status_code, code(early)) == (409, "RUN_NOT_ENDED")
            await w.submit("k3", "t:fail", waitMs=20_000)
            failed = await w.http.get("/workflow/k3/result")
            assert (failed.status_code, code(failed)) == (409, "RUN_FAILED")
            error = (await w.http.get("/workflow/k3")).json()["error"]
            assert (error["class"], error["code"]) == ("user_error", "ValueError")
            assert error["message"] == "no such thing"

    asyncio.run(main())


def test_tail_pages_give_every_stored_byte_once(tmp_path: Path) -> None:
    """The cursor is a position; pages put together are the stream, byte for byte."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", waitMs=20_000)
            await w.submit("k2", waitMs=20_000)
            for path, stream in (("/workflow/k1/tail", run_stream("k1")), ("/events", None)):
                found: list[object] = []
                url: str | None = f"{path}?limit=2"
                while url is not None:
                    page = await w.http.get(url)
                    found += page.json()["events"]
                    assert page.json()["more"] == ("next" in page.links)
                    url = page.links.get("next", {}).get("url")
                stored = await w.ledger.log.read_leaves(0, stream, 1000)
                assert found == [json.loads(leaf) for _, leaf in stored]
            only = await w.http.get("/events?types=run.completed&stream=run/k2")
            assert [item["subject"] for item in only.json()["events"]] == ["run/k2"]
            missing = await w.http.get("/workflow/none/tail")
            assert (missing.status_code, code(missing)) == (404, "RUN_NOT_FOUND")

    asyncio.run(main())


def test_the_list_is_newest_first_and_pages_by_submit_position(tmp_path: Path) -> None:
    """A cursor, filters, and what each run waits for."""

    async def main() -> None:
        async with world(tmp_path) as w:
            for n in range(5):
                await w.submit(f"r{n}", waitMs=20_000)
            await w.submit("waits", "t:parent")
            await w.reach("waits", "child.requested")
            names: list[str] = []
            url: str | None = "/workflow?limit=2&play=t:echo"
            while url is not None:
                page = await w.http.get(url)
                names += [run["runId"] for run in page.json()["runs"]]
                url = page.links.get("next", {}).get("url")
            assert names == ["r4", "r3", "r2", "r1", "r0"]
            running = (await w.http.get("/workflow?status=running&play=t:parent")).json()["runs"]
            assert [wait["kind"] for wait in running[0]["waitingOn"]] == ["child"]
            assert running[0]["waitingOn"][0]["key"] == "only"

    asyncio.run(main())


def test_errors_are_problem_json_for_who_asks(tmp_path: Path) -> None:
    """The same facts, in one form or the other, never both."""

    async def main() -> None:
        async with world(tmp_path) as w:
            asked = {"Accept": "application/problem+json"}
            problem = await w.http.get("/workflow/none", headers=asked)
            plain = (await w.http.get("/workflow/none")).json()["error"]
            assert problem.headers["content-type"] == "application/problem+json"
            shown = problem.json()
            assert (shown["status"], shown["type"]) == (404, "/docs/errors#RUN_NOT_FOUND")
            assert (shown["detail"], shown["code"]) == (plain["message"], plain["code"])
            assert "error" not in shown
            listed = (await w.http.get("/docs/errors")).text
            assert "id='RUN_NOT_FOUND'" in listed

    asyncio.run(main())


def test_every_answer_guards_itself(tmp_path: Path) -> None:
    """Security headers stand on successes, errors and what no route took."""

    async def main() -> None:
        async with world(tmp_path) as w:
            for path in ("/health", "/workflow/none", "/nowhere", "/docs"):
                answer = await w.http.get(path)
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert "default-src 'none'" in answer.headers["content-security-policy"]
            for answer in (await w.http.get("/nowhere"), await w.http.put("/health")):
                assert code(answer) in ("ROUTE_NOT_FOUND", "METHOD_NOT_ALLOWED")

    asyncio.run(main())


def test_the_log_s_folder_is_not_told_to_callers(tmp_path: Path) -> None:
    """An error names the log by its file, not by its place on the server."""

    async def main() -> None:
        async with world(tmp_path) as w:
            answer = await w.http.get("/workflow/none")
            assert str(tmp_path) not in answer.text
            assert "http.db" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_openapi_describes_every_run_route(tmp_path: Path) -> None:
    """The description has the routes, their bodies and their access."""

    async def main() -> None:
        async with world(tmp_path) as w:
            document = (await w.http.get("/openapi.json")).json()
            submit = document["paths"]["/workflow/{run_id}/submit"]["post"]
            assert submit["x-access"] == "operate"
            fields = submit["requestBody"]["content"]["application/json"]["schema"]["properties"]
            assert {"playName", "input", "files", "waitMs"} <= fields.keys()
            assert "$ref" not in json.dumps(submit["requestBody"])
            assert "/workflow/{run_id}/tail" in document["paths"]

    asyncio.run(main())


def test_health_has_no_side_effects_and_survives_a_lost_log(tmp_path: Path) -> None:
    """It answers while the log cannot be read; `ready` says that it is not."""

    async def main() -> None:
        async with world(tmp_path) as w:
            before = await w.ledger.log.position()
            assert (await w.http.get("/health")).json() == {"status": "ok"}
            assert (await w.http.get("/ready")).json()["ready"] is True
            assert await w.ledger.log.position() == before
            w.app.state.drain.begin(3.0)
            refused = await w.submit("k1")
            assert (refused.status_code, code(refused)) == (503, "SHUTTING_DOWN")
            assert int(refused.headers["retry-after"]) >= 3
            assert (await w.http.get("/ready")).status_code == 503
            assert (await w.http.get("/health")).status_code == 200

    asyncio.run(main())


def test_the_app_can_be_mounted_in_another(tmp_path: Path) -> None:
    """Under a prefix the run id is still one segment, split on the path as it was sent."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async def main() -> None:
        async with world(tmp_path) as w:
            outer = Starlette(routes=[Mount("/ledger", app=w.app)])
            transport = httpx.ASGITransport(app=outer)
            async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
                made = await http.post("/ledger/workflow/a%2Fb/submit", json={"playName": "t:echo"})
                assert made.json()["runId"] == "a/b"
                assert (await http.get("/ledger/workflow/a%2Fb")).status_code == 200

    asyncio.run(main())
