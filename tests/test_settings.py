"""Settings: where each value comes from, and what is refused (UX section 7)."""

from __future__ import annotations

from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest

from handlers.submit import DEFAULT_POLICY
from playledger.settings import (
    SettingInvalid,
    Settings,
    load,
    show,
    show_duration,
)
from playledger.tokens import ControlToken, read_tokens


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("PLAYLEDGER_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def origin(key: str, **options: object) -> str:
    return load(**options).origins.get(key, "")  # type: ignore[arg-type]


def test_INV_38_default_settings_freeze_the_policy_that_the_rules_name() -> None:
    """There is one set of default numbers, and a test that keeps the two places equal."""
    assert Settings().run_policy() == DEFAULT_POLICY


def test_option_wins_over_environment_over_file_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer hides the one below it, and says that it did."""
    assert load().values.db == "playledger.db"
    (tmp_path / "playledger.toml").write_text('db = "file.db"\n')
    assert load().values.db == "file.db"
    assert origin("db") == "playledger.toml:1"
    monkeypatch.setenv("PLAYLEDGER_DB", "environment.db")
    assert load().values.db == "environment.db"
    assert origin("db") == "PLAYLEDGER_DB"
    given = load({"db": ("--db", "option.db")})
    assert (given.values.db, given.origins["db"]) == ("option.db", "--db")


def test_an_option_that_was_not_given_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """None means that the option is absent."""
    monkeypatch.setenv("PLAYLEDGER_SERVE__PORT", "81")
    assert load({"serve.port": ("--port", None)}).values.serve.port == 81


def test_own_file_hides_the_project_file_whole(tmp_path: Path) -> None:
    """As uv does: two files are never mixed."""
    project = '[project]\nname = "x"\n[tool.playledger.policy]\nretry_limit = 7\n'
    (tmp_path / "pyproject.toml").write_text(project)
    assert load().values.policy.retry_limit == 7
    assert origin("policy.retry_limit") == "pyproject.toml:4"
    (tmp_path / "playledger.toml").write_text('log.level = "debug"\n')
    assert load().values.policy.retry_limit == 2
    assert load().values.log.level == "debug"


def test_nearest_file_upward_counts_and_its_paths_are_meant_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project's log is one file, wherever in the project a command is typed."""
    (tmp_path / "playledger.toml").write_text('db = "my.db"\nplays = ["a.py", "mod"]\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert load().values.db == str(tmp_path / "my.db")
    assert load().values.plays == (str(tmp_path / "a.py"), "mod")


def test_config_option_replaces_both_files(tmp_path: Path) -> None:
    """`--config FILE` is the only file then."""
    (tmp_path / "playledger.toml").write_text('db = "one.db"\n')
    other = tmp_path / "other.toml"
    other.write_text("policy.retry_limit = 9\n")
    found = load(config=other).values
    assert (found.db, found.policy.retry_limit) == ("playledger.db", 9)


@pytest.mark.parametrize("name", ["policy.retry_limit", "policy.retryLimit"])
def test_policy_is_written_as_in_settings_or_as_in_the_log(tmp_path: Path, name: str) -> None:
    """The table is what `run.submitted` freezes, under the same names."""
    (tmp_path / "playledger.toml").write_text(f"{name} = 3\n")
    assert load().values.run_policy().retry_limit == 3


def test_lengths_are_written_with_a_unit(tmp_path: Path) -> None:
    """30s, 5m, 2d."""
    (tmp_path / "playledger.toml").write_text(
        '[policy]\nbackoff = "1500ms"\nretry_ttl = "2d"\ncancel_grace = "5m"\ncreate_window="1h"\n'
    )
    policy = load().values.run_policy()
    assert policy.backoff_ms == 1500
    assert policy.retry_ttl_ms == 172_800_000
    assert policy.cancel_grace_ms == 300_000
    assert policy.create_window_ms == 3_600_000


@pytest.mark.parametrize("text", ["0s", "1500ms", "30s", "5m", "2h", "7d"])
def test_a_length_is_shown_as_it_is_written(text: str) -> None:
    """`config` prints what could be put back."""
    from playledger.settings import duration

    assert show_duration(duration(text)) == text


@pytest.mark.parametrize(
    ("toml", "message", "hint"),
    [
        ('dbb = "x"', 'playledger.toml:1: "dbb" is no setting', 'did you mean "db"?'),
        (
            "[policy]\nretry_limt = 3",
            'playledger.toml:2: "policy.retry_limt" is no setting',
            'did you mean "policy.retry_limit"?',
        ),
        (
            '[policy]\nretry_limit = "x"',
            "playledger.toml:2: policy.retry_limit: input should be a valid integer",
            "its default: 2",
        ),
        (
            '[policy]\nbackoff = "5"',
            "playledger.toml:2: policy.backoff: a length is written 500ms, 30s, 5m, 2h or 2d",
            "its default: 5s",
        ),
        (
            'token = "s3cret"',
            'playledger.toml:1 holds "token": no secret belongs in a settings file',
            "PLAYLEDGER_TOKEN_FILE=FILE",
        ),
        (
            'db = "postgresql://u:pw@host/x"',
            'playledger.toml:1 holds a password in "db"',
            "environment",
        ),
        ("db = ", "playledger.toml is not TOML", "mend that line"),
        ("[policy]\nretry_limit = -1", "policy.retry_limit: input should be greater", "2"),
        ("[serve]\nport = 99999", "serve.port: input should be less than", "7529"),
        ('engine.isolation = "thread"', "engine.isolation: input should be 'task'", "task"),
    ],
    ids=lambda text: str(text)[:30],
)
def test_a_setting_that_cannot_be_is_refused_by_its_place(
    tmp_path: Path, toml: str, message: str, hint: str
) -> None:
    """File and line, both values, and the nearest known name."""
    (tmp_path / "playledger.toml").write_text(toml + "\n")
    with pytest.raises(SettingInvalid) as refused:
        load()
    assert message in refused.value.message
    assert hint in refused.value.hint
    assert "s3cret" not in refused.value.message + refused.value.hint
    assert "pw" not in refused.value.message.replace("password", "")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PLAYLEDGER_POLICY__RETRY_LMIT", "3", "PLAYLEDGER_POLICY__RETRY_LMIT"),
        ("PLAYLEDGER_TOKNS_FILE", "x", "PLAYLEDGER_TOKNS_FILE"),
        ("PLAYLEDGER_SERVE__PORT", "high", "PLAYLEDGER_SERVE__PORT: serve.port"),
    ],
)
def test_a_slip_in_the_environment_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    """A variable that does nothing is worse than an error."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingInvalid, match=message):
        load()


def test_variables_of_others_with_our_prefix_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not one slip away from a setting is none of ours."""
    monkeypatch.setenv("PLAYLEDGER_DEPLOYED_BY", "ci")
    monkeypatch.setenv("PLAYLEDGER_DB", "")
    assert load().values.db == "playledger.db"


def test_a_list_in_the_environment_is_written_with_commas_or_as_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are what people try."""
    monkeypatch.setenv("PLAYLEDGER_PLAYS", "a.py, b.py")
    assert load().values.plays == ("a.py", "b.py")
    monkeypatch.setenv("PLAYLEDGER_PLAYS", '["a.py","b.py"]')
    assert load().values.plays == ("a.py", "b.py")


def test_rows_name_every_setting_with_its_default() -> None:
    """`config` leaves nothing out."""
    rows = {row.key: row for row in load({"db": ("--db", "x.db")}).rows()}
    assert rows["db"].changed
    assert rows["db"].value == "x.db"
    assert not rows["policy.backoff"].changed
    assert rows["policy.backoff"].default == timedelta(seconds=5)
    assert show(rows["tokens_file"].value) == "-"


def test_tokens_file_holds_hashes_and_never_a_token(tmp_path: Path) -> None:
    """A line is a name, the SHA-256 of a token, its role, and its organisation if it has one."""
    digest = sha256(b"a-token-of-ci-0123456789").hexdigest()
    path = tmp_path / "tokens"
    path.write_text(
        f"# who may come in\nci {digest} operate  # the build\n\nboss {'1' * 64} admin acme\n"
    )
    assert read_tokens(Settings(tokens_file=str(path))) == {
        "ci": ControlToken(digest, "operate"),
        "boss": ControlToken("1" * 64, "admin", "acme"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ci a-token-of-ci-0123456789", ":1 is not a name, the SHA-256 of a token and a role"),
        (f"ci {'0' * 64} read\nci {'1' * 64} read", ':2 names "ci" a second time'),
        (f"ci {'0' * 64}", ':1 gives "ci" no role'),
        (f"ci {'0' * 64} root", ':1 gives "ci" the role "root", which is none'),
        (f"ci {'0' * 64} read acme too", ":1 has 5 words"),
        ("ci", ":1 is not a name"),
    ],
)
def test_tokens_file_that_is_unfit_is_refused_by_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    """The message names file and line and does not repeat what may be a secret."""
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(SettingInvalid) as refused:
        read_tokens(Settings(tokens_file=str(path)))
    assert message in refused.value.message
    assert "a-token" not in refused.value.message


def test_token_file_holds_one_token(tmp_path: Path) -> None:
    """The simple way for one machine: a file with the token itself, made by openssl rand."""
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    found = read_tokens(Settings(token_file=str(path)))
    assert found == {"token_file": ControlToken(sha256(b"0123456789abcdef").hexdigest(), "admin")}
    path.write_text("short\n")
    with pytest.raises(SettingInvalid, match="holds 5 characters"):
        read_tokens(Settings(token_file=str(path)))
    with pytest.raises(SettingInvalid, match="cannot be read"):
        read_tokens(Settings(token_file=str(tmp_path / "none")))
