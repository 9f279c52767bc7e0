"""What the exit code says, and the way from an error to it."""

from __future__ import annotations

from enum import IntEnum

from ostler.errors import (
    AuthorizationError,
    ConflictError,
    DeadlineError,
    InvalidOperationError,
    NotFoundError,
    OstlerError,
    ValidationError,
)


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    WRONG_STATE = 3
    NOT_FOUND = 4
    NOT_ALLOWED = 5
    CONFLICT = 7
    TIMED_OUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


_BY_ERROR: tuple[tuple[type[OstlerError], Exit], ...] = (
    (ValidationError, Exit.USAGE),
    (InvalidOperationError, Exit.WRONG_STATE),
    (NotFoundError, Exit.NOT_FOUND),
    (AuthorizationError, Exit.NOT_ALLOWED),
    (ConflictError, Exit.CONFLICT),
    (DeadlineError, Exit.TIMED_OUT),
)


def exit_for(error: OstlerError) -> Exit:
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), Exit.FAILED)
