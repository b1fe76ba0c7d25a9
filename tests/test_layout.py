"""The style is a test: which way imports go, what is pure, how long files are, what names hold."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

import pytest

from handlers.decide import decide
from handlers.react import react
from ledger.events import EVENT_TYPES, RunEvent
from playledger.version import VERSION
from projections.rows import project
from projections.run import evolve
from projections.state import RunState
from tests.given import (
    Fact,
    Later,
    Story,
    cancel,
    child,
    child_ended,
    created,
    errored,
    fired,
    loaded,
    lost,
    signal,
    submitted,
    terminated,
    wait,
)

ROOT: Final = Path(__file__).parents[1]
LAYERS: Final = ("ledger", "projections", "handlers", "engines", "playledger")
SOURCES: Final = [
    ROOT / "replay.py",
    *sorted(
        path
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*.py")
        if "migrations/versions" not in path.as_posix()
    ),
]
TESTS: Final = sorted((ROOT / "tests").rglob("*.py"))
LINES_MAX: Final = 400
FUNCTION_MAX: Final = 70


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yields every module a file imports, wherever in it, with its line."""
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.Import):
            for alias in found.names:
                yield alias.name, found.lineno
        elif isinstance(found, ast.ImportFrom):
            yield found.module or "", found.lineno


# --- which way imports go -------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    """Ledger <- projections <- handlers <- engines <- playledger; nothing imports the tests."""
    layer = path.relative_to(ROOT).parts[0]
    if layer not in LAYERS:
        return
    above = LAYERS[LAYERS.index(layer) + 1 :]
    for module, line in imports(path):
        top = module.split(".")[0]
        assert top not in (*above, "tests"), f"{name_of(path)}:{line} imports {module}"
        if layer == "playledger":
            continue
        assert top != "replay", f"{name_of(path)}:{line} imports {module}"
        assert top not in ("fastapi", "typer", "rich", "uvicorn"), f"{name_of(path)}:{line}"


def test_INV_81_replay_reaches_no_engine_no_effect_and_no_writer() -> None:
    """Nor does anything it loads: an effect is impossible, not forbidden."""
    code = (
        "import sys, replay; print(sorted(m for m in sys.modules if m.split('.')[0] in"
        " ('engines', 'playledger') or m in ('handlers.effects', 'handlers.acts', 'handlers.port',"
        " 'handlers.submit', 'handlers.node')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    allowed = {"playledger", "playledger.version"}
    assert set(ast.literal_eval(done.stdout)) <= allowed


# --- purity ---------------------------------------------------------------------------------------

PURE: Final = (
    "ledger/events.py",
    "ledger/ids.py",
    "projections/state.py",
    "projections/run.py",
    "projections/rows.py",
    "handlers/commands.py",
    "handlers/decide.py",
    "handlers/react.py",
    "handlers/retry.py",
    "handlers/ends.py",
)
IMPURE: Final = frozenset(
    [
        "time",
        "random",
        "os",
        "asyncio",
        "sqlite3",
        "threading",
        "secrets",
        "socket",
        "subprocess",
        "pathlib",
        "logging",
        "structlog",
        "datetime",
        "uuid",
        "sqlalchemy",
        "aiosqlite",
        "io",
        "tempfile",
    ]
)


@pytest.mark.parametrize("name", PURE)
def test_INV_82_rules_and_folds_import_nothing_that_is_not_a_function_of_its_arguments(
    name: str,
) -> None:
    for module, line in imports(ROOT / name):
        assert module.split(".")[0] not in IMPURE, f"{name}:{line} imports {module}"


def test_INV_82_rules_and_folds_read_no_clock_no_chance_no_file_and_no_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long story is told while all of them raise, and gives what it gave before."""
    facts: list[Fact] = [
        submitted(timeout_ms=50_000, retry_limit=3),
        created(),
        child(),
        wait(until=10**13),
        signal(),
        errored("platform_reset", again_in=5),
        loaded(),
        created(1),
        lost(attempt=1),
        loaded(1),
        created(2),
        child_ended(),
        child("b"),
        cancel(),
        Later(10_000, fired("cancel_grace")),
        terminated(2),
    ]
    before = Story(*facts)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a rule reached out of its arguments")

    with monkeypatch.context() as patch:
        for clock in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "sleep"):
            patch.setattr(time, clock, refuse)
        for chance in ("random", "randint", "uniform", "choice", "shuffle"):
            patch.setattr(f"random.{chance}", refuse)
        patch.setattr("os.urandom", refuse)
        patch.setattr("os.getenv", refuse)
        patch.setattr("secrets.token_bytes", refuse)
        patch.setattr("uuid.uuid4", refuse)
        patch.setattr(builtins, "open", refuse)
        patch.setattr("socket.socket", refuse)
        after = Story(*facts)
        state: RunState | None = None
        for recorded in after.events:
            earlier, state = state, evolve(state, recorded)
            project(recorded, earlier, state)
    assert after.events == before.events
    assert after.state == before.state == state


@pytest.mark.parametrize("function", [decide, react, evolve, project])
def test_the_rules_are_plain_functions_of_named_values(function: object) -> None:
    """No defaults that hide something, no coroutine, no method."""
    assert callable(function)
    code = function.__code__  # type: ignore[attr-defined]
    assert not code.co_flags & 0x80  # a coroutine
    assert not code.co_freevars
    assert function.__defaults__ is None  # type: ignore[attr-defined]


# --- every event ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", get_args(RunEvent), ids=lambda kind: kind.__name__)
def test_every_event_of_a_run_has_its_case_in_fold_rules_and_tests(kind: type[RunEvent]) -> None:
    """A new one is found here before it is found in a log."""
    for name in ("projections/run.py", "projections/rows.py", "handlers/react.py",
                 "handlers/decide.py"):  # fmt: skip
        assert re.search(rf"\be\.{kind.__name__}\b", (ROOT / name).read_text()), name
    tests = "\n".join(path.read_text() for path in TESTS if path.name.startswith("test_"))
    assert re.search(rf"\be\.{kind.__name__}\b", tests) or kind.__name__ in tests


def test_every_event_stands_in_the_catalogue_of_the_docs() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    for name in EVENT_TYPES:
        assert f"### `{name}`" in page


# --- sizes and words ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_are_short_or_say_why(path: Path) -> None:
    """Under 400 lines, or named with a reason in ARCHITECTURE.md."""
    lines = path.read_text().count("\n")
    if lines <= LINES_MAX:
        return
    architecture = ROOT / "ARCHITECTURE.md"
    if not architecture.exists():
        pytest.skip("ARCHITECTURE.md is not written yet")
    _, _, reasons = architecture.read_text().partition("## Files over 400 lines")
    assert f"`{name_of(path)}`" in reasons, f"{name_of(path)} has {lines} lines, and no reason"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    """Under 70 lines, but for one `match` over the catalogue and what it cannot be without."""
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (found.end_lineno or 0) - found.lineno + 1
            body = [part for part in found.body if isinstance(part, ast.Match)]
            cases = sum((part.end_lineno or 0) - part.lineno + 1 for part in body)
            assert lines - cases <= FUNCTION_MAX, f"{name_of(path)}:{found.lineno} {found.name}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_are_named_for_what_they_hold(path: Path) -> None:
    banned = {"utils", "util", "common", "base", "manager", "helpers", "misc"}
    assert not banned & set(path.with_suffix("").parts)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), f"{name_of(path)} has no docstring"


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == VERSION


def test_every_package_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    there = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for layer in LAYERS
        for path in (ROOT / layer).rglob("__init__.py")
        if "migrations" not in path.as_posix()
    }
    assert there == listed


# --- what is tested where -------------------------------------------------------------------------

INVARIANTS: Final = (*range(1, 39), 55, 56, *range(62, 71), *range(80, 91))
KINDS: Final = (*range(1, 11), *range(12, 17), 18, 20, 25, 26, 28, 29)


def names() -> dict[str, set[str]]:
    """Returns which tests name an invariant or a case, by its id."""
    found: dict[str, set[str]] = {}
    for path in TESTS:
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE):
            for number in re.findall(r"(?:INV_\d+|(?<=_)C\d{3})(?=_|$)", name):
                found.setdefault(number.replace("_", "-"), set()).add(path.name)
    return found


def page() -> str:
    return (ROOT / "tests" / "CASES.md").read_text()


def rows(start: str) -> dict[str, str]:
    """Returns the rows of tests/CASES.md whose first cell begins so."""
    return {
        number: rest
        for number, rest in re.findall(r"^\| (\S+) \| (.*) \|$", page(), re.MULTILINE)
        if number.startswith(start)
    }


@pytest.mark.parametrize("number", INVARIANTS, ids=lambda n: f"INV-{n:02}")
def test_every_invariant_is_in_the_name_of_a_test_or_has_a_reason(number: int) -> None:
    row = rows("INV-")[f"INV-{number:02}"]
    where = names().get(f"INV-{number:02}", set())
    assert where or "not yet:" in row, f"no test is named for INV-{number:02}"


def test_every_file_that_the_table_of_cases_names_holds_what_it_says() -> None:
    found = names()
    for number, row in (rows("INV-") | rows("C0")).items():
        for name in re.findall(r"`(test_\w+\.py)`", row):
            assert name in found.get(number, set()), f"{name} names no {number}"


def test_every_case_is_in_the_name_of_a_test_or_has_a_reason() -> None:
    found = names()
    listed = rows("C0")
    kinds = {int(kind) for kind in re.findall(r"^\| C\d{3} \| K(\d\d) ", page(), re.MULTILINE)}
    assert kinds >= set(KINDS)
    for number, row in listed.items():
        assert found.get(number) or "not yet:" in row, f"no test is named for {number}"
    assert {number for number in found if number.startswith("C")} <= set(listed)
