"""The loop on which an agent lives where it has one of its own: in a thread, or in a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from ostler.agent_process.workers import Cutoff, Workers
from ostler.agents.failures import error_text

_log = logging.getLogger("ostler.isolation")


class AgentLoop(asyncio.SelectorEventLoop):
    """Whatever the agent hands to the loop's own executor goes to the workers of its cell, and so is bounded."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        super().__init__()
        self.set_exception_handler(_note)

    def run_in_executor(  # type: ignore[override]  # typeshed ties the arguments to those of func
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        return super().run_in_executor(executor or self.workers, func, *args)

    def _check_signal(self, sig: int) -> None:
        """Asyncio asks this by making a set of all signals, most of the work of a loop that wants to hear of one."""
        if not isinstance(sig, int):
            raise TypeError(f"sig must be an int, not {sig!r}")
        if not 1 <= sig < signal.NSIG:
            raise ValueError(f"invalid signal number {sig}")

    def end_tasks(self) -> None:
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            # One that wants to end the program instead is done with that; the others have their turn again.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.run_until_complete(self.shutdown_asyncgens())

    def leave(self) -> None:
        """It may have been cut off so hard that it still thinks it runs."""
        self._thread_id = None
        asyncio._set_running_loop(None)  # noqa: SLF001 - meant for authors of loops


def _note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What goes wrong beside the calls, on one line and written without a trace: see `agents.failures` for why."""
    error = context.get("exception")
    if not isinstance(error, Cutoff):  # which is our doing
        _log.error("%s%s", context.get("message", "an error"), f" ({error_text(error)})" if error else "")
