"""What must hold after a simulation, of the records and of the machine together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from folding import all_events, all_instances
from simulated_machine import Machine, SimulatedAgent

from ostler.lifecycle.observe import filter_of
from ostler.model.attempt import AttemptOutcome
from ostler.model.events import AgentSignalEvent, EventsMissed
from ostler.model.query import ObservationOptions
from ostler.model.states import INACTIVE_STATES, AgentState, SuspendDepth
from ostler.model.wait import WaitKind
from ostler.store import attempts, waits
from ostler.store.transaction import Reader

_BY_ITSELF = frozenset({AttemptOutcome.EXIT_CODE, AttemptOutcome.SIGNAL, AttemptOutcome.OOM})
_SERVES = frozenset({AgentState.READY, AgentState.WAITING})


@dataclass(eq=False)
class Execution:
    """One run of a request."""

    number: int
    agent: SimulatedAgent
    signals: list[str] = field(default_factory=list)
    #: It has returned its answer.
    done: bool = False


def machine_faults(reader: Reader, machine: Machine) -> Iterator[str]:
    """What is said to live lives, once and at its attempt, and nothing else does."""
    records = {record.instance_id: record for record in all_instances(reader)}
    for agent in machine.living():
        if agent.plan.instance_id not in records:
            yield f"an agent of {agent.plan.instance_id} lives, and has no record"
    for instance_id, record in records.items():
        alive = [one.plan.attempt for one in machine.living(instance_id)]
        found = waits.open_waits(reader, instance_id=instance_id)
        depths = [(one.detail or {}).get("depth") for one in found if one.kind is WaitKind.RESUME]
        if record.state in _SERVES and alive != [record.attempt]:
            yield f"{instance_id} is {record.state} at attempt {record.attempt}, and {alive or 'none'} lives"
        if record.state in INACTIVE_STATES and alive:
            yield f"{instance_id} is {record.state}, and attempt {alive} lives"
        if record.state in {AgentState.INITIALIZING, AgentState.PROCESSING}:
            yield f"{instance_id} is still {record.state}"
        if record.job is not None and record.state in _SERVES:
            yield f"{instance_id} is {record.state}, and its job was neither done nor failed"
        if record.state is AgentState.SUSPENDED and depths == [SuspendDepth.PARK] and alive:
            yield f"{instance_id} is parked, and attempt {alive} lives"


def exit_faults(reader: Reader, machine: Machine) -> Iterator[str]:
    """An attempt is said to have ended by itself only if it did, and as it did."""
    for record in all_instances(reader):
        for row in attempts.list_attempts(reader, record.instance_id):
            how = machine.exits.get((record.instance_id, row.number))
            if row.outcome in _BY_ITSELF and (how is None or how.outcome is not row.outcome):
                yield f"attempt {row.number} of {record.instance_id} is said to have ended by {row.outcome}, was {how}"


def signal_faults(
    reader: Reader, instance_id: UUID, said: list[str], *, attempt: int | None = None, whole: bool = True
) -> list[str]:
    """What an agent said is in the log, in its order and once; `whole`: all of it."""
    log = [
        one.name
        for one in all_events(reader, instance_id)
        if isinstance(one, AgentSignalEvent) and (one.name in said if attempt is None else one.attempt == attempt)
    ]
    expected = sorted(log, key=log.index)
    if len(set(log)) != len(log) or expected != log:
        return [f"signals of {instance_id} are in the log twice: {log}"]
    missing = [name for name in said if name not in log]
    if missing and whole:
        return [f"signals {missing} of {instance_id} (attempt {attempt}) are not in the log"]
    by_execution: dict[str, list[str]] = {}
    for name in log:
        by_execution.setdefault(name.split("-")[0], []).append(name)
    return [
        f"signals of {instance_id} are not in the log as they were said: {names}"
        for number, names in by_execution.items()
        if names != [f"{number}-{place}" for place in range(len(names))]
    ]


def observer_faults(reader: Reader, instance_id: UUID, seen: list[Any]) -> Iterator[str]:
    """An observer sees the log exactly, or is told how many events it missed and from where."""
    wanted = filter_of(ObservationOptions())
    log = [one.sequence for one in all_events(reader, instance_id) if wanted(one)]
    place: int | None = None
    for one in seen:
        if isinstance(one, EventsMissed):
            start = log.index(one.first_sequence)
            if place is not None and start != place:
                yield f"a gap begins at {one.first_sequence}, but the next was {log[place]}"
            place = start + one.count
        elif one.sequence:
            if place is not None and (place >= len(log) or log[place] != one.sequence):
                expected = log[place] if place < len(log) else "the end"
                yield f"an observer of {instance_id} saw {one.sequence} where {expected} comes next"
            place = log.index(one.sequence) + 1
