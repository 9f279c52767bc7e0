"""A manager's program that forks, as `multiprocessing` does: the child lives on when the program is killed.

    python forking_manager.py HOME

One line of JSON: the pids of the agent and of the child, and how many sockets the level opened and the child has.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from defect_ground import plan_for

from ostler.clock import SystemClock
from ostler.isolation import Site, Verb
from ostler.isolation.process.level import ProcessIsolation


def sockets() -> set[str]:
    names: set[str] = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            names.add(str(descriptor.readlink()))
        except OSError:
            continue  # the one of this very listing
    return {name for name in names if name.startswith("socket:")}


def live_as_child(ready: int, opened: set[str]) -> NoReturn:
    """Until the test, which holds standard input, has ended."""
    os.write(ready, json.dumps(len(opened & sockets())).encode())
    os.read(0, 1)
    os._exit(0)


async def main() -> None:
    site = Site(directory=Path(sys.argv[1]), epoch=1)
    level, before = ProcessIsolation(SystemClock(), site), sockets()
    cell = await level.start(plan_for(), Silent())
    await cell.call(Verb.INITIALIZE)
    opened = sockets() - before
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        live_as_child(writing, opened)
    report = {"agent": cell.handle["pid"], "child": child, "opened": len(opened), "copied": int(os.read(reading, 100))}
    sys.stdout.write(f"{json.dumps(report)}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


class Silent:
    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


if __name__ == "__main__":
    asyncio.run(main())
