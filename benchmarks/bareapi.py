"""The floor of an answer over HTTP: FastAPI and uvicorn on a Unix socket, and nothing else.

    bareapi.py SOCKET [FILE]

`/list` is the JSON of the file, made anew for each answer. `/events` is a stream; a line on the standard input is the
number of events to publish at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

app = FastAPI()
CONTENT: Any = json.loads(Path(sys.argv[2]).read_text()) if len(sys.argv) > 2 else None
QUEUES: list[asyncio.Queue[dict[str, Any]]] = []
_EVENT = {"event_type": "agent_signal", "workspace_id": "0" * 36, "instance_id": "0" * 36, "name": "burst"}


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@app.get("/list")
async def list_all() -> JSONResponse:
    return JSONResponse(CONTENT)


@app.get("/events")
async def events() -> StreamingResponse:
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    QUEUES.append(queue)

    async def stream() -> AsyncIterator[str]:
        while True:
            event = await queue.get()
            yield f"id: {event['sequence']}\nevent: agent_signal\ndata: {json.dumps(event)}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


def publish_on_request(loop: asyncio.AbstractEventLoop) -> None:
    """A line on the standard input is the number of events to publish at once; its end is the end."""
    line = sys.stdin.readline()
    if not line:
        loop.remove_reader(sys.stdin)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    for number in range(int(line)):
        for queue in QUEUES:
            queue.put_nowait({**_EVENT, "sequence": number, "payload": {"at": time.monotonic(), "text": "x" * 60}})


async def main() -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(PermissionError):  # of a file or the null device, which nothing comes from
        loop.add_reader(sys.stdin, publish_on_request, loop)
    options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_level": "warning", "access_log": False}
    await uvicorn.Server(uvicorn.Config(app, uds=sys.argv[1], http="h11", **options)).serve()


if __name__ == "__main__":
    asyncio.run(main())
