"""Every error that Ostler raises on purpose, in one tree.

    OstlerError
    ├── ValidationError             the input breaks one or more rules; carries every fault
    │   └── DefinitionError         a definition file is wrong; every fault names file and line
    ├── NotFoundError
    │   ├── AgentNotFoundError      no such definition or instance
    │   ├── SimulationNotFoundError
    │   ├── TaskNotFoundError
    │   └── WorkspaceNotFoundError
    ├── AuthorizationError          the caller may not do this
    ├── LicenseError                the plan of the workspace does not allow this
    ├── InvalidOperationError       not possible in the present state; names both states
    ├── AgentInitializationError    the agent did not become ready
    ├── AgentExecutionError         the agent raised while it processed a request
    │   └── UsageLimitError         its model refuses more work for now; says when to try again
    ├── AgentGoneError              the agent ended before it answered
    ├── AgentBusyError              as many requests wait as may wait; come back later
    ├── ConflictError               another writer was first
    │   ├── VersionConflictError    the record changed since it was read
    │   ├── IdempotencyConflictError  the same key came with another body
    │   ├── LeaseHeldError          another owner holds the lease
    │   ├── MergeConflictError      the work does not merge; names the paths, nothing was changed
    │   ├── CheckoutBlockedError    files in the user's checkout stand in the way; names the paths, nothing was changed
    │   └── StaleWriterError        an old epoch or attempt tried to write
    ├── DeadlineError               also a TimeoutError
    │   ├── InitializationTimeoutError
    │   └── ExecutionTimeoutError
    ├── StoreError
    │   ├── StoreClosedError
    │   ├── StoreFullError          no space left; reads and supervision go on
    │   ├── StoreBusyError          too much waits already, or another process holds the lock
    │   ├── StoreFailedError        the disk lied once; nothing more is written until a restart
    │   ├── OutcomeUnknownError     it may or may not have been written; read again before retrying
    │   ├── StoreTooNewError        made by a newer Ostler
    │   ├── CursorGoneError         the cursor lies before what retention kept (HTTP 410)
    │   ├── DamagedRowError         one row cannot be read; names it, and the others are as they were
    │   ├── AuditBrokenError        the chain does not verify
    │   └── HistoryBrokenError      a turn of a run is missing, or not as it was written
    ├── GitError                    git refused, or is missing or too old
    ├── VaultError                  an entry of the vault is damaged or may not be unpacked
    ├── SimulationError             a turn could not be completed; the run stands at the one before
    └── MissingExtraError           an optional part is not installed

The docstring of a class is its default message, so the two cannot drift apart. Outside the library an error is known by
`code` (stable), `status` (HTTP) and `cli_exit` (of the command line); a class without a code of its own has its base's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from typing import Any, ClassVar, Protocol


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    WRONG_STATE = 3
    NOT_FOUND = 4
    NOT_ALLOWED = 5
    UNREACHABLE = 6
    CONFLICT = 7
    PENDING = 8
    TIMED_OUT = 124
    INTERRUPTED = 130


class FaultLike(Protocol):
    """Anything with a sentence that says what is wrong, such as `ostler.Fault`."""

    @property
    def message(self) -> str: ...


class OstlerError(Exception):
    """Ostler could not do this."""

    code: ClassVar[str] = "failed"
    status: ClassVar[int] = 500
    cli_exit: ClassVar[ExitCode] = ExitCode.FAILED
    #: Whether the audit has an entry of this refusal already.
    audited: bool = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or self.sentence())

    @classmethod
    def sentence(cls) -> str:
        """The default message. Under `-OO` there are no docstrings, so it is made from the name."""
        return (cls.__doc__ or "").strip() or _in_words(cls.__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        # The message is built in the class, so a copy (a process pool makes one) must not build it again.
        return _revive, (type(self), self.args, self.__dict__)


def _revive(cls: type[OstlerError], args: tuple[Any, ...], state: dict[str, Any]) -> OstlerError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ValidationError(OstlerError):
    """The input breaks one or more rules."""

    code = "invalid"
    status = 422
    cli_exit = ExitCode.USAGE

    def __init__(self, faults: Sequence[FaultLike]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(fault.message for fault in self.faults) or None)


class DefinitionError(ValidationError):
    """A definition file is wrong."""


class NotFoundError(OstlerError):
    """There is no such thing."""

    code = "not_found"
    status = 404
    cli_exit = ExitCode.NOT_FOUND


class AgentNotFoundError(NotFoundError):
    """There is no such agent; list what exists, or check the id."""


class SimulationNotFoundError(NotFoundError):
    """There is no such simulation; list what exists, or check the id."""


class TaskNotFoundError(NotFoundError):
    """There is no such task; list what exists, or check the id."""


class WorkspaceNotFoundError(NotFoundError):
    """There is no such workspace; create it first, or check the id."""


class AuthorizationError(OstlerError):
    """You may not do this; ask an administrator of the workspace for the permission."""

    code = "forbidden"
    status = 403
    cli_exit = ExitCode.NOT_ALLOWED


class LicenseError(OstlerError):
    """The plan of this workspace does not allow this."""

    code = "plan_limit"
    status = 403
    cli_exit = ExitCode.NOT_ALLOWED

    def __init__(
        self, message: str | None = None, *, tier: str = "", current: int | None = None, maximum: int | None = None
    ) -> None:
        self.tier = tier
        #: How many there are and how many the plan admits, where it is a matter of number.
        self.current = current
        self.maximum = maximum
        super().__init__(message)


class InvalidOperationError(OstlerError):
    """This cannot be done in the present state."""

    code = "wrong_state"
    status = 409
    cli_exit = ExitCode.WRONG_STATE

    def __init__(self, message: str | None = None, *, current: str = "", wanted: str = "") -> None:
        self.current = current
        self.wanted = wanted
        super().__init__(message or (f"cannot go from {current} to {wanted}" if wanted else None))


class AgentInitializationError(OstlerError):
    """The agent did not become ready."""

    code = "start_failed"
    status = 502

    def __init__(
        self,
        message: str | None = None,
        *,
        outcome: str | None = None,
        exception_type: str | None = None,
        stack_trace: str | None = None,
    ) -> None:
        #: How the start ended, as an `AttemptOutcome`, where it is known.
        self.outcome = outcome
        self.exception_type = exception_type
        self.stack_trace = stack_trace
        super().__init__(message)


class AgentExecutionError(OstlerError):
    """The agent raised an error while it processed a request."""

    code = "agent_error"
    status = 502

    def __init__(  # noqa: PLR0913 - what is known of a run that failed
        self,
        message: str | None = None,
        *,
        exception_type: str | None = None,
        stack_trace: str | None = None,
        exit_code: int | None = None,
        signal: str | None = None,
        out_of_memory: bool = False,
        answer: Mapping[str, Any] | None = None,
    ) -> None:
        self.exception_type = exception_type
        self.stack_trace = stack_trace
        #: Of a command: the exit code of its run, or the name of the signal that ended it.
        self.exit_code = exit_code
        self.signal = signal
        #: It was killed because it used more memory than its limit.
        self.out_of_memory = out_of_memory
        #: Of a coding agent: what its answer would have been, with the session, the tokens and the cost of the run.
        self.answer = answer
        super().__init__(message)


class UsageLimitError(AgentExecutionError):
    """The model of the agent refuses more work for now; try again later."""

    code = "usage_limit"
    status = 429

    def __init__(
        self,
        message: str | None = None,
        *,
        retry_at: datetime | None = None,
        session: str | None = None,
        exit_code: int | None = None,
        answer: Mapping[str, Any] | None = None,
    ) -> None:
        #: When the limit ends, in UTC; a guess where the program does not say it.
        self.retry_at = retry_at
        #: The session that can be resumed then.
        self.session = session
        super().__init__(message, exit_code=exit_code, answer=answer)


class AgentGoneError(OstlerError):
    """The agent has ended, so this was not answered; look at why, and spawn or restart it."""

    code = "agent_gone"
    status = 502


class AgentBusyError(OstlerError):
    """The agent has as many requests waiting as it accepts; try again when some are done."""

    code = "agent_busy"
    status = 503


class ConflictError(OstlerError):
    """Another writer was first; read the record again and decide anew."""

    code = "conflict"
    status = 409
    cli_exit = ExitCode.CONFLICT


class VersionConflictError(ConflictError):
    """The record changed since it was read; read it again and decide anew."""


class IdempotencyConflictError(ConflictError):
    """This idempotency key was already used with another request; use a new key."""


class LeaseHeldError(ConflictError):
    """Another owner holds the lease; stop it first, or wait until the lease ends."""


class MergeConflictError(ConflictError):
    """The work does not merge; nothing was changed, so send it back to its agent or merge its target by hand."""

    code = "merge_conflict"

    def __init__(self, message: str | None = None, *, paths: Sequence[str] = ()) -> None:
        self.paths = tuple(paths)
        super().__init__(message)


class CheckoutBlockedError(ConflictError):
    """Files in your checkout stand in the way; nothing was changed, so commit or stash them and try again."""

    code = "checkout_blocked"

    def __init__(self, message: str | None = None, *, paths: Sequence[str] = ()) -> None:
        self.paths = tuple(paths)
        super().__init__(message)


class StaleWriterError(ConflictError):
    """A newer owner or attempt has taken over; this one may not write any more."""


class DeadlineError(OstlerError, TimeoutError):
    """This took longer than it was allowed to."""

    code = "timeout"
    status = 504
    cli_exit = ExitCode.TIMED_OUT


class InitializationTimeoutError(DeadlineError):
    """The agent did not become ready within its initialization timeout."""

    code = "start_timeout"


class ExecutionTimeoutError(DeadlineError):
    """The operation ran longer than its execution timeout and was cancelled."""


class StoreError(OstlerError):
    """The store could not do this."""

    code = "store_failed"


class StoreClosedError(StoreError):
    """The store is closed; open it again."""


class StoreFullError(StoreError):
    """The disk is full: new work is refused, what runs is still supervised; free some space and try again."""

    code = "store_full"
    status = 507


class StoreBusyError(StoreError):
    """The store has more waiting than it accepts; try again in a moment."""

    code = "store_busy"
    status = 503


class StoreFailedError(StoreError):
    """The disk reported an error, so nothing more is written; check the disk, then restart to recover."""


class OutcomeUnknownError(StoreError):
    """Whether this was written is unknown; read the record again before you retry, or use an idempotency key."""


class StoreTooNewError(StoreError):
    """This store was made by a newer Ostler; upgrade the program, nothing was changed."""


class CursorGoneError(StoreError):
    """The events after this cursor are no longer kept; take a snapshot and follow from there."""

    code = "cursor_gone"
    status = 410

    def __init__(self, *, cursor: int, horizon: int) -> None:
        self.cursor = cursor
        self.horizon = horizon
        super().__init__(
            f"events up to {horizon} are no longer kept, so reading on from {cursor} would skip some; "
            f"take a snapshot and follow from {horizon}"
        )


class DamagedRowError(StoreError):
    """A row of the store is damaged; restore the store from a backup."""


class HistoryBrokenError(StoreError):
    """The history of this run is not as it was written; restore the home from a backup, or fork the run earlier."""


class AuditBrokenError(StoreError):
    """The audit chain does not verify."""


class GitError(OstlerError):
    """git could not do this; see what it said, and try the same by hand in the repository."""

    code = "git_failed"
    status = 502


class VaultError(OstlerError):
    """This entry of the vault is damaged or holds what may not be unpacked; nothing was written."""

    code = "vault_refused"
    status = 409


class SimulationError(OstlerError):
    """A turn could not be completed."""


class MissingExtraError(OstlerError):
    """An optional part is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{feature} needs an optional part; run: pip install 'ostler[{extra}]'")


def _in_words(name: str) -> str:
    return "".join(f" {char.lower()}" if char.isupper() else char for char in name.removesuffix("Error")).strip()


# --- errors as documents ---------------------------------------------------------------------------

#: Codes that HTTP itself gives, without an error of the library.
UNAUTHENTICATED = "unauthenticated"
TOO_LARGE = "too_large"
UNREACHABLE = "unreachable"
_EXIT_OF_HTTP = {
    UNAUTHENTICATED: ExitCode.NOT_ALLOWED,
    TOO_LARGE: ExitCode.USAGE,
    UNREACHABLE: ExitCode.UNREACHABLE,
}
#: The class that defines each code.
CLASS_OF_CODE: Mapping[str, type[OstlerError]] = {
    value.code: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, OstlerError) and "code" in vars(value)
}


def exit_code_of(code: str) -> ExitCode:
    """The exit code of the command line for the code of a problem document."""
    return _EXIT_OF_HTTP.get(code) or CLASS_OF_CODE.get(code, OstlerError).cli_exit


def document(error: OstlerError) -> dict[str, Any]:
    """The body of an `application/problem+json` answer."""
    body: dict[str, Any] = {
        "type": f"about:blank#{error.code}",
        "code": error.code,
        "status": error.status,
        "title": CLASS_OF_CODE[error.code].sentence(),
        "detail": str(error),
    }
    if isinstance(error, ValidationError):
        body["faults"] = [fault.message for fault in error.faults]
    if isinstance(error, MergeConflictError | CheckoutBlockedError):
        body["paths"] = list(error.paths)
    if isinstance(error, UsageLimitError):
        body["retry_at"] = None if error.retry_at is None else error.retry_at.isoformat()
        body["session"] = error.session
    return body


class _RemoteFault:
    """A fault that came over HTTP as a sentence."""

    def __init__(self, message: str) -> None:
        self.message = message


def error_of(body: Mapping[str, Any]) -> OstlerError:
    """The error that a problem document stands for, for clients that want the types of the library."""
    code = str(body.get("code"))
    text = str(body.get("detail") or body.get("title") or "the daemon refused")
    error_class = AuthorizationError if code == UNAUTHENTICATED else CLASS_OF_CODE.get(code, OstlerError)
    if error_class is ValidationError:
        return ValidationError([_RemoteFault(str(sentence)) for sentence in body.get("faults") or [text]])
    if error_class is MergeConflictError or error_class is CheckoutBlockedError:
        return error_class(text, paths=[str(path) for path in body.get("paths") or ()])
    if error_class is UsageLimitError:
        when = body.get("retry_at")
        return UsageLimitError(
            text, retry_at=datetime.fromisoformat(when) if when else None, session=body.get("session")
        )
    if error_class is CursorGoneError:
        return StoreError(text)
    return error_class(text)
