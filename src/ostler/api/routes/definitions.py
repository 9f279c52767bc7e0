"""Definitions: what can be spawned by name."""

from __future__ import annotations

from typing import Any

from ostler.agents.registry import COMMAND_PREFIX
from ostler.api.context import ContextOf, Handlers, ManagerOf


async def list_definitions(context: ContextOf, manager: ManagerOf) -> list[dict[str, Any]]:
    context.refresh()
    return [manifest.to_dict() for manifest in manager.registry.list() if not manifest.name.startswith(COMMAND_PREFIX)]


async def get_definition(name: str, context: ContextOf, manager: ManagerOf) -> dict[str, Any]:
    context.refresh()
    return manager.registry.find(name).to_dict()


HANDLERS: Handlers = {
    "definitions": list_definitions,
    "definition": get_definition,
}
