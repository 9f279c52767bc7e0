"""Errors outside the library: one table from an error to its stable code, its HTTP status and its exit code."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from ostler import errors


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


class Problem(NamedTuple):
    error: type[errors.OstlerError]
    code: str
    status: int
    exit_code: ExitCode


#: The first row whose error fits counts, so a class stands before its base.
PROBLEMS = (
    Problem(errors.ValidationError, "invalid", 422, ExitCode.USAGE),
    Problem(errors.NotFoundError, "not_found", 404, ExitCode.NOT_FOUND),
    Problem(errors.AuthorizationError, "forbidden", 403, ExitCode.NOT_ALLOWED),
    Problem(errors.LicenseError, "plan_limit", 403, ExitCode.NOT_ALLOWED),
    Problem(errors.InvalidOperationError, "wrong_state", 409, ExitCode.WRONG_STATE),
    Problem(errors.MergeConflictError, "merge_conflict", 409, ExitCode.CONFLICT),
    Problem(errors.CheckoutBlockedError, "checkout_blocked", 409, ExitCode.CONFLICT),
    Problem(errors.ConflictError, "conflict", 409, ExitCode.CONFLICT),
    Problem(errors.GitError, "git_failed", 502, ExitCode.FAILED),
    Problem(errors.VaultError, "vault_refused", 409, ExitCode.FAILED),
    Problem(errors.AgentInitializationError, "start_failed", 502, ExitCode.FAILED),
    Problem(errors.UsageLimitError, "usage_limit", 429, ExitCode.FAILED),
    Problem(errors.AgentExecutionError, "agent_error", 502, ExitCode.FAILED),
    Problem(errors.AgentGoneError, "agent_gone", 502, ExitCode.FAILED),
    Problem(errors.AgentBusyError, "agent_busy", 503, ExitCode.FAILED),
    Problem(errors.InitializationTimeoutError, "start_timeout", 504, ExitCode.TIMED_OUT),
    Problem(errors.DeadlineError, "timeout", 504, ExitCode.TIMED_OUT),
    Problem(errors.CursorGoneError, "cursor_gone", 410, ExitCode.FAILED),
    Problem(errors.StoreFullError, "store_full", 507, ExitCode.FAILED),
    Problem(errors.StoreBusyError, "store_busy", 503, ExitCode.FAILED),
    Problem(errors.StoreError, "store_failed", 500, ExitCode.FAILED),
    Problem(errors.OstlerError, "failed", 500, ExitCode.FAILED),
)
#: Codes that HTTP itself gives, without an error of the library.
UNAUTHENTICATED = "unauthenticated"
TOO_LARGE = "too_large"
UNREACHABLE = "unreachable"
_BY_CODE: Mapping[str, Problem] = MappingProxyType({problem.code: problem for problem in PROBLEMS})


def problem_of(error: errors.OstlerError) -> Problem:
    return next(problem for problem in PROBLEMS if isinstance(error, problem.error))


def document(error: errors.OstlerError) -> dict[str, Any]:
    """The body of an `application/problem+json` answer."""
    problem = problem_of(error)
    body: dict[str, Any] = {
        "type": f"about:blank#{problem.code}",
        "code": problem.code,
        "status": problem.status,
        "title": problem.error.sentence(),
        "detail": str(error),
    }
    if isinstance(error, errors.ValidationError):
        body["faults"] = [fault.message for fault in error.faults]
    if isinstance(error, errors.MergeConflictError | errors.CheckoutBlockedError):
        body["paths"] = list(error.paths)
    if isinstance(error, errors.UsageLimitError):
        body["retry_at"] = None if error.retry_at is None else error.retry_at.isoformat()
        body["session"] = error.session
    return body


def exit_code_of(code: str) -> ExitCode:
    """The exit code for the code of a problem."""
    if code == UNAUTHENTICATED:
        return ExitCode.NOT_ALLOWED
    if code == UNREACHABLE:
        return ExitCode.UNREACHABLE
    if code == TOO_LARGE:
        return ExitCode.USAGE
    known = _BY_CODE.get(code)
    return ExitCode.FAILED if known is None else known.exit_code


class _Told:
    """A fault that came over HTTP as a sentence."""

    def __init__(self, message: str) -> None:
        self.message = message


def error_of(body: Mapping[str, Any]) -> errors.OstlerError:
    """The error that a problem document stands for, for clients that want the types of the library."""
    problem = _BY_CODE.get(str(body.get("code")))
    text = str(body.get("detail") or body.get("title") or "the daemon refused")
    if problem is None:
        return errors.AuthorizationError(text) if body.get("code") == UNAUTHENTICATED else errors.OstlerError(text)
    if problem.error is errors.ValidationError:
        return errors.ValidationError([_Told(str(one)) for one in body.get("faults") or [text]])
    if problem.error in {errors.MergeConflictError, errors.CheckoutBlockedError}:
        return problem.error(text, paths=[str(path) for path in body.get("paths") or ()])
    if problem.error is errors.UsageLimitError:
        when = body.get("retry_at")
        return errors.UsageLimitError(
            text, retry_at=datetime.fromisoformat(when) if when else None, session=body.get("session")
        )
    if problem.error is errors.CursorGoneError:
        return errors.StoreError(text)
    return problem.error(text)
