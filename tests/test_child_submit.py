"""submit-child: what is checked in which order, through both doors (SPEC 1.20; INV-53 to 57)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from handlers.child_submit import ChildSubmitRefused, check_child_submit, child_options
from handlers.port import decode_params
from ledger import events as e
from ledger.canonical import Json
from ledger.errors import ChildKeyConflict, PlayledgerError, RunNotFound, RunTerminal
from projections.load import run_query
from tests.http_world import World, world

CANARY = "canary-parent-token"
MISSING: Any = object()
MANIFEST: dict[str, Json] = {
    "artifactHash": "a1",
    "artifactStorageKey": "plays/echo",
    "bundledCode": "code-that-is-fetched-by-key",
    "graphHash": "g1",
    "maxCreditsPerRun": 5,
    "playName": "t:echo",
    "sourceCode": "source-that-nobody-needs",
    "staticPipeline": None,
}


def body(**changes: Any) -> dict[str, Json]:
    """Returns a body that is taken; a change to MISSING takes the field away."""
    whole: dict[str, Json] = {
        "input": {"n": 1},
        "internalRunPlay": {"parentRunId": "p", "rootRunId": "p"},
        "manifest": MANIFEST,
        "orgId": "local",
        "parentExecutorToken": CANARY,
    }
    return {name: value for name, value in {**whole, **changes}.items() if value is not MISSING}


def manifest(**changes: Any) -> dict[str, Json]:
    return {name: value for name, value in {**MANIFEST, **changes}.items() if value is not MISSING}


MANIFEST_REQUIRED = (
    "CHILD_MANIFEST_REQUIRED",
    "submit-child requires a trusted child manifest and lineage.",
)
ORG_REQUIRED = ("CHILD_ORG_REQUIRED", "submit-child requires orgId from the parent runtime.")
TOKEN_REQUIRED = (
    "PARENT_EXECUTOR_TOKEN_REQUIRED",
    "submit-child requires the parent executor token for origin-scoped child token minting.",
)
BAD: list[tuple[str, Json, tuple[str, str]]] = [
    ("not an object", ["no"], ("CHILD_BODY_INVALID", "submit-child requires a JSON object.")),
    ("no manifest", body(manifest=MISSING), MANIFEST_REQUIRED),
    ("no manifest, org, token", {}, MANIFEST_REQUIRED),
    ("manifest is a text", body(manifest="m", orgId=""), MANIFEST_REQUIRED),
    ("no name", body(manifest=manifest(playName="  ")), MANIFEST_REQUIRED),
    ("no storage key", body(manifest=manifest(artifactStorageKey=MISSING)), MANIFEST_REQUIRED),
    ("no artifact hash", body(manifest=manifest(artifactHash="")), MANIFEST_REQUIRED),
    ("no graph hash", body(manifest=manifest(graphHash=3)), MANIFEST_REQUIRED),
    ("no lineage", body(internalRunPlay=None, orgId=""), MANIFEST_REQUIRED),
    ("no org", body(orgId=MISSING), ORG_REQUIRED),
    ("blank org and no token", body(orgId=" ", parentExecutorToken=""), ORG_REQUIRED),
    ("org is a number", body(orgId=7), ORG_REQUIRED),
    ("no token", body(parentExecutorToken=MISSING), TOKEN_REQUIRED),
    ("blank token", body(parentExecutorToken=" "), TOKEN_REQUIRED),
    (
        "key is a number",
        body(childKey=3),
        ("CHILD_BODY_INVALID", "childKey is no text."),
    ),
    (
        "another end",
        body(onParentEnd="explode"),
        ("CHILD_BODY_INVALID", "onParentEnd is neither cancel nor abandon."),
    ),
]


@pytest.mark.parametrize(("_name", "bad", "expected"), BAD, ids=[name for name, _, _ in BAD])
def test_INV_53_the_first_failed_check_gives_its_code_and_message(
    _name: str, bad: Json, expected: tuple[str, str]
) -> None:
    with pytest.raises(ChildSubmitRefused) as refused:
        check_child_submit(bad, "p")
    assert (refused.value.code, refused.value.message) == expected


def test_INV_54_both_doors_refuse_alike(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        await here.submit("p", "t:gate")
        before = await here.ledger.log.position()
        for _, bad, (code, message) in BAD:
            answered = await here.http.post("/workflow/p/submit-child", json=bad)
            with pytest.raises(PlayledgerError) as refused:
                await here.ledger.submit_child("p", bad)
            assert answered.status_code == 400
            error = answered.json()["error"]
            assert (error["code"], error["message"]) == (code, message)
            assert (refused.value.code, refused.value.message) == (code, message)
            assert error["phase"] == "coordinator_child_submit"
            assert error["parentRunId"] == "p"
        assert await here.ledger.log.position() == before

    run(tmp_path, scenario, driven=False)


def test_a_body_that_is_no_json_has_the_code_of_the_door(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        await here.submit("p", "t:gate")
        for content in (b"", b"{", b'{"a":1,"a":2}', b"\xff"):
            answered = await here.http.post(
                "/workflow/p/submit-child",
                content=content,
                headers={"Content-Type": "application/json"},
            )
            assert answered.status_code == 400
            assert answered.json()["error"]["code"] == "CHILD_BODY_INVALID"
            assert answered.json()["error"]["phase"] == "coordinator_child_submit"

    run(tmp_path, scenario, driven=False)


def test_INV_55_a_child_by_manifest_runs_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        await here.submit("p", "t:gate")
        asked = body(childKey="one")
        first = await here.http.post("/workflow/p/submit-child", json=asked)
        again = await here.http.post("/workflow/p/submit-child", json=asked)
        assert (first.status_code, again.status_code) == (202, 200)
        child = first.json()["runId"]
        assert first.json() | {"replayed": True} == again.json()
        assert first.json()["mode"] == "workflow"
        assert first.json()["workflowId"] == child
        assert await ended(here, child) == "completed"
        assert (await here.http.get(f"/workflow/{child}/result")).json()["result"] == {"n": 1}
        await here.reach("p", "child.terminal_set")
        submitted = [r async for r in here.ledger.events() if isinstance(r.data, e.RunSubmitted)]
        assert [r.subject for r in submitted] == ["run/p", f"run/{child}"]

    run(tmp_path, scenario)


def test_INV_55_another_input_under_the_same_key_is_a_conflict(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        await here.submit("p", "t:gate")
        await here.ledger.submit_child("p", body(childKey="one"))
        with pytest.raises(ChildKeyConflict):
            await here.ledger.submit_child("p", body(childKey="one", input={"n": 2}))
        answered = await here.http.post(
            "/workflow/p/submit-child", json=body(childKey="one", input={"n": 2})
        )
        assert answered.status_code == 409
        assert answered.json()["error"]["code"] == "CHILD_KEY_CONFLICT"

    run(tmp_path, scenario, driven=False)


def test_INV_55_without_a_key_the_request_key_or_the_input_names_the_child(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        await here.submit("p", "t:gate")
        path = "/workflow/p/submit-child"
        plain = [await here.http.post(path, json=body()) for _ in range(2)]
        assert plain[0].json()["runId"] == plain[1].json()["runId"]
        other = await here.http.post(path, json=body(input={"n": 2}))
        named = await here.http.post(path, json=body(), headers={"Idempotency-Key": "r-1"})
        ids = {plain[0].json()["runId"], other.json()["runId"], named.json()["runId"]}
        assert len(ids) == 3
        assert named.json()["childKey"] == "r-1"

    run(tmp_path, scenario, driven=False)


def test_INV_56_lineage_and_org_are_the_parents(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        await here.submit("p", "t:gate")
        bad = [
            (body(internalRunPlay={"parentRunId": "q"}), "CHILD_LINEAGE_MISMATCH"),
            (body(internalRunPlay={"rootRunId": "q"}), "CHILD_LINEAGE_MISMATCH"),
            (body(orgId="rival"), "CHILD_ORG_MISMATCH"),
        ]
        for given, code in bad:
            with pytest.raises(ChildSubmitRefused) as refused:
                await here.ledger.submit_child("p", given)
            assert refused.value.code == code
        done = await here.ledger.submit_child("p", body(internalRunPlay={}))
        await ended(here, done.run_id)
        child = await here.ledger.log.reader.ask(run_query(done.run_id))
        assert child is not None
        assert child.lineage == e.Lineage(
            family_key="p",
            root_run_id="p",
            parent_run_id="p",
            parent_play_name="t:gate",
            child_key=done.child_key,
        )

    run(tmp_path, scenario)


def test_INV_04_a_child_carries_its_manifest_and_no_code(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        await here.submit("p", "t:gate")
        others: Json = {"t:other": MANIFEST, "odd": 3}
        done = await here.ledger.submit_child("p", body(childPlayManifests=others, userId="u-1"))
        await ended(here, done.run_id)
        child = await here.ledger.log.reader.ask(run_query(done.run_id))
        assert child is not None
        stored = await here.ledger.log.vault.reveal_bytes(child.params)
        options = decode_params(stored)["options"]
        assert options["artifactHash"] == "a1"
        assert options["contractSnapshot"]["billingLimit"] == {"maxCreditsPerRun": 5}
        assert options["contractSnapshot"]["compatibility"]["apiVersion"] == 2
        assert options["playId"] == done.run_id
        assert options["userId"] == "u-1"
        assert options["childPlayManifests"]["odd"] == 3
        assert "bundledCode" not in options["childPlayManifests"]["t:other"]
        assert b"code-that-is" not in stored
        assert b"source-that" not in stored

    run(tmp_path, scenario)


def test_INV_45_the_parents_token_is_in_nothing_of_the_child(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        await here.submit("p", "t:gate")
        done = await here.ledger.submit_child("p", body())
        assert await ended(here, done.run_id) == "completed"

    run(tmp_path, scenario)
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in repr(check_child_submit(body(), "p"))
    assert CANARY.encode() not in orjson.dumps(child_options(check_child_submit(body(), "p"), "c"))


@pytest.mark.parametrize("ceiling", [5, 2.5, None, "many", True])
def test_INV_57_the_ceiling_is_a_number_or_none(ceiling: Json) -> None:
    asked = check_child_submit(body(manifest=manifest(maxCreditsPerRun=ceiling)), "p")
    expected = ceiling if ceiling in (5, 2.5) and ceiling is not True else None
    assert asked.max_credits == expected


def test_no_child_of_a_run_that_is_not_there_or_has_ended(tmp_path: Path) -> None:
    async def scenario(here: World) -> None:
        with pytest.raises(RunNotFound):
            await here.ledger.submit_child("p", body())
        await here.submit("p", "t:echo")
        await here.end("p")
        with pytest.raises(RunTerminal) as refused:
            await here.ledger.submit_child("p", body())
        assert refused.value.code == "PARENT_TERMINAL"
        answered = await here.http.post("/workflow/p/submit-child", json=body())
        assert answered.status_code == 409

    run(tmp_path, scenario)


async def ended(here: World, child_run_id: str) -> str:
    """Waits until a child has been submitted and has ended, and returns how."""
    await here.reach(child_run_id, "run.submitted")
    return await here.end(child_run_id)


def run(tmp_path: Path, scenario: Any, *, driven: bool = True) -> None:
    async def inside() -> None:
        async with world(tmp_path, driven=driven) as here:
            await scenario(here)

    asyncio.run(inside())
