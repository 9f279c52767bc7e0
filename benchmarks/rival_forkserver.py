"""multiprocessing's forkserver, preloaded with asyncio and json: a child with its own loop that answers by pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from functools import partial
from typing import Any

from measured import pss_kb, tell, timed


def live(pipe: Any) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        asked: asyncio.Queue[Any] = asyncio.Queue()
        loop.add_reader(pipe.fileno(), lambda: asked.put_nowait(pipe.recv()))
        pipe.send("ready")
        while (request := await asked.get()) is not None:
            pipe.send(request)

    asyncio.run(serve())


def spawn(context: Any) -> tuple[Any, Any]:
    ours, theirs = context.Pipe()
    process = context.Process(target=live, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    return process, ours


def end(process: Any, pipe: Any) -> None:
    pipe.send(None)
    process.join()


def call(pipe: Any) -> None:
    pipe.send({"name": "Ada"})
    pipe.recv()


def main(count: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["asyncio", "json", "__main__"])
    end(*spawn(context))
    spawns: list[float] = []
    calls: list[float] = []
    ends: list[float] = []
    lives = [timed(spawns, lambda: spawn(context)) for _ in range(count)]
    for _ in range(count * 5):
        timed(calls, lambda: call(lives[0][1]))
    memory = pss_kb([process.pid for process, _ in lives])
    for process, pipe in lives:
        timed(ends, partial(end, process, pipe))
    begin = time.perf_counter()
    for _ in range(count):
        end(*spawn(context))
    tell(spawn=spawns, call=calls, terminate=ends, memory=memory, rate=count / (time.perf_counter() - begin))


if __name__ == "__main__":
    main(int(sys.argv[1]))
