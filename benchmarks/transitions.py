"""Acknowledged transitions per second, beside the bare driver doing the same statements one commit at a time."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import psycopg

from ostler.model import AgentState, SpawnRequest
from ostler.store import EngineStore, open_store
from ostler.store.commands import MoveInstance, ReserveInstance
from ostler.store.engine import Backend
from recording import Statement, bare_postgres, bare_sqlite, recording_postgres, recording_sqlite
from table import Table

CALLERS = (1, 16, 64, 256)
TOTAL = 4096


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
    each = max(2, TOTAL // callers // 2 * 2)
    begin = time.perf_counter()
    await asyncio.gather(*(flip(store, instance_id, each) for instance_id in ids[:callers]))
    return callers * each / (time.perf_counter() - begin)


async def measure(
    make: Callable[[], tuple[Backend, list[list[Statement]]]], between: Callable[[], None]
) -> tuple[dict[int, float], list[list[Statement]]]:
    backend, commits = make()
    async with EngineStore(backend) as store:
        ids = await populate(store, max(CALLERS))
    between()
    commits.clear()
    rates = {}
    backend, commits = make()
    async with EngineStore(backend) as store:
        rates[1] = await rate(store, ids, 1)
    recorded = list(commits)
    backend, _ = make()
    async with EngineStore(backend) as store:
        for callers in CALLERS[1:]:
            rates[callers] = await rate(store, ids, callers)
    return rates, recorded


def _copy(home: Path, copy: Path) -> None:
    shutil.copytree(home, copy)


def sqlite_table() -> Table:
    with tempfile.TemporaryDirectory(prefix="ostler-bench-") as name:
        home, copy = Path(name) / "home", Path(name) / "copy"
        path = home / "ostler.db"
        rates, commits = asyncio.run(measure(lambda: recording_sqlite(path), lambda: _copy(home, copy)))
        bare = bare_sqlite(copy / "ostler.db", commits)
    return _table("SQLite (WAL, synchronous=FULL)", "bare sqlite3", bare, rates)


def postgres_table(address: str) -> Table:
    def snapshot() -> None:
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("CREATE DATABASE bare TEMPLATE bench")

    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("CREATE DATABASE bench")
    ours, bare_address = (address.replace("/postgres?", f"/{name}?") for name in ("bench", "bare"))
    rates, commits = asyncio.run(measure(lambda: recording_postgres(ours), snapshot))
    bare = bare_postgres(bare_address, commits)
    with psycopg.connect(address, autocommit=True) as connection:
        for name in ("bench", "bare"):
            connection.execute(f"DROP DATABASE {name}".encode())
    return _table("PostgreSQL (synchronous_commit=on)", "bare psycopg", bare, rates)


def _table(title: str, floor: str, bare: float, rates: dict[int, float]) -> Table:
    table = Table(f"Acknowledged transitions per second: {title}", ("callers", "per second", f"x {floor}", "goal"))
    table.add(f"{floor}, single commits", f"{bare:,.0f}", "1.00", "")
    goals = {1: "0.45", 64: "5"} if "SQLite" in title else {}
    for callers, per_second in rates.items():
        table.add(str(callers), f"{per_second:,.0f}", f"{per_second / bare:.2f}", goals.get(callers, ""))
    return table


async def _profile() -> None:
    """`python benchmarks/transitions.py`: only ours, for a profiler to look at."""
    with tempfile.TemporaryDirectory() as name:
        async with open_store(name) as store:
            ids = await populate(store, 64)
            print(f"{await rate(store, ids, 64):,.0f} transitions/s at 64 callers")


if __name__ == "__main__":
    asyncio.run(_profile())
