"""A thousand live agents in processes of their own: until all are ready, and what they take when idle."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import ostler
from floors import Echo
from measured import pss_kb
from table import Table

CROWD, QUICK_CROWD = 1000, 200
_AT_ONCE = 16
_IDLE_SECONDS = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")


def _cpu_seconds(pids: list[int]) -> float:
    """What these and this program have used until now."""
    used = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        used += (int(fields[11]) + int(fields[12])) / _TICKS
    own = resource.getrusage(resource.RUSAGE_SELF)
    return used + own.ru_utime + own.ru_stime


async def _figures(home: Path, count: int) -> tuple[tuple[str, str], ...]:
    settings = ostler.LifecycleSettings(close_grace=timedelta(seconds=5))
    async with ostler.open(home, settings=settings) as manager:
        options = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.PROCESS)
        request = ostler.SpawnRequest(
            agent_definition_id=manager.registry.register(Echo).id, options=options.evolve(name=None)
        )
        lives: list[UUID] = []
        left = iter(range(count))

        async def several() -> None:
            for _ in left:
                lives.append((await manager.spawn(request)).instance_id)  # noqa: PERF401 - several fill one list

        begin = time.perf_counter()
        await asyncio.gather(*(several() for _ in range(_AT_ONCE)))
        ready = time.perf_counter() - begin
        attempts = [(await manager.store.list_attempts(one))[-1] for one in lives]
        pids = [int((one.identity or {})["pid"]) for one in attempts]
        begin = time.perf_counter()
        answers = await asyncio.gather(*(manager.process(one, number) for number, one in enumerate(lives)))
        called = time.perf_counter() - begin
        if answers != list(range(count)):
            raise SystemExit("not everyone answered with what it was asked")
        before = _cpu_seconds(pids)
        await asyncio.sleep(_IDLE_SECONDS)
        idle = (_cpu_seconds(pids) - before) / _IDLE_SECONDS
        return (
            ("until all are ready, s", f"{ready:.1f}"),
            ("spawns per second", f"{count / ready:,.0f}"),
            ("all asked at once, until the last has answered, s", f"{called:.1f}"),
            ("memory of one that has answered once, KB (PSS)", f"{pss_kb(pids):,.0f}"),
            ("cores in use when nobody is asked anything", f"{idle:.2f}"),
        )


def thousand_table(*, quick: bool = False) -> Table:
    count = QUICK_CROWD if quick else CROWD
    table = Table(f"Level process: {count:,} live agents on {os.cpu_count()} cores", ("", "Ostler, Python"))
    with tempfile.TemporaryDirectory(prefix="ostler-bench-") as home:
        for row in asyncio.run(_figures(Path(home), count)):
            table.add(*row)
    return table
