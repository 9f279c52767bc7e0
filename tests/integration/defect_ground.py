"""What the tests of defects once proven stand on."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

from defect_agents import Nuisance
from machine_ground import keeper_of

from ostler.agents import AgentKind, AgentManifest, CommandSpec
from ostler.isolation import Site, StartPlan
from ostler.model.spawn import ResourceLimits

NUMBERS = count(1)


def plan_for(command: CommandSpec | None = None, place: Path | None = None) -> StartPlan:
    kind = AgentKind.PYTHON if command is None else AgentKind.COMMAND
    return StartPlan(
        instance_id=UUID(int=next(NUMBERS)),
        attempt=1,
        name="nuisance",
        manifest=AgentManifest(id=UUID(int=1), name="nuisance", kind=kind, command=command),
        maker=Nuisance,
        limits=ResourceLimits(),
        context={},
        workdir=place,
    )


def do(what: str, **more: Any) -> dict[str, Any]:
    return {"do": what, **more}


def keeper(site: Site) -> int:
    assert site.directory is not None
    return keeper_of(site.directory)
