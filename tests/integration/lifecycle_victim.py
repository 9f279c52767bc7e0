"""A program that manages a home until it is killed. It says on one line what it has made, and then waits."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from lifecycle_aids import Scene, until

from ostler.model import (
    AgentInstance,
    AgentState,
    IsolationLevel,
    RestartPolicy,
    SuspendDepth,
    TerminationOptions,
)
from ostler.testing.clock import ManualClock

S = AgentState
SLOW = RestartPolicy(initial_delay=timedelta(seconds=30), use_jitter=False)
Made = dict[str, AgentInstance]


async def every_state(scene: Scene) -> Made:
    manager, made = scene.manager, {}
    made["ready"] = await scene.spawn()
    made["thread"] = await scene.spawn(IsolationLevel.THREAD)
    made["returns"] = await scene.spawn(restart_policy=RestartPolicy.immediate())
    made["returns_later"] = await scene.spawn(restart_policy=SLOW)
    made["terminated"] = await scene.spawn()
    await manager.terminate(made["terminated"].instance_id)
    made["failed"] = await scene.spawn()
    await scene.crash(made["failed"])
    await scene.reaches(made["failed"], S.FAILED)
    made["failed_returns"] = await scene.spawn(restart_policy=SLOW)
    await scene.crash(made["failed_returns"])
    await scene.reaches(made["failed_returns"], S.FAILED)
    made["held"] = await scene.spawn(restart_policy=RestartPolicy.immediate())
    await manager.suspend(made["held"].instance_id, resume_after=timedelta(hours=1))
    made["parked"] = await scene.spawn()
    await manager.suspend(made["parked"].instance_id, SuspendDepth.PARK)
    made["idle"] = await scene.spawn()
    await manager.process(made["idle"].instance_id, "hello")
    made["waiting"] = await scene.spawn()
    scene.begin(manager.process(made["waiting"].instance_id, "wait"))
    await scene.reaches(made["waiting"], S.WAITING)
    made["processing"] = await scene.spawn()
    await scene.busy(made["processing"])
    made["terminating"] = await scene.spawn()
    scene.stage.ending.shut()
    options = TerminationOptions(reason="it is time")
    scene.begin(manager.terminate(made["terminating"].instance_id, options))
    await scene.reaches(made["terminating"], S.TERMINATING)
    await _unborn(scene, made)
    return made


async def _unborn(scene: Scene, made: Made) -> None:
    before = len(scene.stage.starts)
    scene.stage.starting.shut()
    scene.begin(scene.spawn(restart_policy=RestartPolicy.immediate()))
    await until(lambda: len(scene.stage.starts) > before)
    known = {one.instance_id for one in made.values()}
    (made["initializing"],) = [
        one for one in await scene.manager.get_active_instances() if one.instance_id not in known
    ]


async def one_ready(scene: Scene) -> Made:
    return {"ready": await scene.spawn()}


WHAT: dict[str, Callable[[Scene], Awaitable[Made]]] = {"every_state": every_state, "one_ready": one_ready}


async def main(home: str, what: str) -> None:
    scene = Scene(home=Path(home), clock=ManualClock(datetime.now(UTC)))
    async with scene.open():
        made = await WHAT[what](scene)
        sys.stdout.write(json.dumps({name: str(one.instance_id) for name, one in made.items()}) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
