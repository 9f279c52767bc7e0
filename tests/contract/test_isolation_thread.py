from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from isolation import IsolationContract, RecordingListener, Start
from isolation.agents import PlainAgent
from isolation.ground import do, inventory, passing, until

from ostler.agent_process.agent_loop import AgentLoop
from ostler.agents import Agent, AgentContext
from ostler.clock import SystemClock
from ostler.errors import AgentExecutionError, AgentGoneError, AgentInitializationError
from ostler.isolation import Isolation, StartPlan, Verb
from ostler.isolation.thread import ThreadIsolation
from ostler.model.spawn import ResourceLimits
from ostler.testing.clock import ManualClock

NAME = "ostler-agent-0000a9e7"


class Walled(Agent):
    """Stands before a lock, which nothing but its owner can open."""

    def __init__(self, gate: threading.Lock) -> None:
        self._gate = gate

    async def initialize(self, context: AgentContext) -> None:
        self._context = context

    async def process(self, request: str) -> Any:
        if request == "worker":
            await asyncio.to_thread(self._pass)
        elif request == "loop":
            self._pass()
        elif request == "stop":
            asyncio.get_running_loop().stop()
        elif request == "crowd":
            return await self._crowd()
        self._context.signal("passed")
        return None

    async def _crowd(self) -> int:
        """How many of many get to work at the same time."""
        barred = threading.Semaphore(0)
        inside: list[int] = []

        def enter() -> None:
            inside.append(1)
            barred.acquire()

        jobs = [asyncio.ensure_future(asyncio.to_thread(enter)) for _ in range(4)]
        await until(lambda: len(inside) >= 2)
        most = len(inside)
        for _ in jobs:
            barred.release()
        await asyncio.gather(*jobs)
        return most

    def _pass(self) -> None:
        self._context.signal("began")  # from here on nothing but the gate ends it
        with self._gate:
            pass


class TestThreadIsolation(IsolationContract):
    @pytest.fixture
    def isolation(self, clock: ManualClock) -> Isolation:
        return ThreadIsolation(clock)

    @pytest.fixture
    def gate(self) -> Iterator[threading.Lock]:
        lock = threading.Lock()
        lock.acquire()
        yield lock
        if lock.locked():
            lock.release()

    @pytest.fixture
    def walled(self, plan_of: Callable[..., StartPlan], gate: threading.Lock) -> StartPlan:
        return replace(plan_of(Walled), maker=lambda: Walled(gate), limits=ResourceLimits(max_worker_threads=2))

    async def test_an_idle_agent_has_one_thread_named_after_it(self, start: Start) -> None:
        cell = await start()
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ostler-agent")] == [NAME]
        assert (await cell.usage()).thread_count == 1

    async def test_an_agent_lives_in_one_thread_and_works_in_others(self, start: Start) -> None:
        cell = await start()
        answer = await cell.call(Verb.PROCESS, do("tell"))
        (thread,) = (living for living in threading.enumerate() if living.name == NAME)
        assert answer["thread"] == thread.ident
        plain = await start(PlainAgent)
        assert await plain.call(Verb.PROCESS, do("thread")) not in {thread.ident, threading.get_ident()}
        assert (await plain.usage()).thread_count == 2

    @pytest.mark.parametrize("where", ["loop", "worker"])
    async def test_what_cannot_be_ended_is_cut_off(  # noqa: PLR0913, PLR0917 - fixtures
        self,
        isolation: Isolation,
        clock: ManualClock,
        listener: RecordingListener,
        walled: StartPlan,
        gate: threading.Lock,
        where: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        before = inventory()
        cell = await isolation.start(walled, listener)
        await cell.call(Verb.INITIALIZE)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, where))
        await listener.signal("began")
        began = clock.mono()
        report = await passing(clock, cell.stop(timedelta(seconds=2)), 10)
        assert 2 <= clock.mono() - began < 4
        assert not report.graceful
        assert report.left_behind == "its thread does not end; it is cut off and ends with the program"
        assert "could not be ended" in caplog.text
        with pytest.raises(AgentGoneError):
            await call
        await cell.destroy()
        assert await cell.stop(timedelta(0)) == report
        assert (await cell.usage()).thread_count >= 1
        gate.release()  # it comes back when nobody expects it any more
        await until(lambda: all(now <= then for now, then in zip(inventory(), before, strict=True)))
        assert listener.signals == ["began"]
        assert not listener.exits

    async def test_a_thread_that_only_computes_is_ended(
        self, listener: RecordingListener, plan_of: Callable[..., StartPlan], caplog: pytest.LogCaptureFixture
    ) -> None:
        """By the real clock, for the thread needs real time to be interrupted."""
        for _ in range(5):
            listener.messages.clear()
            cell = await ThreadIsolation(SystemClock()).start(plan_of(), listener)
            await cell.call(Verb.INITIALIZE)
            call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("spin")))
            await listener.signal("began")
            report = await cell.stop(timedelta(0))
            assert (report.graceful, report.left_behind) == (False, None)
            with pytest.raises(AgentGoneError):
                await call
            await cell.destroy()
        assert not caplog.records

    async def test_a_start_that_hangs_can_be_called_off(
        self,
        isolation: Isolation,
        clock: ManualClock,
        listener: RecordingListener,
        walled: StartPlan,
        gate: threading.Lock,
    ) -> None:
        before = inventory()

        def make() -> Agent:
            with gate:
                return Walled(gate)

        starting = asyncio.ensure_future(isolation.start(replace(walled, maker=make), listener))
        await asyncio.sleep(0.02)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await passing(clock, starting, 3)
        gate.release()
        await until(lambda: all(now <= then for now, then in zip(inventory(), before, strict=True)))
        assert not listener.exits

    async def test_a_machine_without_more_threads_or_descriptors_says_so(
        self,
        isolation: Isolation,
        listener: RecordingListener,
        plan_of: Callable[..., StartPlan],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("can't start new thread")

        before = inventory()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(AgentInitializationError, match="can't start new thread"):
                await isolation.start(plan_of(), listener)

        def exhausted(*_: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(AgentLoop, "__init__", exhausted)
            patch.setattr(AgentLoop, "__del__", lambda _: None)  # it was never made
            with pytest.raises(AgentInitializationError, match="Too many open files"):
                await isolation.start(plan_of(), listener)
        assert inventory() == before

    async def test_an_agent_that_stops_its_own_loop_has_ended(
        self, isolation: Isolation, listener: RecordingListener, walled: StartPlan
    ) -> None:
        cell = await isolation.start(walled, listener)
        await cell.call(Verb.INITIALIZE)
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, "stop")
        await until(lambda: len(listener.exits) == 1)
        assert "stopped the loop" in (listener.exits[0].detail or "")
        await cell.destroy()

    async def test_work_in_threads_is_bounded(
        self, isolation: Isolation, listener: RecordingListener, walled: StartPlan
    ) -> None:
        cell = await isolation.start(walled, listener)
        await cell.call(Verb.INITIALIZE)
        assert await cell.call(Verb.PROCESS, "crowd") == 2
        await cell.destroy()

    async def test_its_time_is_counted(
        self, listener: RecordingListener, start: Start, release: Callable[[], None]
    ) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("spin")))
        await listener.signal("began")
        end = time.monotonic() + 20
        while (await cell.usage()).cpu_seconds < 0.05:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        release()
        await call
        await cell.stop(timedelta(seconds=30))
        assert (await cell.usage()).cpu_seconds >= 0.05
        assert (await cell.usage()).thread_count == 0

    async def test_forced_ends_at_any_moment_leave_nothing(
        self,
        isolation: Isolation,
        listener: RecordingListener,
        plan_of: Callable[..., StartPlan],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Ended in the middle of whatever it is doing: starting, answering, tidying up."""
        gc.collect()  # what crashed in an earlier test speaks up when it is collected, and must not do so below
        caplog.clear()
        before = inventory()
        for steps in range(60):
            cell = await isolation.start(plan_of(), listener)
            calls = [
                asyncio.ensure_future(cell.call(*question))
                for question in ((Verb.INITIALIZE,), (Verb.PROCESS, do("hang")), (Verb.PROCESS, do("chat", count=20)))
            ]
            for _ in range(steps % 12):
                await asyncio.sleep(0)
            await cell.destroy()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert all(answer is None or isinstance(answer, AgentGoneError | AgentExecutionError) for answer in answers)
        await until(lambda: all(now <= then for now, then in zip(inventory(), before, strict=True)))
        assert not [record for record in caplog.records if record.name.startswith("asyncio")]

    def test_a_program_ends_though_an_agent_does_not(self) -> None:
        done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=50, check=False)
        assert (done.returncode, done.stdout) == (0, "False its thread does not end"), done.stderr
        assert "Traceback" not in done.stderr


STUCK = """
import asyncio, threading
from datetime import timedelta
from uuid import UUID
from ostler.agents import Agent, AgentKind, AgentManifest
from ostler.isolation import StartPlan, Verb
from ostler.isolation.thread import ThreadIsolation
from ostler.model.spawn import ResourceLimits
from ostler.clock import SystemClock

gate = threading.Lock()
gate.acquire()
begun = threading.Event()

class Stuck(Agent):
    def process(self, request):
        begun.set()
        gate.acquire()

class Deaf:
    def on_message(self, attempt, message): pass
    async def on_question(self, attempt, wait): pass
    def on_report(self, attempt, calls, questions): pass
    def on_exit(self, attempt, how): pass

async def main():
    manifest = AgentManifest(id=UUID(int=1), name="stuck", kind=AgentKind.PYTHON)
    plan = StartPlan(instance_id=UUID(int=2), attempt=1, name="stuck", manifest=manifest, maker=Stuck,
                     limits=ResourceLimits(), context={})
    cell = await ThreadIsolation(SystemClock()).start(plan, Deaf())
    call = asyncio.ensure_future(cell.call(Verb.PROCESS))
    await asyncio.to_thread(begun.wait)
    report = await cell.stop(timedelta(0))
    print(report.graceful, report.left_behind[:23], end="")
    await asyncio.wait((call,))
    call.exception()
    await cell.destroy()

asyncio.run(main())
"""
