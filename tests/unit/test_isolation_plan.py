"""A plan of a start can be sent to another machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from ostler.agents import Agent, AgentKind, AgentManifest, CommandSpec
from ostler.errors import InvalidOperationError
from ostler.isolation import StartPlan
from ostler.isolation.process.sources import source_of
from ostler.model.spawn import ResourceLimits
from ostler.model.states import AgentPriority

COMMAND = CommandSpec(argv=("echo", "{prompt}"), exit_codes={}, pty=True)


@pytest.mark.parametrize("kind", list(AgentKind))
def test_a_plan_comes_back_as_it_was_but_for_its_maker(kind: AgentKind) -> None:
    is_command = kind is AgentKind.COMMAND
    plan = StartPlan(
        instance_id=UUID(int=7),
        attempt=3,
        name="far",
        manifest=AgentManifest(id=UUID(int=8), name="far", kind=kind, command=COMMAND if is_command else None),
        maker=Agent,
        limits=ResourceLimits(max_memory_mb=64),
        context={"depth": [1, {"a": None}]},
        workdir=Path("/work"),
        env={"A": "ü"},
        priority=AgentPriority.HIGH,
        terminal=(24, 80) if is_command else None,
        options={"image": "x"},
        source=None if is_command else source_of(Agent),
    )
    received = StartPlan.from_json(plan.to_json())
    assert replace(received, maker=Agent) == plan
    with pytest.raises(InvalidOperationError, match="came from another program"):
        received.maker()
