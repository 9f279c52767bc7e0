"""Definitions: what can be spawned by name."""

from __future__ import annotations

from typing import Any

from ostler.agents.registry import COMMAND_PREFIX
from ostler.api.context import Handlers, ManagerOf, ProjectOf


async def list_definitions(project: ProjectOf, manager: ManagerOf) -> list[dict[str, Any]]:
    project.refresh()
    manifests = manager.registry.list(project.key)
    return [manifest.to_dict() for manifest in manifests if not manifest.name.startswith(COMMAND_PREFIX)]


async def get_definition(name: str, project: ProjectOf, manager: ManagerOf) -> dict[str, Any]:
    project.refresh()
    return manager.registry.find(name, project.key).to_dict()


HANDLERS: Handlers = {
    "definitions": list_definitions,
    "definition": get_definition,
}
