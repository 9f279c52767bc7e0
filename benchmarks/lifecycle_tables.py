"""Spawns, calls and observers beside what they cost without Ostler."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ostler
from bareparent import BareParent
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.observe import Fanout
from ostler.model.access import HOME_WORKSPACE_ID
from ostler.model.events import AgentProgressEvent
from ostler.store import events
from table import Table, middle, percentile


class Echo(ostler.Agent):
    async def process(self, request: Any) -> Any:
        return request


def spawns(*, quick: bool) -> Table:
    table = Table("Spawn to ready, one at a time, milliseconds", "what", "p50", "p95", "x fork + ready")
    count = 30 if quick else 100
    parent = BareParent()
    floor = []
    for _ in range(count):
        began = time.perf_counter()
        child = parent.spawn()
        floor.append((time.perf_counter() - began) * 1000)
        child.end()
    table.add("fork + ready, no record", f"{middle(floor):.2f}", f"{percentile(floor, 0.95):.2f}", "1")
    with tempfile.TemporaryDirectory() as home:
        for level, took in asyncio.run(_spawn_times(home, count)).items():
            times = f"{middle(took) / middle(floor):.1f}"
            table.add(f"level {level}", f"{middle(took):.2f}", f"{percentile(took, 0.95):.2f}", times)
    return table


async def _spawn_times(home: str, count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    async with ostler.open(home) as manager:
        for level in ("none", "thread", "process"):
            await (await manager.start(Echo, isolation=level)).stop()  # loads what the first one needs
            took = found[level] = []
            for _ in range(count):
                began = time.perf_counter()
                agent = await manager.start(Echo, isolation=level)
                took.append((time.perf_counter() - began) * 1000)
                await agent.stop()
    return found


def calls(*, quick: bool) -> Table:
    title = "Requests: acknowledged answers, milliseconds, and commits per request"
    table = Table(title, "level", "one caller p50", "p95", "commits", "64 at once: requests/s")
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(_calls(home, table, 100 if quick else 400))
    return table


async def _calls(home: str, table: Table, count: int) -> None:
    async with ostler.open(home) as manager:
        for level in ("none", "thread", "process"):
            agent = await manager.start(Echo, isolation=level, tasks=64)
            await agent.ask(0)
            took, commits = [], _count_commits(manager)
            for number in range(count):
                began = time.perf_counter()
                await agent.ask(number)
                took.append((time.perf_counter() - began) * 1000)
            each = commits() / count
            began = time.perf_counter()
            await asyncio.gather(*(_ask_many(agent, count // 10) for _ in range(64)))
            rate = 64 * (count // 10) / (time.perf_counter() - began)
            table.add(level, f"{middle(took):.2f}", f"{percentile(took, 0.95):.2f}", f"{each:.2f}", f"{rate:,.0f}")
            await agent.stop()


async def _ask_many(agent: ostler.AgentHandle, count: int) -> None:
    for number in range(count):
        await agent.ask(number)


def _count_commits(manager: AgentLifecycleManager) -> Any:
    commits = 0

    def committed(_: object) -> None:
        nonlocal commits
        commits += 1

    manager.store.subscribe(committed)
    return lambda: commits


class Pid(ostler.Agent):
    async def process(self, _: Any) -> int:
        return os.getpid()


def fleet(*, quick: bool) -> Table:
    """Many agents at level process."""
    table = Table("A fleet at level process", "what", "value", "goal")
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(_fleet(home, table, 60 if quick else 300))
    return table


async def _fleet(home: str, table: Table, count: int) -> None:
    policy = ostler.RestartPolicy(type=ostler.RestartPolicyType.IMMEDIATE, max_retries=10, burst_limit=100)
    async with ostler.open(home) as manager:
        await (await manager.start(Pid, isolation="process")).stop()
        began = time.perf_counter()
        agents = await asyncio.gather(*(manager.start(Pid, isolation="process", restart=policy) for _ in range(count)))
        table.add(f"{count} agents, all started at once, to ready: seconds", f"{time.perf_counter() - began:.2f}", "")
        pids = await asyncio.gather(*(agent.ask(None) for agent in agents))
        memory = [_pss(pid) / 1024 for pid in pids[:60]]
        table.add("PSS of an idle agent: MB", f"{middle(memory):.2f}", "3.3")
        again = []
        for agent, pid in list(zip(agents, pids, strict=True))[:20]:
            began = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while await _other_pid(agent, pid) is None:
                pass
            again.append((time.perf_counter() - began) * 1000)
        table.add("kill -9 of an agent to its next answer: ms p50", f"{middle(again):.1f}", "")
        began = time.perf_counter()
        await asyncio.gather(*(agent.stop() for agent in agents))
        table.add(f"{count} agents stopped at once: seconds", f"{time.perf_counter() - began:.2f}", "")


async def _other_pid(agent: ostler.AgentHandle, before: int) -> int | None:
    try:
        pid = await agent.ask(None)
    except ostler.OstlerError:
        return None
    return None if pid == before else int(pid)


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def observers(*, quick: bool) -> Table:
    table = Table("100 observers that filter: events per second delivered", "what", "events/s", "x bare queues", "goal")
    count = 500 if quick else 2000
    bare = asyncio.run(_bare_queues(count))
    ours = asyncio.run(_fanned(count))
    table.add("bare asyncio queues", f"{bare:,.0f}", "1", "")
    table.add("fan-out of the manager", f"{ours:,.0f}", f"{ours / bare:.2f}", "0.6")
    return table


async def _bare_queues(count: int) -> float:
    queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(100)]

    async def read(queue: asyncio.Queue[int]) -> None:
        for _ in range(count):
            await queue.get()

    began = time.perf_counter()
    readers = [asyncio.create_task(read(queue)) for queue in queues]
    for number in range(count):
        for queue in queues:
            queue.put_nowait(number)
        if number % 50 == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*readers)
    return count / (time.perf_counter() - began)


async def _fanned(count: int) -> float:
    with tempfile.TemporaryDirectory() as home:
        async with ostler.open(home) as manager:
            agent = await manager.start(Echo, isolation="none")
            options = ostler.ObservationOptions(buffer_capacity=10_000, include_health_checks=False)
            streams = [manager.observe(agent.instance_id, options) for _ in range(100)]

            async def read(stream: ostler.Observation) -> None:
                for _ in range(count):
                    await anext(stream)

            readers = [asyncio.create_task(read(stream)) for stream in streams]
            while len(_fanout(manager)) < 100:  # noqa: ASYNC110 - each observer attaches at its first step
                await asyncio.sleep(0.01)
            first = await manager.store.read(events.newest_sequence)
            said = [_event(agent, first + number + 1) for number in range(count)]
            began = time.perf_counter()
            for start in range(0, count, 50):
                _fanout(manager).publish(said[start : start + 50])
                await asyncio.sleep(0)
            await asyncio.gather(*readers)
            return count / (time.perf_counter() - began)


def _fanout(manager: AgentLifecycleManager) -> Fanout:
    return manager._runtime.fanout  # noqa: SLF001 - measured without the store in between


def _event(agent: ostler.AgentHandle, sequence: int) -> AgentProgressEvent:
    assert not isinstance(agent.instance_id, str)
    return AgentProgressEvent(
        sequence=sequence, workspace_id=HOME_WORKSPACE_ID, instance_id=agent.instance_id, fraction=0.5
    )
