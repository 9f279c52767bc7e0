"""A scripted life of a store, to be killed at any of its steps.

Run as a program: `kill_scenario.py WHERE MARKERS [--mutant | --reopen | --lax]`. Every acknowledged commit is one line
on standard output. What would be a process is a file in MARKERS, made after its intent is durable. The mutant makes the
file first, so that a kill in between leaves a process that no record knows.

`kill_scenario.py --serve` plays many lives without the cost of an interpreter for each: see `kill_points.Victims`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid5

from store_ground import ENDED, new_record, new_wait

import ostler.store.postgres  # noqa: F401 - else each of the forked programs would import it anew
from ostler.failpoints import FaultPlan, FaultPoint, Seams, no_fault
from ostler.model.access import HOME_WORKSPACE_ID, SYSTEM
from ostler.model.attempt import Request, RequestState
from ostler.model.instance import AgentHealthStatus, AgentInstance
from ostler.model.states import AgentState, HealthState
from ostler.model.wait import WaitKind
from ostler.policy.retention import RetentionPolicy
from ostler.store import attempts, instances, moves, reports, retention, waits
from ostler.store.connection import Connection
from ostler.store.idempotency import IdempotencyKey
from ostler.store.instances import Failure, Finish
from ostler.store.moves import Move
from ostler.store.reports import CallEnd
from ostler.store.requests import RequestEnd
from ostler.store.store import SqliteDatabase, Store

_DEFINITION = uuid5(HOME_WORKSPACE_ID, "scenario")
_AGENTS = 3
_TTL = timedelta(minutes=1)


def acknowledge(kind: str, key: object, said: object) -> None:
    """One line per acknowledged commit, in one write, so that a kill cannot tear it."""
    line = json.dumps({"kind": kind, "id": str(key), "said": said})
    os.write(1, line.encode() + b"\n")


def acknowledged(record: AgentInstance, changes: Mapping[str, Any]) -> AgentInstance:
    new = record.evolve(**changes)
    acknowledge("instance", new.instance_id, new.version)
    return new


async def spawn(store: Store, markers: Path, number: int, *, mutant: bool) -> AgentInstance:
    marker = markers / f"process-agent-{number}"
    if mutant:
        marker.touch()
    record = new_record(f"agent-{number}", tags=("scenario", f"n-{number}"), definition_id=_DEFINITION)
    key = IdempotencyKey.of(f"spawn-{os.getpid()}-{number}", "body")
    record, _ = await store.run(instances.reserve_instance, record, by=SYSTEM, key=key)
    acknowledge("instance", record.instance_id, record.version)
    if not mutant:
        marker.touch()
    changes = await store.run(instances.ready_instance, record, {"pid": number}, {}, by=SYSTEM)
    return acknowledged(record, changes)


async def work(store: Store, one: AgentInstance) -> AgentInstance:
    """A request with a signal and a wait in it, then its answer."""
    asked = Request(
        instance_id=one.instance_id,
        request_id=f"request-{one.name}",
        workspace_id=one.workspace_id,
        attempt=one.attempt,
        input_digest="d",
        begun_at=one.created_at,
    )
    one = acknowledged(one, await store.run(reports.begin_call, one, Move(to=AgentState.PROCESSING), asked))
    store.submit_lazy(reports.report_progress, one, 0.5, "half", None)
    await store.run(reports.report_signals, one, (("hello", {"n": 1}), ("again", None)), 0, 2)
    acknowledge("heard", one.instance_id, 2)
    wait = new_wait(one, kind=WaitKind.HUMAN, created_at=one.created_at)
    _, changes = await store.run(reports.open_agent_wait, one, Move(to=AgentState.WAITING), wait)
    one = acknowledged(one, changes)
    await store.run(waits.end_wait, wait.wait_id, "answered", {"yes": True})
    acknowledge("wait", wait.wait_id, "answered")
    one = acknowledged(one, await store.run(moves.move_instance, one, Move(to=AgentState.PROCESSING)))
    end = CallEnd(request=RequestEnd(request=asked, state=RequestState.DONE, answer='"done"'))
    one = acknowledged(one, await store.run(reports.end_call, one, Move(to=AgentState.WAITING), end))
    acknowledge("request", one.instance_id, asked.request_id)
    return one


async def fail_and_restart(store: Store, one: AgentInstance) -> AgentInstance:
    wait = new_wait(one, kind=WaitKind.BACKOFF, created_at=one.created_at)
    failure = Failure(end=ENDED, error=instances.error_event(one, "it fell"), reason="it fell", backoff=wait)
    one = acknowledged(one, await store.run(instances.fail_instance, one, failure))
    again = await store.run(instances.new_attempt, one, by=SYSTEM, reason="again", wait_id=wait.wait_id)
    one = acknowledged(one, again)
    one = acknowledged(one, await store.run(instances.ready_instance, one, {"pid": 9}, {}, by=SYSTEM))
    healthy = AgentHealthStatus(state=HealthState.HEALTHY)
    return acknowledged(one, await store.run(reports.report_health, one, healthy))


async def end(store: Store, one: AgentInstance) -> None:
    move = Move(to=AgentState.TERMINATING, act="terminate")
    one = acknowledged(one, await store.run(moves.move_instance, one, move))
    finish = Finish(end=ENDED, was_graceful=True, final_state={"notes": "x" * 500})
    acknowledged(one, await store.run(instances.finish_instance, one, finish))


async def scenario(where: str, markers: Path, fault: FaultPoint, flags: tuple[str, ...]) -> None:
    opened = Store(Lax(Path(where) / "ostler.db")) if "--lax" in flags else Store(where, Seams(fault=fault))
    async with opened as store:
        await store.take_lease("scenario", ttl=_TTL, steal=True)
        mutant = "--mutant" in flags
        spawned = [await spawn(store, markers, number, mutant=mutant) for number in range(_AGENTS)]
        worked = await asyncio.gather(*(work(store, one) for one in spawned))
        again = await fail_and_restart(store, worked[0])
        await asyncio.gather(*(end(store, one) for one in worked[1:]))
        await store.run(retention.sweep, RetentionPolicy())
        await end(store, again)
        await store.release_lease()


class Lax(SqliteDatabase):
    """A mutant that does not wait for the disk."""

    def open_writer(self, fault: FaultPoint) -> Connection:
        connection = super().open_writer(fault)
        connection.execute("PRAGMA synchronous = NORMAL", {})
        return connection


async def reopen(where: str) -> None:
    """What a restart does first: open, take over, look for open intents, clean up."""
    async with Store(where) as store:
        await store.take_lease("successor", ttl=_TTL, steal=True)
        await store.read(attempts.open_attempts)
        await store.run(retention.sweep, RetentionPolicy())


def play(where: str, markers: str, fault: str, flags: tuple[str, ...]) -> None:
    plan = FaultPlan.parse(fault) if fault else no_fault
    asyncio.run(reopen(where) if "--reopen" in flags else scenario(where, Path(markers), plan, flags))


def serve() -> None:
    """Each line is a life to play in a process of its own; how it ended is answered with a line."""
    for line in sys.stdin:
        told = json.loads(line)
        child = os.fork()
        if not child:
            os.dup2(os.open(told["output"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), 1)
            play(told["where"], told["markers"], told["fault"], tuple(told["flags"]))
            os._exit(0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve()
    else:
        play(sys.argv[1], sys.argv[2], os.environ.get("OSTLER_FAULT", ""), tuple(sys.argv[3:]))
