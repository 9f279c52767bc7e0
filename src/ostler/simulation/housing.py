"""What is asked of the manager for one managed brain: its instance, an answer, its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from ostler.agents import Agent, AgentRegistry
from ostler.errors import AgentNotFoundError, IdempotencyConflictError, InvalidOperationError, OstlerError
from ostler.lifecycle import AgentLifecycleManager
from ostler.model import (
    INACTIVE_STATES,
    AgentInstance,
    AgentState,
    GetInstancesFilter,
    SpawnRequest,
    TerminationOptions,
    WaitKind,
)
from ostler.model.query import MAX_PAGE
from ostler.seams import Clock, Deadline
from ostler.simulation.brains import Managed
from ostler.simulation.members import Member

T = TypeVar("T")

TAG = "simulation"
#: Where an instance says which agent of which run it thinks for.
RUN, NAME, NUMBER = "simulation_run", "simulation_agent", "simulation_number"

#: So many dead ones are stepped over in one go; the next time goes on from there.
MOST_STALE = 64
#: So many are started, or ended, at a time.
_AT_ONCE = 16
#: How long a death that was seen may take to be written down.
_DEATH_LIMIT = timedelta(seconds=2)
_REASON = "its agent has left the simulation"
_OPEN = frozenset({AgentState.READY, AgentState.PROCESSING, AgentState.WAITING})
_ON_ITS_WAY = frozenset({AgentState.INITIALIZING, AgentState.FAILED})
_ENDING = INACTIVE_STATES | {AgentState.TERMINATING}
#: Those that live; and those that have failed, for they may be on their way back.
_WANTED = (
    GetInstancesFilter(tag=TAG, limit=MAX_PAGE),
    GetInstancesFilter(tag=TAG, limit=MAX_PAGE, state=AgentState.FAILED),
)


def definition_of(registry: AgentRegistry, definition: type[Agent] | UUID) -> UUID:
    """The id to spawn by. A class that somebody has registered already, under whatever name, stays as it is."""
    if isinstance(definition, UUID):
        return definition
    for manifest in registry.list():
        if registry.maker(manifest.id) is definition:
            return manifest.id
    return registry.register(definition).id


def request_for(member: Member, managed: Managed, run_id: UUID, definition_id: UUID) -> SpawnRequest:
    options = managed.options.evolve(
        isolation_level=managed.isolation,
        name=member.name,
        tags=tuple(dict.fromkeys((*(managed.options.tags or ()), TAG))),
    )
    context = {**managed.context, RUN: str(run_id), NAME: member.name, NUMBER: member.number}
    return SpawnRequest(agent_definition_id=definition_id, options=options, context=context)


def key_of(run_id: UUID, number: int, generation: int) -> str:
    """The same for the same life, so that asking twice, also after a crash, makes one instance."""
    first = f"simulation:{run_id}:{number}"
    return first if generation == 1 else f"{first}:{generation}"


async def spawned(
    manager: AgentLifecycleManager, request: SpawnRequest, run_id: UUID, number: int, generation: int
) -> tuple[AgentInstance | None, int]:
    """A living instance and its generation. Those of earlier generations that have ended are stepped over."""
    for step in range(generation, generation + MOST_STALE):
        try:
            record = await manager.spawn(request, idempotency_key=key_of(run_id, number, step))
        except IdempotencyConflictError:
            continue  # that one was made with other settings
        except OstlerError as error:
            found = await manager.get_instance(error.known) if error.known is not None else None
            if found is None:
                raise
            record = found  # it failed before, and may be on its way back all the same
        if await is_usable(manager, record):
            return record, step
    return None, generation + MOST_STALE


def fits(record: AgentInstance, request: SpawnRequest) -> bool:
    """Whether one that was found is what would be spawned now."""
    found, wanted = record.spawn_options, request.options
    level = found.isolation_level if found else None
    return (
        record.definition_id == request.agent_definition_id
        and wanted is not None
        and level is wanted.isolation_level
        and _as_text(record.context) == _as_text(request.context)
    )


def number_of(record: AgentInstance) -> int:
    """Which agent it thinks for; 0, which nobody has, where it does not say."""
    found = (record.context or {}).get(NUMBER)
    return found if isinstance(found, int) else 0


def _as_text(context: Mapping[str, Any] | None) -> str:
    return json.dumps(dict(context or {}), sort_keys=True, default=repr)


# --- looking ------------------------------------------------------------------------------------


async def is_usable(manager: AgentLifecycleManager, record: AgentInstance) -> bool:
    """It lives, or is on its way back."""
    if record.state is AgentState.FAILED:
        return await is_coming_back(manager, record.instance_id)
    return record.state not in _ENDING


async def is_coming_back(manager: AgentLifecycleManager, instance_id: UUID) -> bool:
    """Being started, or failed with a return that is decided on; by the store, which knows it first."""
    while (record := await manager.store.get_instance(instance_id)) is not None:
        if record.state is not AgentState.FAILED:
            return record.state is AgentState.INITIALIZING
        if any(wait.kind is WaitKind.BACKOFF for wait in await manager.get_waits(instance_id)):
            return True
        again = await manager.store.get_instance(instance_id)  # its wait may have ended between the two questions
        if again is None or again.version == record.version:
            return False
    return False


async def answered(manager: AgentLifecycleManager, instance_id: UUID, request: Any, request_id: UUID) -> Any:
    """What it makes of a request. One that is on its way back is waited for; the caller bounds the time."""
    while True:
        try:
            return await manager.process(instance_id, request, request_id=request_id)
        except InvalidOperationError as error:
            if error.current not in _ON_ITS_WAY or not await _came_back(manager, instance_id):
                raise


async def _came_back(manager: AgentLifecycleManager, instance_id: UUID) -> bool:
    """Wait until it is there again, or it is certain that it will not be."""
    async with manager.observe(instance_id) as events:
        while await is_coming_back(manager, instance_id):
            if await anext(events, None) is None:
                break
    record = await manager.store.get_instance(instance_id)
    return record is not None and record.state in _OPEN


async def mourned(
    manager: AgentLifecycleManager, clock: Clock, instance_id: UUID, attempt: int
) -> AgentInstance | None:
    """The record, when it tells of a death that a caller has seen; not for long, for that may have been a mistake."""
    record = None
    async with manager.observe(instance_id) as events:
        try:
            async with Deadline(clock, _DEATH_LIMIT):
                while (record := await manager.store.get_instance(instance_id)) is not None:
                    if not record.is_active or record.attempt != attempt or await anext(events, None) is None:
                        break
        except TimeoutError:
            pass
    return record


async def instances_of(manager: AgentLifecycleManager, run_id: UUID) -> AsyncIterator[AgentInstance]:
    """Those that think for an agent of this run and live, or have failed; newest first."""
    for wanted in _WANTED:
        page = await manager.get_active_instances(wanted)
        while page:
            for record in page:
                if (record.context or {}).get(RUN) == str(run_id):
                    yield record
            if len(page) < MAX_PAGE:
                break
            page = await manager.get_active_instances(wanted.evolve(before=page[-1].instance_id))


# --- ending -------------------------------------------------------------------------------------


async def ended(manager: AgentLifecycleManager, instance_id: UUID) -> str | None:
    """End it; why that did not go, or None. One that has ended already is what was wanted."""
    try:
        result = await manager.terminate(instance_id, TerminationOptions(reason=_REASON))
    except AgentNotFoundError:
        return None
    except InvalidOperationError as error:
        return None if error.current == AgentState.TERMINATED else str(error)
    except OstlerError as error:
        return str(error)
    return None if result.success else result.error_message


async def each(work: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """All of them, some at a time. The work does not raise."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(item: T) -> None:
        async with gate:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(one(item))
