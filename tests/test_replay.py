"""Reading the tape: timelines, states, differences, and choices made again."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import orjson
import pytest

import replay
from handlers.rechoose import Rechooser
from handlers.verify import verify
from ledger import events as e
from ledger.codec import decode
from ledger.errors import LogMissing, Refused, RunNotFound
from ledger.events import EVENT_TYPES
from ledger.export import export, read_export, write_export
from projections.describe import describe, safe_json, visible
from tests.bless import LOGS, record_refund, record_weather

RESET = LOGS / "platform-reset.jsonl"
CANCEL = LOGS / "cancelled-parent.jsonl"
REFUND = LOGS / "refund.jsonl"
WEATHER = LOGS / "weather-demo.jsonl"
Edit = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's log, as it is left on disk."""
    path = tmp_path_factory.mktemp("demo") / "demo.db"
    asyncio.run(record_weather(path))
    return path


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Runs the program as a user does whose stdout and stderr are pipes."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = replay.main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def edited(tmp_path: Path, log: Path, edit: Edit) -> Path:
    """Returns a log whose events were edited and numbered anew, each leaf in canonical form."""
    events = edit([orjson.loads(leaf) for leaf in read_export(log)])
    versions: dict[str, int] = {}
    path = tmp_path / "edited.jsonl"
    with path.open("wb") as file:
        for position, event in enumerate(events, 1):
            version = versions[event["subject"]] = versions.get(event["subject"], 0) + 1
            event |= {"sequence": f"{position:016d}", "streamversion": version}
            file.write(orjson.dumps(event, option=orjson.OPT_SORT_KEYS) + b"\n")
    return path


def kinds(path: Path) -> list[tuple[str, str]]:
    """Returns what a verification finds, in order."""
    return [(found.kind, found.type) for found in verify(path).divergences]


# --- choices made again ---------------------------------------------------------------------------


def test_the_database_verifies_whole(demo: Path) -> None:
    """Bytes, read models and choices in one reading."""
    verdict = verify(demo)
    assert verdict.ok
    assert (verdict.events, verdict.same, verdict.choices) == (50, 50, 20)
    assert verdict.read_models == 6


def test_verify_needs_no_vault(demo: Path, tmp_path: Path) -> None:
    """Sealed values are never needed: an export, which has none, verifies as the database does."""
    path = tmp_path / "demo.jsonl"
    with path.open("wb") as file:
        write_export(export(demo), file)
    assert verify(path).choices == verify(demo).choices


def test_one_run_alone_verifies(demo: Path, tmp_path: Path) -> None:
    """An incident log of one run or one family is a log, though its positions have gaps."""
    for name, leaves in (
        ("run", export(demo, run="weather-demo")),
        ("family", export(demo, family="weather-demo")),
    ):
        path = tmp_path / f"{name}.jsonl"
        with path.open("wb") as file:
            write_export(leaves, file)
        verdict = verify(path)
        assert verdict.ok
        assert verdict.root is None


def test_C038_a_changed_choice_is_named_with_both_values(tmp_path: Path) -> None:
    """Only an argument differs: first position, expected and found, exit code not 0."""

    def edit(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["type"] == "retry.decided" and event["data"]["failedAttempt"] == 1:
                event["data"] |= {"reason": "limit_reached"}
        return events

    path = edited(tmp_path, RESET, edit)
    verdict = verify(path)
    (found,) = verdict.divergences
    assert (found.kind, found.type, found.stream) == (
        "changed",
        "retry.decided",
        "run/reset-thrice",
    )
    assert found.given is not None
    assert found.given.type == "instance.errored"
    assert [(f.path, f.recorded, f.today) for f in found.fields] == [
        ("reason", "limit_reached", "platform_reset")
    ]
    assert found.why == "decided by react_to_end (handlers/retry.py); the run froze retryLimit 2"
    assert (verdict.changed, verdict.same) == (1, verdict.events - 1)


def test_a_choice_that_is_missing_is_not_recorded(tmp_path: Path) -> None:
    """Today something follows that the log does not have: that is a difference too."""
    path = edited(
        tmp_path,
        CANCEL,
        lambda all_: [x for x in all_ if x["type"] != "instance.terminate_requested"],
    )
    assert ("not_recorded", "instance.terminate_requested") in kinds(path)


def test_a_choice_that_nothing_gives_is_not_made(tmp_path: Path) -> None:
    """And the reverse: it stands under a choice's id, and today nothing yields it."""
    from ledger.ids import event_id

    def edit(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        place = next(i for i, x in enumerate(events) if x["type"] == "retry.started")
        extra = json.loads(json.dumps(events[place]))
        extra["id"] = event_id(extra["causationid"], "7")
        return [*events[: place + 1], extra, *events[place + 1 :]]

    assert kinds(edited(tmp_path, RESET, edit)) == [("not_made", "retry.started")]


def test_a_choice_under_another_id_is_no_choice(tmp_path: Path) -> None:
    """Ids are derived: the same data under an id of its own was not decided here."""

    def edit(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["type"] == "run.launch_state_put":
                event["id"] = "0" * 32
        return events

    found = kinds(edited(tmp_path, CANCEL, edit))
    assert ("not_recorded", "run.launch_state_put") in found
    assert ("not_allowed", "run.launch_state_put") in found


def test_a_fact_under_another_id_is_not_allowed(tmp_path: Path) -> None:
    """A fact's id comes from its stream and its natural key, an outcome's from its intent."""

    def edit(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["type"] in ("signal.received", "timer.fired"):
                event["id"] = event["id"][::-1]
        return events

    found = verify(edited(tmp_path, LOGS / "poll.jsonl", edit)).divergences
    assert {(f.kind, f.type) for f in found if f.today is None} >= {
        ("not_allowed", "signal.received"),
        ("not_allowed", "timer.fired"),
    }
    assert "derived is" in found[0].why


def test_C011_a_fact_that_the_state_does_not_allow_is_not_allowed(tmp_path: Path) -> None:
    """A second cancel, recorded where today nothing would be."""
    from ledger.ids import event_id

    def edit(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        last = max(i for i, x in enumerate(events) if x["type"] == "run.cancel_refused")
        twice = json.loads(json.dumps(events[last]))
        twice["id"] = event_id(twice["subject"], "cancel-refused")
        return [*events, twice]

    (found,) = verify(edited(tmp_path, REFUND, edit)).divergences
    assert (found.kind, found.why) == ("not_allowed", "the run is completed")


def test_what_the_fold_refuses_stops_its_stream_only(tmp_path: Path) -> None:
    """The other runs go on; what is behind the refused event is not judged."""

    def edit(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["type"] == "instance.errored" and event["subject"] == "run/reset-once":
                event["data"]["attempt"] = 5
        return events

    verdict = verify(edited(tmp_path, RESET, edit))
    assert ("not_allowed", "instance.errored") in [(f.kind, f.type) for f in verdict.divergences]
    assert {f.stream for f in verdict.divergences} == {"run/reset-once"}
    assert verdict.skipped == 10


def test_any_edit_of_any_event_is_found_and_ends_in_no_traceback(tmp_path: Path) -> None:
    """Every value of every event, changed one at a time: verify speaks, whatever it is given."""
    missed = []
    for log in (RESET, CANCEL):
        originals = [orjson.loads(leaf) for leaf in read_export(log)]
        for place, original in enumerate(originals):
            for name, value in original["data"].items():
                other: Any = value + 1 if isinstance(value, int) else None
                if isinstance(value, bool):
                    other = not value
                elif isinstance(value, str):
                    other = value + "x"
                if other is None:
                    continue

                def edit(events: list[dict[str, Any]], i: int, n: str, v: object) -> None:
                    events[i] = events[i] | {"data": events[i]["data"] | {n: v}}

                changed = list(originals)
                edit(changed, place, name, other)
                if verify(edited(tmp_path, log, lambda _, c=changed: c)).ok:  # type: ignore[misc]
                    missed.append((original["type"], name))
    assert sorted(set(missed)) == UNSEEN


UNSEEN = [
    ("child.cancel_delivered", "answer"),
    ("child.cancel_delivered", "childKey"),
    ("child.requested", "playName"),
    ("child.terminal_set", "childRunId"),
    ("child.terminal_set", "eventKey"),
    ("instance.created", "alreadyExisted"),
    ("instance.created", "instanceId"),
    ("instance.errored", "code"),
    ("instance.started", "startGapMs"),
    ("log.created", "scope"),
    ("log.created", "version"),
    ("node.started", "plays"),
    ("node.started", "version"),
    ("node.stopped", "clean"),
    ("retry.params_loaded", "bytes"),
    ("run.submitted", "orgId"),
    ("run.submitted", "playDigest"),
    ("run.submitted", "playName"),
    ("run.submitted", "requestDigest"),
    ("run.wait_started", "key"),
    ("run.wait_started", "ordinal"),
]
"""What facts say of the world outside: taken as given, and kept by the hash in the head alone."""


def test_choices_in_another_order_are_benign() -> None:
    """Same ids, types and data: an order of the closure that changed decides nothing else."""
    leaves = list(read_export(RESET))
    recorded = [decode(leaf) for leaf in leaves]
    from projections.run import evolve

    state, rechooser = None, Rechooser()
    for event in (recorded[1], recorded[2]):
        before, state = state, evolve(state, event)
        assert not rechooser.take(event, before, state)
    assert rechooser.waits
    rechooser = Rechooser()
    first = evolve(None, recorded[1])
    rechooser.take(recorded[1], None, first)
    rechooser.take(recorded[3], first, first)
    assert (rechooser.choices, rechooser.moved) == (1, 1)


def test_C038_verify_is_the_same_under_every_hash_seed() -> None:
    """Nothing rests on the order of a set."""
    seen = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "replay.py", "verify", str(CANCEL), "--json"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
        found = json.loads(done.stdout)
        found.pop("elapsedMs")
        seen.add(json.dumps(found))
    assert len(seen) == 1


# --- the program ----------------------------------------------------------------------------------


def test_show_tells_causes_and_waits(demo: Path) -> None:
    """UX section 3: groups are told once, a wait where it begins, a cause by its position."""
    code, out, err = run("show", demo, "weather-demo")
    assert (code, err) == (0, "")
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0][0] == "@3"
    assert lines[0][2:] == ["run.submitted", "weather:yearly_report, 1 file", ""]
    assert lines[5][2:] == ["child.requested", "key 2012, and 3 more to @11", "<- @7"]
    assert lines[6][3].startswith("waited ")
    assert " for 4 children, longest 20" in lines[6][3]
    assert lines[-1][2] == "run.completed"
    assert lines[-1][3].endswith("list of 4, 176 bytes")


def test_show_as_json_prints_the_stored_bytes(demo: Path) -> None:
    """One event a line, as an export writes it."""
    _, out, _ = run("show", demo, "weather-demo", "--json")
    assert out.encode().splitlines() == list(export(demo, run="weather-demo"))
    _, out, _ = run("show", "--json", demo)
    assert out.encode().splitlines() == list(export(demo))


def test_show_of_a_log_has_a_line_for_every_event(demo: Path) -> None:
    """Without a run the whole tape is told, each line with its run."""
    _, out, _ = run("show", demo)
    assert len(out.splitlines()) == 50
    assert "\trun.submitted\tweather-demo: weather:yearly_report, 1 file\t" in out


@pytest.mark.parametrize("place", ["30", "@30", "v9"])
def test_state_at_a_place(demo: Path, place: str) -> None:
    """A position, or a version of the run; later events are as if they had not happened."""
    found = replay.state(demo, "weather-demo", place)
    run_state = found.state.run
    assert (run_state.version, run_state.status, run_state.children.running) == (9, "running", 4)


def test_state_at_a_time_is_the_last_event_before_it(demo: Path) -> None:
    """Times never decrease along positions."""
    events = list(replay.read(demo))
    for recorded in events[2:]:
        found = replay.state(demo, "weather-demo", recorded.time)
        assert found.position == max(x.position for x in events if x.time <= recorded.time)


def test_state_as_json_has_the_shape_of_a_status(demo: Path) -> None:
    """The keys of UX section 3; what is absent is null, never missing."""
    code, out, _ = run("state", demo, "weather-demo", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found) == [
        "runId", "playName", "status", "attempt", "instanceId", "orgId", "parentRunId",
        "workflowFamilyKey", "result", "resultRef", "error", "retry", "progress", "children",
        "waitingOn", "parked", "submittedAt", "startedAt", "endedAt", "version", "asOfPosition",
    ]  # fmt: skip
    assert len(found["result"]) == 4
    assert (found["waitingOn"], found["error"]) == ([], None)
    _, out, _ = run("state", demo, "weather-demo", "--json", "--at", "@9")
    found = json.loads(out)
    assert [(wait["kind"], wait["key"]) for wait in found["waitingOn"]] == [
        ("child", "2012"),
        ("child", "2013"),
    ]


def test_state_of_an_export_keeps_values_sealed() -> None:
    """A file has no vault; what stands for the value is told."""
    code, out, _ = run("state", WEATHER, "weather-demo", "--json")
    assert code == 0
    assert json.loads(out)["resultRef"]["gone"] == "SEALED"
    assert "result\tsealed, 176 bytes" in run("state", WEATHER, "weather-demo")[1]


def test_the_outbox_of_a_state_is_what_was_open_then(demo: Path) -> None:
    """An intent may be settled in another stream: a child's submit is the outcome."""
    kinds = [
        [row.kind for row in replay.state(demo, "weather-demo", at).outbox] for at in (5, 11, 50)
    ]
    assert kinds[0] == ["create"]
    assert kinds[1] == ["child_submit"] * 4
    assert kinds[2] == []


def test_diff_says_what_changed_and_where(demo: Path) -> None:
    """Paths, both values, and the events that did it."""
    code, out, _ = run("diff", demo, "weather-demo", "--from", "@11", "--to", "50", "--json")
    found = json.loads(out)
    assert (code, found["runId"], found["from"], found["to"]) == (0, "weather-demo", 11, 50)
    changes = {change["path"]: change for change in found["changes"]}
    assert changes["status"] == {
        "path": "status", "before": "running", "after": "completed", "positions": [49],
    }  # fmt: skip
    assert (changes["children.completed"]["before"], changes["children.completed"]["after"]) == (
        0,
        4,
    )
    assert len(changes["children.completed"]["positions"]) == 4
    assert changes["waitingOn"]["after"] == "none"
    assert changes["result"]["after"] == "list of 4, 176 bytes"
    assert run("diff", demo, "weather-demo", "--from", "50")[1] == "nothing\n"


def test_verify_speaks_as_the_pages_say(demo: Path) -> None:
    """UX section 3, the four lines."""
    code, out, err = run("verify", demo)
    assert (code, err) == (0, "")
    assert out.splitlines()[:3] == [
        "log        50 events dense, leaves hash to the head",
        "refold     6 read models equal byte for byte",
        "re-decide  20 choices made again: all as recorded",
    ]
    assert out.splitlines()[3].startswith("✓ 50 of 50 the same: today's code would decide what was")


def test_verify_of_a_changed_log_shows_the_block_and_fails() -> None:
    """UX section 3: where, what was given, both values underlined, why, and how many."""
    path = LOGS / "bad" / "verify.jsonl"
    code, out, _ = run("verify", path)
    assert code == 1
    lines = out.splitlines()
    assert lines[2] == "changed: retry.decided"
    assert lines[3] == f"  --> {path} @24, reset-thrice v7"
    assert lines[4].split()[:3] == ["|", "given", "instance.errored"]
    assert lines[5:9] == [
        "  | recorded  limit = 3",
        "  | today     limit = 2",
        "  |           ^^^^^^^^^",
        "help: decided by react_to_end (handlers/retry.py); the run froze retryLimit 2",
    ]
    assert lines[9] == ("first of 3 changed, 0 benign, 40 same; --all lists them, --json for CI")
    code, out, _ = run("verify", path, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["changed"], found["log"]) == (1, False, 3, "ok")
    assert found["first"]["position"] == 24
    assert found["first"]["fields"] == [{"path": "limit", "recorded": 3, "today": 2}]
    assert "divergences" in json.loads(run("verify", path, "--json", "--all")[1])


ERRORS = [
    (["state", "{demo}", "wether-demo"], 4, 'run "wether-demo" is not in {demo}', "did you mean"),
    (["show", "missing.db", "x"], 2, "missing.db does not exist, and reading creates", "check"),
    (["show", "README.md"], 2, "README.md is not a playledger log: it starts with", "check"),
    (["shwo"], 2, "no verb shwo", "did you mean show?"),
    (["show", "--jsno"], 2, "no option --jsno", "did you mean --json?"),
    (["state", "{demo}"], 2, "state needs a run", "replay state [LOG] RUN"),
    (["state", "{demo}", "weather-demo", "--at", "@51"], 2, "@51 is beyond the end", "at most @50"),
    (["state", "{demo}", "weather-demo", "--at", "v99"], 2, "v99 is not in weather", "at most v"),
    (["state", "{demo}", "weather-demo", "--at", "@1"], 2, "weather-demo begins @3", "--at @3"),
    (["state", "{demo}", "weather-demo", "--at", "noon"], 2, '"noon" is no place', "58, @58, v12"),
    (
        ["state", "{demo}", "weather-demo", "--at", "2026-12-01T08:00:00"],
        2,
        '"2026-12-01T08:00:00" is no place',
        "with its zone",
    ),
    (["diff", "{demo}", "weather-demo"], 2, "diff needs --from", "--from @1"),
    (["diff", "{demo}", "weather-demo", "--from", "9", "--to", "5"], 2, "--from @9 is", "swap"),
    (["show", "{demo}", "x", "--db", "{demo}"], 2, "two logs are named", "give one"),
    (["show", "{demo}", "a", "b"], 2, "show takes one run, got 2: a b", "replay show"),
    (["verify", "{demo}", "weather-demo"], 2, "verify takes a log", "playledger export"),
    (["state", "{demo}", "x", "--at"], 2, "--at needs a value", "--at VALUE"),
]


@pytest.mark.parametrize(("arguments", "code", "error", "hint"), ERRORS)
def test_every_error_is_two_lines_and_a_code(
    demo: Path, arguments: list[str], code: int, error: str, hint: str
) -> None:
    """UX section 4: what happened, what to do, never a traceback; with --json one object."""
    words = [word.format(demo=demo) for word in arguments]
    got, out, err = run(*words)
    lines = err.splitlines()
    assert (got, out, len(lines)) == (code, "", 2)
    assert lines[0].startswith("error: " + error.format(demo=demo))
    assert lines[1].startswith("hint: ")
    assert hint in lines[1]
    _, out, err = run("--json", *words)
    assert out == ""
    assert json.loads(err)["error"]["phase"] == "replay"


def test_the_log_may_be_named_by_option_or_environment(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first word is the log only if it names a file; else it is the run."""
    assert replay.main(["state", "weather-demo", "--db", str(demo)]) == 0
    monkeypatch.setenv("PLAYLEDGER_DB", str(demo))
    assert replay.main(["state", "weather-demo"]) == 0
    assert replay.main(["state", f"sqlite:///{demo}", "weather-demo"]) == 0
    assert capsys.readouterr().out.count("weather-demo as of @50") == 3


def test_help_names_every_verb() -> None:
    """And is what an empty command line gets."""
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert all(f"  {verb} " in out for verb in replay.VERBS)
    assert run()[1] == out
    assert run("show", "--help")[1] == out


def test_it_is_a_program_too(demo: Path) -> None:
    """`python replay.py` says what `replay.main` says."""
    done = subprocess.run(
        [sys.executable, "replay.py", "state", str(demo), "weather-demo"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert (0, done.stdout, done.stderr) == run("state", demo, "weather-demo")


def test_help_imports_nothing_heavy() -> None:
    """NUMBERS T8: sqlalchemy and rich are not touched before a verb is known."""
    check = (
        "import sys, replay; replay.main(['--help']);print('HEAVY' * ('sqlalchemy' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert "HEAVY" not in done.stdout


def test_reading_writes_nothing(demo: Path) -> None:
    """No verb leaves a byte or a file behind."""
    before = {path: path.read_bytes() for path in demo.parent.iterdir() if path.is_file()}
    for words in (("show",), ("verify",), ("state", "weather-demo"), ("show", "weather-demo")):
        assert run(words[0], demo, *words[1:])[0] == 0
    after = {path: path.read_bytes() for path in demo.parent.iterdir() if path.is_file()}
    assert {path.name for path in after} - {path.name for path in before} <= {
        "demo.db-wal",
        "demo.db-shm",
    }
    assert after[demo] == before[demo]


def test_C055_text_from_runs_cannot_act_on_a_terminal(tmp_path: Path) -> None:
    """Escapes are shown, not sent: in a timeline, in a state and in JSON for people."""

    def edit(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["type"] == "signal.received":
                event["data"]["signal"] = "a\x1b[2J\u202eb"
        return events

    path = edited(tmp_path, REFUND, edit)
    _, out, _ = run("show", path, "refund-7")
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert r'"a\x1b[2J\u202eb"' in out
    assert visible("a\x1b\u009b\U000e0001") == r"a\x1b\x9b\U000e0001"
    assert json.loads(safe_json('"\u009b\U000e0001"')) == "\u009b\U000e0001"


def test_every_event_type_in_the_logs_is_described() -> None:
    """One line for each, and nothing that a terminal would obey."""
    seen = set()
    for log in LOGS.glob("*.jsonl"):
        for recorded in replay.read(log):
            assert describe(recorded).isprintable()
            seen.add(recorded.type)
    assert len(seen) > len(EVENT_TYPES) // 2


def test_read_is_a_plain_iterator(demo: Path) -> None:
    """UX section 2: reading needs no event loop."""
    assert [recorded.position for recorded in replay.read(demo)] == list(range(1, 51))
    assert [recorded.position for recorded in replay.read(demo, after=48)] == [49, 50]
    assert next(replay.read(demo, run="weather-demo")).type == "run.submitted"
    assert next(replay.read(WEATHER, run="weather-demo")).type == "run.submitted"
    with pytest.raises(RunNotFound):
        list(replay.read(WEATHER, run="nobody"))
    with pytest.raises(LogMissing):
        list(replay.read("missing.db"))


def test_a_refund_shows_its_values_where_the_vault_has_them(tmp_path: Path) -> None:
    """`show` resolves what is present; the play's retries are told with their budget."""
    path = tmp_path / "refund.db"
    asyncio.run(record_refund(path))
    lines = [line.text for line in replay.show(path, "refund-7")]
    assert 'shop:refund, input "order-7"' in lines
    assert 'approval, {"approved":true,"by":"ada"}, 28 bytes' in lines
    child = next(
        r.data.child_run_id for r in replay.read(path) if isinstance(r.data, e.ChildRequested)
    )
    texts = [line.text for line in replay.show(path, child, every=True)]
    assert "retry after play_retry, 0 of 5 used before" in texts
    with pytest.raises(Refused):
        replay.state(path, "refund-7", "v0")
