"""Filter queries and statistics over a thousand, a hundred thousand and a million instances."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fill import DEFINITION, NEEDLES, OWNER, Filler, analyse, create_database, drop_database
from ostler.model import AgentState, GetInstancesFilter, HealthState
from ostler.store import EngineStore, open_store
from ostler.store.postgres import PostgresSession
from ostler.store.sqlite import SqliteSession
from ostler.store.sqlsession import SqlSession
from table import Table

SIZES = (1_000, 100_000, 1_000_000)
_ROUNDS = 150
_HALF = NEEDLES // 2

FILTERS: dict[str, GetInstancesFilter] = {
    "all active": GetInstancesFilter(),
    "state": GetInstancesFilter(state=AgentState.PROCESSING),
    "health_state": GetInstancesFilter(health_state=HealthState.UNHEALTHY),
    "tag": GetInstancesFilter(tag="needle"),
    "definition_id": GetInstancesFilter(definition_id=DEFINITION),
    "owner_id": GetInstancesFilter(owner_id=OWNER),
    "owner_id, finished ones too": GetInstancesFilter(owner_id=OWNER, include_terminated=True),
    "name_pattern needle-*": GetInstancesFilter(name_pattern="needle-*"),
    "name_pattern needle-*, finished too": GetInstancesFilter(name_pattern="needle-*", include_terminated=True),
    "name_pattern *eedle*": GetInstancesFilter(name_pattern="*eedle*"),
    "owner, state and tag": GetInstancesFilter(owner_id=OWNER, state=AgentState.PROCESSING, tag="needle"),
    "second page by offset": GetInstancesFilter(owner_id=OWNER, limit=_HALF, offset=_HALF),
}


async def p95_ms(ask: Callable[[], Awaitable[Any]]) -> float:
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        await ask()
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.quantiles(times, n=20)[-1]


async def measure(store: EngineStore) -> dict[str, float]:
    found = {}
    async with store:
        for name, wanted in FILTERS.items():
            rows = await store.list_instances(wanted)
            assert len(rows) == min(wanted.limit, NEEDLES), (name, len(rows))
            found[name] = await p95_ms(lambda wanted=wanted: store.list_instances(wanted))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        found["statistics"] = await p95_ms(store.statistics)
    return found


@contextmanager
def filled_sqlite(count: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ostler-bench-") as name:
        asyncio.run(_touch(name))
        session = SqliteSession(Path(name) / "ostler.db")
        _fill(session, count)
        yield name


@contextmanager
def filled_postgres(server: str, count: int) -> Iterator[str]:
    address = create_database(server, f"n{count}")
    asyncio.run(_touch(address))
    _fill(PostgresSession(address), count)
    try:
        yield address
    finally:
        drop_database(server, f"n{count}")


async def _touch(where: str) -> None:
    async with open_store(where):
        pass


def _fill(session: SqlSession, count: int) -> None:
    Filler(session).fill_instances(count)
    analyse(session)
    session.close()


def reading_table(title: str, filled: Callable[[int], Any], sizes: tuple[int, ...] = SIZES) -> Table:
    results = {}
    for size in sizes:
        with filled(size) as where:
            results[size] = asyncio.run(measure(open_store(where)))
    heads = ("filter (p95, ms)", *(f"{size:,}" for size in sizes), "largest / smallest", "goal")
    table = Table(f"The same {NEEDLES} rows out of ever more: {title}", heads)
    first, last = sizes[0], sizes[-1]
    for name in results[first]:
        ratio = results[last][name] / results[first][name]
        table.add(name, *(f"{results[size][name]:.2f}" for size in sizes), f"{ratio:.2f}", "3")
    return table
