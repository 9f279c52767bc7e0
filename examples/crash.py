"""The part of the demo that dies: a program that writes as fast as it can, and the check of what it left."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from ostler import (
    AgentSpawnedEvent,
    AgentSpawnOptions,
    AgentState,
    AgentStateChangedEvent,
    AgentStateTransitions,
    MoveInstance,
    ReserveInstance,
    SpawnRequest,
    Store,
    open_store,
)

AGENTS = 16
SECONDS = 1.0
DOOMED = ("doomed",)
Acknowledged = dict[UUID, dict[int, AgentState]]


async def write_for_ever(home: str) -> None:
    """Sixteen agents at work; every acknowledged move is told at once on standard output."""
    async with open_store(home) as store, asyncio.TaskGroup() as group:
        for number in range(AGENTS):
            group.create_task(_work(store, f"doomed-{number}"))


async def _work(store: Store, name: str) -> None:
    request = SpawnRequest(agent_definition_id=uuid4(), options=AgentSpawnOptions(name=name, tags=DOOMED))
    record = await store.commit(ReserveInstance(request=request))
    record = await store.commit(MoveInstance(instance_id=record.instance_id, to=AgentState.READY))
    for state in itertools.cycle((AgentState.PROCESSING, AgentState.WAITING)):
        record = await store.commit(MoveInstance(instance_id=record.instance_id, to=state))
        os.write(1, f"{record.instance_id} {record.version} {record.state}\n".encode())


def kill_in_flight(home: Path) -> Acknowledged:
    """Start the writer, let it run, kill -9 it, and return what it had been told was durable."""
    child = subprocess.Popen([sys.executable, __file__, str(home)], stdout=subprocess.PIPE)
    try:
        lines = list(_until_killed(child))
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    told: Acknowledged = {}
    for line in lines:
        instance_id, version, state = line.split()
        told.setdefault(UUID(instance_id), {})[int(version)] = AgentState(state)
    return told


def _until_killed(child: subprocess.Popen[bytes]) -> Iterator[str]:
    """Its whole lines up to the end of the pipe; the one it was writing when it died does not count."""
    end: float | None = None
    for line in child.stdout or ():
        end = end or time.monotonic() + SECONDS
        if time.monotonic() > end:
            child.send_signal(signal.SIGKILL)
        if line.endswith(b"\n"):
            yield line.decode()


@dataclass(frozen=True, kw_only=True)
class Findings:
    acknowledged: int
    missing: int
    #: Written, but killed before it could be told.
    untold: int
    illegal: int
    gaps: int


async def examine(store: Store, told: Acknowledged) -> Findings:
    """Hold the log against what was acknowledged, and against the table of legal moves."""
    written: Acknowledged = {}
    illegal = gaps = 0
    previous = (await store.head()).horizon
    async for event in store.replay(previous):
        gaps += event.sequence != previous + 1
        previous = event.sequence
        if isinstance(event, AgentSpawnedEvent):
            if event.options is not None and event.options.tags == DOOMED:
                written[event.instance_id] = {event.version: AgentState.INITIALIZING}
        elif isinstance(event, AgentStateChangedEvent) and event.instance_id in written:
            moves = written[event.instance_id]
            follows = moves.get(event.version - 1) == event.previous_state
            illegal += not (follows and AgentStateTransitions.is_valid(event.previous_state, event.new_state))
            moves[event.version] = event.new_state
    for instance_id, moves in written.items():
        record = await store.get_instance(instance_id)
        newest = max(moves)
        illegal += record is None or (record.version, record.state) != (newest, moves[newest])
    promised = [(instance_id, *move) for instance_id, moves in told.items() for move in moves.items()]
    missing = sum(written.get(instance_id, {}).get(version) != state for instance_id, version, state in promised)
    doomed = sum(len(moves) for instance_id, moves in written.items() if instance_id in told)
    # Two moves of each were made before it began to tell.
    untold = doomed - 2 * len(told) - len(promised)
    return Findings(acknowledged=len(promised), missing=missing, untold=untold, illegal=illegal, gaps=gaps)


if __name__ == "__main__":
    # Ctrl-C goes to the whole terminal; the demo ends this program itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(write_for_ever(sys.argv[1]))
    except* BrokenPipeError:
        sys.exit("the demo has gone")
