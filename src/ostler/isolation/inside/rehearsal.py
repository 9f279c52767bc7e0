"""The first steps of an agent, taken in the template before there is one.

Python prepares code while it runs it for the first few times. Done here it is done once; in each agent it would cost
time, and a copy of every page of memory on which it is noted.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import ModuleType
from typing import Any

from ostler.agents import Agent, AgentContext
from ostler.isolation import wire
from ostler.isolation.inside.host import Host

#: Until the interpreter has made up its mind about every line.
ROUNDS = 12
_VERBS = ("initialize", "process", "health", "process")
_LAST = "last"
_ID = "00000000-0000-7000-8000-000000000000"


class Understudy(Agent):
    """Does a little of what agents do, and then has itself stopped."""

    def __init__(self, manager: wire.Sender) -> None:
        self._manager = manager

    async def initialize(self, context: AgentContext) -> None:
        self._context = context

    async def process(self, request: Any) -> Any:
        self._context.report(0.5, "half way")
        await asyncio.sleep(0)
        if request == _LAST:
            self._manager.put(wire.encode({"t": "stop"}))
        return request


def rehearse(rounds: int = ROUNDS) -> None:
    """Leaves nothing behind: no loop, no descriptor, no thread."""
    for _ in range(rounds):
        _live_once()


def _live_once() -> None:
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
    setattr(module, Understudy.__qualname__, partial(Understudy, manager))
    with ours, its:
        manager.put(wire.encode({"t": "begin", "plan": plan}))
        for number, verb in enumerate(_VERBS):
            payload = _LAST if number == len(_VERBS) - 1 else {"key": [number]}
            manager.put(wire.encode({"t": "call", "id": number, "verb": verb, "payload": payload}))
            manager.put(wire.encode({"t": "ack", "ids": [number]}))
            manager.put(wire.encode({"t": "ping", "n": number}))
        host = Host(its, module)
        host.run()
        host.close()
