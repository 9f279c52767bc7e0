"""An end that nobody asked for: who is told, and how often."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

import pytest

from isolation.agents import PlainAgent
from isolation.ground import IsolationGround, RecordingListener, Start, do, until
from ostler.errors import AgentGoneError
from ostler.isolation import Verb
from ostler.model.attempt import AttemptOutcome


class CrashingContract(IsolationGround):
    async def test_a_crash_ends_the_agent_and_is_told_once(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        other = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang")))
        await listener.signal("began")
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, do("exit"))
        with pytest.raises(AgentGoneError):
            await other
        await until(lambda: bool(listener.exits))
        assert "last words" in listener.signals, "what it said before is heard"
        for verb in (Verb.PROCESS, Verb.SHUTDOWN):
            with pytest.raises(AgentGoneError):
                await cell.call(verb, do("echo"))
        with pytest.raises(AgentGoneError):
            await cell.ping()
        await cell.stop(timedelta(seconds=30))
        await cell.destroy()
        (how,) = listener.exits
        assert how.outcome in {AttemptOutcome.ERROR, AttemptOutcome.EXIT_CODE}
        assert how.detail

    async def test_a_crash_of_a_plain_method_is_one_too(self, start: Start, listener: RecordingListener) -> None:
        cell = await start(PlainAgent)
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, do("exit"))
        await until(lambda: len(listener.exits) == 1)

    async def test_a_death_between_calls_is_noticed(
        self, start: Start, listener: RecordingListener, has_own_place: bool
    ) -> None:
        if not has_own_place:
            return
        cell = await start()
        with contextlib.suppress(AgentGoneError):  # it may be quicker than its answer
            await cell.call(Verb.PROCESS, do("exit_later"))
        await until(lambda: len(listener.exits) == 1)
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, do("echo"))
        report = await cell.stop(timedelta(seconds=30))
        assert report.left_behind is None
        assert len(listener.exits) == 1

    async def test_one_crash_does_not_touch_the_others(self, start: Start, listener: RecordingListener) -> None:
        cell, other = await start(), await start()
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, do("exit"))
        assert await other.call(Verb.PROCESS, do("echo", value="alive")) == "alive"
        await until(lambda: len(listener.exits) == 1)

    async def test_an_end_that_was_asked_for_is_not_told(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang")))
        await listener.signal("began")
        await cell.stop(timedelta(seconds=30))
        with pytest.raises(AgentGoneError):
            await call
        await cell.destroy()
        assert not listener.exits
