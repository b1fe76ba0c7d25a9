"""Hostile bodies, sizes and ids over HTTP: a 4xx with its own code, nothing stored, no 500."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.http_world import World, code, policy, raw, world

ODD_IDS = json.loads(Path(__file__).parent.joinpath("cases", "odd_ids.json").read_text())["ids"]
ENTRANCES = {
    "submit": b'{"playName":"t:echo","input":%b}',
    "signal": b'{"eventKey":"x","data":%b}',
    "rerun": b'{"input":%b}',
    "cancel": b'{"reason":%b}',
}
BODIES: list[tuple[str, bytes, str]] = [
    ("C025 NaN", b'{"loss":NaN}', "JSON_NOT_FINITE"),
    ("C025 Infinity", b'{"x":Infinity}', "JSON_NOT_FINITE"),
    ("C025 -Infinity", b"[-Infinity]", "JSON_NOT_FINITE"),
    ("C025 1e400", b'{"x":1e400}', "JSON_NOT_FINITE"),
    ("C026 high half", rb'{"t":"half \ud83d emoji"}', "JSON_LONE_SURROGATE"),
    ("C026 low half", rb'{"t":"\ude00"}', "JSON_LONE_SURROGATE"),
    ("C026 swapped", rb'{"t":"\ude00\ud83d"}', "JSON_LONE_SURROGATE"),
    ("C026 in a key", rb'{"\ud83d":1}', "JSON_LONE_SURROGATE"),
    ("C026 raw", b'{"t":"\xed\xa0\xbd"}', "JSON_INVALID_UTF8"),
    ("C028 2^53+1", b'{"id":9007199254740993}', "JSON_INTEGER_TOO_LARGE"),
    ("C028 2^64", b'{"id":18446744073709551616}', "JSON_INTEGER_TOO_LARGE"),
    ("C028 -2^63-1", b'{"id":-9223372036854775809}', "JSON_INTEGER_TOO_LARGE"),
    ("C028 5000 digits", b'{"id":' + b"9" * 5000 + b"}", "JSON_INTEGER_TOO_LARGE"),
    ("C029 200 arrays", b"[" * 200 + b"]" * 200, "JSON_TOO_DEEP"),
    ("C029 1000 objects", b'{"a":' * 1000 + b"1" + b"}" * 1000, "JSON_TOO_DEEP"),
    ("C029 20000 arrays", b"[" * 20_000 + b"]" * 20_000, "JSON_TOO_DEEP"),
    ("C031 byte FF", b'{"t":"\xff"}', "JSON_INVALID_UTF8"),
    ("C031 cut euro", b'{"t":"\xe2\x82"}', "JSON_INVALID_UTF8"),
    ("C031 overlong", b'{"t":"\xc0\xaf"}', "JSON_INVALID_UTF8"),
    ("C031 Latin-1", b'{"t":"caf\xe9"}', "JSON_INVALID_UTF8"),
    ("C031 second value", b'{"a":1}}{"a":2}', "JSON_INVALID"),
    ("duplicate key", b'{"a":1,"a":2}', "JSON_DUPLICATE_KEY"),
    ("NUL", rb'{"a":"\u0000"}', "JSON_NUL"),
]
WHOLE: list[tuple[str, bytes, str]] = [
    ("C031 BOM", b'\xef\xbb\xbf{"playName":"t:echo"}', "JSON_INVALID"),
    ("C031 UTF-16", '{"playName":"t:echo"}'.encode("utf-16"), "JSON_INVALID"),
    ("not an object", b"[1]", "FIELD_INVALID"),
    ("null", b"null", "FIELD_INVALID"),
    ("a wrong type", b'{"playName":7}', "FIELD_INVALID"),
    ("a missing field", b"{}", "FIELD_INVALID"),
    ("an empty body", b"", "FIELD_INVALID"),
    ("an unknown field", b'{"playname":"t:echo"}', "FIELD_UNKNOWN"),
    ("depth in an ignored field", b'{"zz":' + b"[" * 900 + b"]" * 900 + b"}", "JSON_TOO_DEEP"),
]


async def _post(w: World, verb: str, run_id: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    return await w.http.post(f"/workflow/{run_id}/{verb}", content=body, headers=headers)


def test_C025_C026_C028_C029_C031_hostile_values_are_refused_at_every_entrance(
    tmp_path: Path,
) -> None:
    """Each has its code and its place, the log stays as it was, and the next request is served."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("there", "t:gate")
            await w.reach("there", "run.wait_started")
            before = await w.ledger.log.position()
            for name, value, wanted in BODIES:
                for verb, shell in ENTRANCES.items():
                    target = "new" if verb == "submit" else "there"
                    answer = await _post(w, verb, target, shell.replace(b"%b", value))
                    assert (answer.status_code, code(answer)) == (400, wanted), (name, verb)
                    answer.content.decode("ascii")  # no raw byte of the caller's comes back
                    if wanted != "JSON_INVALID_UTF8":
                        assert "line" in answer.json()["error"]["details"]
            assert await w.ledger.log.position() == before
            assert (await w.http.get("/workflow/new")).status_code == 404
            assert (await w.http.get("/workflow")).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(("body", "wanted"), [b[1:] for b in WHOLE], ids=[b[0] for b in WHOLE])
def test_C031_a_body_that_is_no_request_is_refused(
    tmp_path: Path, body: bytes, wanted: str
) -> None:
    """Whatever the bytes are, the answer is ours and says what would be right."""

    async def main() -> None:
        async with world(tmp_path) as w:
            answer = await _post(w, "submit", "new", body)
            assert (answer.status_code, code(answer)) == (400, wanted)
            assert answer.json()["error"]["hint"]

    asyncio.run(main())


def test_C026_C028_C029_what_is_right_comes_back_exactly(tmp_path: Path) -> None:
    """A whole emoji, the largest integers, -0.0, and nesting under the limit, on every surface."""

    async def main() -> None:
        async with world(tmp_path) as w:
            deep = b"[" * 50 + b"1" + b"]" * 50
            value = rb'{"t":"\ud83d\ude00","n":9007199254740991,"m":-9007199254740991,"z":-0.0,"d":'
            body = ENTRANCES["submit"].replace(b"%b", value + deep + b"}")
            assert (await _post(w, "submit", "k1", body)).status_code == 202
            assert await w.end("k1") == "completed"
            for path in ("/workflow/k1", "/workflow/k1/result"):
                result = (await w.http.get(path)).json()["result"]
                assert result["t"] == "\U0001f600"
                assert (result["n"], result["m"]) == (2**53 - 1, -(2**53 - 1))
                assert str(result["z"]) == "-0.0"
                assert json.dumps(result["d"]).encode() == deep

    asyncio.run(main())


def test_C032_a_body_over_the_limit_is_refused_while_it_streams(tmp_path: Path) -> None:
    """413 with the limit; a lying or absent length costs no more memory than the limit."""

    async def main() -> None:
        async with world(tmp_path, policy=policy(max_bytes=4096)) as w:
            chunk = b"x" * 65_536
            sent = 0

            async def endless(limit: int) -> AsyncIterator[bytes]:
                nonlocal sent
                yield b'{"eventKey":"x","data":"'
                for _ in range(limit):
                    sent += len(chunk)
                    yield chunk

            tracemalloc.start()
            answer = await w.http.post(
                "/workflow/k1/signal",
                content=endless(4000),  # 250 MiB, without a length
                headers={"Content-Type": "application/json"},
            )
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert (answer.status_code, code(answer)) == (413, "BODY_TOO_LARGE")
            assert answer.json()["error"]["details"]["limit"] == 4096 + 65_536
            assert sent < 4 * 65_536
            assert peak < 8 * 1024 * 1024
            declared = await w.http.post(
                "/workflow/k1/signal",
                content=endless(1),
                headers={"Content-Type": "application/json", "Content-Length": "99999999"},
            )
            assert (declared.status_code, code(declared)) == (413, "BODY_TOO_LARGE")

    asyncio.run(main())


def test_C032_params_of_the_limit_pass_and_one_byte_more_does_not(tmp_path: Path) -> None:
    """The limit counts bytes as they are stored, and an input over it leaves nothing."""

    async def main() -> None:
        async with world(tmp_path, policy=policy(max_bytes=4096)) as w:
            fits = await w.submit("k1", input="x" * 4094)  # and two quotes
            assert fits.status_code == 202
            over = await w.submit("k2", input="x" * 4095)
            assert (over.status_code, code(over)) == (413, "PARAMS_TOO_LARGE")
            details = over.json()["error"]["details"]
            assert (details["bytes"], details["limit"]) == (4097, 4096)
            assert (await w.http.get("/workflow/k2")).status_code == 404
            spread = await w.submit("k3", input=[1] * 200_000)  # too much to be parsed at all
            assert (spread.status_code, code(spread)) == (413, "BODY_TOO_LARGE")

    asyncio.run(main())


@pytest.mark.parametrize(
    "entry", ODD_IDS, ids=[ascii(e.get("id", e.get("repeat"))) for e in ODD_IDS]
)
def test_C034_an_odd_id_works_everywhere_or_is_refused_at_the_door(
    tmp_path: Path, entry: dict[str, Any]
) -> None:
    """Submit, status, signal and tail agree, and no two ids are one."""
    run_id = entry["repeat"] * entry["times"] if "repeat" in entry else entry["id"]
    segment = quote(run_id, safe="").replace(".", "%2E")

    async def main() -> None:
        async with world(tmp_path) as w:
            base = "/workflow/" + segment
            if len(base) > 60_000:  # no client sends it
                body = b'{"playName":"t:gate"}'
                status, refusal = await raw(w.app, "POST", f"{base}/submit".encode(), body)
                assert (status, refusal["error"]["code"]) == (422, "RUN_ID_INVALID")
                return
            made = await w.http.post(base + "/submit", json={"playName": "t:gate"})
            assert made.status_code in (202, 422), made.text
            if entry["want"] == "422":
                assert made.status_code == 422
            accepted = made.status_code == 202
            signal = {"eventKey": "other", "data": run_id}
            answers = {
                "status": await w.http.get(base + "/status"),
                "short": await w.http.get(base),
                "signal": await w.http.post(base + "/signal", json=signal),
                "tail": await w.http.get(base + "/tail"),
                "why": await w.http.get(base + "/why"),
            }
            if not accepted:
                for name, answer in answers.items():
                    assert (answer.status_code, code(answer)) == (422, "RUN_ID_INVALID"), name
                assert (await w.http.get("/workflow")).json()["runs"] == []
                return
            assert made.headers["location"] == "/workflow/" + quote(run_id, safe="")
            assert answers["status"].json()["runId"] == answers["short"].json()["runId"] == run_id
            assert answers["signal"].status_code == 202
            assert answers["tail"].json()["events"][0]["subject"] == "run/" + run_id
            assert answers["why"].json()["runId"] == run_id
            listed = (await w.http.get("/workflow")).json()["runs"]
            assert [run["runId"] for run in listed] == [run_id]
            other = run_id.swapcase() if run_id.swapcase() != run_id else run_id + "x"
            assert (await w.http.get("/workflow/" + quote(other, safe=""))).status_code == 404

    asyncio.run(main())


def test_C034_an_encoded_slash_is_a_slash_once(tmp_path: Path) -> None:
    """`a%2Fb` is the run a/b; `a%252Fb` is not, and neither are two segments."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("a%2Fb", waitMs=20_000)
            assert (await w.http.get("/workflow/a%2Fb/status")).json()["runId"] == "a/b"
            assert (await w.http.get("/workflow/a%252Fb/status")).status_code == 422
            assert (await w.http.get("/workflow/a/b/status")).status_code == 404
            for path in (b"/workflow/%ff/status", b"/workflow/./status", b"/workflow/../status"):
                assert (await raw(w.app, "GET", path))[0] == 422

    asyncio.run(main())


def test_a_query_is_as_strict_as_a_body(tmp_path: Path) -> None:
    """Unknown, doubled and unfit fields are refused with their names."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", waitMs=20_000)
            for query, wanted in (
                ("limitt=1", "FIELD_UNKNOWN"),
                ("limit=0", "FIELD_INVALID"),
                ("limit=1001", "FIELD_INVALID"),
                ("limit=1&limit=2", "FIELD_INVALID"),
                ("after=-1", "FIELD_INVALID"),
                ("after=1e3", "FIELD_INVALID"),
                ("after=99999999999999999999", "FIELD_INVALID"),
            ):
                answer = await w.http.get(f"/workflow/k1/tail?{query}")
                assert (answer.status_code, code(answer)) == (400, wanted), query
            assert (await w.http.get("/workflow?status=done")).status_code == 400
            assert (await w.http.get("/events?types=run.exploded")).status_code == 400
            hint = (await w.http.get("/workflow/k1/tail?limitt=1")).json()["error"]["hint"]
            assert hint == 'did you mean "limit"?'

    asyncio.run(main())


def test_a_body_that_says_it_is_no_json_is_refused(tmp_path: Path) -> None:
    """So a form on a web page cannot post here."""

    async def main() -> None:
        async with world(tmp_path) as w:
            for media in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data"):
                answer = await w.http.post(
                    "/workflow/k1/submit",
                    content=b'{"playName":"t:echo"}',
                    headers={"Content-Type": media},
                )
                assert (answer.status_code, code(answer)) == (415, "MEDIA_TYPE_UNSUPPORTED")

    asyncio.run(main())


def test_INV_37_input_that_does_not_fit_the_play_is_422_and_nothing_is_stored(
    tmp_path: Path,
) -> None:
    """The message names the place, the hint the signature."""

    async def main() -> None:
        async with world(tmp_path) as w:
            before = await w.ledger.log.position()
            answer = await w.submit("k1", "t:say", input={"lines": 7})
            assert (answer.status_code, code(answer)) == (422, "INPUT_INVALID")
            assert await w.ledger.log.position() == before

    asyncio.run(main())
