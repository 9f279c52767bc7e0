"""Requests that have a name: done once, however often they are asked for."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ostler.errors import AgentGoneError
from ostler.lifecycle.life import Life, Order, Run

#: As many answers are kept, of each instance.
_KEPT = 100


def take_order(life: Life, run: Run, task: asyncio.Task[object]) -> Order:
    """From now on whoever asks under this name gets this one."""
    if life.orders is None:
        life.orders = {}
    order = life.orders[run.call_id] = Order(run=run, task=task)
    task.add_done_callback(partial(_keep, life, order))
    return order


def _keep(life: Life, order: Order, task: asyncio.Task[object]) -> None:
    """What the agent made of it is remembered for a while; what never came to it, or was called off, is not."""
    orders = life.orders or {}
    orders.pop(order.run.call_id, None)
    if not order.run.began or task.cancelled():
        return
    orders[order.run.call_id] = order
    answered = [name for name, one in orders.items() if one.task.done()]
    for name in answered[:-_KEPT]:
        del orders[name]


async def follow(order: Order) -> Any:
    """Wait for it together with all others who do."""
    order.askers += 1
    try:
        await asyncio.wait([order.task])
    except asyncio.CancelledError:
        if order.askers == 1:
            order.task.cancel()
            await asyncio.wait([order.task])
        raise
    finally:
        order.askers -= 1
    if order.task.cancelled():
        raise AgentGoneError("the request was called off before it was answered")
    return order.task.result()
