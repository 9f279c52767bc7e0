"""Waiting in asyncio: for work that must be finished, and for the first of several."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def wait_ignoring_cancel(*futures: asyncio.Future[Any]) -> None:
    """Wait until the first of them is done. A cancellation of the caller meanwhile is dropped, not raised later."""
    while not any(future.done() for future in futures):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def finish(work: Awaitable[_T]) -> _T:
    """The result of the work, which is finished although its caller is cancelled; the cancellation is raised after."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await wait_ignoring_cancel(task)
        if not task.cancelled():
            task.result()
        raise


async def first_of(*work: Awaitable[Any]) -> None:
    """Wait until one of them is done. Coroutines are run here and cancelled at the end; futures are only waited for.

    An error of a coroutine is raised, an error of a future is left to the owner of the future.
    """
    own = [asyncio.ensure_future(awaitable) for awaitable in work if not asyncio.isfuture(awaitable)]
    others = [awaitable for awaitable in work if asyncio.isfuture(awaitable)]
    try:
        await asyncio.wait([*own, *others], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
    for task in own:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
