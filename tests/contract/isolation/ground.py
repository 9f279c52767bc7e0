"""What all parts of the suite stand on: the fixtures, a listener that remembers, and ways to let time pass."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pytest

from isolation.agents import RELEASE, ScriptedAgent
from ostler.agents import Agent, AgentKind, AgentManifest, Message, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.isolation import Cell, Exit, Isolation, StartPlan, Verb
from ostler.model.spawn import ResourceLimits
from ostler.model.states import IsolationLevel
from ostler.testing.clock import ManualClock

T = TypeVar("T")

INSTANCE = UUID("01890000-0000-7000-8000-00000000a9e7")
DEFINITION = UUID(int=0xDEF)
ATTEMPT = 3
#: Real seconds in which a machine under load gets anything done that these tests wait for.
_PATIENCE_SECONDS = 60.0


class RecordingListener:
    """A listener that remembers, and answers questions when told to."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.exits: list[Exit] = []
        self.attempts: set[int] = set()
        self.threads: set[int] = set()
        self.questions: list[WaitAsked] = []
        self.answer: asyncio.Future[WaitAnswer] = asyncio.get_running_loop().create_future()
        #: What adopted agents reported: calls of an earlier manager, open questions.
        self.reports: list[tuple[dict[UUID, Verb], frozenset[UUID]]] = []
        #: How many questions were called off.
        self.called_off = 0
        self.fails = False

    def on_message(self, attempt: int, message: Message) -> None:
        self._note(attempt)
        self.messages.append(message)
        if self.fails:
            raise RuntimeError("the listener is broken")

    async def on_question(self, attempt: int, wait: WaitAsked) -> WaitAnswer:
        self._note(attempt)
        self.questions.append(wait)
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.called_off += 1
            raise

    def on_exit(self, attempt: int, how: Exit) -> None:
        self._note(attempt)
        self.exits.append(how)
        if self.fails:
            raise RuntimeError("the listener is broken")

    def on_report(self, attempt: int, calls: Mapping[UUID, Verb], questions: Collection[UUID]) -> None:
        self._note(attempt)
        self.reports.append((dict(calls), frozenset(questions)))

    async def report(self, number: int = 1) -> tuple[dict[UUID, Verb], frozenset[UUID]]:
        await until(lambda: len(self.reports) >= number)
        return self.reports[number - 1]

    @property
    def signals(self) -> list[str]:
        return [one.name for one in self.messages if isinstance(one, Signal)]

    @property
    def numbers(self) -> list[int]:
        return [one.number for one in self.messages if isinstance(one, Signal | TokensUsed)]

    async def signal(self, name: str) -> None:
        await until(lambda: name in self.signals)

    def _note(self, attempt: int) -> None:
        self.attempts.add(attempt)
        self.threads.add(threading.get_ident())


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that happens elsewhere, and by itself."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _PATIENCE_SECONDS
    while not holds():
        assert loop.time() < end, "it never came"
        await asyncio.sleep(0.002)


async def passing(clock: ManualClock, work: Awaitable[T], seconds: float) -> T:
    """Let so much time pass, in small steps, until the work is done; it must be by then."""
    task = asyncio.ensure_future(work)
    for _ in range(round(seconds / 0.05) + 1):
        # Real time too, for what has to end by itself; with the work done it costs nothing.
        await asyncio.wait((task,), timeout=0.01)
        if task.done():
            break
        clock.advance(0.05)
    await asyncio.wait((task,), timeout=_PATIENCE_SECONDS / 10)
    assert task.done(), f"not done within {seconds} s"
    return task.result()


def inventory() -> tuple[int, int, int]:
    """What could leak: threads, descriptors, tasks."""
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())  # noqa: PTH208 - only their number is wanted


Start = Callable[..., Awaitable[Cell]]


class IsolationGround:
    """The fixtures. A subclass gives `isolation`; the rest follows from it."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def isolation(self, clock: ManualClock) -> Isolation:
        raise NotImplementedError("a subclass says which level it is about")

    @pytest.fixture
    def has_own_place(self, isolation: Isolation) -> bool:
        """Whether an agent that blocks blocks only itself; where not, nothing that blocks is tried."""
        return isolation.level is not IsolationLevel.NONE

    @pytest.fixture
    async def listener(self) -> RecordingListener:
        return RecordingListener()

    @pytest.fixture
    def plan_of(self, tmp_path: Path) -> Callable[..., StartPlan]:
        """The first is `INSTANCE`, each further one another instance: no two starts are the same attempt of one."""
        numbers = count(INSTANCE.int)

        def plan(agent: type[Agent] = ScriptedAgent, context: Mapping[str, Any] | None = None) -> StartPlan:
            source = f"{agent.__module__}:{agent.__qualname__}"
            return StartPlan(
                instance_id=UUID(int=next(numbers)),
                attempt=ATTEMPT,
                name="somebody",
                manifest=AgentManifest(id=DEFINITION, name=agent.__name__, kind=AgentKind.PYTHON, source=source),
                maker=agent,
                limits=ResourceLimits(),
                context=context or {},
                workdir=tmp_path / "workdir",
                log=tmp_path / "inside.log",
            )

        return plan

    @pytest.fixture
    def release(self, tmp_path: Path) -> Callable[[], None]:
        """Lets go of every agent that refuses to end."""

        def let_go() -> None:
            (tmp_path / "workdir").mkdir(exist_ok=True)
            (tmp_path / "workdir" / RELEASE).touch()

        return let_go

    @pytest.fixture
    async def start(
        self,
        isolation: Isolation,
        listener: RecordingListener,
        plan_of: Callable[..., StartPlan],
        release: Callable[[], None],
    ) -> AsyncIterator[Start]:
        """Starts and initialises an agent; whatever was started is destroyed when the test is done."""
        cells: list[Cell] = []

        async def start(agent: type[Agent] = ScriptedAgent, context: Mapping[str, Any] | None = None) -> Cell:
            plan = plan_of(agent, context)
            await isolation.prepare(plan)
            cell = await isolation.start(plan, listener)
            cells.append(cell)
            await cell.call(Verb.INITIALIZE)
            return cell

        before = inventory()[0]
        yield start
        release()
        for cell in cells:
            await cell.destroy()
        await isolation.close()
        await until(lambda: inventory()[0] <= before)


def do(what: str, **more: Any) -> dict[str, Any]:
    """A request to a scripted agent."""
    return {"do": what, **more}
