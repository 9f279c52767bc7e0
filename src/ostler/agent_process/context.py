"""From the `begin` message to the `AgentContext` that the agent gets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.agents import AgentContext, Voice
from ostler.clock import SystemClock
from ostler.durations import to_duration
from ostler.model.context import ContextData
from ostler.model.spawn import ResourceLimits

_LIMITS = frozenset(limit.name for limit in fields(ResourceLimits))


def context_of(plan: Mapping[str, Any], voice: Voice) -> AgentContext:
    """Raises `KeyError`, `TypeError` or `ValueError` for what is no plan."""
    workdir = plan.get("workdir")
    return AgentContext(
        instance_id=UUID(plan["instance_id"]),
        attempt=int(plan["attempt"]),
        definition_id=UUID(plan["definition_id"]),
        name=plan["name"],
        data=ContextData(plan.get("context") or {}),
        limits=limits_of(plan.get("limits") or {}),
        clock=SystemClock(),
        voice=voice,
        directory=None if workdir is None else Path(workdir),
        owns_directory=bool(plan.get("owns_workdir", True)),
        env=plan.get("env") or {},
        write_log=_write_log,
    )


def _write_log(text: str) -> None:
    """Standard error of an agent is its log."""
    sys.stderr.write(text)
    sys.stderr.flush()


def limits_of(given: Mapping[str, Any]) -> ResourceLimits:
    """By hand: pydantic would be the largest part of an agent's memory, and the manager has validated them."""
    values = {name: value for name, value in given.items() if name in _LIMITS and value is not None}
    if "execution_timeout" in values:
        values["execution_timeout"] = to_duration(values["execution_timeout"])
    return ResourceLimits(**values)
