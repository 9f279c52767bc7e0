"""The part of the demo in which agents have processes of their own: limits that hold, a freeze, a killed manager.

Run as a program, `fleet.py HOME`, it is the manager that is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import ostler
from crew import Counter, Glutton
from lives import becomes, settled, show, spawn
from ostler import (
    AgentInstance,
    AgentLifecycleManager,
    AgentState,
    IsolationLevel,
    LifecycleSettings,
    OstlerError,
    ResourceLimits,
    RestartPolicy,
    SuspendDepth,
)
from telling import say, title

SIZE = 8
PROCESS = IsolationLevel.PROCESS
#: Agents go on without a manager for so long.
SETTINGS = LifecycleSettings(outlive=timedelta(minutes=1), close_grace=timedelta(seconds=1))
Manager = AgentLifecycleManager


async def fleet(home: Path) -> None:
    async with ostler.open(home / "fleet") as manager:
        await limits(manager)
        await frozen(manager, home / "fleet")
    victim = asyncio.create_task(asyncio.to_thread(_kill_manager, home / "fleet"))
    try:
        await killed(home / "fleet", victim)
    finally:  # also when it is interrupted: who opens it without `outlive` ends what is left in it
        await asyncio.wait([victim])
        async with ostler.open(home / "fleet"):
            pass


async def limits(manager: Manager) -> None:
    title("9. A fleet at level process; one of them eats more memory than it may")
    counter = manager.registry.register(Counter, name="counter")
    glutton = manager.registry.register(Glutton, name="glutton")
    await manager.terminate((await spawn(manager, counter, "first", isolation_level=PROCESS)).instance_id)
    began = time.perf_counter()
    crew = await asyncio.gather(
        *(spawn(manager, counter, f"eve-{number}", isolation_level=PROCESS) for number in range(SIZE))
    )
    took = (time.perf_counter() - began) * 1000
    pids = [(await manager.process(one.instance_id, "who"))["pid"] for one in crew]
    say(f"{len(set(pids))} agents in {len(set(pids))} processes, ready after {took:.0f} ms together")
    small = ResourceLimits(max_memory_mb=64)
    gus = await spawn(manager, glutton, "gus", isolation_level=PROCESS, resource_limits=small)
    held = (gus.enforcement or {}).get("max_memory_mb")
    say(f"gus may use 64 MB ({held}) and asks for 200")
    stream = manager.observe(gus.instance_id)
    try:
        await manager.process(gus.instance_id, 200)
    except OstlerError as error:
        say(f"who asked is told: {error}")
    await show(stream, becomes(AgentState.FAILED))
    after = [(await manager.process(one.instance_id, "who"))["pid"] for one in crew]
    say(f"its neighbours: {'all the same processes' if after == pids else 'CHANGED'}")
    await asyncio.gather(*(manager.terminate(one.instance_id) for one in (gus, *crew)))


async def frozen(manager: Manager, home: Path) -> None:
    title("10. One is frozen in mid-work, whatever it does, and thawed")
    counter = manager.registry.find("counter")
    fay = await spawn(manager, counter, "fay", isolation_level=PROCESS)
    work = asyncio.create_task(manager.process(fay.instance_id, "count"))
    await settled(manager, fay, AgentState.PROCESSING)
    await asyncio.sleep(0.3)
    await manager.suspend(fay.instance_id, SuspendDepth.FREEZE)
    first = _counted(home, fay)
    await asyncio.sleep(0.5)
    second = _counted(home, fay)
    say(f"frozen: it had counted to {first:,}, and half a second later to {second:,}")
    await manager.resume(fay.instance_id)
    say(f"thawed: it goes on where it was, and ends at {await work:,}")
    await manager.terminate(fay.instance_id)
    if first != second:
        raise SystemExit("the promise of this act does not hold; please report it")


def _counted(home: Path, one: AgentInstance) -> int:
    return int((home / "work" / str(one.instance_id) / "count").read_text())


async def killed(home: Path, victim: asyncio.Task[dict[str, Any]]) -> None:
    title(f"11. kill -9 of a manager with {SIZE} agents at work; the next one finds them all")
    told = await asyncio.shield(victim)
    living = sum(_alive(pid) for pid in told["pids"].values())
    say(f"the manager is dead; of its {SIZE} agents {living} go on")
    began = time.perf_counter()
    async with ostler.open(home, settings=SETTINGS) as manager:
        took = (time.perf_counter() - began) * 1000
        manager.registry.register(Counter, name="counter")
        found = await manager.get_active_instances()
        answers = {}
        for one in found:
            answers[str(one.instance_id)] = (await manager.process(one.instance_id, "who"))["pid"]
        same = sum(answers.get(name) == pid for name, pid in told["pids"].items())
        say(f"the next manager is up in {took:.0f} ms and finds {len(found)}; {same} are the same processes")
        asked = UUID(told["asked"])
        answer = await manager.process(UUID(told["of"]), "count", request_id=asked)
        say(f"and what the dead manager had asked is answered to the next: {answer:,}; it was not done twice")
        await asyncio.gather(*(manager.terminate(one.instance_id) for one in found))
        if same != SIZE:
            raise SystemExit("the promise of this act does not hold; please report it")


def _kill_manager(home: Path) -> dict[str, Any]:
    child = subprocess.Popen([sys.executable, __file__, str(home)], stdout=subprocess.PIPE, text=True)
    try:
        line = child.stdout.readline() if child.stdout else ""
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    told: dict[str, Any] = json.loads(line)
    return told


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def live_for_ever(home: str) -> None:
    """The manager that is killed: it tells who lives, has one of them at work, and waits."""
    async with ostler.open(home, settings=SETTINGS) as manager:
        counter = manager.registry.register(Counter, name="counter")
        policy = RestartPolicy.immediate()
        crew = await asyncio.gather(
            *(
                spawn(manager, counter, f"hal-{number}", isolation_level=PROCESS, restart_policy=policy)
                for number in range(SIZE)
            )
        )
        pids = {str(one.instance_id): (await manager.process(one.instance_id, "who"))["pid"] for one in crew}
        asked, busy = UUID(int=7), crew[0]
        work = asyncio.create_task(manager.process(busy.instance_id, "count", request_id=asked))
        await settled(manager, busy, AgentState.PROCESSING)
        print(json.dumps({"pids": pids, "asked": str(asked), "of": str(busy.instance_id)}), flush=True)
        await work
        await asyncio.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(live_for_ever(sys.argv[1]))
