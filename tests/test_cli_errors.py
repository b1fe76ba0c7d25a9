"""Every error is two lines that say what happened and what to do (UX section 4)."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ledger.errors import LogFull, Overloaded
from playledger.cli.console import Common, Console
from tests.cli_world import CSV, PLAYS, WEATHER, Caller, cli

__all__ = ["cli"]
HELLO = f"{PLAYS}:hello"
NOBODY = 65534


def check(
    cli: Caller, exits: int, message: str, hint: str, *arguments: str, **details: object
) -> None:
    """Expects exactly one error, in both of its forms, and nothing on stdout."""
    said = cli(*arguments)
    assert said.code == exits, said.err
    assert said.out == ""
    assert re.fullmatch(f"(?s:.*)error: {message}\nhint: {hint}\n", said.err), said.err
    assert "Traceback" not in said.err
    told = cli(*arguments, "--json")
    assert told.code == exits
    assert told.out == ""
    error = json.loads(told.err.splitlines()[-1])["error"]
    assert list(error) == ["code", "message", "phase", "runId", "retriable", "hint", "details"]
    assert re.fullmatch(message, error["message"])
    assert re.fullmatch(hint, error["hint"])
    for name, value in details.items():
        assert error[name] == value


def test_1_a_run_that_is_not_there_names_the_nearest(cli: Caller) -> None:
    """The same words from every command that takes a run."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "weather-demo")
    hint = 'did you mean "weather-demo"\\? all: playledger runs --db demo.db'
    message = 'run "wether-demo" is not in demo.db'
    for verb in ("status", "why", "tail", "cancel", "retry", "rerun", "export"):
        check(
            cli,
            4,
            message,
            hint,
            verb,
            "wether-demo",
            code="RUN_NOT_FOUND",
            phase=verb,
            runId="wether-demo",
        )
    check(cli, 4, message, hint, "signal", "wether-demo", "go", code="RUN_NOT_FOUND")


def test_2_a_play_that_is_not_there_names_those_that_are(cli: Caller) -> None:
    """Of a file, of a module, and of nothing."""
    check(
        cli,
        2,
        f'{WEATHER} has no play "yearly_reprot"',
        "it has: one_year, yearly_report",
        "run",
        f"{WEATHER}:yearly_reprot",
        code="PLAY_NOT_FOUND",
    )
    check(cli, 2, "no.py does not exist", "check the path", "run", "no.py:x")
    check(cli, 2, 'no module "nowhere": .*', ".*", "submit", "nowhere:x", code="PLAY_NOT_FOUND")
    check(cli, 2, '"hello" names no play', "FILE.py:FUNCTION or MODULE:FUNCTION", "run", "hello")
    assert not Path("demo.db").exists()


def test_a_file_of_plays_that_does_not_load_says_where(cli: Caller) -> None:
    """One line, with the line of the file; the rest with --traceback."""
    Path("bad.py").write_text("x = 1\nraise RuntimeError('no luck')\n")
    Path("worse.py").write_text("def f(:\n")
    check(
        cli,
        2,
        "bad.py, line 2: RuntimeError: no luck",
        "python bad.py shows .*",
        "run",
        "bad.py:f",
        code="PLAY_NOT_LOADED",
    )
    check(
        cli, 2, "worse.py, line 1: SyntaxError: .*", ".*", "serve", "worse.py", "--insecure-local"
    )


@pytest.mark.parametrize(
    ("given", "message", "hint", "code"),
    [
        (
            "world",
            "--input: world is not JSON, line 1 column 1",
            "a string needs its quotes: --input '\"world\"'",
            "JSON_INVALID",
        ),
        (
            '{"a":1,"a":2}',
            '--input: key "a" twice, line 1 column 8, at \\$',
            "keep one",
            "JSON_DUPLICATE_KEY",
        ),
        (
            '{"a":NaN}',
            "--input: NaN is not JSON, line 1 column 6, at \\$.a",
            "use null or a string",
            "JSON_NOT_FINITE",
        ),
        (
            '{"id":9007199254740993}',
            "--input: 9007199254740993 at \\$.id is beyond 9007199254740991",
            "send it as a string",
            "JSON_INTEGER_TOO_LARGE",
        ),
    ],
    ids=["3", "4", "5", "6"],
)
def test_3_to_6_json_is_refused_with_its_place(
    cli: Caller, given: str, message: str, hint: str, code: str
) -> None:
    """By the same gate as HTTP; nothing is opened for it."""
    check(cli, 2, message, hint, "run", f"{PLAYS}:echo", "--input", given, code=code)
    Path("in.json").write_text(given)
    assert cli("run", f"{PLAYS}:echo", "--input", "@in.json").error[0].startswith("--input: ")
    assert not Path("demo.db").exists()


def test_7_an_input_that_does_not_fit_shows_the_signature(cli: Caller) -> None:
    """Refused at the door, with the path and the value."""
    check(
        cli,
        2,
        'input does not fit cli_plays:pay: \\$.amount .*, got "12,50"',
        "its signature: pay\\(.*",
        "run",
        f"{PLAYS}:pay",
        "--input",
        '{"item":"x","amount":"12,50"}',
        code="INPUT_INVALID",
    )
    assert cli("runs").out == ""


def test_8_a_run_id_that_is_taken_shows_both_digests(cli: Caller) -> None:
    """Another request under the same id is a conflict, and the first stays."""
    cli("run", HELLO, "--input", '"a"', "--run-id", "h")
    check(
        cli,
        5,
        'run "h" exists with another request: stored .{8}, this .{8}',
        "another --run-id, or playledger rerun h --input ...",
        "run",
        HELLO,
        "--input",
        '"b"',
        "--run-id",
        "h",
        code="RUN_CONFLICT",
        runId="h",
    )
    check(
        cli,
        5,
        'run "h" exists with another request: .*',
        ".*",
        "submit",
        HELLO,
        "--input",
        '"b"',
        "--run-id",
        "h",
    )


def test_10_an_input_over_the_limit_is_to_be_staged(
    cli: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both sizes."""
    monkeypatch.setenv("PLAYLEDGER_POLICY__MAX_BYTES", "2000")
    for size in (3000, 300_000):
        check(
            cli,
            2,
            f".*{size + 2} bytes.*2000.*",
            "stage it: --input @file reaches the play as run.file\\(\\)",
            "run",
            HELLO,
            "--input",
            json.dumps("x" * size),
            code="PARAMS_TOO_LARGE",
        )


@pytest.mark.parametrize("run_id", ["a//b", "-a", "x" * 201, "ä", "a b", "a/../b", ""])
def test_12_a_run_id_outside_its_alphabet_is_refused(cli: Caller, run_id: str) -> None:
    """At the door; nothing is stored."""
    said = cli("run", HELLO, "--input", '"x"', f"--run-id={run_id}")
    assert said.code == 2
    assert said.error[0].startswith("run id ")
    assert said.error[1] == "1 to 200 of A-Za-z0-9._:~/-"
    assert cli("runs").out == ""


def test_13_an_ended_run_takes_no_signal_and_no_cancel(cli: Caller) -> None:
    """With the position of its end, and what to do instead (C011, C056)."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    check(
        cli,
        5,
        'h is completed since @\\d+ and takes no signal "go"',
        "start another: playledger rerun h",
        "signal",
        "h",
        "go",
        code="RUN_TERMINAL",
    )
    check(cli, 5, "h is completed since @\\d+ and cannot be cancelled", ".*", "cancel", "h")


def test_16_a_file_that_was_not_staged_fails_the_run(cli: Caller) -> None:
    """The run fails once, and says which files there are."""
    Path("rain.txt").write_text("x")
    said = cli("run", f"{PLAYS}:files", "--input", "@rain.txt", "--run-id", "f")
    assert said.code == 1
    assert 'run.file("a.txt"): staged are "rain.txt"' in said.err


def test_20_serve_without_tokens_is_refused(cli: Caller) -> None:
    """Unless it is asked for, and then on this machine only."""
    hint = "set PLAYLEDGER_TOKENS_FILE, or --insecure-local on 127.0.0.1"
    check(
        cli,
        2,
        "no control token is set: refusing to serve on 0.0.0.0:7529",
        hint,
        "serve",
        str(PLAYS),
        "--host",
        "0.0.0.0",
    )
    check(
        cli,
        2,
        "--insecure-local is for this machine alone: refusing to serve on 0.0.0.0:7529",
        ".*--host 127.0.0.1",
        "serve",
        str(PLAYS),
        "--host",
        "0.0.0.0",
        "--insecure-local",
    )
    check(cli, 2, "no play is offered", ".*", "serve", "--insecure-local")
    assert not Path("demo.db").exists()


def test_21_a_log_that_is_locked_says_so_after_5_seconds(cli: Caller) -> None:
    """Writing waits for its turn and gives up; reading does not wait at all."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    holder = os.open("demo.db.lock", os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert cli("status", "h").code == 0
        said = cli("cancel", "h", "--json")
    finally:
        os.close(holder)
    error = json.loads(said.err)["error"]
    assert said.code == 6
    assert error["code"] == "LOG_LOCKED"
    assert error["retriable"] is True
    assert error["message"] == ("demo.db is locked: another process held the write lock for 5.0 s")
    assert error["hint"] == "`fuser demo.db` names it; to copy a log: playledger db backup"


def test_22_and_27_full_disk_and_full_queue_are_6(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be had from a test's file system is shown from its error alone."""
    console = Console(Common(), "submit")
    full = LogFull(
        "demo.db: disk full (0 bytes free), nothing was recorded",
        hint="free space, then the same command again",
    )
    assert console.fail(full) == 6
    assert console.fail(Overloaded("the write queue is full: 4096 of 4096 wait", hint="again")) == 6
    assert capsys.readouterr().err.splitlines()[:2] == [
        "error: demo.db: disk full (0 bytes free), nothing was recorded",
        "hint: free space, then the same command again",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "x"),
        ("runs",),
        ("tail",),
        ("why", "x"),
        ("signal", "x", "go"),
        ("cancel", "x"),
        ("retry", "x"),
        ("rerun", "x"),
        ("export",),
        ("db", "fsck"),
        ("db", "migrate"),
        ("db", "backup", "copy.db"),
        ("projections", "verify"),
        ("replay", "show", "x"),
    ],
    ids=" ".join,
)
def test_23_24_reading_creates_nothing_and_takes_nothing_else(
    cli: Caller, arguments: tuple[str, ...]
) -> None:
    """A log that is missing, and a file that is something else."""
    said = cli(*arguments)
    assert said.code == 2
    assert said.error == [
        "demo.db does not exist, and reading creates nothing",
        "check the path, or make one: playledger db create demo.db",
    ]
    assert list(Path().iterdir()) == []
    Path("demo.db").write_bytes(b"\x8f\x1e\x04 and more")
    said = cli(*arguments)
    assert said.code == 2
    assert said.error == [
        'demo.db is not a playledger log: it starts with 8f1e04, not "SQLite format 3"',
        "check the path, or make one: playledger db create PATH",
    ]
    assert Path("demo.db").read_bytes() == b"\x8f\x1e\x04 and more"


def test_24_run_and_create_do_not_touch_what_is_no_log(cli: Caller) -> None:
    """Neither a file of another kind, nor a database of somebody else, nor a folder."""
    Path("demo.db").write_bytes(b"my only copy")
    for arguments in (("run", HELLO, "--input", '"x"'), ("db", "create")):
        assert cli(*arguments).code == 2
    assert Path("demo.db").read_bytes() == b"my only copy"
    with sqlite3.connect("other.db") as connection:
        connection.execute("create table t (x)")
    connection.close()
    said = cli("run", HELLO, "--input", '"x"', "--db", "other.db")
    assert said.code == 2
    assert said.error[0] == "other.db is a database, but not a playledger log"
    Path("folder").mkdir()
    assert cli("status", "x", "--db", "folder").error[0] == "folder is a folder, not a log"
    assert cli("run", HELLO, "--input", '"x"', "--db", "folder").code in (2, 6)
    assert cli("run", HELLO, "--input", '"x"', "--db", "no/such/x.db").code in (2, 6)


def test_25_a_log_of_a_newer_release_is_left_alone(cli: Caller) -> None:
    """By readers and writers alike."""
    cli("run", HELLO, "--input", '"x"', "--run-id", "h")
    with sqlite3.connect("demo.db") as connection:
        connection.execute("update alembic_version set version_num = '9999'")
    connection.close()
    for arguments in (
        ("status", "h"),
        ("tail",),
        ("cancel", "h"),
        ("run", HELLO, "--input", '"x"'),
    ):
        check(
            cli,
            6,
            "demo.db has schema 9999, playledger .* knows up to .*",
            "upgrade playledger; nothing was changed",
            *arguments,
            code="SCHEMA_NEWER",
        )


def test_26_a_damaged_log_is_named_and_never_a_traceback(cli: Caller) -> None:
    """Bytes overwritten in the middle of the file."""
    (cli.folder / "big.txt").write_text("x" * 400_000)
    cli("run", f"{WEATHER}:yearly_report", "--input", f"@{CSV}", "--run-id", "w")
    cli("db", "backup", "copy.db")
    with Path("copy.db").open("r+b") as file:
        file.seek(8192)
        file.write(b"\xa5" * 60_000)
    codes = set()
    for arguments in (
        ("status", "w"),
        ("runs",),
        ("tail",),
        ("cancel", "w"),
        ("db", "fsck"),
        ("replay", "verify"),
        ("db", "backup", "again.db"),
    ):
        said = cli(*arguments, "--db", "copy.db")
        assert "Traceback" not in said.err
        assert "internal error" not in said.err
        codes.add(said.code)
    assert codes & {1, 6}
    assert not Path("again.db").exists()


def test_a_folder_that_cannot_be_written_can_be_read(
    cli: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """status, runs and tail work; what writes says why it cannot."""
    with TemporaryDirectory() as name, as_nobody(Path(name)) as begin:
        monkeypatch.chdir(name)
        cli("run", HELLO, "--input", '"x"', "--run-id", "h")
        for arguments in (("status", "h"), ("tail", "h"), ("cancel", "h")):
            cli(*arguments)  # everything is imported before the rights are gone
        begin()
        assert cli("status", "h").code == 0
        assert cli("tail", "h").code == 0
        said = cli("cancel", "h")
    assert said.code == 6
    assert "cannot be" in said.error[0]


@contextmanager
def as_nobody(folder: Path) -> Iterator[Callable[[], None]]:
    """Gives what takes away the right to write into a folder, also from root, for a block."""
    user = os.geteuid()

    def begin() -> None:
        if user == 0:
            for path in (folder, *folder.iterdir()):
                os.chown(path, NOBODY, NOBODY)
        folder.chmod(0o555)
        os.seteuid(NOBODY if user == 0 else user)

    try:
        yield begin
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("statsu",), 'no such command "statsu"', 'did you mean "status".*all: playledger --help'),
        (("zzz",), 'no such command "zzz"', "all: playledger --help"),
        (("status",), 'missing argument "RUN"', "playledger status --help"),
        (("run", "a:b", "--inptu", "1"), "no such option: --inptu.*", ".*"),
        (("runs", "--limit", "many"), ".*--limit.*", "playledger runs --help"),
        (("runs", "--status", "done"), '--status: "done" is no status', "submitted .*"),
        (("runs", "--before", "x"), '--before: "x" is no position', "--before @58"),
        (("run", HELLO, "--isolation", "vm"), '--isolation: engine.isolation: .*"vm"', ".*task"),
        (("serve", "x.py", "--grace", "10"), "--grace: serve.grace: a length .*", ".*10s"),
        (("--db",), "--db needs a value", "--db DB"),
        (("run", HELLO, "--input", "1", "--input", "2"), '--input: a second JSON value, "2"', ".*"),
        (("run", HELLO, "--input", "@none.txt"), "--input: none.txt does not exist", ".*"),
        (("signal", "r", "k", "--data", "@none"), "--data: none does not exist", ".*"),
        (("help", "me"), 'there is no help on "me"', ".*"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_what_was_typed_is_refused_with_2(
    cli: Caller, arguments: tuple[str, ...], message: str, hint: str
) -> None:
    """The parser's own words, in our two lines."""
    said = cli(*arguments)
    assert said.code == 2, said.err
    assert said.out == ""
    assert len(said.error) == 2, said.err
    assert re.fullmatch(message, said.error[0]), said.error
    assert re.fullmatch(hint, said.error[1]), said.error


def test_a_refused_command_keeps_nothing(cli: Caller) -> None:
    """Not a file is left behind by what was refused at the door."""
    cli("run", HELLO, "--input", "nope")
    cli("run", "no.py:x")
    cli("status", "x")
    assert list(Path().iterdir()) == []


def test_the_unexpected_is_one_line_and_shows_more_when_asked(cli: Caller) -> None:
    """Never a traceback, but with --traceback."""
    odd = ("status", "x", "--db", "a\0b")
    said = cli(*odd)
    assert said.code == 6
    assert said.error[0].startswith("internal error in status: ValueError: ")
    assert "--traceback" in said.error[1]
    assert "Traceback" in cli(*odd, "--traceback").err


def test_an_error_cannot_act_on_a_terminal(cli: Caller) -> None:
    """What was typed is shown escaped."""
    said = cli("status", "a\x1b[2Jb\u202ec", "--db", "x\x1b[2J.db")
    assert "\x1b" not in said.err
    assert "\u202e" not in said.err
