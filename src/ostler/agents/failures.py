"""An exception of an agent as the error that its caller gets."""

from __future__ import annotations

import itertools
import linecache
import traceback
from collections.abc import Iterator
from pathlib import PurePath
from types import TracebackType

from ostler.errors import AgentExecutionError
from ostler.model.text import clean_text, clipped

MAX_MESSAGE = 2000
#: Of a trace that is too long the beginning says where it came from, the end what happened.
_HEAD = 4_000
_TAIL = 12_000
_FRAMES = 200
_OURS = PurePath(__file__).parents[1]


def execution_error(error: BaseException, *, ours: str) -> AgentExecutionError:
    """Frames of the file `ours` at the top of the trace are left out."""
    return AgentExecutionError(
        clipped(error_text(error), MAX_MESSAGE), exception_type=_type_name(error), stack_trace=_trace(error, ours)
    )


def error_text(error: BaseException) -> str:
    """Its type and its text, also where making the text raises."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the error is foreign, and so is the way it writes itself
        return f"{name}: (its text cannot be shown)"
    return f"{name}: {text}" if text else name


def error_place(error: BaseException) -> str:
    """The file and the line of the user's own code that led to it, short; empty when it is not known."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = PurePath(frame.f_code.co_filename)
        if not path.is_relative_to(_OURS):
            place = f"{path.name}:{line}"
    return place


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _trace(error: BaseException, ours: str) -> str:
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == ours:
        frames = frames.tb_next
    try:
        text = "".join(_rendered(error, frames))
    except Exception:  # noqa: BLE001 - rendering runs foreign code; a failure without a trace is still a failure
        return error_text(error)
    if len(text) <= _HEAD + _TAIL:
        return clean_text(text)
    left_out = len(text) - _HEAD - _TAIL
    return clean_text(f"{text[:_HEAD]}\n… ({left_out} characters left out) …\n{text[-_TAIL:]}")


def _rendered(error: BaseException, frames: TracebackType | None) -> Iterator[str]:
    """A trace as Python writes it, without the marks under the lines.

    Those are found by parsing the source, and Python 3.11 bears neither two threads that parse at once nor an agent
    that is cut off while it does.
    """
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and cause is not error:
        yield f"{error_text(cause)}\n\nwhich led to:\n\n"
    yield "Traceback (most recent call last):\n"
    for frame, line in itertools.islice(traceback.walk_tb(frames), _FRAMES):
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {line}, in {code.co_name}\n'
        if source := linecache.getline(code.co_filename, line).strip():
            yield f"    {source}\n"
    yield f"{error_text(error)}\n"
