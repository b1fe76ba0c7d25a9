"""Plays: how a file or module becomes plays, how they are named, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from engines.plays import Plays, as_play, find_play, load_module, load_origin, plays_in
from ledger.errors import InputInvalid, PlayNotFound, Refused
from playledger import Run, play

ROOT = Path(__file__).resolve().parent.parent


class Order(BaseModel):
    id: int
    note: str = ""


@play
async def takes_order(_run: Run, order: Order) -> Order:
    return order


@play
async def takes_nothing(_run: Run) -> None:
    return None


@play
async def takes_default(_run: Run, n: int = 3) -> int:
    return n


def write(folder: Path, name: str, text: str) -> str:
    """Writes a file of plays and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("from playledger import Run, play\n" + textwrap.dedent(text))
    return str(path)


def test_a_file_is_loaded_by_location_and_its_plays_are_named_without_the_folder(
    tmp_path: Path,
) -> None:
    """Only its own marked functions; what it imports is another file's."""
    path = write(
        tmp_path / "deep" / "er",
        "orders.py",
        """
        @play
        async def ship(run: Run, n: int) -> int:
            return n

        @play(name="orders/bill")
        def bill(run: Run) -> None: ...

        async def not_marked(run: Run) -> None: ...
        """,
    )
    assert [item.name for item in plays_in(path)] == ["orders:ship", "orders/bill"]
    assert find_play(path + ":not_marked").name == "orders:not_marked"


def test_two_files_of_one_stem_live_side_by_side(tmp_path: Path) -> None:
    """They are loaded under private names, and neither shadows the other."""
    text = """
        @play(name="{0}")
        async def go(run: Run) -> str:
            return "{0}"
        """
    one = write(tmp_path / "one", "same.py", text.format("one"))
    two = write(tmp_path / "two", "same.py", text.format("two"))
    modules = [load_module(one), load_module(two)]
    assert modules[0] is not modules[1]
    assert [item.name for item in plays_in(one) + plays_in(two)] == ["one", "two"]
    assert load_module(one) is modules[0]


def test_two_functions_of_one_play_name_are_refused(tmp_path: Path) -> None:
    """PLAY_NAME_TAKEN names both places and the way out."""
    text = """
        @play
        async def go(run: Run) -> None: ...
        """
    one = plays_in(write(tmp_path / "three", "twin.py", text))
    two = plays_in(write(tmp_path / "four", "twin.py", text))
    with pytest.raises(Refused, match="two plays are named") as refused:
        Plays([*one, *two])
    assert refused.value.code == "PLAY_NAME_TAKEN"
    assert "three" in refused.value.message
    assert "four" in refused.value.message


@pytest.mark.parametrize("name", ["ledger", "handlers", "replay"])
def test_a_folder_that_holds_one_of_our_names_is_refused(tmp_path: Path, name: str) -> None:
    """Else `import ledger` in a play would be the user's, or ours, by accident."""
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    path = write(tmp_path, "plays.py", "@play\nasync def go(run: Run) -> None: ...\n")
    with pytest.raises(PlayNotFound, match=f"holds {name}.py") as refused:
        plays_in(path)
    assert refused.value.code == "PLAY_FOLDER_CLASH"


def test_a_play_may_import_its_neighbours(tmp_path: Path) -> None:
    """The folder of a file comes behind ours on sys.path."""
    (tmp_path / "neighbour_of_plays.py").write_text("ANSWER = 42\n")
    path = write(
        tmp_path,
        "with_neighbour.py",
        """
        from neighbour_of_plays import ANSWER

        @play
        async def go(run: Run) -> int:
            return ANSWER
        """,
    )
    assert plays_in(path)[0].name == "with_neighbour:go"
    assert sys.path[-1] == str(tmp_path)


def test_a_file_that_fails_to_load_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its error is its own, and the next try loads it again."""
    path = write(tmp_path, "broken.py", "raise RuntimeError('not today')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not today"):
            plays_in(path)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nothing", "names no play"),
        ("missing.py:go", "does not exist"),
        ("no_such_module:go", "no module"),
        ("json:nothing", "has no play"),
    ],
)
def test_a_reference_to_nothing_says_what_is_missing(reference: str, message: str) -> None:
    """PLAY_NOT_FOUND, with a hint."""
    with pytest.raises(PlayNotFound, match=message) as refused:
        find_play(reference)
    assert refused.value.hint


def test_a_module_of_a_package_is_named_by_its_import_name() -> None:
    """`module:function`, as one would import it."""
    assert find_play("tests.process_plays:one").name == "tests.process_plays:one"


def test_an_unmarked_function_is_no_play_unless_it_is_trusted() -> None:
    """`serve` offers what is marked; `run FILE:NAME` and `run.child` take any function."""

    async def plain(_run: Run) -> None: ...

    with pytest.raises(PlayNotFound, match="is not marked @play"):
        as_play(plain)
    assert as_play(plain, trusted=True).name.endswith(":plain")


def test_input_is_checked_by_the_signature() -> None:
    """The message names the place, what it is and the signature."""
    item = as_play(takes_order)
    assert item.read_input({"id": 7}) == Order(id=7)
    with pytest.raises(InputInvalid, match=r"\$\.id") as refused:
        item.read_input({"id": "x"})
    assert "takes_order(" in refused.value.hint
    assert as_play(takes_nothing).read_input({"any": "thing"}) is None
    assert as_play(takes_default).read_input(None) == 3


def test_another_process_finds_a_play_where_it_stands(tmp_path: Path) -> None:
    """By module, or by file; what stands inside a function it cannot find."""
    path = write(tmp_path, "elsewhere.py", "@play\nasync def go(run: Run) -> None: ...\n")
    item = plays_in(path)[0]
    assert item.origin is not None
    assert load_origin(item.origin, "its name").name == "its name"

    async def inner(_run: Run) -> None: ...

    hidden: Any = as_play(inner, trusted=True).origin
    with pytest.raises(PlayNotFound, match="inside a function"):
        load_origin(hidden, "x")


def test_plays_of_the_main_script_are_named_after_its_file(tmp_path: Path) -> None:
    """`python script.py` and `playledger run script.py:go` mean the same play name."""
    path = write(
        tmp_path,
        "script.py",
        """
        from engines.plays import as_play

        @play
        async def go(run: Run) -> None: ...

        print(as_play(go).name)
        """,
    )
    said = subprocess.run(
        [sys.executable, path], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert said.stdout == "script:go\n"


def test_plays_are_a_set_of_names_that_may_grow() -> None:
    """A node's scope is that set, so what a play starts beside it is driven too."""
    plays = Plays([as_play(takes_order)])
    names = iter(plays)
    plays.add(as_play(takes_nothing))
    assert len(list(names)) == 1
    assert len(plays) == 2
    assert as_play(takes_nothing).name in plays
