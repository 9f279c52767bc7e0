"""Whose exception it is: the user's own code's, or that of somebody outside who calls the work off.

Code of a scenario may raise anything, also what ends a program: `SystemExit`, `GeneratorExit`, a `CancelledError` of
its own. All of that is a failure of that code. Ctrl-C and the cancellation of a caller only pass through it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any


def own_task() -> asyncio.Task[Any] | None:
    """The task that runs now; None where no loop runs."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def is_call_off(error: BaseException, awaiting: asyncio.Task[Any] | None = None) -> bool:
    """Whether it came from outside, while foreign code was called; or awaited, by this task.

    A call that is not awaited can neither be cancelled nor closed, so what looks like that is its own. Ctrl-C comes to
    the main thread only, and there it cannot be told from one that the code has raised itself.
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if awaiting is None:
        return False
    if isinstance(error, asyncio.CancelledError):
        return awaiting.cancelling() > 0
    # A coroutine that is thrown away is closed by whoever does that, not by its task.
    return isinstance(error, GeneratorExit) and own_task() is not awaiting
