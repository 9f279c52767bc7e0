"""A daemon that emits a burst of signals whenever a line comes on its standard input: `burst_daemon.py HOME`.

Signals come from inside agents; here they are committed beside one, so that the figures are those of the observers.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from lifecycle_tables import Echo
from ostler.api import app
from ostler.api.context import Context
from ostler.daemon import run
from ostler.store.reports import add_signal


async def main(home: Path) -> None:
    contexts: list[Context] = []

    def create_app(context: Context) -> Any:
        contexts.append(context)
        return app.create_app(context)

    run.create_app = create_app  # type: ignore[attr-defined]  # the one way to the manager of a daemon
    serving = asyncio.create_task(run.serve(home))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        manager = contexts[0].manager
        agent = await manager.start(Echo, isolation="none")
        record = await agent.record()
        await asyncio.gather(
            *(
                manager.store.submit(add_signal, record, "burst", {"at": time.monotonic(), "text": "x" * 60})
                for _ in range(int(line))
            )
        )
        await agent.stop()
    contexts[0].stop(False)
    await serving


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
