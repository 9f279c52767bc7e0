"""Ten thousand live agents in one program, and what each of them takes while it has nothing to do.

Every crowd lives in a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import ostler
from floors import Asked
from living import Spawn, bare_task, bare_thread, spawning
from table import Table

GOAL_KB = 30
CROWD = 10_000
QUICK_CROWD = 1000
THREADS = 500
#: Tracing makes a program several times slower, and the mean of fewer is the same.
TRACED = 1500
QUICK_TRACED = 500
#: Everyone is looked at once in it.
IDLE_SECONDS = 5.0
_AT_ONCE = 64
_FIRST = 50
#: So long without an event, and everyone has been found healthy and measured.
_QUIET_SECONDS = 2.0
_MOST_SECONDS = 40.0
#: Where only memory is asked for, or little time is given, everyone is looked at more often than by default.
_SOON = timedelta(seconds=1)

Figures = dict[str, float]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def fill(spawn: Spawn, count: int) -> list[Asked]:
    left, lives = iter(range(count)), []

    async def one() -> None:
        lives.extend([await spawn() for _ in left])

    await asyncio.gather(*(one() for _ in range(_AT_ONCE)))
    return lives


async def quiet(store: ostler.Store) -> None:
    """Until nothing is written any more: a new agent is looked at a few times before it is idle."""
    end, last, since = time.monotonic() + _MOST_SECONDS, -1, time.monotonic()
    while time.monotonic() < end:
        newest = (await store.head()).sequence
        if newest != last:
            last, since = newest, time.monotonic()
        if time.monotonic() - since >= _QUIET_SECONDS:
            return
        await asyncio.sleep(0.25)


async def idle(seconds: float) -> float:
    """The share of one core that a house with nothing to do takes."""
    begin, spent = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - spent) / (time.perf_counter() - begin)


class Crowd:
    """One measured crowd; how it lives and who looks after it is left to `run`."""

    def __init__(self, count: int, *, traced: bool) -> None:
        self._count = count
        self._traced = traced
        self.figures: Figures = {}

    async def grow(self, spawn: Spawn) -> list[Asked]:
        first = await fill(spawn, _FIRST)  # what is made once for all is made by then
        gc.collect()
        if self._traced:
            tracemalloc.start()
        self._before = resident()
        begin = time.perf_counter()
        lives = await fill(spawn, self._count)
        self.figures["spawned"] = time.perf_counter() - begin
        return first + lives

    def weigh(self) -> None:
        gc.collect()
        self.figures["resident"] = (resident() - self._before) / self._count
        if self._traced:
            self.figures["traced"] = tracemalloc.get_traced_memory()[0] / self._count
            tracemalloc.stop()


async def managed(crowd: Crowd, level: ostler.IsolationLevel, *, rush: bool, idles: bool) -> None:
    settings = ostler.LifecycleSettings(metrics_interval=_SOON) if rush else ostler.LifecycleSettings()
    check = ostler.HealthCheckConfig(interval=_SOON, timeout=_SOON) if rush else None
    with tempfile.TemporaryDirectory(prefix="ostler-bench-") as name:
        async with ostler.open(name, settings=settings) as manager:
            await crowd.grow(spawning(manager, level, check))
            await quiet(manager.store)
            crowd.weigh()
            if idles:
                crowd.figures["idle"] = await idle(_SOON.total_seconds() if rush else IDLE_SECONDS)
            begin = time.perf_counter()
        crowd.figures["closed"] = time.perf_counter() - begin


async def unmanaged(crowd: Crowd, spawn: Spawn) -> None:
    lives = await crowd.grow(spawn)
    crowd.weigh()
    crowd.figures["idle"] = await idle(_SOON.total_seconds())
    begin = time.perf_counter()
    await asyncio.gather(*(one.terminate() for one in lives))
    crowd.figures["closed"] = time.perf_counter() - begin


async def run(subject: str, count: int, how: Iterable[str]) -> Figures:
    crowd = Crowd(count, traced="traced" in how)
    match subject:
        case "task":
            await unmanaged(crowd, bare_task)
        case "bare thread":
            await unmanaged(crowd, bare_thread)
        case _:
            await managed(crowd, ostler.IsolationLevel(subject), rush="rush" in how, idles="idle" in how)
    return crowd.figures


def _start(subject: str, count: int, *how: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, subject, str(count), *how], stdout=subprocess.PIPE, text=True)


def _wait(child: subprocess.Popen[str]) -> Figures:
    told, _ = child.communicate()
    assert child.returncode == 0, child.args
    figures: Figures = json.loads(told)
    return figures


def crowd_tables(*, quick: bool = False) -> tuple[Table, Table]:
    count = QUICK_CROWD if quick else CROWD
    task = _wait(_start("task", count))
    none = _wait(_start("none", count, "idle", *(("rush",) if quick else ())))
    often = _SOON if quick else ostler.HealthCheckConfig().interval
    return _crowd((task, none), count, often), _memory((task, none), count, quick=quick)


def _crowd(crowds: tuple[Figures, Figures], count: int, often: timedelta) -> Table:
    task, none = crowds
    table = Table(f"{count:,} live agents at level none", ("", "bare tasks", "none", "per agent"))
    for title, name in (("all are up, s", "spawned"), ("all are closed, s", "closed")):
        each = f"{none[name] / count * 1e6:,.0f} µs"
        table.add(title, f"{task[name]:.2f}", f"{none[name]:.2f}", each)
    shares = (f"{one['idle']:.1%}" for one in (task, none))
    title = f"share of one core when idle, each looked at every {often.total_seconds():g} s"
    table.add(title, *shares, f"{none['idle'] / count * 1e6:,.1f} µs/s")
    return table


def _memory(crowds: tuple[Figures, Figures], count: int, *, quick: bool) -> Table:
    """Threads are left out of a quick run."""
    # Memory does not mind who else is running, so these need not wait for each other.
    traced = QUICK_TRACED if quick else TRACED
    children = [_start("task", traced, "traced"), _start("none", traced, "rush", "traced")]
    if not quick:
        children += [_start("bare thread", THREADS), _start("thread", THREADS, "rush")]
        children += [_start("thread", THREADS, "rush", "traced")]
    task_traced, none_traced, *threads = [_wait(child) for child in children]
    task, none = crowds
    heads = ("", "agents", "resident", "traced by Python", "x bare, resident", "goal")
    table = Table("Memory of an idle agent, KB", heads)
    table.add("bare task", f"{count:,}", _kb(task["resident"]), _kb(task_traced["traced"]), "", "")
    times, goal = f"{none['resident'] / task['resident']:.1f}", f"below {GOAL_KB}"
    table.add("none", f"{count:,}", _kb(none["resident"]), _kb(none_traced["traced"]), times, goal)
    if threads:
        bare, thread, thread_traced = threads
        table.add("bare thread", f"{THREADS:,}", _kb(bare["resident"]), "", "", "")
        times = f"{thread['resident'] / bare['resident']:.1f}"
        table.add("thread", f"{THREADS:,}", _kb(thread["resident"]), _kb(thread_traced["traced"]), times, "")
    return table


def _kb(count: float) -> str:
    return f"{count / 1024:.1f}"


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))))
