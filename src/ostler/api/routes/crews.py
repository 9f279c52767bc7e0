"""Crews: listed, brought up, scaled, stopped in order, and their settings read again."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body, Depends, Request

from ostler.api.context import ContextOf, Handlers, ManagerOf, Number, context_of, manager_of, project_of
from ostler.crews.supervisor import Supervisor
from ostler.errors import AuthorizationError
from ostler.model.crew import CrewView

Names = Annotated[tuple[str, ...], Body(embed=True)]


async def supervisor_of(request: Request) -> Supervisor:
    """Crews work for the workspace of the daemon."""
    context = context_of(request)
    if manager_of(request).principal.workspace_id != context.manager.principal.workspace_id:
        raise AuthorizationError("crews belong to the workspace of the home; ask its owner")
    return await context.crews.of(project_of(request).scope)


SupervisorOf = Annotated[Supervisor, Depends(supervisor_of)]


def _shown(crews: list[CrewView]) -> list[dict[str, Any]]:
    return [crew.to_dict() for crew in crews]


async def list_crews(crews: SupervisorOf) -> list[dict[str, Any]]:
    return _shown(await crews.list_crews())


async def up(crews: SupervisorOf, manager: ManagerOf, names: Names = ()) -> dict[str, Any]:
    """The crews, and the number of the last event before they came up: a stream from there misses nothing."""
    cursor = manager.store.newest
    views = await crews.up(*names, by=manager.actor)
    return {"crews": _shown(views), "cursor": cursor}


async def stop(
    context: ContextOf,
    crews: SupervisorOf,
    manager: ManagerOf,
    names: Names = (),
    force: Annotated[bool, Body(embed=True)] = False,
) -> list[dict[str, Any]]:
    """Answered when their agents have ended; it goes on when the caller leaves."""
    stopping = context.run(crews.stop(*names, force=force, by=manager.actor))
    return _shown(await stopping)


async def reload(crews: SupervisorOf) -> list[dict[str, Any]]:
    return _shown(await crews.reload())


async def scale(
    crew: str, crews: SupervisorOf, manager: ManagerOf, count: Annotated[Number, Body(embed=True)]
) -> dict[str, Any]:
    return (await crews.scale(crew, count, by=manager.actor)).to_dict()


HANDLERS: Handlers = {
    "crews": list_crews,
    "crew_up": up,
    "crew_stop": stop,
    "crew_reload": reload,
    "crew_scale": scale,
}
