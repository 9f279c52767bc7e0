"""One small agent life inside the template, before anything is forked, and the first steps of one in each spare.

Python writes into its code on first use (inline caches, type caches, lazily made objects). What is written in the
template is shared by all agents; what is written in an agent is a page of its own. A spare has time to write before
its agent is started.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ostler.agent_process.framing import encode
from ostler.agent_process.host import Host, HostLoop
from ostler.agents import Agent, AgentContext

_CALLS = 12  #: an inline cache settles after about eight uses
_PLAN = {
    "instance_id": "00000000-0000-7000-8000-000000000001",
    "attempt": 1,
    "name": "rehearsal",
    "definition_id": "00000000-0000-7000-8000-000000000002",
    "context": {"a": 1},
    "limits": {"max_memory_mb": 512, "execution_timeout": "PT5M", "max_concurrent_tasks": 10},
    "workdir": "/",
    "owns_workdir": True,
    "env": {},
    "source": {"qualname": "Rehearsed"},
}
_HELLO = {"t": "hello", "key": "k", "epoch": 1}
_BEGIN = {"t": "begin", "plan": _PLAN}
_INITIALIZE = {"t": "call", "id": "initialize:00000000-0000-7000-8000-00000000000a", "verb": "initialize"}


class _Rehearsed(Agent):
    async def initialize(self, context: AgentContext) -> None:
        context.signal("ready")

    async def process(self, request: Any) -> Any:
        return request


class _Beginner(Agent):
    async def initialize(self, _context: AgentContext) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.stop)  # after the answer


def rehearse() -> None:
    ids = [f"process:00000000-0000-7000-8000-{number:012d}" for number in range(_CALLS)]
    script: list[Mapping[str, Any]] = [_HELLO, _BEGIN, _INITIALIZE]
    for call_id in ids:
        script += [{"t": "call", "id": call_id, "verb": "process", "payload": [1]}, {"t": "ping", "n": 1}]
    script += [{"t": "ack", "ack": ids, "seen": 1}]
    host, manager = _with_manager(_Rehearsed, HostLoop(), script)
    host._loop.call_later(0.01, manager.send, encode({"t": "stop"}))  # noqa: SLF001 - a part of the host
    try:
        host.run()
    finally:
        host.close()
        manager.close()


def take_first_steps(loop: HostLoop) -> None:
    """From the first connection to the answer of `initialize`, on the loop on which the agent will live."""
    host, manager = _with_manager(_Beginner, loop, [_HELLO, _BEGIN, _INITIALIZE])
    host.open()
    loop.run_forever()
    host.leave_loop()
    manager.close()


def _with_manager(
    agent: type[Agent], loop: HostLoop, script: Sequence[Mapping[str, Any]]
) -> tuple[Host, socket.socket]:
    module = ModuleType("ostler_rehearsal")
    module.__dict__["Rehearsed"] = agent
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind("")  # an abstract address that the kernel chooses
    listener.listen(1)
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    manager.connect(listener.getsockname())
    manager.send(b"".join(map(encode, script)))
    return Host(listener, module, "k", "/dev/null", loop), manager
