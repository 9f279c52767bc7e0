"""The whole story of a spawn: admitted, reserved, isolated, initialised, ready."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial

from ostler.errors import (
    AgentInitializationError,
    InitializationTimeoutError,
    LicenseError,
    OstlerError,
    StoreError,
)
from ostler.isolation.base import Exit
from ostler.lifecycle.admit import Admission, admit, make_life
from ostler.lifecycle.doors import Asker, require_kind
from ostler.lifecycle.fail import explained, write_failure
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life
from ostler.lifecycle.start import start
from ostler.lifecycle.terminate import end
from ostler.model import (
    INACTIVE_STATES,
    AgentInstance,
    AgentState,
    AttemptOutcome,
    Definition,
    SpawnRequest,
    TerminationOptions,
    WaitKind,
)
from ostler.store.commands import Idempotency, PutRecord, ReserveInstance

_ENDED_STARTING = "it was terminated while it was starting"
#: Whoever called it off waits so long at most for its farewell.
_UNWANTED = TerminationOptions(graceful_timeout=timedelta(seconds=5), reason="its spawn was called off")
#: A start that has just ended takes one more look; no more, for a store may have lost what came of it.
_LOOKS = 3


async def spawn(
    house: House, asker: Asker, request: SpawnRequest, *, idempotency_key: str | None = None
) -> AgentInstance:
    """A ready instance, or an error and nothing left of it but its record."""
    require_kind("request", request, SpawnRequest)
    # In a task of the house: one that closes meanwhile waits until this has come to an end, good or bad.
    made: list[Life] = []
    task = house.run(_spawn(house, asker, request, idempotency_key, made), "ostler-spawn")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([house.run(_undo(house, asker, task, made), "ostler-spawn-undone")])
        raise


async def _undo(house: House, asker: Asker, task: asyncio.Task[AgentInstance], made: list[Life]) -> None:
    """What became ready just as its caller went would live on, and nobody would know its id."""
    await asyncio.wait([task])
    if made and not task.cancelled() and task.exception() is None:
        await asyncio.shield(end(house, made[0], _UNWANTED, asker.actor))


async def _spawn(
    house: House, asker: Asker, request: SpawnRequest, idempotency_key: str | None, made: list[Life]
) -> AgentInstance:
    """`made` gets what this call brought up itself; one that was found by its key is others' as well."""
    house.log.emit("spawn_requested", definition_id=request.agent_definition_id, options=request.options)
    began = house.clock.mono()
    try:
        admission = await admit(house, asker, request)
        await _remember_definition(house, admission)
        house.fault("spawn.intent.before")
        record = await _reserved(house, asker, admission, idempotency_key)
        house.fault("spawn.intent.after")
        life = house.lives.get(record.instance_id)
        if life is not None:
            return await _same(house, life)
        life = house.lives[record.instance_id] = make_life(house, record, admission.manifest, admission.isolation)
        if idempotency_key is not None and (known := await _earlier(house, life)) is not None:
            return known
        await _bring_up(house, asker, life)
        made.append(life)
    except LicenseError as error:
        house.metrics.count("lifecycle.spawn.failures")
        if error.maximum is not None:
            house.metrics.count("lifecycle.license.rejections")
            house.log.emit("spawn_rejected", current=error.current, max=error.maximum)
        raise
    except BaseException:
        house.metrics.count("lifecycle.spawn.failures")
        raise
    house.metrics.count("lifecycle.spawn.count")
    house.metrics.observe("lifecycle.spawn.duration", house.clock.mono() - began)
    house.log.emit(
        "spawned",
        instance_id=life.instance_id,
        definition_id=life.record.definition_id,
        isolation=life.options.isolation_level,
    )
    return life.record


async def _reserve(house: House, asker: Asker, admission: Admission, key: str | None) -> AgentInstance:
    """Intent first: record, place in the quota, event and audit are one commit, before anything lives."""
    house.require_open()
    request = admission.request
    short = house.ids.new().hex[-6:]
    command = ReserveInstance(
        by=asker.actor,
        idempotency=Idempotency.of(key, request.to_json()) if key is not None else None,
        request=request,
        workspace_id=admission.workspace.workspace_id,
        default_name=f"{admission.manifest.name[:190]}-{short}",
    )
    return await house.store.commit(command)


async def _reserved(house: House, asker: Asker, admission: Admission, key: str | None) -> AgentInstance:
    """The same, with an eye on a caller who is cancelled just then: a reservation that nobody uses is given back."""
    task = house.run(_reserve(house, asker, admission, key), "ostler-reserve")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(partial(_give_back, house, admission))
        raise


def _give_back(house: House, admission: Admission, done: asyncio.Task[AgentInstance]) -> None:
    if done.cancelled() or done.exception() is not None or done.result().instance_id in house.lives:
        return
    life = make_life(house, done.result(), admission.manifest, admission.isolation)
    house.lives[life.instance_id] = life
    house.run(give_up(house, life, 1, asyncio.CancelledError()), "ostler-give-back")


async def _same(house: House, life: Life) -> AgentInstance:
    """The same idempotency key, while the first is still at it: one start, and its answer for both."""
    record = life.record
    for _ in range(_LOOKS):
        async with life.lock:
            starting = life.starting
        if starting is not None:
            await asyncio.wait([starting])
        record = await house.store.get_instance(life.instance_id) or life.record
        if record.state is not AgentState.INITIALIZING:
            break  # else its start has just ended, and what came of it is being written down
    return await _once_ready(house, record)


async def _earlier(house: House, life: Life) -> AgentInstance | None:
    """What the same key made before, and is not looked after any more; None where it is a new one."""
    async with life.lock:  # whoever comes with the same key meanwhile waits here
        current = await house.store.get_instance(life.instance_id)
    if current is None or current.version == life.record.version:
        return None
    house.drop(life)
    return await _once_ready(house, current)


async def _once_ready(house: House, record: AgentInstance) -> AgentInstance:
    """A spawn answers with one that became ready, whatever became of it since; else with why it did not."""
    # How well its limits are held is written with its first readiness, and stays.
    if record.enforcement is not None or record.state not in INACTIVE_STATES:
        return record
    attempts = await house.store.list_attempts(record.instance_id, after=max(record.attempt - 1, 0))
    said = record.error_message or _ENDED_STARTING
    waits = await house.store.open_waits(instance_id=record.instance_id)
    if any(wait.kind is WaitKind.BACKOFF for wait in waits):
        said = f"{said}; it is started again by its policy, so ask once more with the same key"
    late = bool(attempts) and attempts[-1].outcome is AttemptOutcome.TIMEOUT
    error: OstlerError = InitializationTimeoutError(said) if late else AgentInitializationError(said)
    error.known = record.instance_id
    raise error


async def _bring_up(house: House, asker: Asker, life: Life) -> None:
    try:
        await start(house, life, by=asker.actor)
    except BaseException as error:
        house.log.emit("initialization_failed", instance_id=life.instance_id, error=explained(error))
        ending = house.run(give_up(house, life, 1, error), "ostler-spawn-failed")
        if not isinstance(error, StoreError):  # a disk that takes nothing would keep the caller waiting
            await asyncio.shield(ending)
        raise


async def give_up(house: House, life: Life, attempt: int, error: BaseException, *, final: bool = True) -> None:
    """The start failed and has left nothing. Say so in the record, unless it is being terminated anyway."""
    async with life.lock:
        if life.attempt == attempt and life.record.is_active and life.state is not AgentState.TERMINATING:
            life.mourned = life.attempt
            await write_failure(house, life, start_exit(error), final=final)


def start_exit(error: BaseException) -> Exit:
    # Either it knows how the start ended, or what it came of does.
    known = isinstance(error, AgentInitializationError) and error.outcome is not None
    cause = error if known else error.__cause__
    kind = type(cause).__name__ if cause and not known else None
    return Exit(
        outcome=_outcome(error),
        detail=explained(error) if not isinstance(error, asyncio.CancelledError) else "its start was called off",
        exception_type=getattr(cause, "exception_type", None) or kind,
        stack_trace=getattr(cause, "stack_trace", None),
    )


def _outcome(error: BaseException) -> AttemptOutcome:
    match error:
        case InitializationTimeoutError():
            return AttemptOutcome.TIMEOUT
        case asyncio.CancelledError() | StoreError():
            return AttemptOutcome.STOPPED
        case AgentInitializationError():
            return next((one for one in AttemptOutcome if one == error.outcome), AttemptOutcome.ERROR)
        case _:
            return AttemptOutcome.UNKNOWN


async def _remember_definition(house: House, admission: Admission) -> None:
    """So that others who look into the store know what the id stands for."""
    manifest = admission.manifest
    if house.told_definitions.get(manifest.id) is manifest:
        return
    house.told_definitions[manifest.id] = manifest
    now = house.clock.wall()
    record = Definition(
        definition_id=manifest.id,
        name=manifest.name,
        kind=manifest.kind,
        manifest={"description": manifest.description, "version": manifest.version},
        source=manifest.source,
        created_at=now,
        updated_at=now,
    )
    try:
        await house.store.commit(PutRecord(record=record))
    except OstlerError:
        house.told_definitions.pop(manifest.id, None)
        raise
