"""Planning and checking database sessions (SPEC 1.15, 7.16; INV-41, INV-42, INV-46)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.session_checks import (
    Scope,
    SessionRefused,
    check_count,
    check_encrypted,
    check_scope,
    check_shape,
    life_left_ms,
)
from handlers.session_plan import OPERATIONS, Requirement, plan, plan_of_play
from ledger.canonical import Json
from ledger.errors import InputInvalid

NEED = Requirement("crm", "leads", ("select", "update"))
SCOPE = Scope(play_name="enrich", org_id="acme")


def session(**changes: Json) -> dict[str, Json]:
    """Returns a session just as it was asked for."""
    whole: dict[str, Json] = {
        "encryptedPostgresUrl": {"ct": "AAAA", "v": 1},
        "expiresAt": 1_000_000,
        "operations": ["update", "select"],
        "playName": "enrich",
        "target": {"logicalTable": "leads", "orgId": "acme", "tableNamespace": "crm"},
    }
    return {**whole, **changes}


def step(table: str, *operations: str, **limits: int) -> dict[str, Json]:
    return {
        "limits": dict(limits),
        "logicalTable": table,
        "operations": list(operations),
        "tableNamespace": "crm",
    }


def test_one_requirement_for_each_table_with_operations_united_and_the_strictest_limits() -> None:
    pipeline: Json = {
        "steps": [
            step("leads", "update", rows=50),
            {"kind": "map", "inner": [step("notes", "insert"), step("leads", "select", rows=10)]},
        ]
    }
    assert plan(pipeline) == (
        Requirement("crm", "leads", ("select", "update"), (("rows", 10),)),
        Requirement("crm", "notes", ("insert",)),
    )


def test_no_pipeline_needs_no_session() -> None:
    assert plan(None) == ()
    assert plan({"steps": [{"kind": "http"}]}) == ()


def test_a_play_declares_what_it_needs() -> None:
    assert plan_of_play({"crm.leads": ["update", "select"]}) == (NEED,)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(sorted(OPERATIONS)))))
def test_a_plan_is_the_least_that_covers_every_step(steps: list[tuple[str, str]]) -> None:
    planned = plan([step(table, operation) for table, operation in steps])
    wanted = {(table, operation) for table, operation in steps}
    given_now = {(need.logical_table, name) for need in planned for name in need.operations}
    assert given_now == wanted
    assert [need.logical_table for need in planned] == list(dict.fromkeys(t for t, _ in steps))


@pytest.mark.parametrize(
    "pipeline",
    [
        {"tableNamespace": "crm", "operations": ["select"]},
        {"tableNamespace": "crm", "logicalTable": "leads"},
        {"tableNamespace": "crm", "logicalTable": "leads", "operations": []},
        {"tableNamespace": "crm", "logicalTable": "leads", "operations": ["drop"]},
        {"tableNamespace": "crm", "logicalTable": "leads", "operations": [3]},
        {"tableNamespace": "", "logicalTable": "leads", "operations": ["select"]},
        step("leads", "select", rows=-1),
        [step(f"t{n}", "select") for n in range(65)],
    ],
)
def test_a_plan_that_says_too_little_or_too_much_is_refused(pipeline: Json) -> None:
    with pytest.raises(InputInvalid) as refused:
        plan(pipeline)
    assert refused.value.code == "SESSION_PLAN_INVALID"


def test_a_session_as_asked_passes_every_check() -> None:
    answered = check_shape(session())
    check_scope(answered, NEED, SCOPE)
    check_encrypted([answered])
    check_count([answered], 1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"playName": "other"}, "SESSION_OUT_OF_SCOPE"),
        (
            {"target": {"logicalTable": "leads", "orgId": "rival", "tableNamespace": "crm"}},
            "SESSION_OUT_OF_SCOPE",
        ),
        (
            {"target": {"logicalTable": "leads", "orgId": "acme", "tableNamespace": "hr"}},
            "SESSION_OUT_OF_SCOPE",
        ),
        (
            {"target": {"logicalTable": "notes", "orgId": "acme", "tableNamespace": "crm"}},
            "SESSION_OUT_OF_SCOPE",
        ),
        ({"operations": ["select"]}, "SESSION_OPERATIONS_UNEXPECTED"),
        ({"operations": ["select", "update", "delete"]}, "SESSION_OPERATIONS_UNEXPECTED"),
        ({"operations": ["select", "select", "update"]}, "SESSION_OPERATIONS_UNEXPECTED"),
    ],
)
def test_INV_42_scope_and_operations_must_be_the_ones_asked_for(
    changes: dict[str, Json], code: str
) -> None:
    with pytest.raises(SessionRefused) as refused:
        check_scope(check_shape(session(**changes)), NEED, SCOPE)
    assert refused.value.code == code


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        "session",
        {},
        session(playName=3),
        session(target=None),
        session(target={"orgId": "acme"}),
        session(operations="select"),
        session(operations=["select", 3]),
        session(expiresAt="soon"),
        session(expiresAt=True),
        session(expiresAt=0),
    ],
)
def test_an_answer_of_another_shape_is_refused(answer: Json) -> None:
    with pytest.raises(SessionRefused) as refused:
        check_shape(answer)
    assert refused.value.code == "SESSION_RESPONSE_INVALID"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"postgresUrl": "postgres://u:canary@db/x"}, "RAW_DB_URL_REFUSED"),
        ({"encryptedPostgresUrl": None}, "SESSION_NOT_ENCRYPTED"),
        ({"encryptedPostgresUrl": "text"}, "SESSION_NOT_ENCRYPTED"),
        ({"encryptedPostgresUrl": {"v": 1}}, "SESSION_NOT_ENCRYPTED"),
    ],
)
def test_INV_41_only_encrypted_sessions_pass(changes: dict[str, Json], code: str) -> None:
    with pytest.raises(SessionRefused) as refused:
        check_encrypted([session(), session(**changes)])
    assert refused.value.code == code
    assert "canary" not in str(refused.value)


def test_INV_46_the_count_is_the_one_referred_to() -> None:
    with pytest.raises(SessionRefused, match="1 db sessions are stored, the run refers to 2"):
        check_count([session()], 2)


def test_INV_49_the_shortest_life_counts() -> None:
    assert life_left_ms([session(), session(expiresAt=900_000)], 880_000) == 20_000
    assert life_left_ms([session(expiresAt="never")], 880_000) == 0
    assert life_left_ms([session()], 2_000_000) == 0
