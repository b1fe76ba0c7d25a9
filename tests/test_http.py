"""The HTTP face: commands, reads, pages, preconditions, who may come in."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import Counter
from pathlib import Path

import pytest

from playledger import HttpOptions
from playledger.tokens import ControlToken
from tests.http_world import TOKEN, TOKENS, World, code, world


async def _launches(w: World, run_id: str) -> int:
    return (await w.types(run_id)).count("instance.create_requested")


# --- submitting -----------------------------------------------------------------------------------


def test_C001_a_e_h_a_repeat_is_the_same_run_also_after_a_restart(tmp_path: Path) -> None:
    """Every answer has the run's id and says whether it is a replay; there is one launch."""

    async def main() -> None:
        async with world(tmp_path) as w:
            with pytest.raises(TimeoutError):  # (a), (h): the client gives up, the server does not
                async with asyncio.timeout(0):
                    await w.submit("k1", "t:gate")
            answers = [await w.submit("k1", "t:gate") for _ in range(5)]
            assert {a.json()["runId"] for a in answers} == {"k1"}
            assert [a.json()["replayed"] for a in answers[1:]] == [True] * 4
            assert [a.status_code for a in answers[1:]] == [200] * 4
            assert answers[0].headers["location"] == "/workflow/k1"
        async with world(tmp_path) as w:  # (e)
            again = await w.submit("k1", "t:gate")
            assert (again.status_code, again.json()["replayed"]) == (200, True)
            assert (await w.types("k1")).count("run.submitted") == 1

    asyncio.run(main())


def test_C001_b_a_race_of_twenty_is_one_run_and_one_launch(tmp_path: Path) -> None:
    """One answer says it was first, nineteen say they were not; none is an error."""

    async def main() -> None:
        async with world(tmp_path) as w:
            answers = await asyncio.gather(*(w.submit("k1", input={"n": 1}) for _ in range(20)))
            assert Counter(a.status_code for a in answers) == {202: 1, 200: 19}
            assert Counter(a.json()["replayed"] for a in answers) == {False: 1, True: 19}
            assert await w.end("k1") == "completed"
            assert await _launches(w, "k1") == 1

    asyncio.run(main())


def test_C001_b_a_race_of_different_requests_has_one_winner(tmp_path: Path) -> None:
    """The losers are told of the conflict with both digests, and never of a unique violation."""

    async def main() -> None:
        async with world(tmp_path) as w:
            answers = await asyncio.gather(*(w.submit("k1", input=n % 4) for n in range(20)))
            statuses = Counter(a.status_code for a in answers)
            assert statuses == {202: 1, 200: 4, 409: 15}
            assert {code(a) for a in answers if a.status_code == 409} == {"RUN_CONFLICT"}

    asyncio.run(main())


def test_C001_c_other_key_order_and_spacing_is_the_same_request(tmp_path: Path) -> None:
    """What counts is the value, not how its bytes were written."""

    async def main() -> None:
        async with world(tmp_path) as w:
            bodies = (
                b'{"playName":"t:echo","input":{"a":1,"b":[1.5,"x"]}}',
                b' { "input" : {"b": [1.5, "\\u0078"] ,"a":1}, "playName": "t:echo" }\n',
            )
            answers = [await w.http.post("/workflow/k1/submit", content=b) for b in bodies]
            assert [a.status_code for a in answers] == [202, 200]

    asyncio.run(main())


def test_C001_d_the_same_id_with_another_body_is_a_conflict(tmp_path: Path) -> None:
    """409 with a stable code and both digests; the first run is untouched."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", input={"n": 1})
            await w.end("k1")
            before = await w.ledger.log.position()
            refused = await w.submit("k1", input={"n": 2})
            assert (refused.status_code, code(refused)) == (409, "RUN_CONFLICT")
            assert {"stored", "given"} <= refused.json()["error"]["details"].keys()
            assert await w.ledger.log.position() == before

    asyncio.run(main())


def test_C001_f_a_repeat_after_the_end_finds_the_finished_run(tmp_path: Path) -> None:
    """The finished run, with its result if it is waited for, and no new launch."""

    async def main() -> None:
        async with world(tmp_path) as w:
            first = await w.submit("k1", input=[1], waitMs=20_000)
            again = await w.submit("k1", input=[1], waitMs=20_000)
            assert (first.json()["result"], again.json()["result"]) == ([1], [1])
            assert (again.json()["status"], again.json()["replayed"]) == ("completed", True)
            assert await _launches(w, "k1") == 1

    asyncio.run(main())


def test_C001_g_the_run_id_is_the_key_and_belongs_to_the_log(tmp_path: Path) -> None:
    """Two tokens that send the same request for one run id get one run (of one organisation)."""

    async def main() -> None:
        options = HttpOptions(tokens={**TOKENS, "cd": ControlToken("0" * 64)})
        async with world(
            tmp_path, options=options, headers={"Authorization": f"Bearer {TOKEN}"}
        ) as w:
            first = await w.submit("k1")
            assert first.status_code == 202
            submitted = (await w.ledger.log.read(stream="run/k1"))[0]
            assert submitted.actor == "api/ci"

    asyncio.run(main())


def test_a_play_that_is_not_offered_is_404_and_nothing_is_stored(tmp_path: Path) -> None:
    """`serve` offers only what it was started with."""

    async def main() -> None:
        async with world(tmp_path) as w:
            before = await w.ledger.log.position()
            refused = await w.submit("k1", "os:system")
            assert (refused.status_code, code(refused)) == (404, "PLAY_NOT_FOUND")
            assert await w.ledger.log.position() == before

    asyncio.run(main())


def test_files_come_as_base64_and_reach_the_play(tmp_path: Path) -> None:
    """A single file without an input is named by it, as everywhere else."""

    async def main() -> None:
        async with world(tmp_path) as w:
            file = {"name": "rain.csv", "content": b64encode(b"a,b\n1,2\n").decode()}
            done = await w.submit("k1", "t:files", files=[file], waitMs=20_000)
            assert done.json()["result"] == ["a,b\n1,2\n"]
            again = await w.http.post("/workflow/k1/rerun", json={"runId": "k2", "waitMs": 20_000})
            assert again.json()["result"] == ["a,b\n1,2\n"]
            bad = await w.submit("k3", "t:files", files=[{"name": "x", "content": "%"}])
            assert (bad.status_code, code(bad)) == (422, "FILE_NOT_BASE64")

    asyncio.run(main())


def test_rerun_is_a_new_run_and_once_per_idempotency_key(tmp_path: Path) -> None:
    """The id of the new run follows from the key, so a repeat finds it."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("old", input={"a": 1})
            key = {"Idempotency-Key": '"8e03978e"'}
            first = await w.http.post("/workflow/old/rerun", headers=key)
            again = await w.http.post("/workflow/old/rerun", headers=key)
            other = await w.http.post("/workflow/old/rerun", json={"input": 5, "waitMs": 20_000})
            assert [first.status_code, again.status_code] == [202, 200]
            assert first.json()["runId"] == again.json()["runId"] != "old"
            assert other.json()["result"] == 5
            missing = await w.http.post("/workflow/none/rerun")
            assert (missing.status_code, code(missing)) == (404, "RUN_NOT_FOUND")

    asyncio.run(main())


# --- signal, cancel, retry ------------------------------------------------------------------------


def test_INV_09_a_signal_is_recorded_once_by_its_idempotency_key(tmp_path: Path) -> None:
    """The same key and body is the same answer, another body a conflict with both digests."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", "t:gate")
            url, key = "/workflow/k1/signal", {"Idempotency-Key": '"s-1"'}
            body = {"eventKey": "note", "data": {"n": 1}}
            first = await w.http.post(url, json=body, headers=key)
            again = await w.http.post(url, json=body, headers=key)
            assert [first.status_code, again.status_code] == [202, 202]
            assert [first.json()["replayed"], again.json()["replayed"]] == [False, True]
            assert first.json()["position"] == again.json()["position"]
            other = await w.http.post(url, json=body | {"data": 2}, headers=key)
            assert (other.status_code, code(other)) == (409, "IDEMPOTENCY_CONFLICT")
            both = await w.http.post(url, json=body | {"signalId": "s-2"}, headers=key)
            assert (both.status_code, code(both)) == (400, "FIELD_INVALID")
            none = await w.http.post(url, json={"data": 1})
            assert (none.status_code, code(none)) == (400, "FIELD_INVALID")
            done = await w.http.post(url, json={"signal": "go", "data": "x"})
            assert done.status_code == 202
            assert await w.end("k1") == "completed"
            unknown = await w.http.post("/workflow/none/signal", json=body)
            assert (unknown.status_code, code(unknown)) == (404, "RUN_NOT_FOUND")

    asyncio.run(main())


def test_if_match_is_the_expected_version(tmp_path: Path) -> None:
    """412 when it was lost, on signal, cancel and retry, and nothing is recorded."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", "t:gate")
            await w.reach("k1", "run.wait_started")
            etag = (await w.http.get("/workflow/k1")).headers["etag"]
            old = {"If-Match": 'W/"v1"'}
            before = await w.ledger.log.position()
            for verb, body in (("signal", {"eventKey": "x"}), ("cancel", {}), ("retry", {})):
                lost = await w.http.post(f"/workflow/k1/{verb}", json=body, headers=old)
                assert (lost.status_code, code(lost)) == (412, "VERSION_CONFLICT"), verb
                bad = await w.http.post(
                    f"/workflow/k1/{verb}", json=body, headers={"If-Match": "nine"}
                )
                assert bad.status_code == 400
            assert await w.ledger.log.position() == before
            right = await w.http.post(
                "/workflow/k1/signal", json={"eventKey": "go"}, headers={"If-Match": etag}
            )
            assert right.status_code == 202

    asyncio.run(main())


def test_C011_a_finished_run_takes_nothing_more(tmp_path: Path) -> None:
    """Each late call is 409 with a stable code; state, result and end stay; the rows as well."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", input="first", waitMs=20_000)
            before = (await w.http.get("/workflow/k1")).json()
            for verb, body in (
                ("signal", {"eventKey": "go", "signalId": "s"}),
                ("cancel", {"requestId": "c"}),
                ("cancel", {"requestId": "c"}),
                ("signal", {"eventKey": "go", "signalId": "s"}),
                ("cancel", {"requestId": "d"}),
            ):
                late = await w.http.post(f"/workflow/k1/{verb}", json=body)
                assert (late.status_code, code(late)) == (409, "RUN_TERMINAL")
            again = await w.submit("k1", input="second")
            assert again.status_code == 409
            resumed = await w.http.post("/workflow/k1/retry")
            assert (resumed.status_code, resumed.json()["resumed"]) == (200, [])
            after = (await w.http.get("/workflow/k1")).json()
            for name in ("status", "result", "endedAt", "attempt", "error"):
                assert after[name] == before[name]
            types = await w.types("k1")
            assert types.count("run.completed") == 1
            assert types.count("run.cancel_refused") == 1  # the first wish is kept, once

    asyncio.run(main())


def test_C056_the_answer_to_a_cancel_is_true(tmp_path: Path) -> None:
    """202 while it ends, 200 when it has, 409 with the state when it ended otherwise."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", "t:gate")
            await w.reach("k1", "run.wait_started")
            url = "/workflow/k1/cancel"
            first = await w.http.post(url, json={"reason": "order withdrawn"})
            assert (first.status_code, first.json()["status"]) == (202, "cancelling")
            assert await w.end("k1") == "cancelled"
            twice = await w.http.post(url, json={})
            assert (twice.status_code, twice.json()["status"]) == (200, "cancelled")
            asked = [
                r
                async for r in w.ledger.events(stream="run/k1")
                if r.type == "run.cancel_requested"
            ]
            assert [r.actor for r in asked] == ["api/local"]
            await w.submit("k2", waitMs=20_000)
            late = await w.http.post("/workflow/k2/cancel")
            assert (late.status_code, code(late)) == (409, "RUN_TERMINAL")
            assert late.json()["error"]["details"]["status"] == "completed"

    asyncio.run(main())


def test_C056_a_pending_run_that_was_cancelled_never_launches(tmp_path: Path) -> None:
    """Nobody drives the log yet: the run is cancelled at once, and no instance comes after."""

    async def main() -> None:
        async with world(tmp_path, driven=False) as w:
            assert (await w.submit("k1")).status_code == 202
            answer = await w.http.post("/workflow/k1/cancel", json={})
            assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
        async with world(tmp_path) as w:
            await w.submit("k2", waitMs=20_000)  # whatever was left is done by now
            assert "instance.created" not in await w.types("k1")
            assert (await w.http.get("/workflow/k1")).json()["status"] == "cancelled"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("play_name", "reached"),
    [
        ("t:gate", "run.wait_started"),
        ("t:parent", "child.requested"),
        ("t:later", "retry.claimed"),
    ],
    ids=["waits for a signal", "waits for a child", "waits out a backoff"],
)
def test_C056_a_cancel_ends_a_run_wherever_it_stands(
    tmp_path: Path, play_name: str, reached: str
) -> None:
    """An accepted request ends the run within the grace, and who asked stays in the log."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await w.submit("k1", play_name)
            await w.reach("k1", reached)
            answer = await w.http.post("/workflow/k1/cancel", json={"reason": "enough"})
            assert answer.status_code in (200, 202)
            assert await w.end("k1") == "cancelled"
            types = await w.types("k1")
            assert sum(t in ("run.completed", "run.failed", "run.cancelled") for t in types) == 1

    asyncio.run(main())


def test_C056_cancel_and_signal_race_to_one_end(tmp_path: Path) -> None:
    """Result and cancel at once, from two clients: one terminal event, and every answer fits it."""

    async def main() -> None:
        async with world(tmp_path) as w:
            rounds = 40
            await asyncio.gather(*(w.submit(f"r{n}", "t:gate") for n in range(rounds)))
            await asyncio.gather(*(w.reach(f"r{n}", "run.wait_started") for n in range(rounds)))

            async def race(n: int) -> None:
                go = w.http.post(f"/workflow/r{n}/signal", json={"eventKey": "go"})
                one = w.http.post(f"/workflow/r{n}/cancel", json={})
                two = w.http.post(f"/workflow/r{n}/cancel", json={})
                calls = (go, one, two) if n % 2 else (one, two, go)
                answers = await asyncio.gather(*calls)
                cancels = answers[1:] if n % 2 else answers[:2]
                ended = await w.end(f"r{n}")
                types = await w.types(f"r{n}")
                terminal = [t for t in types if t.startswith("run.") and t[4:] == ended]
                assert terminal == [f"run.{ended}"]
                for answer in cancels:
                    accepted = answer.status_code in (200, 202)
                    assert accepted == (ended == "cancelled"), (answer.text, types)

            await asyncio.gather(*(race(n) for n in range(rounds)))

    asyncio.run(main())
