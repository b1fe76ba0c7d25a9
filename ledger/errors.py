"""Every error a caller can meet, and what it tells them.

    PlayledgerError
    +- Refused         the request is wrong; nothing was stored
    |  +- InputInvalid, JsonInvalid, TooLarge, IdInvalid, PlayNotFound, SecretRefused
    +- Conflict        right for another state of the run
    |  +- RunConflict, RunTerminal, RunTooLarge, StaleAttempt, ChildKeyConflict,
    |     WrongExpectedVersion
    +- NotFound
    |  +- RunNotFound, ValueGone, FileNotStaged, SessionNotPlanned, SessionExpired,
    |     IntentNotFound
    +- Ended           what was awaited ended otherwise
    |  +- RunFailed, RunCancelled, ChildFailed
    +- Unavailable     the log cannot be used now
       +- LogMissing, LogLocked, LogFull, LogReadOnly, LogDamaged, SchemaNewer, SchemaOlder,
          ValuesUnavailable, VaultKeyMissing, VaultKeyWrong, Overloaded
    +- CorruptStream   a stored stream contradicts the rules

`code` is stable and is what callers branch on, `message` holds both values, `hint` says what to do
next, `details` repeats the values for programs.  HTTP and CLI show the same four (UX section 4).
"""

from __future__ import annotations

from typing import ClassVar

Detail = str | int | bool | None


class PlayledgerError(Exception):
    """Says what happened, with a stable code, both values and what to do next."""

    code: str = "INTERNAL"
    retriable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, code: str | None = None, hint: str = "", **details: Detail
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: dict[str, Detail] = details
        if code is not None:
            self.code = code


class Refused(PlayledgerError):
    """Refuses a request that is wrong in itself; nothing was stored."""

    code = "REFUSED"


class InputInvalid(Refused):
    """Refuses a value that does not fit what is asked for."""

    code = "INPUT_INVALID"


class JsonInvalid(Refused):
    """Refuses bytes that are not the JSON we take; the code says why, the message says where."""

    code = "JSON_INVALID"


class TooLarge(Refused):
    """Refuses a value over its size limit."""

    code = "TOO_LARGE"


class IdInvalid(Refused):
    """Refuses an id outside its alphabet or length (UX section 0, CONTRACTS A.3)."""

    code = "ID_INVALID"


class PlayNotFound(Refused):
    """Refuses a play that this process does not offer."""

    code = "PLAY_NOT_FOUND"


class SecretRefused(Refused):
    """Refuses a payload that holds a secret: the log takes none, not even masked (INV-52)."""

    code = "SECRET_REFUSED"


class Conflict(PlayledgerError):
    """Refuses a request that would be right for another state."""

    code = "CONFLICT"


class RunConflict(Conflict):
    """Refuses a submit whose run id is taken by another request."""

    code = "RUN_CONFLICT"


class RunTerminal(Conflict):
    """Refuses what an ended run no longer takes."""

    code = "RUN_TERMINAL"


class RunTooLarge(Conflict):
    """Refuses what would take a run over its limits of children or events."""

    code = "RUN_TOO_LARGE"


class StaleAttempt(Conflict):
    """Refuses the output of an instance that is not, or no longer, the current one."""

    code = "STALE_ATTEMPT"


class ChildKeyConflict(Conflict):
    """Refuses a child whose key is taken by another child of this run."""

    code = "CHILD_KEY_CONFLICT"


class WrongExpectedVersion(Conflict):
    """Refuses a command whose precondition (`If-Match`) was lost."""

    code = "VERSION_CONFLICT"


class NotFound(PlayledgerError):
    """Says that what was named does not exist."""

    code = "NOT_FOUND"


class RunNotFound(NotFound):
    """Says that the log has no such run."""

    code = "RUN_NOT_FOUND"


class ValueGone(NotFound):
    """Says why what lies in the vault cannot be shown; the codes are those of SPEC 3.5.

    For secrets: `SECRET_GONE`, `SECRET_EXPIRED`.
    """

    code = "MISSING"


class FileNotStaged(NotFound):
    """Says that the run has no staged file of that name."""

    code = "FILE_NOT_STAGED"


class SessionNotPlanned(NotFound):
    """Says that a run has no database session for a table."""

    code = "SESSION_NOT_PLANNED"


class SessionExpired(NotFound):
    """Says that a run's database sessions cannot be used any more; the code says why."""

    code = "SESSION_EXPIRED"


class IntentNotFound(NotFound):
    """Says that the run has no such open intent."""

    code = "INTENT_NOT_FOUND"


class Ended(PlayledgerError):
    """Says that what was awaited ended in another way than by completing."""

    code = "ENDED"


class RunFailed(Ended):
    """Says that the awaited run failed."""

    code = "RUN_FAILED"


class RunCancelled(Ended):
    """Says that the awaited run was cancelled."""

    code = "RUN_CANCELLED"


class ChildFailed(Ended):
    """Says that the awaited child failed or was cancelled."""

    code = "CHILD_FAILED"


class Unavailable(PlayledgerError):
    """Says that the log or the server cannot be used now."""

    code = "UNAVAILABLE"
    retriable = True


class LogMissing(Unavailable):
    """Says that there is no log at this path, or that the file is something else."""

    code = "LOG_MISSING"
    retriable = False


class LogLocked(Unavailable):
    """Says that another process held the write lock for too long."""

    code = "LOG_LOCKED"


class LogFull(Unavailable):
    """Says that the disk is full; nothing was recorded."""

    code = "LOG_FULL"


class LogReadOnly(Unavailable):
    """Says that the log's file or folder cannot be written."""

    code = "LOG_READ_ONLY"
    retriable = False


class LogDamaged(Unavailable):
    """Says where the stored bytes contradict themselves."""

    code = "LOG_DAMAGED"
    retriable = False


class SchemaNewer(Unavailable):
    """Says that the log was written by a newer playledger."""

    code = "SCHEMA_NEWER"
    retriable = False


class SchemaOlder(Unavailable):
    """Says that the log has to be migrated first."""

    code = "SCHEMA_OLDER"
    retriable = False


class ValuesUnavailable(Unavailable):
    """Says that a value could not be stored, so nothing was appended (INV-02)."""

    code = "WORKFLOW_RETRY_STATE_PERSISTENCE_FAILED"


class VaultKeyMissing(Unavailable):
    """Says that a key is needed to open or store what the vault keeps, and none is set."""

    code = "VAULT_KEY_MISSING"
    retriable = False


class VaultKeyWrong(Unavailable):
    """Says that the key that is set is not the one the vault was written with, or no key."""

    code = "VAULT_KEY_WRONG"
    retriable = False


class Overloaded(Unavailable):
    """Says that the write queue is full; `retry_after` is in seconds."""

    code = "OVERLOADED"
    retry_after: int = 1


class CorruptStream(PlayledgerError):
    """Says that a stored stream holds what no rule allows; only that stream is stopped."""

    code = "STREAM_CORRUPT"


class Reseal(PlayledgerError):
    """Asks the submitter to seal again under the run's own key (CONTRACTS A.5)."""

    code = "RESEAL"
