"""Why an ended run ended as it did: its result, what it failed of, who cancelled it.

A failure is followed to the child that began it; what was left behind is said too.
"""

from __future__ import annotations

from typing import Final

from ledger import events as e
from ledger.codec import Recorded
from ledger.errors import NotFound
from ledger.events import Seal
from ledger.ids import quote
from playledger.render import count_of, length
from playledger.story import Said, Sentence, Story, listed, places, tell, unique, words
from projections.describe import describe_value, plain

CHAIN_MAX: Final = 3
"""How far a failure is followed from parent to child."""


async def completed(story: Story, said: Said) -> None:
    run = story.state.run
    end = story.last(e.RunCompleted)
    said.say(f"{story.run_id} is completed; nothing will move it.", *places(end))
    returned = f"the play returned {await _value(story, run.result)}"
    result = story.last(e.InstanceCompleted)
    children = run.children
    if children.total:
        last = story.last(e.ChildTerminalSet)
        if children.completed == children.total:
            own = count_of(children.total, "child", "children")
            text = f"Its {own} completed and {returned}."
        else:
            done = f"{children.completed} of its {children.total} children completed"
            text = f"{done} and {returned}."
        said.say(text, *places(last, result))
    else:
        said.say(f"{returned[0].upper()}{returned[1:]}.", *places(result))
    retries = count_of(len(story.all(e.RetryClaimed)), "retry", "retries")
    waited = len(story.all(e.RunWaitStarted))
    waits = count_of(waited, "wait")
    if not waited and children.total:
        waits = "no wait but for its children"
    took = length((run.ended_at or story.at) - run.submitted_at)
    said.say(
        f"{retries[0].upper()}{retries[1:]}, {waits}; {took}.",
        run.submitted_position,
        *places(end),
    )
    _refused_cancel(story, said)
    _left_behind(story, said)


async def _value(story: Story, seal: Seal | None) -> str:
    if seal is None:
        return "nothing"
    try:
        shown = describe_value(await story.ledger.reveal(seal))
    except NotFound:
        return f"{seal.bytes} bytes, which are no longer kept"
    article = {"list": "a ", "object": "an ", "text": "a "}.get(shown.partition(" of ")[0], "")
    return article + shown


async def failed(story: Story, said: Said) -> None:
    run = story.state.run
    said.say(f"{story.run_id} is failed; nothing will move it.", *places(story.last(e.RunFailed)))
    await _cause(story, said, "", CHAIN_MAX)
    _refused_cancel(story, said)
    _left_behind(story, said)
    said.type("rerun", run.run_id)


async def _cause(story: Story, said: Said, whose: str, depth: int) -> None:
    """Says what a run failed of, and follows it to the child that began it."""
    run = story.state.run
    end, current, decided = (
        story.last(e.RunFailed),
        story.state.current,
        story.last(e.RetryDecided),
    )
    last = None if current is None else story.end_of(current)
    told = await words(story.ledger, run.error)
    name = await words(story.ledger, run.error, "type") or run.code or "an error"
    text = f"{plain(name)}{'' if told is None else ': ' + told}"
    denied = _denied(story)
    if run.error_class == "user_error":
        subject = f"The play{whose}" if not run.attempt else f"Attempt {run.attempt}{whose}"
        said.say(f"{subject} raised {text}; user_error is never retried.", *places(last, decided))
    elif run.error_class == "engine_timeout":
        limit = length(run.policy.timeout_ms or 0)
        said.say(
            f"Attempt {run.attempt}{whose} ran longer than its timeout of {limit}.", *places(last)
        )
    elif denied is not None:
        said.say(f"A retry{whose} was denied: {plain(denied.data.reason)}.", *places(denied))
    elif last is not None and isinstance(last.data, e.InstanceCreateFailed):
        said.say(
            f"Its instance{whose} could not be created: {plain(last.data.code)}.", *places(last)
        )
    else:
        said.say(f"The last attempt{whose} ended by {run.error_class}, {text}.", *places(last, end))
    if len(story.state.instances) > 1 or (decided is not None and decided.data.budget != "none"):
        attempts(story, said)
    if depth:
        await _failed_children(story, said, depth)


def _denied(story: Story) -> Recorded[e.RetryDenied] | Recorded[e.RetryAbandoned] | None:
    return story.last(e.RetryDenied) or story.last(e.RetryAbandoned)


async def _failed_children(story: Story, said: Said, depth: int) -> None:
    failed = sorted(
        (c for c in story.state.children.values() if c.status in ("failed", "cancelled")),
        key=lambda child: child.ended_position or 0,
    )
    for child in failed[:3]:
        said.say(
            f"Its child {quote(child.child_key)} had {child.status} before: "
            f"{child.child_run_id or 'no run'}"
            f"{'' if child.code is None else ', ' + plain(child.code)}.",
            child.ended_position or child.position,
        )
        if child.status == "failed" and child.child_run_id is not None:
            at = None if story.live else story.as_of
            below = await tell(story.ledger, child.child_run_id, at=at)
            if below is not None and below.state.run.status == "failed":
                await _cause(below, said, f" of {child.child_run_id}", depth - 1)


def _refused_cancel(story: Story, said: Said) -> None:
    refused = story.last(e.RunCancelRefused)
    if refused is not None:
        said.say(
            f"{refused.actor} asked to cancel it after its end; that was refused.",
            *places(refused),
        )


def _left_behind(story: Story, said: Said) -> None:
    left = [c for c in story.state.children.values() if c.status == "requested"]
    if left:
        noun = count_of(len(left), "child", "children")
        said.say(f"{noun} of it had not ended when it did.", *(c.position for c in left[:6]))


def parked(story: Story, said: Said) -> None:
    """What a handler gave up on waits for somebody, whatever else the run does."""
    items = story.parked()
    if not items:
        return
    first = said.sentences[0]
    status = story.state.run.status
    noun = count_of(len(items), "item")
    verb = "is" if len(items) == 1 else "are"
    said.sentences[0] = Sentence(
        f"{story.run_id} is {status}, and {noun} of it {verb} parked.",
        (*first.positions, *(given_up.position for given_up, _ in items)),
    )
    for given_up, failure in items[:10]:
        kind = "An effect" if failure is None else f"Its {quote(failure.data.kind)}"
        answer = "" if failure is None else f", last by {plain(failure.data.code)}"
        said.say(
            f"{kind} failed {count_of(given_up.data.tries, 'time')}{answer}, and was parked.",
            *places(failure, given_up),
        )
        said.moves("effect.resumed", given_up.data.intent_id)
    said.type("retry", story.run_id)


def attempts(story: Story, said: Said) -> None:
    """Says how the attempts before ended, and what the frozen policy allows."""
    decided = story.all(e.RetryDecided)
    for cause in unique([d.data.error_class for d in decided]):
        of_cause = [d for d in decided if d.data.error_class == cause]
        numbers = [str(d.data.failed_attempt) for d in of_cause]
        ends = [story.end_of(story.state.instances[d.data.failed_attempt]) for d in of_cause]
        noun = "Attempt" if len(numbers) == 1 else "Attempts"
        both = " both" if len(numbers) == 2 else ""
        said.say(f"{noun} {listed(numbers)}{both} ended by {cause}.", *places(*ends))
    if decided and decided[-1].data.budget != "none":
        last = decided[-1].data
        used = last.used + 1 if last.retry else last.used
        said.say(
            f"The policy frozen at submit allows {count_of(last.limit, 'retry', 'retries')} "
            f"on budget {quote(last.budget)}; {used} used.",
            story.state.run.submitted_position,
            *places(decided[-1]),
        )


async def asked_by(story: Story, said: Said) -> None:
    request = story.last(e.RunCancelRequested)
    if request is None:
        return
    reason = await words(story.ledger, request.data.reason)
    because = "" if reason is None else f", because: {reason}"
    said.say(f"{request.actor} asked for it{because}.", *places(request))


async def cancelled(story: Story, said: Said) -> None:
    end = story.last(e.RunCancelled)
    said.say(f"{story.run_id} is cancelled; nothing will move it.", *places(end))
    await asked_by(story, said)
    if end is not None and end.data.refused is not None:
        current = story.state.current
        last = None if current is None else story.end_of(current)
        if current is not None and current.error_class == "cancelled":
            said.say("Its instance ended as it was asked to.", *places(last))
        else:
            said.say(
                f"Its instance {plain(end.data.refused)} after the request; that was refused.",
                *places(last),
            )
    _left_behind(story, said)
