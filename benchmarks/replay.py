"""Replays a long log from a cursor: how fast, and in how much memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fill import Filler, create_database, drop_database
from ostler.store import open_store
from ostler.store.postgres import PostgresSession
from ostler.store.sqlite import SqliteSession
from ostler.store.sqlsession import SqlSession
from table import Table

COUNTS = (10_000, 1_000_000)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def replay(where: str, count: int) -> tuple[float, float]:
    """Events per second, and the most memory it took beyond the first page."""
    async with open_store(where) as store:
        start, most, seen = 0.0, 0.0, 0
        begin = time.perf_counter()
        async for event in store.replay(0):
            seen += 1
            assert event.sequence == seen
            if seen == 2000:
                start = _resident_mb()
            if seen % 20_000 == 0:
                most = max(most, _resident_mb() - start)
        seconds = time.perf_counter() - begin
    assert seen == count, (seen, count)
    return seen / seconds, most


def _apart(where: str, count: int) -> tuple[float, float]:
    """In a process of its own, so that its memory is its own."""
    done = subprocess.run([sys.executable, __file__, where, str(count)], capture_output=True, text=True, check=True)
    rate, memory = done.stdout.split()
    return float(rate), float(memory)


async def _touch(where: str) -> None:
    async with open_store(where):
        pass


def _fill(session: SqlSession, count: int) -> None:
    Filler(session).fill_events(count)
    session.close()


def replay_table(server: str | None, counts: tuple[int, ...] = COUNTS) -> Table:
    table = Table("Replay from the beginning", ("store", "events", "events per second", "memory beyond one page, MB"))
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="ostler-bench-") as name:
            _measure(table, "SQLite", name, count, lambda name=name: SqliteSession(Path(name) / "ostler.db"))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        if server is not None:
            address = create_database(server, f"replay{count}")
            _measure(table, "PostgreSQL", address, count, lambda address=address: PostgresSession(address))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            drop_database(server, f"replay{count}")
    return table


def _measure(table: Table, title: str, where: str, count: int, session: Callable[[], SqlSession]) -> None:
    asyncio.run(_touch(where))
    _fill(session(), count)
    rate, memory = _apart(where, count)
    table.add(title, f"{count:,}", f"{rate:,.0f}", f"{memory:.1f}")


if __name__ == "__main__":
    print(*asyncio.run(replay(sys.argv[1], int(sys.argv[2]))))
