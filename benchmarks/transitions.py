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
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

import psycopg

from ostler.model import AgentState, SpawnRequest
from ostler.store import EngineStore, open_store
from ostler.store.commands import MoveInstance, ReserveInstance
from ostler.store.life import Backend
from recording import Bare, BarePostgres, BareSqlite, Commits, recording_postgres, recording_sqlite
from table import Table


@dataclass(frozen=True, kw_only=True)
class Size:
    callers: tuple[int, ...] = (1, 16, 64, 256)
    rounds: int = 7
    #: Moves of one caller alone, and of all callers together.
    single: int = 300
    shared: int = 3072


WHOLE = Size()


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


async def rate(store: EngineStore, ids: list[UUID], callers: int, size: Size) -> float:
    each = size.single if callers == 1 else size.shared // callers // 2 * 2
    begin = time.perf_counter()
    await asyncio.gather(*(flip(store, instance_id, each) for instance_id in ids[:callers]))
    return callers * each / (time.perf_counter() - begin)


Rates = dict[str, list[float]]


async def measure(where: str, recording: Callable[[Commits], Backend], floor: Callable[[], Bare], size: Size) -> Rates:
    async with open_store(where) as store:
        ids = await populate(store, max(size.callers))
    bare = floor()
    recorded: Commits = []
    async with EngineStore(recording(recorded)) as store:
        await flip(store, ids[0], size.rounds * size.single)
    rates: Rates = {"bare": [], **{str(callers): [] for callers in size.callers}}
    async with open_store(where) as store:
        for turn in range(size.rounds):
            rates["bare"].append(bare.rate(recorded[turn * size.single : (turn + 1) * size.single]))
            for callers in size.callers:
                rates[str(callers)].append(await rate(store, ids, callers, size))
    bare.close()
    return rates


def sqlite_table(size: Size = WHOLE) -> Table:
    with tempfile.TemporaryDirectory(prefix="ostler-bench-") as name:
        home, copy = Path(name) / "home", Path(name) / "copy"

        def floor() -> Bare:
            shutil.copytree(home, copy)
            return BareSqlite(copy / "ostler.db")

        path = home / "ostler.db"
        rates = asyncio.run(measure(str(home), lambda commits: recording_sqlite(path, commits), floor, size))
    return _table("SQLite (WAL, synchronous=FULL)", "bare sqlite3", rates, {"1": "0.45", "64": "5"})


def postgres_table(server: str, size: Size = WHOLE) -> Table:
    address, other = (server.replace("/postgres?", f"/{name}?") for name in ("bench", "bare"))

    def floor() -> Bare:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute("CREATE DATABASE bare TEMPLATE bench")
        return BarePostgres(other)

    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE bench")
        rates = asyncio.run(measure(address, lambda commits: recording_postgres(address, commits), floor, size))
        for name in ("bench", "bare"):
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
    return _table("PostgreSQL (synchronous_commit=on)", "bare psycopg", rates, {})


def _table(title: str, floor: str, rates: Rates, goals: dict[str, str]) -> Table:
    table = Table(f"Acknowledged transitions per second: {title}", ("callers", "per second", f"x {floor}", "goal"))
    bare = rates["bare"]
    table.add(f"{floor}, single commits", f"{statistics.median(bare):,.0f}", "1.00", "")
    for callers, ours in rates.items():
        if ours is not bare:
            ratio = statistics.median(mine / its for mine, its in zip(ours, bare, strict=True))
            table.add(callers, f"{statistics.median(ours):,.0f}", f"{ratio:.2f}", goals.get(callers, ""))
    return table


async def _alone() -> None:
    """`python benchmarks/transitions.py`: only ours, for a profiler to look at."""
    with tempfile.TemporaryDirectory() as name:
        async with open_store(name) as store:
            ids = await populate(store, 64)
            print(f"{await rate(store, ids, 64, WHOLE):,.0f} transitions/s at 64 callers")


if __name__ == "__main__":
    asyncio.run(_alone())
