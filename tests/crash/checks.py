"""What must be true of a log after a crash, and after its runs were driven to their ends."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from handlers.react import react
from ledger import events as e
from ledger.codec import Recorded, decode
from ledger.database import reading
from ledger.events import Event, Seal
from ledger.ids import event_id
from ledger.merkle import CompactRange, leaf_hash
from ledger.query import ask
from ledger.rows import RowBuffer
from ledger.seal import BlobRef
from ledger.transaction import read_head
from ledger.vault import blob_query, check_blob, check_disclosure, disclosure_query
from projections.rows import project
from projections.run import evolve
from projections.state import RunState
from projections.tables import READ_MODELS, TABLES
from tests.crash.scenarios import End


def check_log(path: Path) -> list[Recorded[Event]]:
    """Checks what holds at every instant, and returns the events."""
    with reading(path) as connection:
        connection.execute("begin")  # one snapshot: others may be writing
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        events = _check_leaves(connection)
        _check_meaning(connection, events)
        _check_values(connection, events)
    created = Counter(
        (r.subject, r.data.attempt) for r in events if isinstance(r.data, e.InstanceCreated)
    )
    twice = [key for key, count in created.items() if count > 1]
    assert twice == [], f"two creates of one attempt: {twice}"
    return events


def _check_leaves(connection: sqlite3.Connection) -> list[Recorded[Event]]:
    """Positions and versions are dense, the columns repeat the leaf, the head is the tree's."""
    tree, events = CompactRange(), []
    versions: Counter[str] = Counter()
    rows = connection.execute(
        "select e.position, e.id, s.name, e.version, t.name, e.leaf from events e"
        " join streams s using (stream_id) join event_types t using (type_id) order by position"
    )
    for number, (position, identity, stream, version, kind, leaf) in enumerate(rows, 1):
        recorded = decode(leaf)
        versions[stream] += 1
        assert (position, version) == (number, versions[stream])
        assert (recorded.position, recorded.id, recorded.subject) == (position, identity, stream)
        assert (recorded.streamversion, recorded.type) == (version, kind)
        tree.append(leaf_hash(leaf))
        events.append(recorded)
    head = read_head(connection)
    assert (head.position, head.range) == (len(events), tree.dump())
    return events


def _check_meaning(connection: sqlite3.Connection, events: list[Recorded[Event]]) -> None:
    """The read models are the fold of the log, and every choice is made again as recorded."""
    known = {recorded.id: recorded for recorded in events}
    states: dict[str, RunState] = {}
    rows = RowBuffer(TABLES)
    for recorded in events:
        if not recorded.subject.startswith("run/"):
            continue
        before = states.get(recorded.subject)
        state = states[recorded.subject] = evolve(before, recorded)
        rows.add(project(recorded, before, state))
        choices = react(state, recorded)
        for index, choice in enumerate(choices):
            made = known.get(event_id(recorded.id, str(index)))
            assert made is not None, f"@{recorded.position}: {choice} was not recorded"
            assert made.data == choice, f"@{made.position}: {made.data}, today {choice}"
        more = known.get(event_id(recorded.id, str(len(choices))))
        assert more is None, f"@{recorded.position}: today's rules do not make {more}"
    for table in READ_MODELS:
        stored = connection.execute(f"select * from {table.name}").fetchall()
        folded = [row for row in rows.rows[table.name].values() if isinstance(row, tuple)]
        differing = {repr(row) for row in stored} ^ {repr(row) for row in folded}
        assert differing == set(), f"{table.name}: {differing}"


def _check_values(connection: sqlite3.Connection, events: list[Recorded[Event]]) -> None:
    """Every digest in the log has its value, every run its key and launch state, at once."""
    seals = {}
    for recorded in events:
        for value in _fields(recorded.data):
            if isinstance(value, Seal):
                seals[value.digest] = value
        if isinstance(recorded.data, e.RunSubmitted):
            last = 3 + (recorded.data.sessions is not None)
            beside = [
                type(r.data)
                for r in events
                if r.subject == recorded.subject and r.streamversion <= last
            ]
            assert beside[-2:] == [e.RunLaunchStatePut, e.InstanceCreateRequested]
    ending = _sessions_of(events, e.SessionRevokeRequested)
    gone = _sessions_of(events, e.SessionRevoked)
    kept = 0
    for digest in seals:
        found = ask(connection, disclosure_query(digest))
        if found is None and digest in ending:
            continue
        assert found is not None, f"{digest} has no value"
        assert digest not in gone, f"{digest} was revoked and is there"
        kept += 1
        held = check_disclosure(digest, found[1])
        if isinstance(held, BlobRef):
            check_blob(held, ask(connection, blob_query(held.blob)))
    (keys,) = connection.execute(
        "select count(*) from vault_keys where subject like 'run/%'"
    ).fetchone()
    submitted = sum(isinstance(r.data, e.RunSubmitted) for r in events)
    assert keys == submitted, f"{keys} keys, {submitted} runs"
    values = connection.execute("select count(*) from vault_values").fetchone()[0]
    assert values == kept, f"{values} values, {kept} digests in the log"


def _sessions_of(events: list[Recorded[Event]], kind: type[Event]) -> set[str]:
    """Returns the digests of the sessions of all runs that have an event of this kind."""
    runs = {recorded.subject for recorded in events if isinstance(recorded.data, kind)}
    return {
        recorded.data.sessions.digest
        for recorded in events
        if isinstance(recorded.data, e.SessionStored) and recorded.subject in runs
    }


def _fields(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__struct_fields__]


def check_acknowledged(events: list[Recorded[Event]], acks: Path) -> None:
    """Whatever was answered stands in the log."""
    if not acks.exists():
        return
    kept = set()
    for recorded in events:
        run_id = recorded.subject.removeprefix("run/")
        match recorded.data:
            case e.RunSubmitted():
                kept.add(f"submit {run_id}")
            case e.SignalReceived(signal_id=signal_id):
                kept.add(f"signal {run_id}/{signal_id}")
            case e.RunCancelRequested(request_id=request_id):
                kept.add(f"cancel {run_id}/{request_id}")
            case e.RunCompleted():
                kept.add(f"end {run_id}")
            case _:
                continue
    lost = set(acks.read_text().splitlines()) - kept
    assert lost == set(), f"acknowledged, and lost: {lost}"


def check_ends(
    path: Path, events: list[Recorded[Event]], ends: Mapping[str, End], effects: Path
) -> None:
    """Every run is at its right end, nothing is left to do, nobody holds or runs anything."""
    with reading(path) as connection:
        for left in (
            "select * from outbox",
            "select * from leases",
            "select instance_id, phase from instances where phase in ('created', 'started')",
            "select run_id, status from runs where ended_at is null",
        ):
            rows = connection.execute(left).fetchall()
            assert rows == [], f"{left}: {rows}"
        for run_id, end in ends.items():
            found = ended(connection, events, run_id)
            assert found == end, f"{run_id} ended as {found}, not {end}"
    _check_retries(events)
    done = Counter(effects.read_text().splitlines())
    twice = [line for line, count in done.items() if count > 1]
    assert twice == [], f"an attempt ran twice: {twice}"
    completed = {r.subject for r in events if isinstance(r.data, e.RunCompleted)}
    idle = completed - {"run/" + line.split()[0] for line in done}
    assert idle == set(), f"completed without having run: {idle}"


def ended(connection: sqlite3.Connection, events: list[Recorded[Event]], run_id: str) -> End:
    """Returns how a run ended."""
    for recorded in reversed(events):
        if recorded.subject != "run/" + run_id:
            continue
        match recorded.data:
            case e.RunCompleted(result=result):
                return End("completed", None if result is None else reveal(connection, result))
            case e.RunFailed(code=code):
                return End("failed", code=code)
            case e.RunCancelled():
                return End("cancelled")
            case _:
                continue
    raise AssertionError(f"{run_id} has no end")


def reveal(connection: sqlite3.Connection, seal: Seal) -> Any:
    """Returns what a seal stands for."""
    found = ask(connection, disclosure_query(seal.digest))
    assert found is not None
    held = check_disclosure(seal.digest, found[1])
    if isinstance(held, BlobRef):
        return orjson.loads(check_blob(held, ask(connection, blob_query(held.blob))))
    return held


def _check_retries(events: list[Recorded[Event]]) -> None:
    """A claim leads to a start, unless the run was cancelled or ended first (INV-30)."""
    settled = set()
    for recorded in events:
        match recorded.data:
            case e.RetryStarted(attempt=attempt) | e.RetryAbandoned(attempt=attempt):
                settled.add((recorded.subject, attempt))
            case e.RunCancelRequested():
                settled.add((recorded.subject, -1))
            case _:
                continue
    for recorded in events:
        if isinstance(recorded.data, e.RetryClaimed):
            keys = {(recorded.subject, recorded.data.attempt), (recorded.subject, -1)}
            assert keys & settled, recorded
