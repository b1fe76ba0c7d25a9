"""What of a run's launch parameters is kept for a restart (SPEC 1.6, 1.7, 1.8; INV-04).  Pure.

Code is fetched again by its artifact key, sessions lie apart and are referred to, and a token is a
secret: none of them is in what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from handlers.child_submit import strip_manifest
from ledger.canonical import Json

PACKAGED_FIELDS: Final = ("playPath", "storageKey", "contentType", "bytes")
SECRET_FIELDS: Final = ("executorToken", "coordinatorInternalToken")
"""Tokens: they lie encrypted in the vault, apart from the params, and never in an event."""
_SNAPSHOT_SOURCES: Final = frozenset({"sourceCode", "sourceFiles"})
_ENVELOPE: Final = "__dispatcherMetadata"


class TraceContext(Struct, frozen=True):
    """What names an event of an engine in traces (SPEC 1.7)."""

    run_id: str
    graph_hash: str | None
    instance_id: str | None
    submitted_at: int | None


def payload_params(payload: Json) -> Mapping[str, Json] | None:
    """Returns the params of an engine's event, enveloped or plain; None for what is neither."""
    if not isinstance(payload, Mapping):
        return None
    if _ENVELOPE not in payload:
        return payload
    params = payload.get("params")
    return params if isinstance(params, Mapping) else None


def trace_context(payload: Json, instance_id: str | None) -> TraceContext:
    """Returns whose event this is: by its params, else by its metadata, else by its instance."""
    params = payload_params(payload) or {}
    found = payload.get(_ENVELOPE) if isinstance(payload, Mapping) else None
    metadata = found if isinstance(found, Mapping) else {}
    submitted_at = params.get("submittedAt")
    return TraceContext(
        run_id=_text(params.get("runId"))
        or _text(metadata.get("runId"))
        or instance_id
        or "unknown-workflow-run",
        graph_hash=_text(params.get("graphHash")) or _text(metadata.get("graphHash")),
        instance_id=instance_id,
        submitted_at=submitted_at if type(submitted_at) is int else None,
    )


def strip_params(params: Mapping[str, Json]) -> dict[str, Json]:
    """Returns params as they are stored; stripping twice is stripping once."""
    kept = {name: value for name, value in params.items() if name not in SECRET_FIELDS}
    manifests, files = params.get("childPlayManifests"), params.get("packagedFiles")
    return kept | {
        "childPlayManifests": {name: strip_manifest(item) for name, item in manifests.items()}
        if isinstance(manifests, Mapping)
        else None,
        "contractSnapshot": _without_sources(params.get("contractSnapshot")),
        "dynamicWorkerCode": None,
        "packagedFiles": [_packaged(item) for item in files if isinstance(item, Mapping)]
        if isinstance(files, list)
        else None,
        "preloadedDbSessions": None,
    }


def _without_sources(snapshot: Json) -> Json:
    if not isinstance(snapshot, Mapping):
        return snapshot
    return {name: value for name, value in snapshot.items() if name not in _SNAPSHOT_SOURCES}


def _packaged(item: Mapping[str, Json]) -> Json:
    return {name: item.get(name) for name in PACKAGED_FIELDS}


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) and value else None
