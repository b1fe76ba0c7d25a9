"""The command line: what it answers, what it says, and where each goes (UX section 3)."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import typer

from ledger.export import export
from ledger.fsck import fsck
from playledger.cli.app import app
from playledger.cli.verbs import PANELS, top_help
from tests.cli_world import (
    CSV,
    PLAYS,
    ROOT,
    WEATHER,
    Caller,
    call,
    call_in_terminal,
    cli,
    environment,
    read_until,
    running,
)

__all__ = ["cli"]
HELLO = f"{PLAYS}:hello"


# --- help -----------------------------------------------------------------------------------------


def test_T8_help_is_there_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """0.2 s is what an interpreter and our own few modules take; no library may come in."""
    code = (
        "import sys; from playledger.cli import main; main(['--help']);"
        "sys.exit(','.join(sorted({'typer', 'pydantic', 'sqlalchemy', 'rich', 'asyncio', 'msgspec',"
        " 'structlog'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == top_help() + "\n"


def test_help_groups_every_command_and_fits_a_terminal(cli: Caller) -> None:
    """What the help lists is what there is, in the same words."""
    command: Any = typer.main.get_command(app)
    listed = {name: text for verbs in PANELS.values() for name, text in verbs.items()}
    there = {
        name: c.help.partition("\n")[0] for name, c in command.commands.items() if not c.hidden
    }
    assert there == listed
    said = cli("--help")
    assert said.out == cli().out == cli("help").out
    assert max(map(len, said.out.splitlines())) <= 80
    for name in listed:
        shown = cli(name, "--help")
        assert shown.code == 0
        assert "Usage: " in shown.out


@pytest.mark.parametrize("topic", ["exit-codes", "environment", "json"])
def test_help_topics_are_pages(cli: Caller, topic: str) -> None:
    """What belongs to no one command has a page of its own."""
    said = cli("help", topic)
    assert said.code == 0
    assert len(said.out.splitlines()) > 5
    assert cli("help", "exitcodes").error[1].startswith("did you mean exit-codes?")


def test_common_options_go_before_or_after_the_verb(cli: Caller) -> None:
    """As with git and kubectl; there is nothing to remember."""
    cli("run", HELLO, "--input", '"a"', "--run-id", "a", "--db", "other.db")
    before = cli("--db", "other.db", "--json", "status", "a")
    after = cli("status", "a", "--json", "--db=other.db")
    assert before == after
    assert json.loads(before.out)["runId"] == "a"


# --- run ------------------------------------------------------------------------------------------


def test_run_prints_the_result_alone_and_talks_on_stderr(cli: Caller) -> None:
    """A pipe is given the result as JSON; each change is a line of stderr."""
    said = cli("run", HELLO, "--input", '"world"', "--run-id", "h1")
    assert (said.code, said.out) == (0, '"hello, world"\n')
    assert re.search(r"^h1 submitted @\d+$", said.err, re.MULTILINE)
    assert re.search(
        r"^✓ h1 completed in .+: no child, no retry, \d+ events$", said.err, re.MULTILINE
    )
    assert said.err.endswith(
        "Next: playledger why h1\n      playledger replay show demo.db h1\n"
        "      playledger replay verify demo.db\n"
    )


def test_what_a_play_prints_is_no_answer(cli: Caller) -> None:
    """A play may print; the result stays the only thing on stdout."""
    said = cli("run", f"{PLAYS}:echo", "--input", "[1, 2.5]")
    assert said.out == "[1,2.5]\n"
    assert "a play that prints" in said.err


def test_the_same_run_again_shows_its_result_and_says_so(cli: Caller) -> None:
    """Nothing is done twice, and the command may be repeated without fear."""
    first = cli("run", HELLO, "--input", '"x"', "--run-id", "h1")
    head = cli.json("status", "h1")["asOfPosition"]
    again = cli("run", HELLO, "--input", '"x"', "--run-id", "h1")
    assert again.out == first.out
    assert re.match(r"✓ h1 was already completed \(@\d+, \d+ m?s ago\); its result:", again.err)
    assert cli.json("status", "h1")["asOfPosition"] == head


def test_run_json_is_the_status_alone(cli: Caller) -> None:
    """`run --json` ends with what `status --json` prints, also while progress shows."""
    said = cli("run", HELLO, "--input", '"x"', "--run-id", "h1", "--json")
    shown = json.loads(said.out)
    assert shown["status"] == "completed"
    assert shown["result"] == "hello, x"
    assert {*shown} >= {"runId", "playName", "attempt", "instanceId", "resultRef", "error",
                        "children", "waitingOn", "version", "asOfPosition"}  # fmt: skip


def test_quiet_says_nothing_but_the_answer(cli: Caller) -> None:
    """For scripts that want no talk; an error is no talk."""
    said = cli("run", HELLO, "--input", '"x"', "--quiet")
    assert (said.out, said.err) == ('"hello, x"\n', "")
    assert cli("status", "nope", "--quiet").error


def test_inputs_are_one_json_and_any_number_of_files(cli: Caller) -> None:
    """@file.json is JSON; every other @file is staged under its own name."""
    (cli.folder / "a.txt").write_text("abc")
    (cli.folder / "b.txt").write_text("x")
    (cli.folder / "in.json").write_text('{"k": 1}')
    said = cli(
        "run", f"{PLAYS}:files", "--input", "@a.txt", "--input", "@in.json", "--input", "@b.txt"
    )
    assert json.loads(said.out) == {"value": {"k": 1}, "names": ["a.txt", "b.txt"], "size": 3}


def test_run_exits_with_the_end_of_the_run(cli: Caller) -> None:
    """1 for a failed run, and the reason in one line; looking at it is 0."""
    said = cli("run", f"{PLAYS}:boom", "--run-id", "b")
    assert (said.code, said.out) == (1, "")
    assert "  user_error ValueError: it broke" in said.err
    assert cli("status", "b").code == 0
    assert cli("status", "b", "--exit-status").code == 1
    assert cli("tail", "b", "--exit-status").code == 1


def test_a_terminal_gets_a_table_and_three_redrawn_lines(tmp_path: Path) -> None:
    """A list of flat objects is a table: what names a row first, figures at the right."""
    code, sent = call_in_terminal(
        "run", f"{WEATHER}:yearly_report", "--input", f"@{CSV}", "--run-id", "w", "--db", "d.db",
        cwd=tmp_path,
    )  # fmt: skip
    text = sent.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert code == 0
    assert "\x1b[2K" in text
    assert re.search(r"children +[█░]+ +\d of 4 done, \d running, 0 failed", plain)
    table = ["  year  days  rain_mm", "  2012   366   1226.0", "  2013   365    828.0",
             "  2014   365   1232.8", "  2015   365   1139.2"]  # fmt: skip
    lines = [line.rstrip() for line in plain.splitlines()]
    start = lines.index(table[0])
    assert lines[start : start + 5] == table
    assert lines[start + 5] == "Next: playledger why w --db d.db"


@pytest.mark.parametrize(
    ("more", "encoding", "coloured", "mark"),
    [
        ({}, "utf-8", True, "✓"),
        ({"NO_COLOR": "1"}, "utf-8", False, "✓"),
        ({}, "ascii", True, "+"),
    ],
    ids=["as it is", "NO_COLOR", "an ASCII terminal"],
)
def test_colour_and_marks_follow_the_terminal(
    cli: Caller, more: dict[str, str], encoding: str, coloured: bool, mark: str
) -> None:
    """NO_COLOR takes the colour, an encoding without our marks takes those."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    _, sent = call_in_terminal(
        "status", "h", "--db", "demo.db", cwd=cli.folder, encoding=encoding, **more
    )
    assert (b"\x1b[" in sent) is coloured
    assert mark in sent.decode()


def test_force_color_and_ascii_are_taken_in_a_pipe(cli: Caller, monkeypatch: Any) -> None:
    """Both are asked for by name."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    assert "\x1b" not in cli("why", "h").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m+" in cli("run", HELLO, "--input", '"x"', "--run-id", "h", "--ascii").err


def test_ctrl_c_stops_watching_and_keeps_the_run(cli: Caller) -> None:
    """Exit 130; the same command carries on, and a signal ends it."""
    run = ("run", f"{PLAYS}:approve", "--run-id", "r", "--db", "demo.db")
    with running(*run, cwd=cli.folder) as process:
        read_until(process, 'waits for signal "approval"')
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.endswith("stopped watching; r is kept: the same command carries on\n")
    with running(*run, cwd=cli.folder) as process:
        said = read_until(process, "carrying on")
        assert re.match(r"● r was interrupted at @\d+; carrying on\n", said[-1])
        read_until(process, 'waits for signal "approval"')
        told = cli("signal", "r", "approval", "--data", '"yes"')
        assert told.code == 0
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, '"yes"\n')


def test_a_run_that_another_process_drives_is_followed(cli: Caller) -> None:
    """Two commands on one run: one drives, both print the result."""
    run = ("run", f"{PLAYS}:approve", "--run-id", "r", "--db", "demo.db")
    with running(*run, cwd=cli.folder) as first:
        read_until(first, 'waits for signal "approval"')
        with running(*run, cwd=cli.folder) as second:
            said = read_until(second, "following it")
            assert re.match(r"● r is run by n-[0-9a-f]+; following it\n", said[-1])
            read_until(second, 'waits for signal "approval"')
            cli("signal", "r", "approval")
            assert second.communicate(timeout=30)[0] == "null\n"
        assert first.communicate(timeout=30)[0] == "null\n"
    assert cli("status", "r", "--json").out.count('"attempt":0') == 1


def test_a_cancelled_run_exits_3_and_takes_its_children_along(cli: Caller) -> None:
    """The command waits until the children have ended too, so that nothing is left behind."""
    run = ("run", f"{PLAYS}:spawner", "--input", "3", "--run-id", "s", "--db", "demo.db")
    with running(*run, cwd=cli.folder) as process:
        read_until(process, "children 0/3")
        told = cli("cancel", "s", "--reason", "enough")
        assert told.out.startswith("s\tcancel of s recorded")
        process.communicate(timeout=30)
    assert process.returncode == 3
    lines = cli("runs", "--json").out.splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["cancelled"] * 4


# --- looking --------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_with_tabs_in_a_pipe(cli: Caller) -> None:
    """A pipe has fields between tabs and RFC 3339 times; JSON has one run a line."""
    for name in ("a", "b", "c"):
        cli("run", HELLO, "--input", f'"{name}"', "--run-id", name)
    rows = [line.split("\t") for line in cli("runs").out.splitlines()]
    assert [row[:3] for row in rows] == [
        [name, "cli_plays:hello", "completed"] for name in ("c", "b", "a")
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row[5]) for row in rows)
    page = cli("runs", "--limit", "2")
    assert len(page.out.splitlines()) == 2
    older = re.fullmatch(r"2 shown; older: --before (@\d+)\n", page.err)
    assert older
    rest = cli("runs", "--before", older[1], "--json").out.splitlines()
    assert [json.loads(line)["runId"] for line in rest] == ["a"]


def test_runs_can_be_asked_for_what_they_wait_for(cli: Caller) -> None:
    """By status, play, kind of wait or key."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    cli("submit", f"{PLAYS}:approve", "--run-id", "r")
    assert [
        line.split("\t")[0] for line in cli("runs", "--status", "submitted").out.splitlines()
    ] == ["r"]
    assert cli("runs", "--play", "cli_plays:approve").out.startswith("r\t")
    assert cli("runs", "--waiting-on", "signal").out == ""


def test_status_shows_what_a_run_waits_for_and_reveals_only_when_asked(cli: Caller) -> None:
    """The input is sealed: it shows with --reveal."""
    cli("run", HELLO, "--input", '"secret name"', "--run-id", "h")
    plain = cli("status", "h").out
    assert "secret name" not in plain.replace("hello, secret name", "")
    assert re.search(r"^input\tsealed, \d+ bytes \(--reveal\)$", plain, re.MULTILINE)
    assert 'input\t"secret name"' in cli("status", "h", "--reveal").out
    assert cli.json("status", "h", "--reveal")["input"] == "secret name"
    assert "input" not in cli.json("status", "h")


def test_tail_prints_the_stored_bytes_and_ends_with_the_run(cli: Caller) -> None:
    """With --json one event a line, exactly as stored; --follow ends at the terminal event."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    stored = [leaf.decode() for leaf in export(Path("demo.db"), run="h")]
    assert cli("tail", "h", "--json").out.splitlines() == stored
    assert cli("tail", "h", "--json", "--follow").out.splitlines() == stored
    rows = [line.split("\t") for line in cli("tail", "h").out.splitlines()]
    assert rows[0][2:] == ["run.submitted", 'cli_plays:hello, input "x"']
    assert [row[2] for row in rows][-1] == "run.completed"
    behind = cli("tail", "h", "--after", rows[-2][0]).out.splitlines()
    assert [line.split("\t")[0] for line in behind] == [rows[-1][0]]
    assert len(cli("tail").out.splitlines()) > len(rows)


def test_tail_shows_log_lines_and_families(cli: Caller) -> None:
    """--logs are the lines that plays log; --family are the children's events too."""
    cli("run", f"{WEATHER}:yearly_report", "--input", f"@{CSV}", "--run-id", "w")
    assert cli("tail", "w", "--logs").out == ""
    lines = [line.split("\t") for line in cli("tail", "w", "--logs", "--family").out.splitlines()]
    assert sorted(line[2:] for line in lines) == [
        ["info", "read the year days=365"]] * 3 + [["info", "read the year days=366"]
    ]  # fmt: skip
    told = cli("tail", "w", "--logs", "--family", "--json").out.splitlines()
    assert json.loads(told[0])["message"] == "read the year"
    family = [json.loads(line) for line in cli("tail", "w", "--family", "--json").out.splitlines()]
    assert {event["correlationid"] for event in family} == {"w"}
    assert len({event["subject"] for event in family}) == 5


def test_tail_follows_a_run_that_another_process_drives(cli: Caller) -> None:
    """A follower in a pipe is read as it goes, and ends with the run."""
    with running(
        "run", f"{PLAYS}:approve", "--run-id", "r", "--db", "demo.db", cwd=cli.folder
    ) as process:
        read_until(process, "waits for")
        with running("tail", "r", "--follow", "--db", "demo.db", cwd=cli.folder) as tail:
            assert tail.stdout is not None
            for line in tail.stdout:
                if "run.wait_started" in line:
                    break
            cli("signal", "r", "approval")
            rest, _ = tail.communicate(timeout=30)
    assert tail.returncode == 0
    assert rest.splitlines()[-1].split("\t")[2] == "run.completed"


def test_why_gives_sentences_with_their_positions(cli: Caller) -> None:
    """Each sentence comes with its evidence, behind a tab in a pipe."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    first = cli("why", "h").out.splitlines()[0]
    assert re.fullmatch(r"h is completed; nothing will move it\.\t@\d+", first)
    told = cli.json("why", "h")
    assert told["status"] == "completed"
    assert told["sentences"][0]["positions"]
    cli("submit", f"{PLAYS}:approve", "--run-id", "r")
    assert "It moves when" in cli("why", "r").out


# --- acting ---------------------------------------------------------------------------------------


def test_submit_returns_at_once_and_again_is_the_same_run(cli: Caller) -> None:
    """Nothing is driven; the answer has the run's id first, for scripts."""
    said = cli("submit", f"{PLAYS}:approve", "--run-id", "r")
    assert re.fullmatch(r"r\tr is submitted, cli_plays:approve\t@\d+\n", said.out)
    again = cli.json("submit", f"{PLAYS}:approve", "--run-id", "r")
    assert (again["replayed"], again["status"]) == (True, "submitted")
    drawn = cli.json("submit", f"{PLAYS}:approve")["runId"]
    assert re.fullmatch(r"cli_plays-approve-[0-9a-z]{16}", drawn)


def test_submit_takes_a_module_too(cli: Caller) -> None:
    """MODULE:FUNCTION is imported, from this folder too."""
    (cli.folder / "plays_of_mine.py").write_text(
        "from playledger import Run, play\n@play\nasync def one(run: Run) -> int:\n    return 1\n"
    )
    assert cli.json("submit", "plays_of_mine:one", "--run-id", "m")["runId"] == "m"
    assert cli.json("status", "m")["playName"] == "plays_of_mine:one"


def test_signal_cancel_and_retry_answer_with_position_and_words(cli: Caller) -> None:
    """One command, one answer; asking again is the same answer."""
    cli("submit", f"{PLAYS}:approve", "--run-id", "r")
    one = cli.json("signal", "r", "approval", "--data", "1", "--id", "s1")
    two = cli.json("signal", "r", "approval", "--data", "1", "--id", "s1")
    assert (one["replayed"], two["replayed"]) == (False, True)
    assert one["position"] == two["position"]
    assert "nothing of r waits" in cli("retry", "r").out
    assert cli.json("retry", "r")["resumed"] == []
    first = cli("cancel", "r", "--reason", "order withdrawn")
    assert first.code == 0
    assert re.match(r"r\tr is cancelled; no instance of it ran\t@\d+", first.out)
    assert "r is cancelled already" in cli("cancel", "r").out


def test_rerun_takes_input_files_and_play_of_the_old_run(cli: Caller) -> None:
    """A new run of its own, with its own copy of the files."""
    (cli.folder / "a.txt").write_text("abc")
    (cli.folder / "b.txt").write_text("x")
    play = f"{PLAYS}:files"
    cli("run", play, "--input", "@a.txt", "--input", "@b.txt", "--input", "7", "--run-id", "old")
    (cli.folder / "a.txt").unlink()
    assert cli.json("rerun", "old", "--run-id", "new")["status"] == "submitted"
    shown = cli.json("status", "new", "--reveal")
    assert (shown["input"], shown["files"]) == (7, ["a.txt", "b.txt"])
    cli("rerun", "old", "--run-id", "other", "--input", "8")
    assert cli.json("status", "other", "--reveal")["input"] == 8


# --- keeping --------------------------------------------------------------------------------------


def test_export_writes_the_stored_bytes(cli: Caller) -> None:
    """To a file that has its name only when whole, of the log, a run or a family."""
    cli("run", f"{WEATHER}:yearly_report", "--input", f"@{CSV}", "--run-id", "w")
    count = len(list(export(Path("demo.db"))))
    assert cli("export", "-o", "log.jsonl").out == f"✓ {count} events in log.jsonl\n"
    assert Path("log.jsonl").read_bytes().splitlines() == list(export(Path("demo.db")))
    assert cli.json("export", "w", "-o", "run.jsonl")["events"] == 15
    assert cli.json("export", "w", "--family", "-o", "family.jsonl")["events"] == 47
    assert not list(Path().glob("*.part"))


def test_export_to_a_pipe_is_bytes(cli: Caller) -> None:
    """What goes through a pipe is what stands in the file."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    said = call("export", "--db", "demo.db", cwd=cli.folder)
    assert said.out.encode().splitlines() == list(export(cli.folder / "demo.db"))


def test_a_reader_that_goes_away_ends_a_command_without_a_word(cli: Caller) -> None:
    """As with any other tool before `head`."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    for verb in ("tail", "export"):
        with running(verb, "--db", "demo.db", cwd=cli.folder) as process:
            assert process.stdout is not None
            process.stdout.close()
            assert process.stderr is not None
            assert process.stderr.read() == ""
            assert process.wait(timeout=30) == 141


def test_replay_is_the_same_program(cli: Caller) -> None:
    """Its arguments are its own; the common options reach it from before the verb too."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    assert "run.submitted" in cli("replay", "show", "h").out
    assert cli("replay", "show", "demo.db", "h").out == cli("replay", "show", "h").out
    assert cli.json("--db", "demo.db", "replay", "verify")["ok"] is True
    assert cli("replay", "verify").code == 0
    assert "show" in cli("replay", "--help").out


def test_projections_are_verified_and_rebuilt(cli: Caller) -> None:
    """A row that was changed is found, named, and put right."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    assert cli("projections", "verify").code == 0
    with sqlite3.connect("demo.db") as connection:
        connection.execute("update runs set status = 'failed' where run_id = 'h'")
    connection.close()
    found = cli("projections", "verify")
    assert found.code == 1
    assert "status" in found.out
    assert "playledger projections rebuild" in found.err
    assert cli("projections", "rebuild").code == 0
    assert cli.json("projections", "verify")["ok"] is True


def test_db_create_migrate_and_fsck_say_what_they_found(cli: Caller) -> None:
    """Each is safe to repeat."""
    assert "is a new, empty log" in cli("db", "create", "x.db").out
    assert "is a log already, with 1 events" in cli("db", "create", "x.db").out
    assert "already" in cli("db", "migrate", "x.db").out
    assert cli("db", "fsck", "x.db").out == (
        "✓ x.db: 1 events, dense, leaves and head agree; guards in place\n"
    )
    assert cli.json("db", "fsck", "x.db") == {"ok": True, "events": 1, "findings": [], "more": 0}


def test_C022_backup_beside_a_writer_is_a_whole_log_and_proved(cli: Caller) -> None:
    """A copy taken while a run goes on opens, has no gap and hashes to its head."""
    with running(
        "run",
        f"{PLAYS}:spawner",
        "--input",
        "60",
        "--run-id",
        "s",
        "--db",
        "demo.db",
        cwd=cli.folder,
    ) as process:
        read_until(process, "children")
        for name in ("one.db", "two.db", "three.db"):
            said = cli("db", "backup", "demo.db", name, "--json")
            assert said.code == 0, said.err
            told = json.loads(said.out)
            assert told["events"] == len(list(export(cli.folder / name)))
            assert list(fsck(cli.folder / name)) == []
    leaves = list(export(cli.folder / "demo.db"))
    copy = list(export(cli.folder / "three.db"))
    assert copy == leaves[: len(copy)]
    verified = cli("replay", "verify", "three.db")
    assert verified.code == 0


def test_C022_backup_proves_the_copy_and_overwrites_nothing(cli: Caller) -> None:
    """A source whose leaves do not hash to its head gives no backup, however SQLite feels."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    assert cli("db", "backup", "good.db").code == 0
    assert cli("db", "backup", "good.db").error[0] == "good.db exists"
    with sqlite3.connect("demo.db") as connection:
        for (name,) in connection.execute(
            "select name from sqlite_master where type = 'trigger'"
        ).fetchall():
            connection.execute(f"drop trigger {name}")
        connection.execute(
            "update events set leaf = cast(replace(leaf, 'hello', 'jello') as blob)"
            " where position = 2"
        )
    connection.close()
    said = cli("db", "backup", "bad.db")
    assert said.code == 6
    assert said.error[0].startswith("bad.db.part is damaged: ")
    assert not Path("bad.db").exists()
    assert not Path("bad.db.part").exists()
    assert cli("db", "fsck").code == 1


def test_config_shows_where_each_value_came_from(cli: Caller) -> None:
    """The option, the variable, or the line of the file."""
    Path("playledger.toml").write_text("[policy]\nretry_limit = 3\n")
    said = cli("config", "--changed")
    assert said.out.splitlines() == [
        "db\tdemo.db\tPLAYLEDGER_DB",
        "policy.retry_limit\t3 (default 2)\tplayledger.toml:2",
    ]
    assert re.match(r"\d+ more at their defaults: --all\. Secrets are never shown", said.err)
    rows = [json.loads(line) for line in cli("config", "--json").out.splitlines()]
    assert {"key": "policy.retry_limit", "value": "3", "default": "2",
            "from": "playledger.toml:2"} in rows  # fmt: skip
    cli("submit", f"{PLAYS}:approve", "--run-id", "r")
    submitted = json.loads(next(export(Path("demo.db"), run="r")))
    assert submitted["data"]["policy"]["retryLimit"] == 3


# --- serving --------------------------------------------------------------------------------------


def test_serve_says_it_is_ready_wants_its_token_and_leaves_with_0(tmp_path: Path) -> None:
    """The ready block, a token by its hash alone, SIGTERM."""
    token = "0123456789abcdef0123"
    digest = sha256(token.encode()).hexdigest()
    (tmp_path / "tokens").write_text(f"ci {digest} operate\n")
    with running(
        "serve", str(PLAYS), "--port", "0", "--grace", "0s", "--db", "d.db", cwd=tmp_path,
        PLAYLEDGER_TOKENS_FILE="tokens",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        block = []
        for line in process.stdout:
            block.append(line.rstrip("\n"))
            if line.startswith("ready"):
                break
        assert block[0].startswith("playledger 0.1.0, log d.db (sqlite, synchronous=FULL), head @")
        assert "cli_plays:approve" in block[1]
        assert block[2] == "engine   local, up to 64 instances, one task each"
        assert block[3] == "auth     1 token from PLAYLEDGER_TOKENS_FILE; reads need one too"
        found = re.search(r"http://127\.0\.0\.1:\d+/", block[-1])
        assert found
        url = found[0]
        with (
            pytest.raises(urllib.error.HTTPError) as refused,
            urllib.request.urlopen(f"{url}workflow"),
        ):
            pass
        refused.value.close()
        assert refused.value.code == 401
        asked = urllib.request.Request(
            f"{url}workflow", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_a_served_run_is_submitted_and_signalled_from_the_command_line(cli: Caller) -> None:
    """Several processes share one log: what one writes the server notices."""
    with running(
        "serve", str(PLAYS), "--port", "0", "--grace", "0s", "--insecure-local", "--db", "demo.db",
        cwd=cli.folder,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert any(line.startswith("ready") for line in process.stdout)
        cli("submit", f"{PLAYS}:approve", "--run-id", "r")
        cli("signal", "r", "approval", "--data", "true")
        followed = cli("tail", "r", "-f", "--exit-status")
        assert followed.code == 0
        assert followed.out.splitlines()[-1].split("\t")[2] == "run.completed"


# --- what runs say --------------------------------------------------------------------------------

CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u2069]"
)
OURS = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|2K|\d*A)")


@pytest.mark.parametrize(
    "arguments",
    [
        ("tail", "x"),
        ("tail", "x", "--logs"),
        ("tail", "x", "--json"),
        ("tail", "x", "--logs", "--json"),
        ("status", "x"),
        ("status", "x", "--reveal"),
        ("status", "x", "--json"),
        ("runs",),
        ("why", "x"),
    ],
    ids=" ".join,
)
def test_C055_what_runs_say_cannot_act_on_a_terminal(
    cli: Caller, hostile: Path, arguments: tuple[str, ...]
) -> None:
    """In a pipe and in a terminal control characters are shown, not sent."""
    said = cli(*arguments, "--db", str(hostile / "d.db"))
    assert said.code == 0
    assert not CONTROL.search(said.out + said.err)
    assert "\x1b" not in said.out
    code, sent = call_in_terminal(*arguments, "--db", "d.db", cwd=hostile)
    text = OURS.sub("", sent.decode()).replace("\r\n", "\n")
    assert code == 0
    assert not CONTROL.search(text)
    assert "\x1b" not in text
    assert "\r" not in text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log in which a run said all of the hostile lines, shown while it ran in a terminal."""
    folder = tmp_path_factory.mktemp("hostile")
    code, sent = call_in_terminal(
        "run", f"{PLAYS}:hostile", "--run-id", "x", "--db", "d.db", cwd=folder
    )
    assert code == 1
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sent.decode()).replace("\r", "")
    assert not CONTROL.search(text)
    assert "\x1b" not in text
    return folder


def test_the_checkout_is_what_was_tested() -> None:
    """The subprocesses above run this checkout, not something installed elsewhere."""
    import playledger

    assert Path(playledger.__file__).is_relative_to(ROOT)
