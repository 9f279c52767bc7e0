"""Waits: what agents wait for, and the answers to it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body

from ostler.api.context import ManagerOf
from ostler.api.gate import Route
from ostler.model.people import Permission


async def list_waits(manager: ManagerOf, instance: str | None = None) -> list[dict[str, Any]]:
    names: dict[Any, str | None] = {}
    shown = []
    for wait in await manager.open_waits(instance):
        if wait.instance_id is not None and wait.instance_id not in names:
            found = await manager.get_instance(wait.instance_id)
            names[wait.instance_id] = None if found is None else found.name
        shown.append({**wait.to_dict(), "instance_name": names.get(wait.instance_id)})
    return shown


async def answer(
    wait_id: str,
    manager: ManagerOf,
    outcome: Annotated[str, Body()] = "done",
    answer: Annotated[dict[str, Any] | None, Body()] = None,
) -> dict[str, Any]:
    return (await manager.answer(wait_id, outcome, answer)).to_dict()


ROUTES = (
    Route(method="GET", path="/v1/waits", handler=list_waits, permission=Permission.AGENTS_READ),
    Route(method="POST", path="/v1/waits/{wait_id}/answer", handler=answer, permission=Permission.AGENTS_PROCESS),
)
