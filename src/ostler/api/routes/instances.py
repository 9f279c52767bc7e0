"""Instances: spawned, listed, looked at, suspended, resumed, restarted, terminated, removed."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

from fastapi import Body, Header

from ostler.agents.commandspec import CommandSpec
from ostler.agents.registry import COMMAND_PREFIX, AgentManifest
from ostler.api.context import ContextOf, ManagerOf
from ostler.api.gate import LARGE_BODY, Route
from ostler.drivers import driver_of
from ostler.errors import AgentNotFoundError, DefinitionError
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.access import Permission
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.record import Record, record
from ostler.model.spawn import AgentSpawnOptions, SpawnRequest, TerminationOptions
from ostler.model.states import IsolationLevel


@record
class SpawnBody(Record):
    """The body of a spawn: a definition by name or id, or a command."""

    definition: str | None = None
    #: Words of a command; nothing in them is a placeholder.
    command: tuple[str, ...] | None = None
    #: The directory that a command or a coding agent works in, where the options name none.
    cwd: str | None = None
    options: AgentSpawnOptions | None = None
    context: dict[str, Any] | None = None
    job: dict[str, Any] | None = None


async def spawn(
    context: ContextOf,
    manager: ManagerOf,
    body: Annotated[dict[str, Any], Body()],
    idempotency_key: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    wanted = SpawnBody.from_dict(body)
    broken = context.refresh().broken.get(wanted.definition or "")
    if broken:
        raise DefinitionError(broken)
    options = wanted.options
    definition: Any = wanted.definition or ""
    if wanted.command is not None:
        definition = register_command(manager, wanted.command, wanted.cwd).id
        given = options or AgentSpawnOptions()
        name = given.name or f"{Path(wanted.command[0]).name[:40] or 'command'}-{token_hex(3)}"
        options = given.evolve(isolation_level=IsolationLevel.PROCESS, name=name)
    elif wanted.cwd is not None and (options is None or options.workdir is None):
        options = _in_directory(manager, definition, wanted.cwd, options)
    request = SpawnRequest(agent_definition_id=definition, options=options, context=wanted.context, job=wanted.job)
    return (await manager.spawn(request, idempotency_key=idempotency_key)).to_dict()


def register_command(manager: AgentLifecycleManager, words: tuple[str, ...], cwd: str | None) -> AgentManifest:
    """A command is a definition named after its own words, so that a restart runs the same one."""
    argv = tuple(word.replace("{", "{{").replace("}", "}}") for word in words)
    spec = CommandSpec(argv=argv) if cwd is None else CommandSpec(argv=argv, cwd=cwd)
    digest = hashlib.sha256("\0".join((cwd or "", *words)).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return manager.registry.register(spec, name=f"{COMMAND_PREFIX}{digest}", replace=True)


def _in_directory(
    manager: AgentLifecycleManager, name: str, cwd: str, options: AgentSpawnOptions | None
) -> AgentSpawnOptions | None:
    """A coding agent works where it was called, as a command does; any other agent in a directory of its own."""
    with contextlib.suppress(AgentNotFoundError):  # told by the spawn
        if driver_of(manager.registry.find(name)) is not None:
            return (options or AgentSpawnOptions()).evolve(workdir=cwd)
    return options


async def get_instances(
    context: ContextOf,
    manager: ManagerOf,
    state: str | None = None,
    health_state: str | None = None,
    tag: str | None = None,
    definition: str | None = None,
    name_pattern: str | None = None,
    include_terminated: bool = False,
    limit: int = 100,
    offset: int = 0,
    before: str | None = None,
) -> list[dict[str, Any]]:
    given: dict[str, Any] = {
        "state": state,
        "health_state": health_state,
        "tag": tag,
        "name_pattern": name_pattern,
        "before": before,
    }
    if definition is not None:
        context.refresh()
        given["definition_id"] = manager.registry.find(definition).id
    chosen = {name: value for name, value in given.items() if value is not None}
    wanted = GetInstancesFilter.from_dict(
        {**chosen, "include_terminated": include_terminated, "limit": limit, "offset": offset}
    )
    found = await manager.get_active_instances(wanted)
    return [await _shown(manager, one) for one in found]


async def _shown(manager: AgentLifecycleManager, instance: AgentInstance) -> dict[str, Any]:
    """The record with what a list shows beside it: the name of its definition, its last progress, its metrics now."""
    return {**instance.to_dict(), **await manager.details(instance)}


async def get_instance(instance_id: str, manager: ManagerOf) -> dict[str, Any]:
    found = await manager.require_instance(instance_id)
    attempts = await manager.get_attempts(found.instance_id)
    return {**await _shown(manager, found), "attempts": [one.to_dict() for one in attempts]}


async def why(instance_id: str, manager: ManagerOf) -> dict[str, Any]:
    return (await manager.why(instance_id)).to_dict()


async def suspend(
    instance_id: str,
    manager: ManagerOf,
    depth: Annotated[str | None, Body()] = None,
    resume_after: Annotated[str | float | None, Body()] = None,
    timeout: Annotated[str | float | None, Body()] = None,  # noqa: ASYNC109 - the time for its work to end
    reason: Annotated[str | None, Body()] = None,
) -> dict[str, Any]:
    found = await manager.suspend(instance_id, depth, resume_after=resume_after, timeout=timeout, reason=reason)
    return found.to_dict()


async def resume(instance_id: str, manager: ManagerOf) -> dict[str, Any]:
    return (await manager.resume(instance_id)).to_dict()


async def restart(
    instance_id: str, manager: ManagerOf, reason: Annotated[str | None, Body(embed=True)] = None
) -> dict[str, Any]:
    return (await manager.restart(instance_id, reason=reason)).to_dict()


async def terminate(
    instance_id: str, manager: ManagerOf, body: Annotated[dict[str, Any] | None, Body()] = None
) -> dict[str, Any]:
    options = TerminationOptions.from_dict(body or {})
    return (await manager.terminate(instance_id, options)).to_dict()


async def remove(instance_id: str, manager: ManagerOf) -> dict[str, Any]:
    return await manager.remove(instance_id)


_ONE = "/v1/instances/{instance_id}"
ROUTES = (
    Route(
        method="POST",
        path="/v1/instances",
        handler=spawn,
        permission=Permission.AGENTS_SPAWN,
        body_limit=LARGE_BODY,
        status=201,
    ),
    Route(method="GET", path="/v1/instances", handler=get_instances, permission=Permission.AGENTS_READ),
    Route(method="GET", path=_ONE, handler=get_instance, permission=Permission.AGENTS_READ),
    Route(method="DELETE", path=_ONE, handler=remove, permission=Permission.AGENTS_TERMINATE),
    Route(method="GET", path=f"{_ONE}/why", handler=why, permission=Permission.AGENTS_READ),
    Route(method="POST", path=f"{_ONE}/suspend", handler=suspend, permission=Permission.AGENTS_SUSPEND),
    Route(method="POST", path=f"{_ONE}/resume", handler=resume, permission=Permission.AGENTS_SUSPEND),
    Route(method="POST", path=f"{_ONE}/restart", handler=restart, permission=Permission.AGENTS_SPAWN),
    Route(method="POST", path=f"{_ONE}/terminate", handler=terminate, permission=Permission.AGENTS_TERMINATE),
)
