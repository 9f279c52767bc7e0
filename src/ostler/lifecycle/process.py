"""One request to one agent: admitted, bounded in number and time, answered or told why not.

A request may have a name. Then it is done once, however often it is asked for: who asks again shares the answer, also
after the manager has died and another has found the agent, and its work, again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from uuid import UUID

from ostler.errors import AgentGoneError, AgentNotFoundError, InvalidOperationError
from ostler.lifecycle.doors import Asker, reach, require_kind
from ostler.lifecycle.house import House
from ostler.lifecycle.introduce import introduce
from ostler.lifecycle.life import Life, Run
from ostler.lifecycle.orders import follow, take_order
from ostler.lifecycle.working import begin, closed, let_go_error, require_open, work
from ostler.model import Permission
from ostler.store import Actor


async def process(
    house: House,
    asker: Asker,
    instance_id: UUID,
    request: Any,
    *,
    wait: bool = True,
    request_id: UUID | None = None,
) -> Any:
    """Answer the agent's result. With `wait=False` a full agent is an error at once, not a place in the queue."""
    require_kind("wait", wait, bool)
    if request_id is not None:
        require_kind("request_id", request_id, UUID)
    record = await reach(house, asker, instance_id, Permission.AGENTS_PROCESS)
    life = house.lives.get(instance_id)
    if life is None:
        raise closed(record)
    if life.stranger:
        await _introduced(house, life)
    order = (life.orders or {}).get(request_id) if request_id is not None else None
    if order is not None:
        return await follow(order)
    require_open(life)
    run = Run(call_id=request_id or house.ids.new(), left=life.limits.execution_timeout.total_seconds())
    serving = _serve(house, life, request, asker.actor, run, wait=wait)
    if request_id is None:
        return await serving
    return await follow(take_order(life, run, house.run(serving, "ostler-order")))


async def _introduced(house: House, life: Life) -> None:
    """An agent that is a program of ours can answer whatever its definition is; of a command it is the definition."""
    try:
        await introduce(house, life)
    except AgentNotFoundError as error:
        if life.is_riddle:
            raise InvalidOperationError(
                f"instance {life.instance_id} was found again, but its definition {life.manifest.name} is not "
                "registered here; register it, then ask again",
                current=life.state,
            ) from error


async def _serve(house: House, life: Life, request: Any, by: Actor, run: Run, *, wait: bool) -> Any:
    await life.slots.acquire(wait=wait)
    task = begin(house, life, run, work(house, life, request, by, run))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        with contextlib.suppress(BaseException):
            task.result()  # looked at; the caller has gone
        raise
    if life.left and (task.cancelled() or isinstance(task.exception(), AgentGoneError)):
        raise let_go_error(life)
    if task.cancelled():
        raise AgentGoneError(f"instance {life.instance_id} ended before it had answered")
    return task.result()
