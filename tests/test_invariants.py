"""Invariants of the specification that need more than one part: rules, writer, vault and a node.

tests/CASES.md says which file holds which.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from handlers.acts import Acts
from handlers.commands import Reporter
from handlers.engine import PlayInfo
from handlers.node import Node
from handlers.port import Port
from handlers.submit import StagedFile, Submission, Submitter
from ledger import events as e
from ledger.canonical import canonical
from ledger.errors import (
    Conflict,
    LogDamaged,
    NotFound,
    StaleAttempt,
    TooLarge,
    Unavailable,
)
from ledger.ids import instance_id, run_stream
from ledger.seal import digest_of, seal
from ledger.transaction import Disclosure
from ledger.vault import check_blob, check_disclosure
from ledger.writer import Committed
from playledger import Run, play
from projections.rebuild import rebuild
from replay import verify
from tests import http_world
from tests.given import (
    DAY,
    HOST,
    KEY,
    POLICY,
    RUN,
    Ticks,
    World,
    cancel,
    child,
    completed,
    created,
    errored,
    instance,
    leaves,
    loaded,
    lost,
    signal,
    submitted,
    wait,
    world,
)
from tests.local_node import node

PLAY = PlayInfo(name="shop:refund")
Change = Callable[[Any, int], Any]


def submitter(given: World, info: PlayInfo = PLAY) -> Submitter:
    """Submits runs of one play that nothing drives."""
    return Submitter(
        given.log,
        lambda name: info if name == info.name else None,
        scope="default",
        version="0",
        plays=1,
    )


def asked(value: Any, *staged: StagedFile, run: str = RUN, **policy: Any) -> Submission:
    return Submission(
        run_id=run,
        play_name="shop:refund",
        input=value,
        actor="cli/local",
        policy=replace(POLICY, **policy),
        staged=staged,
    )


async def run_sql(given: World, sql: str, *parameters: Any) -> None:
    await given.log.run_job(lambda connection, _: connection.execute(sql, parameters))


# --- submit and launch ----------------------------------------------------------------------------


def test_INV_02_INV_07_launch_state_that_cannot_be_stored_is_503_and_starts_nothing(
    tmp_path: Path,
) -> None:
    """The blob goes first: without room for it there is no run, no intent, and nothing to clean."""

    async def main() -> None:
        async with world(tmp_path) as given:
            large = asked("x" * 300_000)
            await run_sql(given, "pragma max_page_count=1")
            with pytest.raises(Unavailable) as caught:
                await submitter(given).submit(large)
            assert caught.value.code == "WORKFLOW_RETRY_STATE_PERSISTENCE_FAILED"
            assert caught.value.retriable
            for table in ("runs", "outbox", "vault_values", "blobs"):
                assert given.rows(f"select count(*) from {table}") == [(0,)]
            keys = given.rows("select count(*) from vault_keys where subject like 'run/%'")
            assert keys == [(0,)]
            await run_sql(given, "pragma max_page_count=1000000")
            answer = await submitter(given).submit(large)
            assert not answer.replayed

    asyncio.run(main())


def test_INV_07_a_reference_in_the_log_has_its_blob_behind_it(tmp_path: Path) -> None:
    """At the very commit that brings the event, for a value and for a staged file alike."""

    async def main() -> None:
        async with world(tmp_path) as given:
            found: list[int] = []

            def look(committed: Committed) -> None:
                for recorded in committed.events:
                    if isinstance(recorded.data, e.RunSubmitted):
                        digest = recorded.data.params.digest
                        ((text,),) = given.rows(
                            "select disclosure from vault_values where digest = ?", digest
                        )
                        ref: Any = check_disclosure(digest, text)
                        ((content,),) = given.rows(
                            "select content from blobs where key = ? and expires_at is null",
                            ref.blob,
                        )
                        found.append(len(check_blob(ref, content)))

            stop = given.log.writer.subscribe(asyncio.get_running_loop(), look)
            file = StagedFile(name="a.csv", content=b"a,b\n")
            await submitter(given).submit(asked("x" * 100, file, externalize_after_bytes=50))
            stop()
            assert found[0] > 100
            assert given.rows("select count(*), count(expires_at) from blobs") == [(2, 0)]

    asyncio.run(main())


def test_INV_04_stored_params_hold_input_options_and_where_files_are(tmp_path: Path) -> None:
    """No source, no bundle, no bytes of files: code is found again by the play's name."""

    async def main() -> None:
        async with world(tmp_path) as given:
            file = StagedFile(name="a.csv", content=b"a,b\n")
            await submitter(given).submit(asked({"n": 1}, file))
            state = given.loaded()
            assert state is not None
            params: Any = await given.log.vault.reveal(state.run.params)
            assert set(params) == {"files", "input", "options"}
            assert params["input"] == {"n": 1}
            assert [set(f) for f in params["files"]] == [{"blob", "bytes", "name", "sha256"}]
            stored = json.dumps(params)
            assert "a,b" not in stored
            for name in ("dynamicWorkerCode", "sourceCode", "bundledCode", "sourceFiles"):
                assert name not in stored

    asyncio.run(main())


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_INV_05_the_size_of_params_is_that_of_their_canonical_json(
    tmp_path: Path, over: int
) -> None:
    """In bytes of UTF-8: equal to the limit passes, one more is 413 and nothing is stored."""

    async def main() -> None:
        value = "é" * 40
        limit = len(canonical(value)) - over
        async with world(tmp_path) as given:
            if over > 0:
                with pytest.raises(TooLarge) as caught:
                    await submitter(given).submit(asked(value, max_bytes=limit))
                assert caught.value.code == "PARAMS_TOO_LARGE"
                assert f"82 bytes exceeds {limit}" in caught.value.message
                assert not caught.value.retriable
                assert await given.types() == []
                return
            await submitter(given).submit(asked(value, max_bytes=limit))
            (put,) = [r.data for r in await given.events()
                      if isinstance(r.data, e.RunLaunchStatePut)]  # fmt: skip
            whole = canonical({"files": [], "input": value, "options": {}})
            assert put.params_bytes == len(whole)

    asyncio.run(main())


def test_INV_13_instance_ids_are_pure_and_a_clash_is_never_shared(tmp_path: Path) -> None:
    """The pair of run ids whose 32-bit hashes are equal has two instances here."""
    pair = ("play/lead-enrich/run/eae0cb76a2674106", "play/lead-enrich/run/66f3f9f6cb9f3ad2")
    assert fnv(pair[0]) == fnv(pair[1]) == 0x0415144D
    ids = [instance_id("s", run, n) for run in pair for n in range(3)]
    assert len(set(ids)) == 6
    assert all(re.fullmatch(r"run-[0-9a-f]{8}-[0-9a-f]{32}(-retry-[1-9]\d*)?", i) for i in ids)

    async def main() -> None:
        async with world(tmp_path) as given:
            for run in pair:
                await given.tell(submitted(run), run=run)
            found = given.rows("select instance_id from instances")
            assert len({row[0] for row in found}) == 2

    asyncio.run(main())


def fnv(text: str) -> int:
    """The hash of the origin: FNV-1a over UTF-16 units, 32 bits."""
    found = 2166136261
    for unit in text:
        found = (found ^ ord(unit)) * 16777619 % 2**32
    return found


# --- instances ------------------------------------------------------------------------------------


def test_INV_18_only_an_instance_of_the_runs_own_registry_is_heard(tmp_path: Path) -> None:
    """A name that only looks like one is not found, whatever its suffix."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            for suffix in ("-retry-x", "-retry-0", "-retry-01", "-retry-1", "-retry-99", "x"):
                with pytest.raises(NotFound):
                    await given.tell(wait(), reporter=Reporter(instance() + suffix, HOST))
            await given.tell(submitted("r2"), run="r2")
            with pytest.raises(NotFound):
                await given.tell(wait(), run="r2", reporter=Reporter(instance(), HOST))
            await given.tell(wait(), reporter=Reporter(instance(), HOST))

    asyncio.run(main())


def test_INV_19_a_superseded_attempt_may_read_and_not_act(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created(), wait(), signal(), lost(), loaded(), created(1))
            old = Reporter(instance(0), HOST)
            for report in (completed(0), child(), wait("go", 1)):
                with pytest.raises(StaleAttempt) as caught:
                    await given.tell(report, reporter=old)
                assert isinstance(caught.value, Conflict)
            answer = await given.log.transact(await given.command(wait(), reporter=old))
            assert answer.replayed  # the wait it knew is answered by what is recorded
            assert [r.type for r in await given.log.read(0, stream=run_stream(RUN))]

    asyncio.run(main())


def test_INV_20_a_live_run_knows_its_instance_however_long_it_runs(tmp_path: Path) -> None:
    """Nothing expires but the launch state, and that only refuses a retry."""

    async def main() -> None:
        clock = Ticks()
        async with world(tmp_path, clock=clock) as given:
            await given.tell(submitted(), created(), errored("platform_reset"), loaded())
            await given.tell(created(1))
            for _ in range(3):
                clock.now += 30 * DAY
                await given.tell(signal(clock.now))
            state = given.loaded()
            assert state is not None
            assert state.current is not None
            assert state.current.instance_id == instance(1)
            await given.tell(completed(1), reporter=Reporter(instance(1), HOST))
            assert await given.status() == "completed"

    asyncio.run(main())


def test_INV_21_state_that_cannot_be_read_is_503_and_nothing_is_assumed(tmp_path: Path) -> None:
    """Rows of one run are damaged: its callers are told, others go on, a rebuild mends it."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await given.tell(submitted(), created())
            await given.tell(submitted("r2"), run="r2")
            await run_sql(given, "update instances set state = '{' where run_id = 'r1'")
            given.log.writer._cache.clear()
            before = await given.log.position()
            for fact in (signal(), cancel(), completed()):
                with pytest.raises(LogDamaged) as caught:
                    await given.tell(fact)
                assert "projections rebuild" in caught.value.hint
                assert isinstance(caught.value, Unavailable)
            assert await given.log.position() == before
            await given.tell(signal(), run="r2")
        rebuild(tmp_path / "t.db")
        async with world(tmp_path) as given:
            await given.tell(signal())

    asyncio.run(main())


# --- launch state at a retry ----------------------------------------------------------------------

INLINE, BLOB = 10**6, 5
FLIP = "update vault_values set disclosure = 'A' || substr(disclosure, 2)"
FLIP_BLOB = "update blobs set content = cast(x'00' || substr(content, 2) as blob)"
CUT_BLOB = "update blobs set content = substr(content, 1, length(content) - 1)"
MUTATIONS = [
    pytest.param(INLINE, FLIP, "HASH_MISMATCH", id="flipped byte"),
    pytest.param(BLOB, FLIP_BLOB, "HASH_MISMATCH", id="flipped byte of a blob"),
    pytest.param(BLOB, CUT_BLOB, "BYTES_MISMATCH", id="truncated blob"),
    pytest.param(INLINE, "update vault_values set subject = 'run/r2'", "WRONG_RUN", id="wrong run"),
    pytest.param(INLINE, "delete from vault_values", "MISSING", id="missing value"),
    pytest.param(BLOB, "delete from blobs", "MISSING", id="missing blob"),
]


async def load_again(given: World) -> list[Any]:
    """Lets a node load the launch state of a failed instance; returns what it recorded."""
    path = given.log.path
    working = Node(path)
    try:
        acts = Acts(given.log, Port(given.log), working, {}, submitter(given))
        events = await given.events()
        (intent,) = [r for r in events if isinstance(r.data, e.RetryParamsRequested)]
        state = given.loaded()
        assert state is not None
        await acts.load_params(intent, state.run)
    finally:
        working.close()
    return [r.data for r in (await given.events())[len(events) :]]


@pytest.mark.parametrize(("externalize_after", "sql", "code"), MUTATIONS)
def test_INV_36_R4_damaged_launch_state_has_its_own_code_and_starts_nothing(
    tmp_path: Path, externalize_after: int, sql: str, code: str
) -> None:
    """Checked on what is stored, not on what a process remembers; no attempt is charged."""

    async def main() -> None:
        async with world(tmp_path) as given:
            sent = asked({"n": 1}, externalize_after_bytes=externalize_after)
            await submitter(given).submit(sent)
            await given.tell(created(), errored("platform_reset"))
            await run_sql(given, sql)
            recorded = await load_again(given)
            assert [type(data).__name__ for data in recorded] == [
                "RetryParamsFailed",
                "RetryDenied",
                "RunFailed",
            ]
            assert recorded[0].code == code
            assert given.rows("select max(attempt) from instances") == [(0,)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "code"),
    [(None, "NOT_OBJECT"), ("bm9uc2Vuc2U", "REF_INVALID")],
    ids=["not an object", "bad JSON"],
)
def test_INV_36_launch_state_that_was_never_one_has_its_own_code(
    tmp_path: Path, text: str | None, code: str
) -> None:
    """Length and hash are right; it is what they protect that is no launch state."""

    async def main() -> None:
        async with world(tmp_path) as given:
            made = seal(KEY, RUN, "run.submitted/submit/params", b"[1]", 100)
            held = made.disclosure
            if text is not None:
                held = Disclosure(digest=digest_of(text), subject="run/r1", text=text)
            params = e.Seal(sd=(held.digest,), bytes=3)
            await given.tell(replace(submitted(), params=params), values=(held,))
            await given.tell(created(), errored("platform_reset"))
            recorded = await load_again(given)
            assert recorded[0].code == code
            assert given.rows("select max(attempt) from instances") == [(0,)]

    asyncio.run(main())


def test_INV_32_a_retry_runs_with_what_the_submit_stored(tmp_path: Path) -> None:
    """Loaded whole, byte for byte; the claim follows in the same append."""

    async def main() -> None:
        async with world(tmp_path) as given:
            await submitter(given).submit(asked({"n": [1, 2.5, "é"]}))
            await given.tell(created(), errored("platform_reset"))
            recorded = await load_again(given)
            state = given.loaded()
            assert state is not None
            assert recorded[0].bytes == state.run.params.bytes
            assert [type(data).__name__ for data in recorded[1:]] == [
                "RetryClaimed",
                "InstanceCreateRequested",
            ]

    asyncio.run(main())


# --- families -------------------------------------------------------------------------------------


@play
async def leaf(run: Run, n: int) -> int:
    run.log("leaf")
    return n


@play
async def branch(run: Run, n: int) -> int:
    return int(await run.child(leaf, n, key="leaf"))


@play
async def trunk(run: Run, n: int) -> int:
    return int(await run.child(branch, n, key="branch"))


def test_INV_56_every_run_belongs_to_the_family_of_its_root(tmp_path: Path) -> None:
    """The root is its own family; each child names its parent, its root and its key."""

    async def main() -> None:
        async with node(tmp_path, trunk, branch, leaf) as given:
            assert await given.run(trunk, 1, run_id="root") == "completed"
        lineages = {
            r.data.play_name.split(":")[-1]: r.data.lineage
            for r in leaves(tmp_path / "t.db")
            if isinstance(r.data, e.RunSubmitted)
        }
        assert {lineage.family_key for lineage in lineages.values()} == {"root"}
        assert lineages["trunk"] == e.Lineage(family_key="root")
        assert lineages["branch"].parent_run_id == "root"
        assert lineages["branch"].child_key == "branch"
        assert lineages["leaf"].root_run_id == "root"
        assert lineages["leaf"].parent_run_id != "root"

    asyncio.run(main())


# --- doors ---------------------------------------------------------------------------------------


def test_INV_12_the_path_alone_names_the_run(tmp_path: Path) -> None:
    """A body that names one too is refused, equal or not, and nothing is stored."""

    async def main() -> None:
        async with http_world.world(tmp_path) as w:
            before = await w.ledger.log.position()
            for body in ("r1", "other"):
                answer = await w.submit("r1", runId=body)
                assert answer.status_code == 400
            assert await w.ledger.log.position() == before
            assert (await w.submit("r1")).status_code in (200, 201, 202)

    asyncio.run(main())


def test_INV_87_health_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with http_world.world(tmp_path) as w:
            before = (await w.ledger.log.position(), w.ledger.log.writer.recorded_at)
            for _ in range(3):
                assert (await w.http.get("/health")).status_code == 200
                assert (await w.http.get("/ready")).status_code == 200
            assert (await w.ledger.log.position(), w.ledger.log.writer.recorded_at) == before

    asyncio.run(main())


# --- rebuild --------------------------------------------------------------------------------------


def test_INV_80_a_rebuild_from_the_first_event_gives_the_live_rows(tmp_path: Path) -> None:
    """Every table of every read model, value by value, after a bit of everything."""

    async def main() -> None:
        clock = Ticks()
        async with world(tmp_path, clock=clock) as given:
            await given.tell(submitted(timeout_ms=60_000), created(), child("a"), child("b"))
            await given.tell(wait(until=clock.now + 500), signal(1), signal(2), wait("x"))
            await given.tell(signal(3, "integration_event", "a"), errored("platform_reset"))
            await given.tell(loaded(), created(1))
            await given.tell(submitted("r2"), run="r2")
            await given.tell(cancel(), run="r2")
            await given.tell(submitted("r3", parent=RUN, key="c"), run="r3")
            await given.tell(created(run="r3"), completed(run="r3"), run="r3")
            await given.tell(cancel())
            clock.now += 10_000
            await given.tell(e.TimerFired(purpose="cancel_grace", armed_by=""))

    asyncio.run(main())
    assert verify(tmp_path / "t.db").ok
    assert rebuild(tmp_path / "t.db").differed == 0
