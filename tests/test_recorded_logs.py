"""Logs of real runs, recorded once: today's code must still read, fold and decide them alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import replay
from handlers.rechoose import Rechooser
from handlers.verify import verify
from ledger.codec import decode, encode
from ledger.export import read_export
from ledger.fsck import fsck
from projections.tables import READ_MODELS
from projections.verify import Refold
from tests.bless import LOGS, as_json, golden_path

PATHS = sorted(LOGS.glob("*.jsonl"))


def rows(refold: Refold) -> dict[str, list[object]]:
    """Returns every row of every read model."""
    refold.flush()
    return {table.name: list(refold.rows(table)) for table in READ_MODELS}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
class TestRecordedLog:
    def test_folds_to_its_golden_state(self, path: Path) -> None:
        """Today's folds, over yesterday's log, reach the state that was blessed."""
        found = json.loads(json.dumps(as_json(replay.states(path))))
        assert found == json.loads(golden_path(path).read_text())

    def test_chooses_what_was_chosen_then(self, path: Path) -> None:
        """Each choice is what today's reactions still give, and each fact is allowed."""
        verdict = verify(path)
        assert verdict.divergences == ()
        assert verdict.choices > 0
        assert verdict.same == verdict.events
        assert verdict.ok

    def test_INV_89_split_anywhere_folds_the_same(self, path: Path) -> None:
        """The rows at any version, plus the tail, equal full replay."""
        leaves = list(read_export(path))
        whole = Refold()
        whole.take_all(leaves)
        expected = rows(whole)
        for place in range(1, len(leaves)):
            split = Refold()
            split.take_all(leaves[:place])
            split.forget()
            split.take_all(leaves[place:])
            assert rows(split) == expected, f"split at @{place}"
            split.close()
        whole.close()

    def test_every_prefix_passes_fsck(self, path: Path, tmp_path: Path) -> None:
        """An export up to any position is a log."""
        leaves = list(read_export(path))
        for place in range(1, len(leaves) + 1):
            prefix = tmp_path / "prefix.jsonl"
            prefix.write_bytes(b"".join(leaf + b"\n" for leaf in leaves[:place]))
            assert list(fsck(prefix)) == []

    def test_a_prefix_that_ends_with_a_closure_verifies(self, path: Path) -> None:
        """An incident log may end anywhere between two commands; in the middle of one it shows."""
        refold, rechooser = Refold(), Rechooser()
        whole = 0
        for leaf in read_export(path):
            recorded = decode(leaf)
            before, after = refold.take(recorded)
            assert not rechooser.take(recorded, before, after)
            whole += not rechooser.waits
        refold.close()
        assert whole > 3
        assert rechooser.end() == []

    def test_records_survive_a_round_trip(self, path: Path) -> None:
        """Bytes in are bytes out."""
        for leaf in read_export(path):
            assert encode(decode(leaf)) == leaf


def test_a_log_that_lost_a_line_must_fail_fsck() -> None:
    """The gap is named, and the version of the stream that it tore."""
    found = list(fsck(LOGS / "bad" / "fsck.jsonl"))
    assert [finding.message for finding in found] == [
        "@10 is missing",
        "@11 is v10 of run/reset-once, v9 is next",
    ]


def test_a_log_with_another_decision_must_fail_verify() -> None:
    """Every byte is in order, and still it is not what was decided."""
    path = LOGS / "bad" / "verify.jsonl"
    assert list(fsck(path)) == []
    verdict = verify(path)
    assert not verdict.ok
    assert (verdict.changed, verdict.divergences[0].position) == (3, 24)
    field = verdict.divergences[0].fields[0]
    assert (field.path, field.recorded, field.today) == ("limit", 3, 2)
