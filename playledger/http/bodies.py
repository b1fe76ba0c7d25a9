"""What a request says: its path, query, preconditions and body, each refused with its own code.

A body passes the strict gate (ledger/gate.py) and then its model, which knows every field.  It is
counted while it streams, so one that lies about its length costs no more memory than the limit.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import unquote_to_bytes

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from starlette.requests import Request

from ledger import gate
from ledger.canonical import INTEGER_MAX, Json
from ledger.errors import IdInvalid, TooLarge
from ledger.ids import check_run_id, quote
from ledger.vault import BLOB_BYTES_MAX
from playledger.http.errors import FieldInvalid, FieldUnknown, MediaTypeRefused

M = TypeVar("M", bound=BaseModel)
WAIT_MS_MAX: Final = 30_000
PAGE_MAX: Final = 1000
PAGE_DEFAULT: Final = 100
ENVELOPE_BYTES: Final = 65_536
FILES_BYTES_MAX: Final = BLOB_BYTES_MAX * 4 // 3 + 4
PARSE_HERE_BYTES: Final = 1 << 20
"""Larger bodies are parsed beside the event loop, few at a time."""

_BIG: Final = ThreadPoolExecutor(max_workers=2, thread_name_prefix="bodies")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_ETAG: Final = re.compile(r'\s*(?:W/)?"v(\d{1,9})"\s*')


class _Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=to_camel, populate_by_name=False
    )


WaitMs = Annotated[int, Field(ge=0, le=WAIT_MS_MAX)]
Key = Annotated[str, Field(min_length=1, max_length=200)]


class FileBody(_Body):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    content: Annotated[str, Field(description="base64")]


class SubmitBody(_Body):
    """A request to run a play; the run id in the path makes a repeat of it the same run."""

    play_name: Annotated[str, Field(min_length=1, max_length=500)]
    input: Any = None
    files: tuple[FileBody, ...] = Field(default=(), max_length=100, strict=False)
    org_id: Key | None = None
    options: dict[str, Any] = {}
    executor_token: Annotated[str, Field(min_length=8, max_length=8192)] | None = None
    preloaded_db_sessions: list[dict[str, Any]] = Field(default=[], max_length=64)
    wait_ms: WaitMs = 0


class SubmitChildBody(_Body):
    """A request for a child, by a trusted manifest and its parent's lineage (SPEC 1.20).

    Only described here: handlers/child_submit.py checks it, in an order of its own.
    """

    name: str | None = None
    manifest: dict[str, Any]
    internal_run_play: dict[str, Any]
    org_id: str
    parent_executor_token: str
    parent_play_name: str | None = None
    input: Any = None
    child_play_manifests: dict[str, Any] | None = None
    user_email: str | None = None
    user_id: str | None = None
    child_key: Key | None = None
    on_parent_end: Literal["cancel", "abandon"] = "cancel"


class SignalBody(_Body):
    """A signal for a run, early or late; `signalId` makes a repeat the same."""

    event_key: Key | None = None
    signal: Key | None = None
    data: Any = None
    event_type: Key | None = None
    signal_id: Key | None = None


class CancelBody(_Body):
    reason: Annotated[str, Field(max_length=4000)] = ""
    request_id: Key | None = None


class RetryBody(_Body):
    pass


class RerunBody(_Body):
    """A new run from an old one's input and files, or from another input."""

    run_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    input: Any = None
    wait_ms: WaitMs = 0


def _position(value: Any) -> Any:
    return value.removeprefix("@") if isinstance(value, str) else value


Position = Annotated[int, BeforeValidator(_position), Field(ge=0, le=INTEGER_MAX)]
Limit = Annotated[int, Field(ge=1, le=PAGE_MAX)]


class _Query(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=False
    )


class NoQuery(_Query):
    pass


class StatusQuery(_Query):
    min_position: Position | None = None
    wait_ms: WaitMs = WAIT_MS_MAX


class ResultQuery(_Query):
    wait_ms: WaitMs = 0


class TailQuery(_Query):
    after: Position = 0
    limit: Limit = PAGE_DEFAULT
    reveal: bool = False


class WhyQuery(_Query):
    as_of: Position | None = None


class TracesQuery(_Query):
    limit: Limit = PAGE_DEFAULT


class WarmupBody(_Body):
    label: Annotated[str, Field(max_length=200)] = ""


class ListQuery(_Query):
    status: (
        Literal["submitted", "running", "cancelling", "completed", "failed", "cancelled"] | None
    ) = None
    play: str | None = None
    family: str | None = None
    waiting_on: str | None = None
    org: Key | None = None
    before: Position | None = None
    limit: Limit = PAGE_DEFAULT


class EventsQuery(_Query):
    after: Position = 0
    limit: Limit = PAGE_DEFAULT
    types: str | None = None
    stream: str | None = None


def run_id_of(segment: str) -> str:
    """Returns the run id of a path segment as it was sent, decoded once, or raises IdInvalid."""
    try:
        return check_run_id(unquote_to_bytes(segment).decode())
    except UnicodeDecodeError:
        raise IdInvalid(
            f"run id {quote(segment)} is not UTF-8", code="RUN_ID_INVALID", hint="UTF-8, %-encoded"
        ) from None


def read_query(request: Request, model: type[M]) -> M:
    """Returns the query as its model has it; a field twice or one it does not know is refused."""
    if not request.scope.get("query_string"):
        return model()
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise FieldInvalid(f"query has {quote(name)} twice", hint="send it once", field=name)
        given[name] = value
    return check(model, given, "query")


async def read_body(
    request: Request, model: type[M], *, max_bytes: int, plain_bytes: int | None = None
) -> M:
    """Returns the body as its model has it; an empty one is `{}` where the model allows it.

    What goes beyond `plain_bytes` must be the content of files: text without commas, whose parsing
    costs next to nothing, where a long list of numbers would hold the interpreter for seconds.
    """
    data = await read_bytes(request, max_bytes)
    if plain_bytes is not None and len(data) > plain_bytes and data.count(b",") > plain_bytes // 2:
        raise _too_large(f"{len(data)}", plain_bytes)
    if not data:
        return check(model, {}, "body")
    check_media_type(request)
    if len(data) <= PARSE_HERE_BYTES:
        return check(model, gate.parse(data, what="body"), "body")
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        _BIG, lambda: check(model, gate.parse(data, what="body"), "body")
    )


def check(model: type[M], value: Json | dict[str, str], what: str) -> M:
    """Returns a value as a model has it, or says in our words what does not fit."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        # A misspelt field is missing too, under its right name: the slip is what helps.
        first = min(found, key=lambda item: item["type"] != "extra_forbidden")
    names = [field.alias or name for name, field in model.model_fields.items()]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(place, names, 1, 0.5)
        raise FieldUnknown(
            f"{what} has no field {quote(place)}",
            hint=f"did you mean {quote(near[0])}?" if near else "it has: " + ", ".join(names),
            field=place,
        )
    if first["type"] == "missing":
        raise FieldInvalid(f"{what} needs {quote(place)}", hint="send it", field=place)
    message = first["msg"].removeprefix("Value error, ")
    raise FieldInvalid(
        f"{what}: {quote(place) + ': ' if place else ''}{message[0].lower()}{message[1:]}",
        hint="the shapes are in /openapi.json",
        field=place,
    )


def idempotency_key(request: Request, given: str | None) -> str | None:
    """Returns the id of a request, from its body or its Idempotency-Key; both must agree."""
    header = request.headers.get("idempotency-key")
    if header is None:
        return given
    key = header
    if len(header) >= 2 and header[0] == header[-1] == '"':
        key = re.sub(r"\\(.)", r"\1", header[1:-1])
    if given is not None and given != key:
        raise FieldInvalid(
            f"Idempotency-Key says {quote(key)}, the body {quote(given)}", hint="send one of them"
        )
    return key


def expected_version(request: Request) -> int | None:
    """Returns the version that `If-Match` names: W/"v9" is 9; None without it or for *."""
    header = request.headers.get("if-match")
    if header is None or header.strip() == "*":
        return None
    match = _ETAG.fullmatch(header)
    if match is None:
        raise FieldInvalid(
            f"If-Match {quote(header)} is no version", hint='If-Match: W/"v9", as ETag gives it'
        )
    return int(match[1])


def unchanged(request: Request, etag: str) -> bool:
    """Says whether `If-None-Match` names this version; weakly, as GET compares."""
    header = request.headers.get("if-none-match")
    if header is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return "*" in tags or etag.removeprefix("W/") in tags


def check_media_type(request: Request) -> None:
    """Raises MediaTypeRefused for a body that says it is no JSON."""
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if media != "application/json" and not media.endswith("+json"):
        raise MediaTypeRefused(
            f"a body of {quote(media)} is not taken", hint="Content-Type: application/json"
        )


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """Returns a body, counted while it streams; raises TooLarge."""
    declared = request.headers.get("content-length", "")
    if _LENGTH.fullmatch(declared) and int(declared) > max_bytes:
        raise _too_large(declared, max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(f"over {max_bytes}", max_bytes)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(size: str, limit: int) -> TooLarge:
    return TooLarge(
        f"body is {size} bytes, the limit is {limit}",
        code="BODY_TOO_LARGE",
        hint="send less at a time, or stage it as a file",
        limit=limit,
    )
