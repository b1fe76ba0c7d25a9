"""Submitting a run: strip, seal, store, and hand one command to the writer.

The same way for a caller's run and for a child.  Everything that can fail for lack of room or of a
play is done before the command, so a refused submit leaves nothing (SPEC 1.8, INV-02).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from handlers.commands import Command
from handlers.engine import PlayInfo as PlayInfo  # noqa: PLC0414 - submitters name it from here
from handlers.execute import Answer
from handlers.port import RunLog
from handlers.session_checks import Session, check_encrypted
from ledger import events as e
from ledger.canonical import Json, canonical, canonical_own
from ledger.errors import PlayNotFound, Reseal, TooLarge, ValuesUnavailable
from ledger.failpoint import failpoint
from ledger.ids import check_run_id, quote, run_stream
from ledger.seal import Sealed, blob_ref, request_digest, seal
from projections.state import EDGE

DEFAULT_ORG: Final = "local"
KEY_BYTES: Final = 32
KEYS_AT_ONCE: Final = 128
PARAMS_PLACE: Final = "run.submitted/submit/params"
SESSIONS_PLACE: Final = "run.submitted/submit/sessions"
SECRET_NAMES: Final = {
    "executorToken": "executor_token",
    "coordinatorInternalToken": "internal_token",
}
"""The secrets of a run: their field in params, and their name in the vault."""


class StagedFile(Struct, frozen=True):
    """A file that came with a request; children see the files of their family."""

    name: str
    content: bytes


class Submission(Struct, frozen=True, kw_only=True):
    """A request to run a play; `files` refer to files stored before, `staged` are new ones.

    `secrets` are tokens by the name of their field in params; `sessions` are encrypted, and kept
    for `sessions_ttl_ms`.
    """

    run_id: str
    play_name: str
    input: Json
    actor: str
    policy: e.Policy
    org_id: str = DEFAULT_ORG
    files: tuple[Mapping[str, Any], ...] = ()
    staged: tuple[StagedFile, ...] = ()
    lineage: e.Lineage | None = None
    on_parent_end: e.OnParentEnd = "cancel"
    options: Mapping[str, Json] = {}
    engine: str = "local"
    isolation: e.Isolation = "task"
    cause: str | None = None
    secrets: Mapping[str, str] = {}
    sessions: tuple[Session, ...] = ()
    sessions_ttl_ms: int = 0

    def __repr__(self) -> str:
        """Says which run, and nothing of its input or secrets."""
        return f"Submission({self.run_id}, {self.play_name})"


class Submitter:
    """Submits runs into one log; `find_play` says what this process knows of a play."""

    def __init__(
        self,
        log: RunLog,
        find_play: Callable[[str], PlayInfo | None],
        *,
        scope: str,
        version: str,
        plays: int,
        isolation: e.Isolation = "task",
    ) -> None:
        self._log = log
        self._find_play = find_play
        self._scope = scope
        self._keys: list[bytes] = []
        self._isolation: e.Isolation = isolation
        self.version = version
        self.plays = plays

    async def submit(self, submission: Submission) -> Answer:
        """Records a run, or finds it; raises Refused, TooLarge, RunConflict or Unavailable."""
        check_run_id(submission.run_id)
        edge = submission.engine == EDGE  # its coordinator knows the play, this process need not
        play = PlayInfo(submission.play_name) if edge else self._find_play(submission.play_name)
        if play is None:
            raise PlayNotFound(
                f"no play {quote(submission.play_name)} is offered here",
                hint="start serve with the file or module it is in",
            )
        size = len(canonical(submission.input))
        canonical(dict(submission.options))
        if size > submission.policy.max_bytes:
            raise TooLarge(
                f"workflow retry params too large: {size} bytes exceeds "
                f"{submission.policy.max_bytes}. Pass large payloads as staged files or ctx.csv "
                "inputs instead of inline JSON.",
                code="PARAMS_TOO_LARGE",
                hint="stage it: --input @file reaches the play as run.file()",
                bytes=size,
                limit=submission.policy.max_bytes,
            )
        if play.check is not None:
            play.check(submission.input)
        vault = self._log.vault
        key = vault.known_key(submission.run_id) or self._draw_key()
        try:
            return await self._submit(submission, play, key)
        except ValuesUnavailable as error:
            self._log.traces.record(
                submission.run_id,
                "coordinator.retry_state_persistence",
                0,
                error=error.code,
                status="failed",
            )
            raise
        except Reseal:
            # The run exists under its own key, so that equal requests compare equal: seal again.
            own = await vault.run_key(submission.run_id)
            return await self._submit(submission, play, own or key)

    def _draw_key(self) -> bytes:
        """Draws run keys in bulk: each call to the kernel gives up the interpreter."""
        if not self._keys:
            drawn = secrets.token_bytes(KEY_BYTES * KEYS_AT_ONCE)
            self._keys = [drawn[i : i + KEY_BYTES] for i in range(0, len(drawn), KEY_BYTES)]
        return self._keys.pop()

    async def _submit(self, submission: Submission, play: PlayInfo, key: bytes) -> Answer:
        run_id = submission.run_id
        vault = self._log.vault
        stream = run_stream(run_id)
        files, stored = await self._store_files(submission, key)
        params = canonical_own(
            {"files": files, "input": submission.input, "options": dict(submission.options)}
        )
        policy = policy_for(submission, play)
        sealed = seal(key, run_id, PARAMS_PLACE, params, policy.externalize_after_bytes)
        offer, offered = _offer(submission, key)
        secrets_kept = [
            await vault.seal_secret(stream, SECRET_NAMES[field], value.encode(), None)
            for field, value in submission.secrets.items()
        ]
        refs = {ref.vault_key.rpartition("/")[2]: ref for ref, _ in secrets_kept}
        await vault.store_blobs([sealed, *offered])
        lineage = submission.lineage or e.Lineage(family_key=run_id)
        fact = e.RunSubmitted(
            run_id=run_id,
            play_name=submission.play_name,
            play_digest=play.digest,
            engine=submission.engine,
            isolation=self._isolation,
            scope=self._scope,
            org_id=submission.org_id,
            lineage=lineage,
            params=sealed.seal,
            request_digest=request_digest(
                {
                    "engine": submission.engine,
                    "lineage": msgspec.to_builtins(lineage),
                    "options": dict(submission.options),
                    "params": sealed.seal.digest,
                    "playName": submission.play_name,
                    "runId": run_id,
                }
            ),
            policy=policy,
            sessions=offer,
            executor_token=refs.get("executor_token"),
            internal_token=refs.get("internal_token"),
        )
        vault.learn(sealed, params)  # before the commit: its create may be taken at once
        failpoint("before_submit")
        began = time.monotonic()
        answer = await self._log.transact(
            Command(
                stream=stream,
                fact=fact,
                actor=submission.actor,
                cause=submission.cause,
                values=(
                    replace(sealed.disclosure, blobs=(*sealed.disclosure.blobs, *stored)),
                    *(item.disclosure for item in offered),
                ),
                secrets=tuple(row for _, row in secrets_kept),
                run_key=key,
            )
        )
        failpoint("after_submit")
        self._trace(submission, answer, (time.monotonic() - began) * 1000)
        vault.learn_key(run_id, key)
        return answer

    async def _store_files(
        self, submission: Submission, key: bytes
    ) -> tuple[list[Json], list[str]]:
        """Stores the new files of a request; returns all of its files, and the new blobs' keys."""
        vault, stream = self._log.vault, run_stream(submission.run_id)
        files: list[Json] = [dict(file) for file in submission.files]
        stored = []
        for staged in submission.staged:
            ref = blob_ref(key, staged.content)
            await vault.store_blob(stream, ref, staged.content)
            stored.append(ref.blob)
            files.append(
                {"blob": ref.blob, "bytes": ref.bytes, "name": staged.name, "sha256": ref.sha256}
            )
        return files, stored

    def _trace(self, submission: Submission, answer: Answer, ms: float) -> None:
        combined = bool(submission.sessions)
        run_id, traces = submission.run_id, self._log.traces
        if answer.state is not None and answer.state.run.sessions is not None and combined:
            sessions = answer.state.run.sessions
            traces.record(
                run_id,
                "coordinator.workflow_db_sessions_externalized",
                ms,
                combinedLaunchState=True,
                expiresAt=sessions.expires_at,
                sessions=sessions.count,
            )
        phase = "coordinator.retry_state_persistence"
        traces.record(run_id, phase, ms, combinedLaunchState=combined)


def _offer(submission: Submission, key: bytes) -> tuple[e.SessionOffer | None, list[Sealed]]:
    """Seals the sessions that came with a request; raises SessionRefused for a raw one (INV-41)."""
    if not submission.sessions:
        return None, []
    check_encrypted(submission.sessions)
    value = canonical([dict(session) for session in submission.sessions])
    limit = submission.policy.externalize_after_bytes
    sealed = seal(key, submission.run_id, SESSIONS_PLACE, value, limit)
    offer = e.SessionOffer(
        sessions=sealed.seal,
        count=len(submission.sessions),
        ttl_ms=submission.sessions_ttl_ms,
    )
    return offer, [sealed]


def policy_for(submission: Submission, play: PlayInfo) -> e.Policy:
    """Returns the policy that a run freezes: the caller's, and what the play itself declares."""
    return replace(
        submission.policy,
        play_retries=play.retries,
        timeout_ms=play.timeout_ms,
        on_parent_end=submission.on_parent_end,
    )


DEFAULT_POLICY: Final = e.Policy(
    retry_limit=2,
    lost_limit=2,
    restart_limit=20,
    play_retries=0,
    backoff_ms=5_000,
    retry_ttl_ms=7 * 24 * 3600 * 1000,
    create_window_ms=600_000,
    cancel_grace_ms=10_000,
    externalize_after_bytes=65_536,
    max_bytes=1_048_576,
    on_parent_end="cancel",
)
