"""The workspace of the caller: its plan, its feature flags, its share of tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body

from ostler.api.context import Handlers, ManagerOf
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.access import Workspace
from ostler.policy.quota import plan


async def show(manager: ManagerOf) -> dict[str, Any]:
    return await _document(manager, await manager.get_workspace())


async def change(manager: ManagerOf, changes: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
    """`name`, `tier`, `disabled_features`, `max_tokens_per_minute`; what is not named stays."""
    return await _document(manager, await manager.change_workspace(changes))


async def _document(manager: AgentLifecycleManager, workspace: Workspace) -> dict[str, Any]:
    """The workspace, what its plan admits, and whether more is active than that; nothing is ended for it."""
    limits, active = plan(workspace.tier), (await manager.get_statistics()).active_instances
    return {
        **workspace.to_dict(),
        "plan": {
            "max_concurrent": limits.max_concurrent,
            "isolation": sorted(limits.isolation),
            "restart": sorted(limits.restart),
            "custom_health_checks": limits.custom_health_checks,
            "priorities": sorted(limits.priorities),
        },
        "active_instances": active,
        "is_over_limit": limits.max_concurrent is not None and active > limits.max_concurrent,
    }


HANDLERS: Handlers = {"workspace": show, "change_workspace": change}
