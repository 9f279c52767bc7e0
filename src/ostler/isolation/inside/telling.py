"""What goes wrong inside an agent's process, in the words of the channel, of its log and of its exit code."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Mapping

from ostler.agents.context import LOGGER_NAME
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


def log_to_stderr() -> None:
    """What the agent says to `context.logger` goes into its log, from INFO on; its own program may change that."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger(LOGGER_NAME)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_failure(verb: str, told: Mapping[str, str | None]) -> None:
    """A request that failed, with its trace."""
    text = told["stack_trace"] or told["message"] or ""
    logging.getLogger(LOGGER_NAME).error("%s failed: %s", verb, text.rstrip())


def complain(text: str) -> None:
    """Into the agent's own log; the agent may have closed it."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"ostler: {text}\n")
        sys.stderr.flush()
