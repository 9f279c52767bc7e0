"""Instances: spawned, listed, looked at, suspended, resumed, restarted, terminated, removed."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

from fastapi import Body, Header, Response

from ostler.agents.commandspec import CommandSpec
from ostler.agents.registry import COMMAND_PREFIX, AgentManifest
from ostler.api.context import Handlers, ManagerOf, Number, ProjectOf
from ostler.definitions.projects import Project
from ostler.drivers import driver_of
from ostler.errors import AgentNotFoundError, DefinitionError
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.instance import AgentInstance, InstanceDetails
from ostler.model.query import GetInstancesFilter
from ostler.model.record import Record, adapter, record
from ostler.model.spawn import AgentSpawnOptions, SpawnRequest, TerminationOptions


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
    project: ProjectOf,
    manager: ManagerOf,
    body: Annotated[dict[str, Any], Body()],
    idempotency_key: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    spawned = SpawnBody.from_dict(body)
    broken = project.refresh().broken.get(spawned.definition or "")
    if broken:
        raise DefinitionError(broken)
    options = spawned.options
    definition: Any = spawned.definition or ""
    if spawned.command is not None:
        definition = register_command(manager, spawned.command, spawned.cwd).id
        options = options or AgentSpawnOptions()
        # The same for the same key, because a repeated request must not differ from the first.
        suffix = token_hex(3) if idempotency_key is None else _digest(idempotency_key)[:6]
        name = options.name or f"{Path(spawned.command[0]).name[:40] or 'command'}-{suffix}"
        options = options.evolve(name=name)
    elif spawned.cwd is not None and (options is None or options.workdir is None):
        options = _in_directory(manager, project, definition, spawned.cwd, options)
    request = SpawnRequest(
        agent_definition_id=definition,
        project=project.key,
        options=options,
        context=spawned.context,
        job=spawned.job,
    )
    return (await manager.spawn(request, idempotency_key=idempotency_key)).to_dict()


def register_command(manager: AgentLifecycleManager, words: tuple[str, ...], cwd: str | None) -> AgentManifest:
    """A command is a definition named after its own words, so that a restart runs the same one."""
    argv = tuple(word.replace("{", "{{").replace("}", "}}") for word in words)
    spec = CommandSpec(argv=argv) if cwd is None else CommandSpec(argv=argv, cwd=cwd)
    digest = _digest("\0".join((cwd or "", *words)))[:12]
    return manager.registry.register(spec, name=f"{COMMAND_PREFIX}{digest}", replace=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _in_directory(
    manager: AgentLifecycleManager, project: Project, name: str, cwd: str, options: AgentSpawnOptions | None
) -> AgentSpawnOptions | None:
    """A coding agent works where it was called, as a command does; any other agent in a directory of its own."""
    with contextlib.suppress(AgentNotFoundError):  # the spawn says so
        if driver_of(manager.registry.find(name, project.key)) is not None:
            return (options or AgentSpawnOptions()).evolve(workdir=cwd)
    return options


async def get_instances(
    project: ProjectOf,
    manager: ManagerOf,
    state: str | None = None,
    health_state: str | None = None,
    tag: str | None = None,
    definition: str | None = None,
    name_pattern: str | None = None,
    include_terminated: bool = False,
    include_restarting: bool = False,
    limit: Number = 100,
    offset: Number = 0,
    before: str | None = None,
    task_id: str | None = None,
) -> Response:
    criteria: dict[str, Any] = {
        "state": state,
        "health_state": health_state,
        "tag": tag,
        "name_pattern": name_pattern,
        "before": before,
        "task_id": task_id,
    }
    if definition is not None:
        project.refresh()
        criteria["definition_id"] = manager.registry.find(definition, project.key).id
    chosen = {name: value for name, value in criteria.items() if value is not None}
    query = GetInstancesFilter.from_dict(
        {
            **chosen,
            "include_terminated": include_terminated,
            "include_restarting": include_restarting,
            "limit": limit,
            "offset": offset,
        }
    )
    return await _list_answer(manager, await manager.get_active_instances(query))


async def _list_answer(manager: AgentLifecycleManager, instances: list[AgentInstance]) -> Response:
    """Each record and what a list shows beside it as one object, written as JSON once: a list may be long."""
    write_record, write_details = adapter(AgentInstance).dump_json, adapter(InstanceDetails).dump_json
    details = await manager.details_of(instances)
    objects = [
        write_record(instance)[:-1] + b"," + write_details(beside)[1:]
        for instance, beside in zip(instances, details, strict=True)
    ]
    return Response(b"[" + b",".join(objects) + b"]", media_type="application/json")


async def get_instance(instance: str, manager: ManagerOf) -> dict[str, Any]:
    record = await manager.require_instance(instance)
    attempts = await manager.get_attempts(record.instance_id)
    return {
        **record.to_dict(),
        **await manager.details(record),
        "attempts": [attempt.to_dict() for attempt in attempts],
        "dropped_bytes": await manager.dropped_output(record.instance_id),
    }


async def why(instance: str, manager: ManagerOf) -> dict[str, Any]:
    return (await manager.why(instance)).to_dict()


async def suspend(
    instance: str,
    manager: ManagerOf,
    depth: Annotated[str | None, Body()] = None,
    resume_after: Annotated[str | float | None, Body()] = None,
    timeout: Annotated[str | float | None, Body()] = None,  # noqa: ASYNC109 - the time for its work to end
    reason: Annotated[str | None, Body()] = None,
) -> dict[str, Any]:
    record = await manager.suspend(instance, depth, resume_after=resume_after, timeout=timeout, reason=reason)
    return record.to_dict()


async def resume(instance: str, manager: ManagerOf) -> dict[str, Any]:
    return (await manager.resume(instance)).to_dict()


async def restart(
    instance: str, manager: ManagerOf, reason: Annotated[str | None, Body(embed=True)] = None
) -> dict[str, Any]:
    return (await manager.restart(instance, reason=reason)).to_dict()


async def terminate(
    instance: str, manager: ManagerOf, body: Annotated[dict[str, Any] | None, Body()] = None
) -> dict[str, Any]:
    options = TerminationOptions.from_dict(body or {})
    return (await manager.terminate(instance, options)).to_dict()


async def remove(instance: str, manager: ManagerOf) -> dict[str, Any]:
    return await manager.remove(instance)


async def prune(
    manager: ManagerOf,
    older_than: Annotated[str | float | None, Body()] = None,
    dry_run: Annotated[bool, Body()] = False,
) -> list[dict[str, Any]]:
    return await manager.prune(older_than=older_than, dry_run=dry_run)


HANDLERS: Handlers = {
    "spawn": spawn,
    "instances": get_instances,
    "instance": get_instance,
    "remove": remove,
    "prune": prune,
    "why": why,
    "suspend": suspend,
    "resume": resume,
    "restart": restart,
    "terminate": terminate,
}
