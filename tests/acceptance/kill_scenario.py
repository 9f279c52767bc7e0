"""A scripted life of a store, to be killed at any of its writes.

Run as a program: `python kill_scenario.py HOME [--mutant | --reopen | --lax]`. Every acknowledged commit is one
line on standard output; what would be a process is a marker file, made after its intent is durable. The mutant
makes the marker first, as the seed's order did, so that a kill in between leaves a marker nobody knows of.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid5

from ostler.store.commands import (
    CreateTask,
    EndAttempt,
    Idempotency,
    MoveInstance,
    MoveTask,
    RecordIdentity,
    ReportHealth,
    ReserveInstance,
    RestartInstance,
)
from ostler.store.opening import DATABASE_FILE, sqlite_backend

from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentHealthStatus,
    AgentInstance,
    AgentSpawnOptions,
    AgentState,
    AttemptOutcome,
    HealthState,
    SpawnRequest,
    Task,
    TaskState,
)
from ostler.seams import FaultPlan, FaultPoint, no_fault
from ostler.store import AgentError, Backend, EngineStore, Seams, open_store
from ostler.store.sqlite import SqliteSession

_DEFINITION = uuid5(HOME_WORKSPACE_ID, "scenario")
_AGENTS = 3


def acknowledge(record: AgentInstance | Task) -> None:
    """One line per acknowledged commit, in one write, so that a kill cannot tear it."""
    key = str(record.instance_id if isinstance(record, AgentInstance) else record.task_id)
    line = json.dumps({"id": key, "version": record.version, "state": record.state.value})
    os.write(1, line.encode() + b"\n")


def start_process(home: Path, marker: str) -> None:
    """Stands for a process: a file that exists from here on."""
    os.close(os.open(home / f"process-{marker}", os.O_CREAT | os.O_WRONLY, 0o600))


async def spawn(store: EngineStore, home: Path, number: int, *, mutant: bool) -> AgentInstance:
    options = AgentSpawnOptions(name=f"agent-{number}", tags=("scenario", f"n-{number}"))
    request = SpawnRequest(agent_definition_id=_DEFINITION, options=options, context={"number": number})
    key = Idempotency.of(f"spawn-{number}", request.to_json())
    if mutant:
        start_process(home, f"agent-{number}")
    record = await store.commit(ReserveInstance(request=request, idempotency=key))
    acknowledge(record)
    if not mutant:
        start_process(home, f"agent-{number}")
    await store.commit(RecordIdentity(instance_id=record.instance_id, attempt=1, identity={"pid": number}))
    return record


async def move(store: EngineStore, instance_id: UUID, *states: AgentState) -> None:
    for state in states:
        acknowledge(await store.commit(MoveInstance(instance_id=instance_id, to=state)))


async def fail_and_restart(store: EngineStore, instance_id: UUID) -> None:
    error = AgentError(message="it fell over")
    acknowledge(await store.commit(MoveInstance(instance_id=instance_id, to=AgentState.FAILED, error=error)))
    await store.commit(EndAttempt(instance_id=instance_id, attempt=1, outcome=AttemptOutcome.SIGNAL))
    acknowledge(await store.commit(RestartInstance(instance_id=instance_id, max_attempts=3)))
    healthy = AgentHealthStatus(state=HealthState.HEALTHY)
    acknowledge(await store.commit(ReportHealth(instance_id=instance_id, health=healthy)))
    await move(store, instance_id, AgentState.READY)


async def work(store: EngineStore) -> None:
    task = await store.commit(CreateTask(task="mend the gate", tags=("scenario",)))
    acknowledge(task)
    for state in (TaskState.RUNNING, TaskState.COMPLETED, TaskState.ACCEPTED):
        acknowledge(await store.commit(MoveTask(task_id=task.task_id, to=state)))


async def scenario(home: Path, *, mutant: bool) -> None:
    plan = os.environ.get("OSTLER_FAULT")
    seams = Seams(fault=FaultPlan.parse(plan) if plan else no_fault)
    async with lax_store(home) if "--lax" in sys.argv else open_store(home, seams) as store:
        await store.take_lease("scenario", ttl=timedelta(minutes=1))
        spawned = [await spawn(store, home, number, mutant=mutant) for number in range(_AGENTS)]
        await asyncio.gather(
            *(move(store, one.instance_id, AgentState.READY, AgentState.PROCESSING) for one in spawned)
        )
        await fail_and_restart(store, spawned[0].instance_id)
        await work(store)
        ends = (AgentState.TERMINATING, AgentState.TERMINATED)
        await asyncio.gather(*(move(store, one.instance_id, *ends) for one in spawned[1:]))
        await store.sweep()


def lax_store(home: Path) -> EngineStore:
    """A mutant that does not wait for the disk."""
    backend = sqlite_backend(home / DATABASE_FILE)

    def open_writer(fault: FaultPoint) -> SqliteSession:
        assert backend.open_writer is not None
        session = backend.open_writer(fault)
        assert isinstance(session, SqliteSession)
        session.connection.execute("PRAGMA synchronous = NORMAL")
        return session

    return EngineStore(Backend(open_writer=open_writer, open_reader=backend.open_reader))


async def reopen(home: Path) -> None:
    """What a restart does first: open, take over, look for open intents, clean up."""
    async with open_store(home) as store:
        await store.take_lease("successor", ttl=timedelta(minutes=1), steal=True)
        await store.open_attempts()
        await store.sweep()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    asyncio.run(reopen(where) if "--reopen" in sys.argv else scenario(where, mutant="--mutant" in sys.argv))
