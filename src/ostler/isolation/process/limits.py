"""What of a plan becomes a box: its limits, and its share of a busy machine; and what boxes here will likely hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ostler.agents import AgentKind
from ostler.isolation.base import StartPlan
from ostler.keeper import cgroup_files
from ostler.keeper.groups import ADVISORY, APPROXIMATED, ENFORCED
from ostler.model.states import AgentPriority

_MEBIBYTE = 1 << 20
#: Beside the workers that it may have, a Python agent has children, and libraries have threads of their own.
_PYTHON_PIDS = 256
_COMMAND_PIDS = 1024
#: The share of an agent when all cores are busy; 100 is an ordinary one.
_WEIGHTS: Mapping[AgentPriority, int] = MappingProxyType(
    {AgentPriority.LOW: 25, AgentPriority.NORMAL: 100, AgentPriority.HIGH: 400, AgentPriority.CRITICAL: 1600}
)
_NICE_OF_LOW = 10
_CONTROLLERS = ("memory", "cpu", "pids")


def box_limits(plan: StartPlan) -> dict[str, Any]:
    limits = plan.limits
    is_command = plan.manifest.kind is AgentKind.COMMAND
    return {
        "memory_bytes": limits.max_memory_mb * _MEBIBYTE,
        "cpu_percent": limits.max_cpu_percent or None,
        "pids": _COMMAND_PIDS if is_command else _PYTHON_PIDS + limits.max_worker_threads,
        "weight": _WEIGHTS[plan.priority],
    }


def niceness(plan: StartPlan) -> int:
    """Beside its weight. Where no controller deals that out the keeper makes a nice value of it."""
    return _NICE_OF_LOW if plan.priority is AgentPriority.LOW else 0


def likely_enforcement() -> Mapping[str, str]:
    """What a keeper that this program starts will most likely hold. It finds out by doing; this only looks."""
    try:
        own = cgroup_files.own_groups()
    except (OSError, ValueError):
        own = {}
    unified = own.get(cgroup_files.UNIFIED)
    held = set(_controllers(unified)) if unified is not None and _may_write(unified) else set()
    held.update(name for name in _CONTROLLERS if name in own and _may_write(own[name]))
    if not held:
        return dict.fromkeys(_CONTROLLERS, APPROXIMATED)
    lacking = {"memory": APPROXIMATED, "cpu": ADVISORY, "pids": APPROXIMATED}
    return {name: ENFORCED if name in held else lacking[name] for name in _CONTROLLERS}


def _may_write(group: str) -> bool:
    return os.access(group, os.W_OK | os.X_OK)


def _controllers(group: str) -> list[str]:
    try:
        return cgroup_files.read(f"{group}/cgroup.controllers").split()
    except OSError:
        return []
