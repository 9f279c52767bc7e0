"""What an agent raised, as the error that its caller gets."""

from __future__ import annotations

import traceback
from types import TracebackType

from ostler.errors import AgentExecutionError
from ostler.model import clean_text, clipped

MAX_MESSAGE = 2000
#: Of a trace that is too long the beginning says where it came from, the end what happened.
_HEAD = 4_000
_TAIL = 12_000


def execution_error(error: BaseException, *, ours: str) -> AgentExecutionError:
    """`ours` is the file whose frames at the top of the trace tell the agent's author nothing."""
    return AgentExecutionError(
        clipped(error_text(error), MAX_MESSAGE), exception_type=_type_name(error), stack_trace=_trace(error, ours)
    )


def error_text(error: BaseException) -> str:
    """Its type and its text, whatever the text does."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the error is foreign, and so is the way it writes itself
        return f"{name}: (its text cannot be shown)"
    return f"{name}: {text}" if text else name


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _trace(error: BaseException, ours: str) -> str:
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == ours:
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 - rendering runs foreign code; a failure without a trace is still a failure
        return error_text(error)
    if len(text) <= _HEAD + _TAIL:
        return clean_text(text)
    left_out = len(text) - _HEAD - _TAIL
    return clean_text(f"{text[:_HEAD]}\n… ({left_out} characters left out) …\n{text[-_TAIL:]}")
