"""What an earlier manager left: every open attempt is found again, adopted, or brought to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID

from ostler.agents.registry import AgentKind, AgentManifest
from ostler.errors import AgentNotFoundError, StoreError
from ostler.isolation.base import Cell, Exit, OtherVersionError
from ostler.lifecycle.adopt import begin_adopted, first_phase
from ostler.lifecycle.instance import ActorEndedError, Instance, Runtime
from ostler.lifecycle.job import ended_job
from ostler.lifecycle.messages import Phase
from ostler.lifecycle.operations import plan_for, sweep
from ostler.lifecycle.reports import Listener
from ostler.model.attempt import Attempt, AttemptOutcome
from ostler.model.instance import AgentInstance
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import INACTIVE_STATES, AgentState
from ostler.model.wait import Wait, WaitKind
from ostler.store import attempts, moves, queries, waits
from ostler.store.attempts import AttemptEnd
from ostler.store.transaction import Transaction

#: The number of instances that are recovered at the same time.
_AT_ONCE = 64
#: How long until what could not be recovered is tried again.
_AGAIN_SECONDS = 5.0
_LOST = "its manager has ended"
_WITHOUT_TASK = frozenset({AgentState.FAILED, AgentState.SUSPENDED, AgentState.TERMINATING})


@dataclass(slots=True)
class _OpenWaits:
    """What the store knows before anything is looked for."""

    pauses: dict[UUID, Wait] = field(default_factory=dict)
    backoffs: dict[UUID, Wait] = field(default_factory=dict)
    asks: dict[UUID, list[Wait]] = field(default_factory=dict)


async def recover(runtime: Runtime) -> None:
    """Each instance on its own: a bad record or a silent keeper does not stop the others."""
    open_waits = _by_kind(await runtime.store.read(waits.all_open_waits))
    gate = asyncio.Semaphore(_AT_ONCE)
    opened = await runtime.store.read(attempts.open_attempts)
    runtime.unfinished = {(attempt.instance_id, attempt.number) for attempt in opened}
    unclear = await _recover_all(runtime, opened, open_waits, gate)
    await sweep(runtime)  # before anything new is started
    await _finish_terminations(runtime)
    await _resume_waits(runtime, open_waits)
    if unclear:
        runtime.recovering = runtime.run(_try_again(runtime, unclear, gate), "ostler-recover-again")


def _by_kind(open_waits: list[Wait]) -> _OpenWaits:
    sorted_waits = _OpenWaits()
    for wait in open_waits:
        if wait.instance_id is None:
            continue
        match wait.kind:
            case WaitKind.RESUME:
                sorted_waits.pauses[wait.instance_id] = wait
            case WaitKind.BACKOFF:
                sorted_waits.backoffs[wait.instance_id] = wait
            case _:
                sorted_waits.asks.setdefault(wait.instance_id, []).append(wait)
    return sorted_waits


async def _recover_all(
    runtime: Runtime, opened: list[Attempt], open_waits: _OpenWaits, gate: asyncio.Semaphore
) -> list[Attempt]:
    """Those that could not be recovered."""
    done = await asyncio.gather(*(_recover_one(runtime, attempt, open_waits, gate) for attempt in opened))
    return [attempt for attempt, is_done in zip(opened, done, strict=True) if not is_done]


async def _recover_one(runtime: Runtime, attempt: Attempt, open_waits: _OpenWaits, gate: asyncio.Semaphore) -> bool:
    async with gate:
        return await _on_its_own(runtime, attempt.instance_id, _recover(runtime, attempt, open_waits))


async def _on_its_own(runtime: Runtime, instance_id: UUID, work: Awaitable[Any]) -> bool:
    """Whether it could be done; else `why` and the log say why not."""
    try:
        await work
    except OtherVersionError as error:
        runtime.unrecovered[instance_id] = error.held_by
        return False
    except Exception as error:  # noqa: BLE001 - one instance does not stop the recovery of the others
        runtime.unrecovered[instance_id] = f"it could not be recovered: {error}"
        runtime.log.emit("recovery_failed", instance_id=instance_id, error=str(error))
        return False
    runtime.unrecovered.pop(instance_id, None)
    return True


async def _recover(runtime: Runtime, attempt: Attempt, open_waits: _OpenWaits) -> None:
    record = await runtime.store.read(moves.get_instance, attempt.instance_id)
    if record is None or record.attempt != attempt.number or record.state in INACTIVE_STATES:
        await runtime.store.run(_close_attempt, attempt)
        runtime.unfinished.discard((attempt.instance_id, attempt.number))
        return
    instance = await instance_of(runtime, record)
    plan = plan_for(instance, partial(_make, runtime, instance))
    listener = Listener(instance, record.attempt, committed=attempt.heard)
    seen = await instance.level.adopt(attempt.handle, plan, listener)
    pause = open_waits.pauses.get(record.instance_id)
    if isinstance(seen, Exit) and seen.ended_at is None and seen.outcome is AttemptOutcome.LOST:
        seen = replace(seen, ended_at=runtime.last_owned)  # the time without a manager is no uptime
    cell = seen if isinstance(seen, Cell) else None
    asks = open_waits.asks.get(record.instance_id, [])
    job_end = await ended_job(instance)
    phase = first_phase(record, seen, pause, open_waits.backoffs.get(record.instance_id), job_end)
    if runtime.closing is not None and cell is not None:
        cell.detach()  # the next manager finds it
    runtime.require_open()
    if cell is not None:
        runtime.unfinished.discard((record.instance_id, record.attempt))
    instance.start(lambda new_instance: begin_adopted(new_instance, phase, cell, asks))
    outcome = "adopted" if cell is not None else seen.detail if isinstance(seen, Exit) else ""
    runtime.log.emit("recovered", instance_id=record.instance_id, outcome=outcome)


def _make(runtime: Runtime, instance: Instance) -> Any:
    """It exists; this is for a level that would have to make it again."""
    return runtime.definitions.maker(instance.manifest)()


def _close_attempt(tx: Transaction, attempt: Attempt) -> None:
    end = AttemptEnd(outcome=AttemptOutcome.LOST, detail=_LOST)
    attempts.end_attempt(tx, attempt.instance_id, attempt.number, end)


async def _finish_terminations(runtime: Runtime) -> None:
    """Terminations that were cut off after nothing lived any more."""
    for instance_id in await runtime.store.read(queries.list_terminating):
        if instance_id not in runtime.instances and instance_id not in runtime.unrecovered:
            await _on_its_own(runtime, instance_id, _revive(runtime, instance_id))


async def _revive(runtime: Runtime, instance_id: UUID) -> None:
    record = await runtime.store.read(moves.get_instance, instance_id)
    if record is not None and record.state in {AgentState.FAILED, AgentState.SUSPENDED, AgentState.TERMINATING}:
        await revive(runtime, record)


async def _resume_waits(runtime: Runtime, open_waits: _OpenWaits) -> None:
    """Suspensions and backoffs go on; what an agent waited for that is gone ends."""
    for wait in (*open_waits.backoffs.values(), *open_waits.pauses.values()):
        if wait.instance_id is None or wait.instance_id in runtime.instances | runtime.unrecovered:
            continue
        await _on_its_own(runtime, wait.instance_id, _revive(runtime, wait.instance_id))
    for instance_id, asks in open_waits.asks.items():
        if instance_id in runtime.instances or instance_id in runtime.unrecovered:
            continue
        for wait in asks:
            if wait.task_id is None:
                await runtime.store.run(_end_ask, wait.wait_id)


def _end_ask(tx: Transaction, wait_id: UUID) -> None:
    wait = waits.get_wait(tx, wait_id)
    if wait is not None and wait.ended_at is None:
        waits.end_wait(tx, wait_id, "the agent is gone")


async def _try_again(runtime: Runtime, unclear: list[Attempt], gate: asyncio.Semaphore) -> None:
    while unclear:
        await runtime.clock.sleep(_AGAIN_SECONDS)
        with contextlib.suppress(StoreError):  # a store that cannot be read now is asked again
            open_waits = _by_kind(await runtime.store.read(waits.all_open_waits))
            unclear = await _recover_all(runtime, unclear, open_waits, gate)
    await sweep(runtime)


# --- an instance without a task ----------------------------------------------------------------------


async def revive(runtime: Runtime, record: AgentInstance) -> Instance:
    """The task of a record that has none: failed, parked, or a termination that was cut off.

    Raises `ActorEndedError` for a record that says more: its task ended since it was read, or lives.
    """
    live = runtime.instances.get(record.instance_id)
    if live is not None:
        return live
    if record.state not in _WITHOUT_TASK:
        raise ActorEndedError
    instance = await instance_of(runtime, record)
    open_waits = await runtime.store.read(waits.open_waits, instance_id=record.instance_id)
    sorted_waits = _by_kind(open_waits)
    present = await runtime.store.read(moves.get_instance, record.instance_id)
    live = runtime.instances.get(record.instance_id)
    if live is not None:  # another caller was faster
        return live
    if present is None or present.version != record.version:
        raise ActorEndedError
    runtime.require_open()
    phase: Phase = first_phase(
        record, None, sorted_waits.pauses.get(record.instance_id), sorted_waits.backoffs.get(record.instance_id)
    )
    asks = sorted_waits.asks.get(record.instance_id, [])
    instance.start(lambda new_instance: begin_adopted(new_instance, phase, None, asks))
    return instance


async def instance_of(runtime: Runtime, record: AgentInstance) -> Instance:
    try:
        manifest = await runtime.definitions.manifest(record.definition_id)
    except AgentNotFoundError:
        manifest = AgentManifest(
            id=record.definition_id, name=str(record.definition_id), kind=AgentKind.PYTHON, source=None
        )
    options = record.spawn_options or AgentSpawnOptions()
    return Instance(runtime, record, manifest, runtime.levels.get(options.isolation_level))
