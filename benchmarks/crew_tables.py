"""Crews: how soon a task is in the hands of a member, and what members cost that have nothing to do."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack

import ostler
from lifecycle_tables import Echo
from ostler import CrewSettings, Supervisor, TaskOrchestrator, TaskState
from table import Table, middle, percentile

_MEMBERS = 200
_T = TaskState


def crews(*, quick: bool) -> str:
    return "\n".join(map(str, (_hand_out(20 if quick else 100), _idle(5.0 if quick else 60.0))))


def _hand_out(count: int) -> Table:
    table = Table("Hand-out: from the submitted task, one at a time, milliseconds", "until", "p50", "p95")
    with tempfile.TemporaryDirectory() as home:
        for what, took in asyncio.run(_hand_out_times(home, count)).items():
            table.add(what, f"{middle(took):.2f}", f"{percentile(took, 0.95):.2f}")
    return table


async def _hand_out_times(home: str, count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {
        "the task is committed (floor)": [],
        "a member has it": [],
        "its agent (level none) has answered and the work is submitted": [],
    }
    async with AsyncExitStack() as stack:
        manager = await stack.enter_async_context(ostler.open(home))
        manager.registry.register(Echo, name="echo", defaults=ostler.AgentSpawnOptions(isolation_level="none"))  # type: ignore[arg-type]
        tasks = TaskOrchestrator(manager)
        stack.push_async_callback(tasks.close)
        await stack.enter_async_context(Supervisor(tasks, {"coder": CrewSettings(agent="echo", count=4)}))
        events = await stack.enter_async_context(manager.observe())
        for number in range(count + 3):
            began = time.perf_counter()
            key = (await tasks.submit("echo", agent="echo")).key
            at = {_T.QUEUED: time.perf_counter()}
            async for event in events:
                if isinstance(event, ostler.TaskStateChangedEvent) and event.key == key:
                    at.setdefault(event.new_state, time.perf_counter())
                    if event.new_state is _T.COMPLETED:
                        break
            if number >= 3:  # the first ones load what they need
                for took, state in zip(found.values(), (_T.QUEUED, _T.RUNNING, _T.COMPLETED), strict=True):
                    took.append((at[state] - began) * 1000)
    return found


def _idle(seconds: float) -> Table:
    table = Table(f"{_MEMBERS} idle members for {seconds:.0f} s", "what", "CPU seconds", "share of one core")
    with tempfile.TemporaryDirectory() as home:
        for what, used in asyncio.run(_idle_times(home, seconds)).items():
            table.add(what, f"{used:.3f}", f"{used / seconds:.3%}")
    return table


async def _idle_times(home: str, seconds: float) -> dict[str, float]:
    found = {}
    async with ostler.open(home) as manager:
        manager.registry.register(Echo, name="echo")
        found["a manager alone (floor)"] = await _cpu(seconds)
        tasks = TaskOrchestrator(manager)
        async with Supervisor(tasks, {"coder": CrewSettings(agent="echo", count=_MEMBERS)}) as supervisor:
            await asyncio.sleep(0.5)
            assert len(supervisor.agent_contexts) == _MEMBERS
            found[f"with {_MEMBERS} members"] = await _cpu(seconds)
        await tasks.close()
    return found


async def _cpu(seconds: float) -> float:
    before = time.process_time()
    await asyncio.sleep(seconds)
    return time.process_time() - before
