"""A daemon in this program, with a TCP listener and tokens, and the answers that it gives."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2

from ostler.api.table import Route
from ostler.client.blocking import BlockingClient
from ostler.daemon.run import serve
from ostler.home import SOCKET_FILE

#: For an answer, also on a busy machine.
_SECONDS = 60.0


class Served:
    """A daemon in this program, with a TCP listener and one token of each kind."""

    def __init__(self, home: Path, address: str, tokens: dict[str, str]) -> None:
        self.home = home
        self.address = address
        self.tokens = tokens

    async def ask(
        self, route: Route, *, token: str | None = None, content: bytes | None = None, **headers: str
    ) -> httpx2.Response:
        path = re.sub(r"\{\w+\}", "nobody", route.path)
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        async with httpx2.AsyncClient(base_url=self.address, timeout=_SECONDS) as client:
            return await client.request(route.method, path, headers=headers, content=content)


@contextlib.asynccontextmanager
async def serving(home: Path) -> AsyncIterator[Served]:
    daemon = asyncio.create_task(serve(home, listen="127.0.0.1:0"))
    client = BlockingClient(home)
    while not (home / SOCKET_FILE).exists():
        assert not daemon.done(), daemon.result()
        await asyncio.sleep(0.01)
    call = asyncio.to_thread
    status = await call(client.call, "status")
    tokens = {
        role: (await call(client.call, "create_token", name=role, role=role))["token"] for role in ("viewer", "admin")
    }
    yield Served(home, status["listens"][1], tokens)
    await call(client.call, "stop_daemon")
    await daemon


def problem(response: httpx2.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = response.json()
    assert found["status"] == response.status_code
    assert found["code"]
    assert found["detail"]
    return found
