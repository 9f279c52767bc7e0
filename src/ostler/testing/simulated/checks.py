"""What must hold after every rehearsal, of the record and of the made-up machine together."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.lifecycle.observe import wanted_by
from ostler.model.events import EventsMissed
from ostler.model.instance import AgentInstance
from ostler.model.ledger import Wait, WaitKind
from ostler.model.query import ObservationOptions
from ostler.model.states import AgentState, SuspendDepth
from ostler.store import Store
from ostler.testing.folding import all_instances, invariant_faults
from ostler.testing.simulated.isolation import World
from ostler.testing.simulated.machine import Body, Machine

_WITH_CELL = frozenset({AgentState.READY, AgentState.PROCESSING, AgentState.WAITING})
_WITHOUT = frozenset({AgentState.TERMINATED, AgentState.FAILED})


async def final_faults(store: Store, world: World, workspace_id: UUID, now: datetime) -> list[str]:
    """The log, the table, the totals, the chain; and whether what is said to live lives."""
    faults = await invariant_faults(store, now)
    for record in await all_instances(store, workspace_id):
        faults += [f"instance {record.instance_id}: {fault}" for fault in await _life_faults(store, world, record)]
    return faults


async def _life_faults(store: Store, world: World, record: AgentInstance) -> list[str]:
    cells = [cell.plan.attempt for cell in world.alive.get(record.instance_id, [])]
    waits = await store.open_waits(instance_id=record.instance_id)
    return [
        *_cell_faults(record, cells),
        *_pause_faults(record, cells, waits),
        *_wait_faults(record, {wait.kind for wait in waits}),
        *await _attempt_faults(store, record),
    ]


def _cell_faults(record: AgentInstance, cells: list[int]) -> Iterator[str]:
    """What is said to live lives, once, and nothing else does."""
    if record.state in _WITH_CELL and cells != [record.attempt]:
        yield f"is {record.state} at attempt {record.attempt}, but of its attempts {cells or 'none'} lives"
    if record.state in _WITHOUT and cells:
        yield f"is {record.state} and lives"
    if record.state is AgentState.INITIALIZING:
        yield "is still initializing"
    if record.state is AgentState.PROCESSING:
        yield "is still processing, and nothing is asked of it any more"


def _pause_faults(record: AgentInstance, cells: list[int], waits: list[Wait]) -> Iterator[str]:
    depths = [(wait.detail or {}).get("depth") for wait in waits if wait.kind is WaitKind.RESUME]
    if record.state is not AgentState.SUSPENDED:
        if depths:
            yield f"is {record.state} and has a pause written down"
    elif len(depths) != 1:
        yield f"is suspended with {len(depths)} pauses written down"
    elif depths[0] == SuspendDepth.PARK and cells:
        yield "is parked and lives"


def _wait_faults(record: AgentInstance, kinds: set[WaitKind]) -> Iterator[str]:
    if WaitKind.AGENT in kinds and record.state not in _WITH_CELL:
        yield f"is {record.state} and still waits for an answer"
    if WaitKind.BACKOFF in kinds and record.state is not AgentState.FAILED:
        yield f"is {record.state} and has a restart written down"


async def _attempt_faults(store: Store, record: AgentInstance) -> list[str]:
    attempts = await store.list_attempts(record.instance_id)
    open_ones = [attempt.number for attempt in attempts if attempt.is_open]
    if record.state in _WITHOUT and open_ones:
        return [f"is {record.state} with the attempts {open_ones} open"]
    if [attempt.number for attempt in attempts] != list(range(1, record.attempt + 1)):
        return [f"is at attempt {record.attempt}, its rows are {[attempt.number for attempt in attempts]}"]
    if any(number != record.attempt for number in open_ones):
        return [f"is at attempt {record.attempt} while {open_ones} are open"]
    return []


async def survivors(store: Store, machine: Machine, workspace_id: UUID) -> list[Body]:
    """Those who live without a manager and are whole: the next one must take up each of them."""
    parked = {
        wait.instance_id
        for wait in await store.open_waits()
        if wait.kind is WaitKind.RESUME and (wait.detail or {}).get("depth") == SuspendDepth.PARK
    }
    states = _WITH_CELL | {AgentState.SUSPENDED}
    whole = {
        (record.instance_id, record.attempt)
        for record in await all_instances(store, workspace_id)
        if record.state in states and record.instance_id not in parked
    }
    return [body for name, body in machine.bodies.items() if name in whole and not body.dead and not body.leaving]


async def unseen_faults(store: Store, machine: Machine) -> list[str]:
    """Who ended while nobody looked is told of with the true reason."""
    faults = []
    for (instance_id, number), how in machine.unseen.items():
        attempts = await store.list_attempts(instance_id)
        told = next((attempt.outcome for attempt in attempts if attempt.number == number), None)
        if told is not how.outcome:
            faults.append(f"attempt {number} of {instance_id} ended by {how.outcome}, and {told} is written down")
    return faults


async def observer_faults(store: Store, instance_id: UUID, seen: list[Any]) -> list[str]:
    """An observer sees the log exactly, or is told how many it missed and from where."""
    wanted = wanted_by(ObservationOptions.default())
    if not seen:
        return []
    log = [event.sequence async for event in store.replay(instance_id=instance_id) if wanted(event)]
    faults, place = [], None
    for one in seen:
        if isinstance(one, EventsMissed):
            start = log.index(one.first_sequence)
            if place is not None and start != place:
                faults.append(f"a gap begins at {one.first_sequence}, but the next was {log[place]}")
            place = start + one.count
            continue
        if place is not None and (place >= len(log) or log[place] != one.sequence):
            expected = log[place] if place < len(log) else "the end"
            faults.append(f"an observer of {instance_id} saw {one.sequence} where {expected} comes next")
        place = log.index(one.sequence) + 1
    return faults
