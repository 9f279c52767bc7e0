"""Who speaks on the Unix socket: a person, or a process of an agent of this home.

An agent is not the owner of the home, although it runs as the same user. It may use the routes that the table marks for
agents, about its own instance and its own task, and it may add tasks below its own.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import Request

from ostler.api.table import Route
from ostler.errors import AgentNotFoundError, AuthorizationError
from ostler.isolation.process.speaker import speaker_of
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.access import HOME_WORKSPACE_ID, Actor, Permission, Principal, Role
from ostler.model.instance import AgentInstance
from ostler.model.task import Task
from ostler.model.text import MAX_NAME
from ostler.model.types import from_micros
from ostler.store.moves import get_instance
from ostler.store.tasks import find_task, get_task
from ostler.store.transaction import Transaction

#: In place of the host name of a client on the Unix socket, whose port is its process id.
PERSON, AGENT = "person", "agent"


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A process of an agent, as far as it could be recognised."""

    principal: Principal
    #: None where its attempt has ended, or no keeper of this home has started it.
    instance: AgentInstance | None = None
    task: Task | None = None
    #: Whether an attempt that has ended was recognised.
    has_ended: bool = False

    def owns(self, task: Task) -> bool:
        return self.task is not None and self.task.key in {task.key, task.parent}


async def find_speaker(manager: AgentLifecycleManager, home: Path, pid: int) -> Speaker:
    attempt = speaker_of(pid, home, manager.live_units())
    record = None if attempt is None else await manager.store.read(get_instance, attempt[0])
    if record is None or attempt is None:
        return Speaker(principal=_principal("unknown"))
    name = record.name or str(record.instance_id)
    if not record.is_active or record.attempt != attempt[1]:
        return Speaker(principal=_principal(name, record), has_ended=True)
    task = None if record.task_id is None else await manager.store.read(get_task, record.task_id)
    granted = (Permission.TASKS_WRITE,) if task is not None and await _may_add_tasks(manager, record) else ()
    return Speaker(principal=_principal(name, record, granted), instance=record, task=task)


def _principal(name: str, instance: AgentInstance | None = None, permissions: tuple[Permission, ...] = ()) -> Principal:
    return Principal(
        principal_id=HOME_WORKSPACE_ID if instance is None else instance.instance_id,
        name=f"{AGENT}:{name}"[:MAX_NAME].strip(),
        workspace_id=HOME_WORKSPACE_ID if instance is None else instance.workspace_id,
        roles=(Role.AGENT,),
        permissions=permissions,
        created_at=from_micros(0),
    )


async def _may_add_tasks(manager: AgentLifecycleManager, instance: AgentInstance) -> bool:
    with contextlib.suppress(AgentNotFoundError):  # its definition was removed meanwhile
        return (await manager.definition(instance.definition_id)).may_add_tasks
    return False


async def require_own(manager: AgentLifecycleManager, speaker: Speaker, route: Route, request: Request) -> None:
    """Raise `AuthorizationError`, and say so in the audit, unless the agent may make this call."""
    try:
        await _require_own(manager, speaker, route, request)
    except AuthorizationError as error:
        await manager.store.run(_denied, speaker.principal, route.name, str(error))
        raise


async def _require_own(manager: AgentLifecycleManager, speaker: Speaker, route: Route, request: Request) -> None:
    instance, parameters = speaker.instance, request.path_params
    if route.name == "signal" and instance is None:
        return  # refused by the handler, which knows why
    if not route.agent or instance is None:
        what = f"{speaker.principal.name} is an agent and may not call {route.name}"
        raise AuthorizationError(f"{what}; that is left to a person")
    if "instance" in parameters:
        _same(speaker, await manager.require_instance(parameters["instance"]), instance)
    if "task" in parameters:
        task = await manager.store.read(find_task, instance.workspace_id, parameters["task"])
        if task is not None and not speaker.owns(task):
            raise AuthorizationError(f"{speaker.principal.name} may look at its own task only, not at {task.key}")
    if route.name in {"events", "waits"}:  # without a name they would list what others do
        query = dict(parse_qsl(request.scope["query_string"].decode("latin-1")))
        named = query.setdefault("instance", str(instance.instance_id))
        _same(speaker, await manager.require_instance(named), instance)
        request.scope["query_string"] = urlencode(query).encode()


def _same(speaker: Speaker, record: AgentInstance, own: AgentInstance) -> None:
    if record.instance_id != own.instance_id:
        raise AuthorizationError(f"{speaker.principal.name} may look at itself only, not at {record.name}")


def _denied(tx: Transaction, principal: Principal, action: str, detail: str) -> None:
    by = Actor(name=principal.name, principal_id=principal.principal_id)
    tx.audit(principal.workspace_id, by, action, f"api:{action}", outcome="denied", detail=detail)


def task_of_agent(speaker: Speaker, values: dict[str, Any]) -> dict[str, Any]:
    """The new task of an agent: below its own, about the same directory, without what only a person may set."""
    own = speaker.task
    if own is None:
        raise AuthorizationError(f"{speaker.principal.name} works on no task, so it cannot add one below it")
    if values["parent"] not in {None, own.key}:
        raise AuthorizationError(f"{speaker.principal.name} may add tasks below {own.key} only")
    if values["loop"] is not None:
        raise AuthorizationError(f"{speaker.principal.name} may not add a task with a loop; that is left to a person")
    return {**values, "parent": own.key, "near": own.near}
