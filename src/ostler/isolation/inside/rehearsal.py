"""The first steps of an agent, taken in the template before there is one.

Python prepares code while it runs it for the first few times. Done here it is done once; in each agent it would cost
time, and a copy of every page of memory on which it is noted.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import ModuleType
from typing import Any

from ostler.agents import Agent, AgentContext, AgentMaker
from ostler.isolation import wire
from ostler.isolation.inside.host import Host, HostLoop

#: Until the interpreter has made up its mind about every line.
ROUNDS = 12
_VERBS = ("initialize", "process", "health", "process")
_ROLE = "Understudy"
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


def rehearse(rounds: int = ROUNDS) -> None:
    """All of it. Leaves nothing behind: no loop, no descriptor, no thread."""
    for _ in range(rounds):
        _live_once()


class FirstSteps:
    """Only what every agent does, word for word: each page that a spare writes is its own from then on."""

    def __init__(self) -> None:
        begin = {"t": "begin", "plan": _plan()}
        call = {"t": "call", "id": 0, "verb": _VERBS[0], "payload": None}
        self._packets = [packet for one in (begin, call) for packet in wire.packets(wire.encode(one), 1, 1)]
        self._module = _stage(Pausing)

    def take(self, loop: HostLoop) -> None:
        """On the loop on which the agent will live; nothing of it stays there."""
        ours, its = wire.channel()
        with ours, its:
            for packet in self._packets:
                ours.send(packet)
            Host(its, self._module, loop).listen()
            loop.run_forever()
            loop.remove_reader(its.fileno())


class Pausing(Agent):
    async def initialize(self, _context: AgentContext) -> None:
        # Once it is answered: that is the last thing the loop does in this turn.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.stop)


def _live_once() -> None:
    ours, its = wire.channel()
    manager = wire.Sender(ours, 1, 1)
    module = _stage(partial(Understudy, manager, len(_VERBS)))
    with ours, its:
        manager.put(wire.encode({"t": "begin", "plan": _plan()}))
        for number, verb in enumerate(_VERBS):
            manager.put(wire.encode({"t": "call", "id": number, "verb": verb, "payload": {"key": [number]}}))
            manager.put(wire.encode({"t": "acks", "ack": [number], "heard": 0}))
            manager.put(wire.encode({"t": "ping", "n": number}))
        host = Host(its, module)
        host.run()
        host.close()


def _plan() -> dict[str, Any]:
    return {
        "instance_id": _ID,
        "attempt": 1,
        "name": "understudy",
        "definition_id": _ID,
        "context": {"key": "value"},
        "limits": {"max_worker_threads": 4, "execution_timeout": "PT5M"},
        "workdir": "/",
        "source": {"qualname": _ROLE},
    }


def _stage(maker: AgentMaker) -> ModuleType:
    module = ModuleType("rehearsal")
    setattr(module, _ROLE, maker)
    return module
