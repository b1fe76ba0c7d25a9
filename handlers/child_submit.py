"""Submitting a child by a manifest: what a request must say, and what its launch parameters hold.

SPEC 1.6, 1.20, 1.22, 1.24.  Pure, and one implementation for every door: HTTP and the library
refuse the same body with the same code and the same message (INV-53, INV-54).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from ledger.canonical import Json
from ledger.errors import Refused
from ledger.events import OnParentEnd
from ledger.ids import check_key, quote
from projections.state import Run

PHASE: Final = "coordinator_child_submit"
WORKFLOW_BACKEND: Final = "cf_workflows_dynamic_worker"
INLINE_BACKEND: Final = "cf_workflows_dynamic_worker_inline_child"
_STRIPPED_MANIFEST: Final = frozenset({"bundledCode", "sourceCode"})


class ChildSubmitRefused(Refused):
    """Refuses a child for what its request says, or does not say."""

    code = "CHILD_BODY_INVALID"


class ChildSubmit(Struct, frozen=True, kw_only=True):
    """A checked request for a child; the parent's token is for minting alone and goes nowhere."""

    play_name: str
    manifest: Mapping[str, Json]
    governance: Mapping[str, Json]
    org_id: str
    parent_executor_token: str
    parent_play_name: str | None
    input: Json
    child_manifests: Mapping[str, Json] | None
    user_email: str
    user_id: str | None
    child_key: str | None
    on_parent_end: OnParentEnd

    def __repr__(self) -> str:
        """Says which child, and nothing of its token."""
        return f"ChildSubmit({self.play_name})"

    @property
    def max_credits(self) -> int | float | None:
        """The credits ceiling of the manifest (INV-57)."""
        return _number(self.manifest.get("maxCreditsPerRun"))


def check_child_submit(body: Json, parent_run_id: str) -> ChildSubmit:
    """Returns what a body asks for; raises ChildSubmitRefused, the first failed check of SPEC 1.20.

    What comes behind those four checks (the key, and what `onParentEnd` may be) is refused as a
    body that does not fit.
    """
    if not isinstance(body, Mapping):
        raise _refused("CHILD_BODY_INVALID", "submit-child requires a JSON object.", parent_run_id)
    manifest, governance = body.get("manifest"), body.get("internalRunPlay")
    trusted = isinstance(manifest, Mapping) and isinstance(governance, Mapping)
    name = _text(body.get("name"))
    if isinstance(manifest, Mapping):
        name = name or _text(manifest.get("playName"))
        trusted = trusted and all(
            _text(manifest.get(field))
            for field in ("artifactStorageKey", "artifactHash", "graphHash")
        )
    if not (trusted and name and isinstance(manifest, Mapping) and isinstance(governance, Mapping)):
        raise _refused(
            "CHILD_MANIFEST_REQUIRED",
            "submit-child requires a trusted child manifest and lineage.",
            parent_run_id,
        )
    org_id = body.get("orgId")
    if not isinstance(org_id, str) or not org_id.strip():
        raise _refused(
            "CHILD_ORG_REQUIRED",
            "submit-child requires orgId from the parent runtime.",
            parent_run_id,
        )
    token = _text(body.get("parentExecutorToken"))
    if not token:
        raise _refused(
            "PARENT_EXECUTOR_TOKEN_REQUIRED",
            "submit-child requires the parent executor token for origin-scoped child token "
            "minting.",
            parent_run_id,
        )
    key = body.get("childKey")
    if key is not None:
        if not isinstance(key, str):
            raise _refused("CHILD_BODY_INVALID", "childKey is no text.", parent_run_id)
        check_key(key, "child key")
    return ChildSubmit(
        play_name=name,
        manifest=manifest,
        governance=governance,
        org_id=org_id,
        parent_executor_token=token,
        parent_play_name=_text(body.get("parentPlayName"))
        or _text(governance.get("parentPlayName")),
        input=body.get("input"),
        child_manifests=_mapping(body.get("childPlayManifests")),
        user_email=_text(body.get("userEmail")) or "",
        user_id=_text(body.get("userId")),
        child_key=key,
        on_parent_end=_on_parent_end(body.get("onParentEnd"), parent_run_id),
    )


def check_lineage(asked: ChildSubmit, parent: Run) -> None:
    """Raises ChildSubmitRefused where a request contradicts what the log says of its parent.

    Lineage and organisation are the parent's, as recorded; a request may repeat them, not choose.
    """
    lineage = parent.lineage
    said = {
        "parentRunId": (asked.governance.get("parentRunId"), parent.run_id),
        "rootRunId": (asked.governance.get("rootRunId"), lineage.root_run_id or parent.run_id),
    }
    for field, (given, recorded) in said.items():
        if given is not None and given != recorded:
            raise _refused(
                "CHILD_LINEAGE_MISMATCH",
                f"internalRunPlay.{field} is {quote(str(given))}, the log has {quote(recorded)}.",
                parent.run_id,
            )
    if asked.org_id != parent.org_id:
        raise _refused(
            "CHILD_ORG_MISMATCH",
            f"orgId is {quote(asked.org_id)}, the parent's is another.",
            parent.run_id,
        )


def child_options(asked: ChildSubmit, child_run_id: str) -> dict[str, Json]:
    """Returns what a child's launch parameters hold beside input and files (SPEC 1.6).

    The one builder of them.  No code and no token is in it: code is fetched by artifact key, a
    token is minted for the child (INV-04, INV-45).
    """
    manifest = asked.manifest
    credits_max = asked.max_credits
    return {
        "artifactHash": manifest.get("artifactHash"),
        "artifactStorageKey": manifest.get("artifactStorageKey"),
        "childPlayManifests": None
        if asked.child_manifests is None
        else {name: strip_manifest(item) for name, item in asked.child_manifests.items()},
        "contractSnapshot": {
            "artifactMetadata": {
                "artifactHash": manifest.get("artifactHash"),
                "graphHash": manifest.get("graphHash"),
                "storageKey": manifest.get("artifactStorageKey"),
            },
            "billingLimit": None if credits_max is None else {"maxCreditsPerRun": credits_max},
            "codeFormat": "cjs_module",
            "compatibility": {"apiVersion": 2, "runtimeBackend": "workers_edge"},
            "revisionVersion": None,
            "source": "published",
            "staticPipeline": manifest.get("staticPipeline"),
        },
        "dedupBackend": "in_memory",
        "executionPlan": None,
        "graphHash": manifest.get("graphHash"),
        "playCallGovernance": dict(asked.governance),
        "playId": child_run_id,
        "runtimeBackend": WORKFLOW_BACKEND,
        "userEmail": asked.user_email,
        "userId": asked.user_id,
    }


def strip_manifest(manifest: Json) -> Json:
    """Returns a child manifest without code; what is no object stays as it is (SPEC 1.8)."""
    if not isinstance(manifest, Mapping):
        return manifest
    return {name: value for name, value in manifest.items() if name not in _STRIPPED_MANIFEST}


def _on_parent_end(value: Json, parent_run_id: str) -> OnParentEnd:
    match value:
        case None | "cancel":
            return "cancel"
        case "abandon":
            return "abandon"
        case _:
            raise _refused(
                "CHILD_BODY_INVALID", "onParentEnd is neither cancel nor abandon.", parent_run_id
            )


def _refused(code: str, message: str, parent_run_id: str) -> ChildSubmitRefused:
    return ChildSubmitRefused(message, code=code, parentRunId=parent_run_id)


def _text(value: Json) -> str | None:
    """Returns a text trimmed, or None for an empty one and for what is none."""
    return value.strip() or None if isinstance(value, str) else None


def _mapping(value: Json) -> Mapping[str, Json] | None:
    return value if isinstance(value, Mapping) else None


def _number(value: Json) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
