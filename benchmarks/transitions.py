"""Acknowledged transitions per second, beside the bare driver doing the same statements one commit at a time.

A shared disk is fast in one second and slow in the next, so floor and store take turns within each round, and
the medians over the rounds are what is printed.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import psycopg

from ostler.model import AgentState, SpawnRequest
from ostler.store import EngineStore, open_store
from ostler.store.commands import MoveInstance, ReserveInstance
from ostler.store.life import Backend
from recording import Bare, BarePostgres, BareSqlite, Commits, recording_postgres, recording_sqlite
from table import Table

CALLERS = (1, 16, 64, 256)
ROUNDS = 7
_SINGLE = 300
_SHARED = 3072


async def populate(store: EngineStore, count: int) -> list[UUID]:
    ids = []
    for _ in range(count):
        record = await store.commit(ReserveInstance(request=SpawnRequest(agent_definition_id=uuid4())))
        await store.commit(MoveInstance(instance_id=record.instance_id, to=AgentState.READY))
        await store.commit(MoveInstance(instance_id=record.instance_id, to=AgentState.PROCESSING))
        ids.append(record.instance_id)
    return ids


async def flip(store: EngineStore, instance_id: UUID, times: int) -> None:
    for turn in range(times):
        to = AgentState.PROCESSING if turn % 2 else AgentState.WAITING
        await store.commit(MoveInstance(instance_id=instance_id, to=to))


async def rate(store: EngineStore, ids: list[UUID], callers: int) -> float:
    each = _SINGLE if callers == 1 else _SHARED // callers // 2 * 2
    begin = time.perf_counter()
    await asyncio.gather(*(flip(store, instance_id, each) for instance_id in ids[:callers]))
    return callers * each / (time.perf_counter() - begin)


Rates = dict[str, list[float]]


async def measure(where: str, recording: Callable[[Commits], Backend], floor: Callable[[], Bare]) -> Rates:
    async with open_store(where) as store:
        ids = await populate(store, max(CALLERS))
    bare = floor()
    recorded: Commits = []
    async with EngineStore(recording(recorded)) as store:
        await flip(store, ids[0], ROUNDS * _SINGLE)
    rates: Rates = {"bare": [], **{str(callers): [] for callers in CALLERS}}
    async with open_store(where) as store:
        for turn in range(ROUNDS):
            rates["bare"].append(bare.rate(recorded[turn * _SINGLE : (turn + 1) * _SINGLE]))
            for callers in CALLERS:
                rates[str(callers)].append(await rate(store, ids, callers))
    bare.close()
    return rates


def sqlite_table() -> Table:
    with tempfile.TemporaryDirectory(prefix="ostler-bench-") as name:
        home, copy = Path(name) / "home", Path(name) / "copy"

        def floor() -> Bare:
            shutil.copytree(home, copy)
            return BareSqlite(copy / "ostler.db")

        path = home / "ostler.db"
        rates = asyncio.run(measure(str(home), lambda commits: recording_sqlite(path, commits), floor))
    return _table("SQLite (WAL, synchronous=FULL)", "bare sqlite3", rates, {"1": "0.45", "64": "5"})


def postgres_table(server: str) -> Table:
    address, other = (server.replace("/postgres?", f"/{name}?") for name in ("bench", "bare"))

    def floor() -> Bare:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute("CREATE DATABASE bare TEMPLATE bench")
        return BarePostgres(other)

    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE bench")
        rates = asyncio.run(measure(address, lambda commits: recording_postgres(address, commits), floor))
        for name in ("bench", "bare"):
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
    return _table("PostgreSQL (synchronous_commit=on)", "bare psycopg", rates, {})


def _table(title: str, floor: str, rates: Rates, goals: dict[str, str]) -> Table:
    table = Table(f"Acknowledged transitions per second: {title}", ("callers", "per second", f"x {floor}", "goal"))
    bare = rates["bare"]
    table.add(f"{floor}, single commits", f"{statistics.median(bare):,.0f}", "1.00", "")
    for callers in CALLERS:
        ours = rates[str(callers)]
        ratio = statistics.median(mine / its for mine, its in zip(ours, bare, strict=True))
        table.add(str(callers), f"{statistics.median(ours):,.0f}", f"{ratio:.2f}", goals.get(str(callers), ""))
    return table


async def _alone() -> None:
    """`python benchmarks/transitions.py`: only ours, for a profiler to look at."""
    with tempfile.TemporaryDirectory() as name:
        async with open_store(name) as store:
            ids = await populate(store, 64)
            print(f"{await rate(store, ids, 64):,.0f} transitions/s at 64 callers")


if __name__ == "__main__":
    asyncio.run(_alone())
