"""The store beside bare drivers: acknowledged moves per second, and lists of instances."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from ostler.clock import SystemClock
from ostler.ids import Uuid7Source
from ostler.model.access import HOME_WORKSPACE_ID, OWNER, SYSTEM
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits, RestartPolicy
from ostler.model.states import AgentState
from ostler.model.types import from_micros
from ostler.store import instances, moves, queries
from ostler.store.moves import Move
from ostler.store.store import Store
from table import Table, middle, percentile

_IDS = Uuid7Source(SystemClock())
_ROUNDS = 3
_CALLERS = 64


def new_record() -> AgentInstance:
    return AgentInstance(
        instance_id=_IDS.new(),
        definition_id=uuid4(),
        state=AgentState.INITIALIZING,
        created_at=from_micros(0),
        updated_at=from_micros(0),
        workspace_id=HOME_WORKSPACE_ID,
        owner_id=OWNER.principal_id,
        name="bench",
        tags=("bench",),
        spawn_options=AgentSpawnOptions(resource_limits=ResourceLimits(), restart_policy=RestartPolicy()),
    )


async def ready(store: Store) -> AgentInstance:
    record, _ = await store.run(instances.reserve_instance, new_record(), by=SYSTEM)
    return record.evolve(**await store.run(instances.ready_instance, record, {"pid": 1}, {}, by=SYSTEM))


async def move(store: Store, record: AgentInstance) -> AgentInstance:
    works = record.state is AgentState.PROCESSING
    to = AgentState.WAITING if works else AgentState.PROCESSING
    return record.evolve(**await store.run(moves.move_instance, record, Move(to=to)))


async def _made(home: Path) -> AgentInstance:
    async with Store(home) as store:
        await store.take_lease("bench", ttl=timedelta(minutes=10), steal=True)
        return await ready(store)


def bare_rate(home: Path, count: int) -> float:
    """The rows of a move by the driver alone, one commit each, on the same schema and with the same durability."""
    key = asyncio.run(_made(home)).instance_id.bytes
    db = sqlite3.connect(home / "ostler.db", isolation_level=None)
    db.execute("PRAGMA synchronous=FULL")
    began = time.perf_counter()
    for number in range(count):
        to = ("processing", "waiting")[number % 2]
        db.execute("BEGIN IMMEDIATE")
        sequence = db.execute("SELECT sequence FROM head").fetchone()[0] + 1
        db.execute(
            "UPDATE agent_instances SET state = ?, version = version + 1, updated_at = ? WHERE id = ?",
            (to, number, key),
        )
        db.execute(
            """INSERT INTO agent_instance_events
               (sequence, workspace_id, instance_id, event_type, event_data_json, occurred_at)
               VALUES (?, ?, ?, 'agent_state_changed', ?, ?)""",
            (sequence, key, key, f'{{"attempt":1,"previous_state":"ready","new_state":"{to}"}}', number),
        )
        db.execute("UPDATE head SET sequence = ?", (sequence,))
        db.execute("COMMIT")
    rate = count / (time.perf_counter() - began)
    db.close()
    return rate


async def move_rates(where: str | Path, count: int) -> tuple[float, float]:
    """Acknowledged moves per second with one caller and with 64."""
    async with Store(where) as store:
        await store.take_lease("bench", ttl=timedelta(minutes=10), steal=True)
        one = await ready(store)
        began = time.perf_counter()
        for _ in range(count):
            one = await move(store, one)
        single = count / (time.perf_counter() - began)
        many = [await ready(store) for _ in range(_CALLERS)]

        async def work(record: AgentInstance) -> None:
            for _ in range(count // 10):
                record = await move(store, record)

        began = time.perf_counter()
        await asyncio.gather(*map(work, many))
        shared = _CALLERS * (count // 10) / (time.perf_counter() - began)
        await store.release_lease()
    return single, shared


def transitions(address: str | None, *, quick: bool) -> Table:
    count = 300 if quick else 1000
    table = Table("Acknowledged moves per second", "store", "1 caller", "64 callers", "ratio", "goal")
    bare, single, shared = [], [], []
    for _ in range(_ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            bare.append(bare_rate(Path(name) / "bare", count))
            rates = asyncio.run(move_rates(Path(name) / "home", count))
            single.append(rates[0])
            shared.append(rates[1])
    floor = middle(bare)
    table.add("bare SQLite, one commit each", f"{floor:,.0f}", "", "1", "")
    table.add("SQLite, 1 caller : bare", f"{middle(single):,.0f}", "", f"{middle(single) / floor:.2f}", "0.4")
    table.add("SQLite, 64 callers : bare", "", f"{middle(shared):,.0f}", f"{middle(shared) / floor:.2f}", "2.5")
    if address is not None:
        one, many = asyncio.run(move_rates(address, count // 2))
        table.add("PostgreSQL, 64 callers : 1", f"{one:,.0f}", f"{many:,.0f}", f"{many / one:.2f}", "3")
    return table


def lists(*, quick: bool) -> Table:
    table = Table("Lists of instances, milliseconds", "list", "bare rows p50", "p50", "p95", "x bare", "goal p95")
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(_lists(Path(name), table, rounds=40 if quick else 200))
    return table


async def _lists(home: Path, table: Table, rounds: int) -> None:
    async with Store(home) as store:
        await store.take_lease("bench", ttl=timedelta(minutes=10), steal=True)
        await asyncio.gather(*(store.run(instances.reserve_instance, new_record(), by=SYSTEM) for _ in range(1000)))
        db = sqlite3.connect(home / "ostler.db")
        for limit, goal in ((100, 4), (1000, 50)):
            bare, ours = [], []
            for _ in range(rounds):
                began = time.perf_counter()
                db.execute(
                    "SELECT * FROM agent_instances WHERE active = 1 ORDER BY id DESC LIMIT ?", (limit,)
                ).fetchall()
                bare.append((time.perf_counter() - began) * 1000)
                began = time.perf_counter()
                found = await store.read(queries.list_instances, GetInstancesFilter(limit=limit), HOME_WORKSPACE_ID)
                ours.append((time.perf_counter() - began) * 1000)
                assert len(found) == limit
            row = (middle(bare), middle(ours), percentile(ours, 0.95))
            times = f"{row[1] / row[0]:.1f}"
            table.add(f"{limit} of 1,000", f"{row[0]:.2f}", f"{row[1]:.2f}", f"{row[2]:.2f}", times, f"{goal}")
        db.close()
        await store.release_lease()
