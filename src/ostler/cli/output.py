"""Results on standard output, talk on standard error; control characters leave as escapes; documented exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import click

from ostler.errors import (
    AuthorizationError,
    ConflictError,
    DeadlineError,
    InvalidOperationError,
    NotFoundError,
    OstlerError,
    ValidationError,
)


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    WRONG_STATE = 3
    NOT_FOUND = 4
    NOT_ALLOWED = 5
    CONFLICT = 7
    TIMED_OUT = 124
    INTERRUPTED = 130


_BY_ERROR: tuple[tuple[type[OstlerError], ExitCode], ...] = (
    (ValidationError, ExitCode.USAGE),
    (InvalidOperationError, ExitCode.WRONG_STATE),
    (NotFoundError, ExitCode.NOT_FOUND),
    (AuthorizationError, ExitCode.NOT_ALLOWED),
    (ConflictError, ExitCode.CONFLICT),
    (DeadlineError, ExitCode.TIMED_OUT),
)


def exit_code(error: OstlerError) -> ExitCode:
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.FAILED)


def plain(text: str) -> str:
    """The text with everything escaped that a terminal would act upon or hide."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    lines = [list(head), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def as_json(value: Any, *, indent: int | None = 2) -> None:
    """JSON in ASCII: an escape means the same, and no terminal acts upon it."""
    click.echo(json.dumps(value, indent=indent))


def note(sentence: str) -> None:
    click.echo(f"ostler: {plain(sentence)}", err=True)


def complain(error: OstlerError) -> None:
    """Each fault on a line of its own."""
    faults = error.faults if isinstance(error, ValidationError) else ()
    for sentence in [fault.message for fault in faults] or [str(error)]:
        note(sentence)


def rough_duration(value: timedelta) -> str:
    """Two units are enough: 3 d 4 h, 5 min 12 s, 7 s."""
    seconds = int(value.total_seconds())
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        amount, seconds = divmod(seconds, size)
        if amount:
            parts.append(f"{amount} {unit}")
    return " ".join(parts[:2]) or "0 s"
