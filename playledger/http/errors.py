"""How errors look over HTTP: one table of statuses, one envelope, problem+json for who asks.

Nothing here invents a text: code, message, hint and details are those of ledger/errors.py, the same
four that the command line shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ledger import errors
from ledger.canonical import Json
from ledger.errors import PlayledgerError
from ledger.vault import ValueGone
from playledger.render import safe_json


class FieldUnknown(errors.Refused):
    """Refuses a field that a body or a query does not have."""

    code = "FIELD_UNKNOWN"


class FieldInvalid(errors.Refused):
    """Refuses a field that does not fit."""

    code = "FIELD_INVALID"


class MediaTypeRefused(errors.Refused):
    """Refuses a body that says it is no JSON."""

    code = "MEDIA_TYPE_UNSUPPORTED"


class Unauthorised(PlayledgerError):
    """Says that the caller is not known."""

    code = "TOKEN_MISSING"


class Forbidden(PlayledgerError):
    """Says that the caller may not come this way."""

    code = "FORBIDDEN"


class NoTokenSet(errors.Unavailable):
    """Refuses everybody, because the server was given no token to know anybody by."""

    code = "TOKENS_NOT_SET"
    retriable = False


class ShuttingDown(errors.Unavailable):
    """Refuses new work while the server drains; `retry_after` is in seconds."""

    code = "SHUTTING_DOWN"
    retry_after = 1


class RouteNotFound(errors.NotFound):
    """Says that there is no such resource."""

    code = "ROUTE_NOT_FOUND"


class MethodNotAllowed(errors.Refused):
    """Refuses a method that a resource does not have."""

    code = "METHOD_NOT_ALLOWED"


class NotEnded(errors.Conflict):
    """Says that a run has no result yet."""

    code = "RUN_NOT_ENDED"
    retriable = True


STATUS: Final[tuple[tuple[type[PlayledgerError], int], ...]] = (
    (errors.JsonInvalid, 400),
    (errors.TooLarge, 413),
    (errors.IdInvalid, 422),
    (errors.InputInvalid, 422),
    (errors.PlayNotFound, 404),
    (MediaTypeRefused, 415),
    (MethodNotAllowed, 405),
    (errors.Refused, 400),
    (Unauthorised, 401),
    (Forbidden, 403),
    (ValueGone, 410),
    (errors.NotFound, 404),
    (errors.WrongExpectedVersion, 412),
    (errors.Conflict, 409),
    (errors.Ended, 409),
    (errors.Unavailable, 503),
    (PlayledgerError, 500),
)
"""The first type that an error is decides its status."""

_OUTER: Final = ("runId", "parentRunId")
PROBLEM: Final = "application/problem+json"


def status_of(error: PlayledgerError) -> int:
    """Returns the HTTP status of an error."""
    return next(status for kind, status in STATUS if isinstance(error, kind))


def error_response(
    request: Request,
    error: PlayledgerError,
    *,
    phase: str,
    run_id: str | None = None,
    path: Path | None = None,
) -> Response:
    """Returns an error as the caller wants it; of the log's `path` only the file's name is told."""
    status = status_of(error)
    if path is not None:
        error.message = error.message.replace(str(path), path.name)
        error.hint = error.hint.replace(str(path), path.name)
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="playledger"'
    if status == 405:
        headers["Allow"] = str(error.details.get("allow", ""))
    if status == 413:
        headers["Connection"] = "close"
    if status == 503 and error.retriable:
        headers["Retry-After"] = str(getattr(error, "retry_after", 1))
    if PROBLEM in request.headers.get("accept", ""):
        body, media = _problem(request, error, status), PROBLEM
    else:
        body, media = envelope(error, phase, run_id), "application/json"
    return Response(_bytes(body), status, headers, media_type=media)


def envelope(error: PlayledgerError, phase: str, run_id: str | None = None) -> Json:
    """Returns the one error envelope (DESIGN section 7)."""
    shown: dict[str, Json] = {
        "code": error.code,
        "message": error.message,
        "phase": phase,
        "retriable": error.retriable,
    }
    details = {name: value for name, value in error.details.items() if name not in _OUTER}
    if run_id or "runId" in error.details:
        shown["runId"] = run_id or error.details["runId"]
    if "parentRunId" in error.details:
        shown["parentRunId"] = error.details["parentRunId"]
    if error.hint:
        shown["hint"] = error.hint
    if details:
        shown["details"] = dict(details)
    return {"error": shown}


def _problem(request: Request, error: PlayledgerError, status: int) -> Json:
    """Returns the same facts as RFC 9457 has them."""
    shown: dict[str, Json] = {
        "type": f"/docs/errors#{error.code}",
        "title": error.code.replace("_", " ").lower(),
        "status": status,
        "detail": error.message,
        "instance": request.scope["path"],
        "code": error.code,
        "retriable": error.retriable,
    }
    if error.hint:
        shown["hint"] = error.hint
    if error.details:
        shown["details"] = dict(error.details)
    return shown


def _bytes(body: Json) -> bytes:
    """Writes ASCII, so that an id quoted from a request stays as visible as it is in the log."""
    return safe_json(orjson.dumps(body).decode()).encode()
