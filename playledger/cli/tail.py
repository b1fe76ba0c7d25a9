"""`playledger tail`: events as they stand in the log, or the lines that plays logged."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from ledger import events as e
from ledger.canonical import Json
from ledger.codec import Recorded, decode
from ledger.database import check_revision, reading
from ledger.errors import PlayledgerError
from ledger.events import Event, Seal
from ledger.ids import run_stream
from ledger.log import HEAD_POSITION, PAGE, leaves_query
from ledger.migrations import REVISIONS
from ledger.query import Query, ask
from ledger.seal import BlobRef
from ledger.vault import ValueGone, blob_query, check_blob, check_disclosure, disclosure_query
from playledger.cli.console import END_CODES, Console
from playledger.cli.look import position_of
from playledger.cli.missing import not_found
from playledger.render import clip, clock, json_text, rfc3339, visible
from playledger.version import VERSION
from projections.describe import describe
from projections.load import run_query

POLL_S: Final = 0.02
TYPE_WIDTH: Final = 26


def tail_run(
    console: Console,
    run_id: str | None,
    *,
    follow: bool,
    logs: bool,
    family: bool,
    after: str,
    exit_status: bool,
) -> int:
    """Prints the events of a run or of the log; with `follow` until the run has ended."""
    start = position_of(after, "--after")
    path = console.db
    with reading(path) as connection:
        check_revision(connection, path, REVISIONS, VERSION)
        root = None
        if run_id is not None:
            root = ask(connection, run_query(run_id))
            if root is None:
                raise not_found(connection, path, run_id)
        stream = None if run_id is None else run_stream(run_id)
        wanted = root.lineage.family_key if root is not None and family else None
        printer = Printer(console, connection, logs=logs)
        try:
            for recorded, leaf in _events(connection, start, stream, wanted, follow=follow):
                printer.print(recorded, leaf)
                if follow:
                    console.flush()
        except KeyboardInterrupt:
            if run_id is not None:
                console.say(f"stopped watching; {run_id} is kept: the same command carries on")
            return 128 + signal.SIGINT
        if run_id is None or not exit_status:
            return 0
        root = ask(connection, run_query(run_id))
        return 0 if root is None else END_CODES.get(root.status, 0)


def _events(
    connection: sqlite3.Connection,
    after: int,
    stream: str | None,
    family: str | None,
    *,
    follow: bool,
) -> Iterator[tuple[Recorded[Event], bytes]]:
    """Yields events behind a position; with `follow` until the terminal event of the stream."""
    ended = stream is not None and _has_ended(connection, stream)
    while True:
        before = connection.execute("pragma data_version").fetchone()[0]
        page = ask(
            connection,
            leaves_query(after, stream, PAGE) if family is None else _family_query(family, after),
        )
        for position, leaf in page:
            after = position
            recorded = decode(leaf)
            yield recorded, leaf
            if recorded.subject == stream and isinstance(
                recorded.data, e.RunCompleted | e.RunFailed | e.RunCancelled
            ):
                ended = True
        if page:
            continue
        if not follow or ended:
            return
        while connection.execute("pragma data_version").fetchone()[0] == before:
            time.sleep(POLL_S)


def _has_ended(connection: sqlite3.Connection, stream: str) -> bool:
    """A run that had ended before the cursor has nothing more to wait for."""
    run = ask(connection, run_query(stream.removeprefix("run/")))
    return run is not None and run.terminal


class Printer:
    """Prints events one by one, or what was logged in them."""

    def __init__(self, console: Console, connection: sqlite3.Connection, *, logs: bool) -> None:
        self._console = console
        self._reveal = revealer(connection)
        self._logs = logs
        self._place = max(4, len(str(ask(connection, HEAD_POSITION))) + 1)

    def print(self, recorded: Recorded[Event], leaf: bytes) -> None:
        """Prints one event."""
        if self._logs:
            if isinstance(recorded.data, e.RunLog):
                self._print_log(recorded, recorded.data)
            return
        console = self._console
        if console.json:
            console.leaf(leaf)
            return
        text = visible(describe(recorded, self._reveal))
        if not console.out.terminal:
            console.answer(
                f"@{recorded.position}\t{recorded.time}\t{recorded.type}\t{text}".rstrip()
            )
            return
        place = console.out.dim(f"@{recorded.position:<{self._place}}")
        head = f"{place} {clock(recorded.at)}  {recorded.type:<{TYPE_WIDTH}}"
        room = console.out.width - self._place - TYPE_WIDTH - 18
        console.answer(f"{head} {clip(text, max(room, 20))}".rstrip())

    def _print_log(self, recorded: Recorded[Event], event: e.RunLog) -> None:
        console, run_id = self._console, recorded.subject.removeprefix("run/")
        try:
            lines: Any = self._reveal(event.lines)
        except PlayledgerError:
            console.say(f"@{recorded.position}: {event.count} lines are no longer in the vault")
            return
        for line in lines:
            if console.json:
                told = {"runId": run_id, "position": recorded.position, "attempt": event.attempt}
                console.answer_json({**told, "fields": None, **line})
                continue
            fields = "".join(
                f" {key}={value if isinstance(value, str) else json_text(value)}"
                for key, value in (line.get("fields") or {}).items()
            )
            text = visible(f"{line['message']}{fields}")
            if console.out.terminal:
                place = console.out.dim(f"@{recorded.position:<{self._place}}")
                level = str(line["level"])
                shown = console.out.red(f"{level:<7}") if level == "error" else f"{level:<7}"
                console.answer(f"{place} {clock(line['at'])}  {shown} {text}")
            else:
                at = rfc3339(line["at"])
                console.answer(f"@{recorded.position}\t{at}\t{line['level']}\t{text}")
        if event.dropped:
            console.say(
                f"@{recorded.position}: {event.dropped} lines were over the limit and dropped"
            )


def revealer(connection: sqlite3.Connection) -> Callable[[Seal], Json]:
    """Returns what opens sealed values on a plain connection; raises ValueGone."""

    def reveal(seal: Seal) -> Json:
        found = ask(connection, disclosure_query(seal.digest))
        if found is None:
            raise ValueGone(f"value {seal.digest[:8]} is no longer in the vault")
        held = check_disclosure(seal.digest, found[1])
        if not isinstance(held, BlobRef):
            return held
        value: Json = orjson.loads(check_blob(held, ask(connection, blob_query(held.blob))))
        return value

    return reveal


def _family_query(family: str, after: int) -> Query[list[tuple[int, bytes]]]:
    return Query(
        "select e.position, e.leaf from events e where e.position > ? and e.stream_id in"
        " (select s.stream_id from runs r join streams s on s.name = 'run/' || r.run_id"
        f" where r.family = ?) order by e.position limit {PAGE}",
        (after, family),
        lambda rows: [(row[0], row[1]) for row in rows],
    )
