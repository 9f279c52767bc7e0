"""The first steps of an agent, taken in the template before there is one.

Python prepares code while it runs it for the first few times. Done here it is done once; in each agent it would cost
time, and a copy of every page of memory on which it is noted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from ostler.agents import Agent, AgentContext
from ostler.isolation import wire
from ostler.isolation.inside.host import Host

#: Until the interpreter has made up its mind about every line.
ROUNDS = 12
_VERBS = ("initialize", "process", "health", "process")
_ID = "00000000-0000-7000-8000-000000000000"


class Understudy(Agent):
    """Does a little of what agents do; the last call of all has it stopped."""

    def __init__(self, manager: wire.Sender, calls: int) -> None:
        self._manager = manager
        self._calls = calls

    async def initialize(self, context: AgentContext) -> None:
        self._context = context
        self._count()

    async def process(self, request: Any) -> Any:
        self._context.report(0.5, "half way")
        await asyncio.sleep(0)
        self._count()
        return request

    async def health(self) -> None:
        self._count()

    def _count(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._manager.put(wire.encode({"t": "stop"}))


def rehearse() -> None:
    """All of it. Leaves nothing behind: no loop, no descriptor, no thread."""
    for _ in range(ROUNDS):
        _live_once(_VERBS)


def rehearse_start() -> None:
    """Only what every agent does: each page that a spare writes is its own from then on."""
    _live_once(_VERBS[:1])


def _live_once(verbs: Sequence[str]) -> None:
    ours, its = wire.channel()
    plan = {
        "instance_id": _ID,
        "attempt": 1,
        "name": "understudy",
        "definition_id": _ID,
        "context": {"key": "value"},
        "limits": {"max_worker_threads": 4, "execution_timeout": "PT5M"},
        "workspace": "/",
        "source": {"qualname": Understudy.__qualname__},
    }
    manager = wire.Sender(ours, 1, 1)
    module = ModuleType("rehearsal")
    setattr(module, Understudy.__qualname__, partial(Understudy, manager, len(verbs)))
    with ours, its:
        manager.put(wire.encode({"t": "begin", "plan": plan}))
        for number, verb in enumerate(verbs):
            manager.put(wire.encode({"t": "call", "id": number, "verb": verb, "payload": {"key": [number]}}))
            manager.put(wire.encode({"t": "ack", "ids": [number]}))
            manager.put(wire.encode({"t": "ping", "n": number}))
        host = Host(its, module)
        host.run()
        host.close()
