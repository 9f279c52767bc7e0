"""Requests to an instance: sent, sent in the background, read again."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any
from uuid import uuid4

from fastapi import Body

from ostler.api.context import ContextOf, Handlers, ManagerOf
from ostler.errors import NotFoundError
from ostler.model.attempt import Request, RequestState


async def ask(
    instance: str,
    context: ContextOf,
    manager: ManagerOf,
    request: Annotated[Any, Body()],
    request_id: Annotated[str | None, Body()] = None,
    timeout: Annotated[str | float | None, Body()] = None,  # noqa: ASYNC109 - the agent is cancelled, not the caller
    wait: Annotated[bool, Body()] = True,
    detach: Annotated[bool, Body()] = False,
) -> dict[str, Any]:
    """The answer. A request with an id, or one that is detached, goes on when its caller leaves."""
    name = request_id or (f"r-{uuid4().hex[:8]}" if detach else None)
    record = await manager.require_instance(instance)
    asking = manager.process(record.instance_id, request, request_id=name, timeout=timeout, wait=wait)
    if name is None:
        return {"request_id": None, "state": RequestState.DONE, "answer": await asking}
    task = context.run(asking)
    if detach:
        return {"request_id": name, "state": RequestState.RUNNING, "answer": None}
    return {"request_id": name, "state": RequestState.DONE, "answer": await asyncio.shield(task)}


async def list_requests(instance: str, manager: ManagerOf, state: str | None = None) -> list[dict[str, Any]]:
    return [_shown(record) for record in await manager.get_requests(instance, state=state)]


async def get_request(instance: str, request_id: str, manager: ManagerOf) -> dict[str, Any]:
    for record in await manager.get_requests(instance):
        if record.request_id == request_id:
            return _shown(record)
    raise NotFoundError(f"{instance} has no request {request_id}; list its requests")


def _shown(request: Request) -> dict[str, Any]:
    values = request.to_dict()
    values["answer"] = None if request.answer is None else json.loads(request.answer)
    return values


HANDLERS: Handlers = {
    "ask": ask,
    "requests": list_requests,
    "request": get_request,
}
