"""The questions of one agent that wait for the manager's answer. The agent numbers them as it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from ostler.agents import WaitAsked
from ostler.agents.failures import error_text
from ostler.isolation.base import Listener

#: An agent with more open questions than that does not mean them.
MAX_OPEN = 1000


class Asks:
    def __init__(self, listener: Listener, attempt: int, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._listener = listener
        self._attempt = attempt
        self._tell = tell
        self._open: dict[str | int, asyncio.Task[None]] = {}
        self._ids: dict[str | int, UUID] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def ids(self) -> frozenset[UUID]:
        return frozenset(self._ids.values())

    def open(self, key: str | int, wait: WaitAsked, ask_id: UUID) -> None:
        if key not in self._open:  # an agent that is adopted asks again
            self._ids[key] = ask_id
            self._open[key] = asyncio.get_running_loop().create_task(self._ask(key, wait), name="ostler-ask")

    def call_off(self, key: str | int) -> None:
        task = self._open.get(key)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for task in tuple(self._open.values()):
            task.cancel()

    async def _ask(self, key: str | int, wait: WaitAsked) -> None:
        try:
            answer = await self._listener.asked(self._attempt, wait)
            said = {"outcome": answer.outcome, "answer": None if answer.answer is None else dict(answer.answer)}
        except Exception as error:  # noqa: BLE001 - the agent asked, so the agent is told
            said = {"error": error_text(error)}
        finally:
            del self._open[key], self._ids[key]
        self._tell({"t": "told", "id": key, **said})
