"""What goes wrong inside an agent's process, in the words of the channel, of its log and of its exit code."""

from __future__ import annotations

import contextlib
import signal
import sys

from ostler.agents.failures import execution_error
from ostler.errors import AgentExecutionError
from ostler.model.text import clean_text


def rendered(error: BaseException, *, ours: str) -> dict[str, str | None]:
    """As it goes over the channel. `ours` is the file whose frames tell the agent's author nothing."""
    told = error if isinstance(error, AgentExecutionError) else execution_error(error, ours=ours)
    # The agent may have made it itself, of whatever it had at hand.
    kind, trace = (None if one is None else clean_text(str(one)) for one in (told.exception_type, told.stack_trace))
    return {"message": clean_text(str(told)), "exception_type": kind, "stack_trace": trace}


def exit_code(error: BaseException) -> int:
    """As Python itself would exit."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    complain(str(error.code))
    return 1


def complain(text: str) -> None:
    """Into the agent's own log; the agent may have closed it."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"ostler: {text}\n")
        sys.stderr.flush()
