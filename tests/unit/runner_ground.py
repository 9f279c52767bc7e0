"""An agent's runner for tests, and one plain agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest

from ostler.agents import Agent, AgentContext, AgentRunner, Message, WaitAnswer, WaitAsked
from ostler.model import ResourceLimits
from ostler.testing.clock import ManualClock


class Deaf:
    def say(self, message: Message) -> None: ...

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        return WaitAnswer(outcome=wait.kind)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2, thread_name_prefix="worker") as made:
        yield made


@pytest.fixture(params=["here", "workers"])
def workers(request: pytest.FixtureRequest) -> Executor | None:
    """Most things must be the same whether plain methods run on the loop or in a thread."""
    if request.param == "here":
        return None
    made: Executor = request.getfixturevalue("pool")
    return made


def runner(agent: Agent | Callable[[], Any], clock: ManualClock, workers: Executor | None = None) -> AgentRunner:
    context = AgentContext(
        instance_id=UUID(int=1), attempt=1, definition_id=UUID(int=2), name="fixer", limits=ResourceLimits(),
        clock=clock, voice=Deaf(),
    )  # fmt: skip
    return AgentRunner((lambda: agent) if isinstance(agent, Agent) else agent, context, workers=workers)


def doing(process: Callable[..., Any], name: str = "process") -> Agent:
    """An agent with one method of ours."""
    made: Agent = type("Doing", (Agent,), {name: lambda _self, *request: process(*request)})()
    return made


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def raising(error: BaseException) -> Any:
    raise error


class Plain(Agent):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def initialize(self, context: AgentContext) -> None:
        self.seen.append(context.name)

    def process(self, request: Any) -> Any:
        self.seen.append(request)
        return {"double": request * 2}

    def final_state(self) -> Any:
        return {"seen": tuple(self.seen)}

    def shutdown(self) -> None:
        self.seen.append("shut")
