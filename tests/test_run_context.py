"""What a play may say and ask: values, log lines, progress, files."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

from engines.journal import BATCH_LINES, LINES_PER_SECOND
from engines.lines import LINE_CHARS, sanitise
from handlers.submit import StagedFile
from ledger import events as e
from playledger import Run, play
from playledger.testing import drive
from tests.local_node import node


def test_C025_a_result_that_is_no_json_fails_with_its_code_and_path() -> None:
    """NaN, infinity and what has no JSON form are refused before anything is stored."""

    async def nan(_run: Run) -> Any:
        return {"loss": [1.0, float("nan")]}

    async def infinite(_run: Run) -> Any:
        return float("-inf")

    async def key(_run: Run) -> Any:
        return {float("nan"): 1}

    async def thing(_run: Run) -> Any:
        return object()

    ended = drive(nan)
    assert (ended.status, ended.error_class) == ("failed", "user_error")
    assert ended.code == "JSON_NOT_FINITE"
    assert ended.error is not None
    assert "$.loss[1]" in ended.error
    assert drive(infinite).code == "JSON_NOT_FINITE"
    assert drive(thing).code == "NOT_JSON"
    assert drive(key).status in ("failed", "completed")


def test_C025_a_child_input_that_is_no_json_is_refused_where_it_is_given() -> None:
    """The play can catch it; nothing was stored, and the run goes on."""

    async def tries(run: Run) -> str:
        try:
            run.child("anything", {"loss": float("nan")})
        except Exception as error:  # noqa: BLE001
            return type(error).__name__
        return "?"

    ended = drive(tries)
    assert (ended.result, ended.children_started) == ("JsonInvalid", 0)


def test_INV_70_log_lines_are_bounded_and_the_dropped_are_counted() -> None:
    """500 a second are kept, in batches of 100; with time standing still the rest is dropped."""

    async def chatty(run: Run) -> None:
        for n in range(LINES_PER_SECOND + 250):
            run.log(f"line {n}")

    ended = drive(chatty)
    batches = [r.data for r in ended.events if isinstance(r.data, e.RunLog)]
    assert len(ended.logs) == LINES_PER_SECOND
    assert ended.logs[-1] == f"line {LINES_PER_SECOND - 1}"
    assert sum(batch.dropped for batch in batches) == 250
    assert max(batch.count for batch in batches) <= BATCH_LINES


def test_INV_70_log_lines_are_sanitised() -> None:
    """No escape sequence, no control character, no password of a URL reaches the log."""
    assert sanitise("a\x1b[31mred\x1b[0m\x00b") == "ared\ufffdb"
    assert sanitise("\x1b]0;title\x07text") == "text"
    assert sanitise("GET https://ada:secret@example.org/x") == "GET https://***@example.org/x"
    assert sanitise("Authorization: Bearer abcdefghijkl") == "Authorization: Bearer ***"
    assert sanitise("kept\ttab\nand line") == "kept\ttab\nand line"


def test_C026_text_is_cut_between_characters_and_halves_become_replacements() -> None:
    """A lone surrogate is U+FFFD, in a message and in a field; the cut says how much is missing."""
    assert sanitise("half \ud83d") == "half \ufffd"
    cut = sanitise("\U0001f600" * (LINE_CHARS + 3))
    assert cut == "\U0001f600" * LINE_CHARS + "... 3 more"

    async def odd(run: Run) -> None:
        thing: Any = object()
        run.log("half \ud83d", field="\udc00", nested={"x": "\ud83d"}, thing=thing)

    ended = drive(odd)
    assert (ended.status, ended.logs) == ("completed", ("half \ufffd",))


def test_log_fields_are_json_whatever_they_are() -> None:
    """NaN, a deep value and a large one are shown as text; the run goes on."""

    async def odd(run: Run) -> None:
        deep: Any = 0
        for _ in range(64):
            deep = [deep]
        run.log("odd", nan=float("nan"), deep=deep, large=["x" * 100_000], number=2**60)

    assert drive(odd).status == "completed"


def test_progress_is_coalesced_to_one_a_second_and_the_last_is_kept() -> None:
    """A thousand reports in one second are one event, the last of them."""

    async def counts(run: Run) -> None:
        for n in range(1, 1001):
            run.progress(n, of=1000)
        await run.sleep("nap", timedelta(seconds=2))
        run.progress(1001, of=1001, note="over")

    ended = drive(counts)
    steps = [r.data.done for r in ended.events if isinstance(r.data, e.RunProgress)]
    assert steps == [1000, 1001]


def test_a_file_that_is_not_staged_says_which_are() -> None:
    """FILE_NOT_STAGED with the names that are, and how to stage one."""

    async def reads(run: Run) -> str:
        return run.file("missing.csv").read_text()

    ended = drive(reads)
    assert (ended.status, ended.code) == ("failed", "FILE_NOT_STAGED")
    assert ended.error == 'run.file("missing.csv"): staged are none'


def test_children_see_the_files_of_their_family(tmp_path: Path) -> None:
    """A staged file is read-only and the same one in a child of a child."""

    @play(name="grandchild")
    async def grandchild(run: Run) -> list[dict[str, str]]:
        assert run.file().stat().st_mode & 0o222 == 0
        return list(run.csv("rows.csv"))

    @play(name="child")
    async def child(run: Run) -> Any:
        return await run.child(grandchild, key="g")

    @play(name="top")
    async def top(run: Run) -> Any:
        return await run.child(child, key="c")

    async def main() -> None:
        async with node(tmp_path, top, child, grandchild) as given:
            rows = StagedFile(name="rows.csv", content="a,b\n1,é\n".encode())
            run = await given.ledger.submit(top, files=[rows], run_id="r")
            assert await given.end("r") == "completed"
            assert await run.result() == [{"a": "1", "b": "é"}]

    asyncio.run(main())
