"""Ids: all derived, so that doing a thing twice is doing it once (CONTRACTS A.4).

Drawn ids (run keys, node ids, request ids nobody gave) are drawn in the shell only, never here.
"""

from __future__ import annotations

import hmac
import re
import unicodedata
from hashlib import sha256

from ledger.errors import IdInvalid

RUN_ID_MAX = 200
KEY_MAX = 200

_RUN_ID = re.compile(r"[A-Za-z0-9._:~/-]+")
_SLUG_GAP = re.compile(r"[^A-Za-z0-9_]+")


def event_id(parent: str, label: str) -> str:
    """Returns the id of the event that `parent` (a stream or an event id) gives under `label`."""
    return sha256(f"playledger/1\n{parent}\n{label}".encode()).hexdigest()[:32]


def run_stream(run_id: str) -> str:
    """Returns the name of a run's stream."""
    return "run/" + run_id


def instance_id(scope: str, run_id: str, attempt: int) -> str:
    """Returns the id of one attempt's instance: pure and injective (INV-13)."""
    name = (
        f"run-{sha256(scope.encode()).hexdigest()[:8]}-{sha256(run_id.encode()).hexdigest()[:32]}"
    )
    return name if attempt == 0 else f"{name}-retry-{attempt}"


def slug(play_name: str) -> str:
    """Returns what of a play's name may stand in a run id, at most 40 characters."""
    return _SLUG_GAP.sub("-", play_name).strip("-")[:40] or "play"


def child_run_id(play_name: str, parent_run_id: str, child_key: str) -> str:
    """Returns the run id of a child: the same for the same parent and key (INV-55)."""
    digest = sha256(f"{parent_run_id}\n{child_key}".encode()).hexdigest()[:24]
    return f"{slug(play_name)}-{digest}"


def derived_child_key(run_key: bytes, play_name: str, value: bytes, occurrence: int) -> str:
    """Returns the key of a child that nobody gave one: play, input, occurrence (CONTRACTS A.4).

    The input's digest is keyed, so that it gives a stranger nothing to guess against.
    """
    digest = hmac.digest(run_key, value, "sha256").hex()[:12]
    return f"{play_name}-{digest}-{occurrence}"


def check_run_id(run_id: str) -> str:
    """Returns `run_id`, or raises IdInvalid with the first offending place."""
    hint = f"1 to {RUN_ID_MAX} of A-Za-z0-9._:~/-"

    def refuse(what: str) -> IdInvalid:
        return IdInvalid(f"run id {quote(run_id)} {what}", code="RUN_ID_INVALID", hint=hint)

    if not run_id:
        raise refuse("is empty")
    if len(run_id) > RUN_ID_MAX:
        raise refuse(f"has {len(run_id)} characters, the limit is {RUN_ID_MAX}")
    match = _RUN_ID.match(run_id)
    end = match.end() if match else 0
    if end < len(run_id):
        raise refuse(f"has a character that is not allowed at {end + 1}: {quote(run_id[end])}")
    if run_id[0] in "-/":
        raise refuse(f"starts with {run_id[0]}")
    place = 1
    for segment in run_id.split("/"):
        if not segment:
            raise refuse(f"has an empty segment at {place}")
        if segment in (".", ".."):
            raise refuse(f"has the segment {segment} at {place}")
        place += len(segment) + 1
    return run_id


def check_key(value: str, what: str) -> str:
    """Returns a caller's key (signal, request, child, event), or raises IdInvalid.

    Keys are compared as bytes and never normalised.  1 to 200 characters, no control, format,
    surrogate, private or separator character but the inner space (CONTRACTS A.3).
    """

    def refuse(problem: str) -> IdInvalid:
        return IdInvalid(
            f"{what} {quote(value)} {problem}",
            hint=f"1 to {KEY_MAX} characters, no control or invisible ones, no outer space",
        )

    if not value:
        raise refuse("is empty")
    if len(value) > KEY_MAX:
        raise refuse(f"has {len(value)} characters, the limit is {KEY_MAX}")
    if value[0] == " " or value[-1] == " ":
        raise refuse("starts or ends with a space")
    if value in (".", ".."):  # even escaped, clients and proxies take it out of a path
        raise refuse("is a dot segment")
    for place, character in enumerate(value, 1):
        category = unicodedata.category(character)
        if category[0] == "C" or (category[0] == "Z" and character != " "):
            raise refuse(f"has a character that is not allowed at {place}: {quote(character)}")
    return value


def quote(text: str, limit: int = 80) -> str:
    """Returns text in quotes with everything invisible escaped, safe for a terminal and a log."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    out = []
    for character in shown:
        category = unicodedata.category(character)
        if character in '"\\':
            out.append("\\" + character)
        elif category[0] == "C" or (category[0] == "Z" and character != " "):
            code = ord(character)
            wide = f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
            out.append(f"\\x{code:02x}" if code < 0x100 else wide)
        else:
            out.append(character)
    return '"' + "".join(out) + '"'
