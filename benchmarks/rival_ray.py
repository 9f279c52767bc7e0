"""Ray on one machine: an actor that answers, restarted by max_restarts."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import Any

import ray

from measured import pss_kb, tell, timed


class Echo:
    def process(self, request: Any) -> Any:
        return request

    def pid(self) -> int:
        return os.getpid()


def main(count: int) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    actor_class: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Echo)

    def spawn() -> Any:
        actor = actor_class.remote()
        ray.get(actor.pid.remote())
        return actor

    spawn()
    spawns: list[float] = []
    calls: list[float] = []
    restarts: list[float] = []
    ends: list[float] = []
    begin = time.perf_counter()
    lives = [timed(spawns, spawn) for _ in range(count)]
    rate = count / (time.perf_counter() - begin)
    for _ in range(200):
        timed(calls, lambda: ray.get(lives[0].process.remote({"name": "Ada"})))
    pids = [ray.get(one.pid.remote()) for one in lives]
    memory = pss_kb(pids)

    def killed(actor: Any, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        while ray.get(actor.pid.remote()) == pid:
            pass

    for actor, pid in list(zip(lives, pids, strict=True))[:3]:
        timed(restarts, partial(killed, actor, pid))
    for actor in lives:
        timed(ends, partial(ray.kill, actor))
    tell(spawn=spawns, call=calls, restart=restarts, terminate=ends, memory=memory, rate=rate)
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
