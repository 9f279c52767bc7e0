"""The floor of an answer over HTTP: FastAPI and uvicorn on a Unix socket, and nothing else.

    bareapi.py SOCKET [FILE]

`/list` is the JSON of the file, made anew for each answer; `/events` is a stream of as many events as a POST to
`/publish/N` brings.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

app = FastAPI()
CONTENT: Any = json.loads(Path(sys.argv[2]).read_text()) if len(sys.argv) > 2 else None
QUEUES: list[asyncio.Queue[int]] = []
_EVENT = {"event_type": "agent_signal", "instance_id": "0" * 36, "name": "burst", "detail": {"text": "x" * 60}}


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@app.get("/list")
async def list_all() -> JSONResponse:
    return JSONResponse(CONTENT)


@app.get("/events")
async def events() -> StreamingResponse:
    queue: asyncio.Queue[int] = asyncio.Queue()
    QUEUES.append(queue)

    async def stream() -> AsyncIterator[str]:
        yield ": open\n\n"
        while True:
            number = await queue.get()
            yield f"id: {number}\nevent: agent_signal\ndata: {json.dumps({**_EVENT, 'sequence': number})}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


@app.post("/publish/{number}")
async def publish(number: int) -> dict[str, int]:
    for queue in QUEUES:
        queue.put_nowait(number)
    return {"sequence": number}


if __name__ == "__main__":
    uvicorn.run(app, uds=sys.argv[1], http="h11", ws="none", lifespan="off", log_level="warning", access_log=False)
