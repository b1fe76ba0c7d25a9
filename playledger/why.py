"""Why a run is where it is, in sentences that name the events they rest on (UX section 3).

Everything said follows from the run's own events, folded up to a position (playledger/story.py), so
that the same is said of yesterday as was true then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never, cast

import msgspec
from msgspec import Struct

from ledger import events as e
from ledger.canonical import Json
from ledger.codec import Recorded
from ledger.ids import quote
from playledger.render import clock, count_of, length, moment
from playledger.story import (
    MovedBy,
    Said,
    Sentence,
    Story,
    gone,
    holder,
    listed,
    live_nodes,
    places,
    tell,
    unique,
)
from playledger.why_ended import asked_by, attempts, cancelled, completed, failed, parked
from projections.describe import plain
from projections.state import Child, Instance, Wait

if TYPE_CHECKING:
    from playledger.embed import Ledger


_NAMED_BY_ID: Final = ("instance.", "effect.", "retry.")
"""Events whose key is a derived id, which says nothing to a reader of a sentence."""


class Why(Struct, frozen=True, rename="camel"):
    """The explanation of a run at a position; the first sentence says where it stands."""

    run_id: str
    status: str
    sentences: tuple[Sentence, ...]
    moved_by: tuple[MovedBy, ...]
    commands: tuple[str, ...]
    as_of_position: int

    def to_json(self) -> dict[str, Json]:
        """Returns it as `why --json` and HTTP show it."""
        return cast("dict[str, Json]", msgspec.json.decode(msgspec.json.encode(self)))

    @property
    def movement(self) -> str:
        """Says in a sentence what would move the run; empty if nothing would."""
        if not self.moved_by:
            return ""
        keys: dict[str, list[str]] = {}
        for item in self.moved_by:
            named = item.key is not None and not item.type.startswith(_NAMED_BY_ID)
            keys.setdefault(item.type, []).extend([quote(item.key or "")] if named else [])
        names = [f"{kind} {listed(named, 'or')}".rstrip() for kind, named in keys.items()]
        return f"It moves when {listed(names, 'or')} is recorded"


async def explain(ledger: Ledger, run_id: str, *, at: int | None = None) -> Why:
    """Returns why a run is where it is, now or as of a position; raises RunNotFound."""
    story = await tell(ledger, run_id, at=at)
    if story is None:
        raise await ledger.not_found(run_id)
    said = Said()
    match story.state.run.status:
        case "submitted":
            await _starting(story, said)
        case "running":
            await _running(story, said)
        case "cancelling":
            await _cancelling(story, said)
        case "completed":
            await completed(story, said)
        case "failed":
            await failed(story, said)
        case "cancelled":
            await cancelled(story, said)
        case _:
            assert_never(story.state.run.status)
    parked(story, said)
    return Why(
        run_id=run_id,
        status=story.state.run.status,
        sentences=tuple(said.sentences),
        moved_by=tuple(said.moved_by),
        commands=tuple(said.commands),
        as_of_position=story.as_of,
    )


# --- before an instance runs ----------------------------------------------------------------------


async def _starting(story: Story, said: Said) -> None:
    """An instance was asked for and is not there: the first one, or that of a retry."""
    run = story.state.run
    asked = story.last(e.InstanceCreateRequested)
    if asked is None:  # half-way through the append of its submit
        said.say(f"{story.run_id} is {run.status}, just now.", run.submitted_position)
        said.moves("instance.create_requested")
        return
    attempt = asked.data.attempt
    what = "its first instance" if attempt == 0 else f"the instance of attempt {attempt}"
    due = asked.data.not_before_at
    tries = [t for t in story.all(e.InstanceCreateFailed) if t.data.attempt == attempt]
    said.moves("instance.created", asked.data.instance_id)
    if due is not None and due > story.at:
        await _backoff(story, said, asked)
    elif tries:
        last = tries[-1]
        said.say(
            f"{story.run_id} is {run.status}; creating {what} has failed "
            f"{count_of(len(tries), 'time')}, last by {plain(last.data.code)}.",
            *places(last),
        )
        until = asked.at + run.policy.create_window_ms
        said.say(f"It is tried again until {moment(until)}.", *places(asked))
        said.type("retry", story.run_id)
    elif not story.live:
        said.say(f"{story.run_id} is {run.status}; {what} has been asked for.", *places(asked))
    else:
        node = await holder(story.ledger, asked.id)
        if node is not None:
            said.say(
                f"{story.run_id} is {run.status}; node {node} starts {what} as soon as it has a "
                "free slot.",
                *places(asked),
            )
        else:
            _nobody(story, said, what, places(asked))
    if attempt > 0:
        attempts(story, said)


def _nobody(story: Story, said: Said, what: str, positions: tuple[int, ...]) -> None:
    """No live process has taken what has to be done next."""
    run = story.state.run
    nodes = live_nodes(story.ledger)
    if nodes:
        others = f"of the {count_of(nodes, 'process', 'processes')} that drive this log"
        why = f"none {others} has taken {what}: none offers {plain(run.play_name)}"
    else:
        why = f"no process that offers {plain(run.play_name)} runs, so nobody takes {what}"
    said.say(f"{story.run_id} is {run.status}; {why}.", *positions)
    module = run.play_name.partition(":")[0]
    said.type("serve", f"{module}.py")


async def _backoff(story: Story, said: Said, asked: Recorded[e.InstanceCreateRequested]) -> None:
    run = story.state.run
    due = asked.data.not_before_at
    assert due is not None, "a backoff has an end"
    decided = story.last(e.RetryDecided)
    which = f"attempt {asked.data.attempt}"
    if decided is not None and decided.data.limit:
        which = f"retry {decided.data.used + 1} of {decided.data.limit}"
    said.say(f"{story.run_id} is {run.status}; {which} waits out its backoff.", *places(asked))
    failed = story.state.instances.get(asked.data.attempt - 1)
    pause = due - asked.at
    if failed is not None and failed.retry_after_ms is not None:
        drawn = f"the play asked for a pause of {length(failed.retry_after_ms)}"
    else:
        percent = round(100 * (pause / max(1, run.policy.backoff_ms) - 1))
        sign = "plus" if percent >= 0 else "minus"
        drawn = f"{length(run.policy.backoff_ms)} {sign} {abs(percent)} %, drawn once and recorded"
    said.say(f"It starts at {clock(due)}: {drawn}.", *places(asked))
    said.type("retry", story.run_id)


# --- while an instance runs -----------------------------------------------------------------------


async def _running(story: Story, said: Said) -> None:
    current = story.state.current
    if current is None or current.phase == "requested":
        await _starting(story, said)
        return
    if current.ended:
        await _between(story, said, current)
        return
    started = story.last(e.InstanceStarted)
    if story.live and current.host is not None and gone(story.ledger, current.host):
        said.say(
            f"{story.run_id} is running, but its node {current.host} is gone; the next process on "
            "this log ends the attempt and decides on a retry.",
            *places(started),
        )
        said.moves("instance.lost", current.instance_id)
        said.type("serve", f"{story.state.run.play_name.partition(':')[0]}.py")
        return
    waits = sorted(story.state.waits.values(), key=lambda wait: wait.position)
    children = sorted(
        (child for child in story.state.children.values() if child.status == "requested"),
        key=lambda child: child.position,
    )
    if not waits and not children:
        said.say(
            f"{story.run_id} is running; its play is at work on "
            f"{current.host or story.state.run.engine}, attempt {current.attempt}.",
            *places(started),
        )
        _progress(story, said)
        said.moves("instance.completed", current.instance_id)
        said.type("tail", story.run_id, "--follow")
        return
    named = [_wait_name(wait) for wait in waits]
    if children:
        named.append(_children_name(story, children))
    positions = [wait.position for wait in waits] + [child.position for child in children[:6]]
    said.say(f"{story.run_id} is running; it waits for {listed(named)}.", *positions)
    for wait in waits:
        _wait(story, said, wait)
    for child in children[:10]:
        said.moves("child.terminal_set", child.child_key)
    if children and children[0].child_run_id is not None:
        said.type("why", children[0].child_run_id)
    _progress(story, said)


def _wait_name(wait: Wait) -> str:
    if wait.kind == "sleep":
        until = "" if wait.until_at is None else f" until {moment(wait.until_at)}"
        return f"its own sleep{until}"
    return f"{wait.kind} {quote(wait.key)}"


def _children_name(story: Story, children: list[Child]) -> str:
    keys = listed([quote(child.child_key) for child in children])
    total = story.state.run.children.total
    if total == 1:
        return f"child {keys}"
    return f"{len(children)} of {total} children: {keys}"


def _wait(story: Story, said: Said, wait: Wait) -> None:
    waited = length(story.at - wait.since_at)
    until = "" if wait.until_at is None else f" and times out on {moment(wait.until_at)}"
    if wait.kind == "sleep":
        left = 0 if wait.until_at is None else wait.until_at - story.at
        said.say(f"It has slept {waited}, and sleeps {length(left)} more.", wait.position)
        said.moves("timer.fired", wait.key)
        return
    said.say(f"It has waited {waited}{until}.", wait.position)
    if wait.kind == "signal":
        others = [s for s in story.state.signals.values() if s.key != wait.key]
        if others:
            names = listed(unique([quote(s.key) for s in others]))
            came = "One other signal has" if len(others) == 1 else f"{len(others)} others have"
            said.say(
                f"{came} arrived, {names}; none named {quote(wait.key)}.",
                *(s.position for s in others[:6]),
            )
        said.moves("signal.received", wait.key)
        said.type("signal", story.run_id, wait.key, "--data", "{...}")
    else:
        said.moves("rate.acquired", wait.key)


def _progress(story: Story, said: Said) -> None:
    progress = story.state.run.progress
    if progress is None:
        return
    of = "" if progress.of is None else f" of {progress.of}"
    said.say(
        f"It reported {progress.done}{of} done, {length(story.at - progress.at)} ago.",
        progress.position,
    )


async def _between(story: Story, said: Said, ended: Instance) -> None:
    """An attempt has ended and its retry is decided, but the launch state is not loaded yet."""
    asked = story.last(e.RetryParamsRequested)
    what = "loading its launch state"
    said.moves("retry.params_loaded", ended.instance_id)
    last = places(asked) or places(story.end_of(ended))
    node = None if asked is None else await holder(story.ledger, asked.id)
    if story.live and node is None and not story.parked():
        _nobody(story, said, what, last)
    else:
        said.say(f"{story.run_id} is running; a retry waits for {what}.", *last)
    attempts(story, said)


# --- cancel ---------------------------------------------------------------------------------------


async def _cancelling(story: Story, said: Said) -> None:
    run = story.state.run
    assert run.cancel is not None, "cancelling begins with a request"
    until = run.cancel.at + run.policy.cancel_grace_ms
    said.say(
        f"{story.run_id} is cancelling; its instance has until {clock(until)} to clean up.",
        run.cancel.position,
        *places(story.last(e.InstanceTerminateRequested)),
    )
    await asked_by(story, said)
    asked, answered = story.all(e.ChildCancelRequested), story.all(e.ChildCancelDelivered)
    if asked:
        said.say(
            f"{len(asked)} of its {count_of(run.children.total, 'child', 'children')} "
            f"{'was' if len(asked) == 1 else 'were'} asked to end, {len(answered)} answered.",
            *places(asked[-1], answered[-1] if answered else None),
        )
    said.moves("run.cancelled")
    said.type("tail", story.run_id, "--follow")
