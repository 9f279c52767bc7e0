"""Calls: what comes back, what overlaps, and what becomes of those whose caller has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from isolation.agents import PlainAgent
from isolation.ground import IsolationGround, RecordingListener, Start, do, passing, until
from ostler.errors import AgentExecutionError
from ostler.isolation import Verb
from ostler.testing.clock import ManualClock


class CallingContract(IsolationGround):
    async def test_every_verb_is_answered(self, start: Start, listener: RecordingListener) -> None:
        cell = await start(context={"hook": True})
        assert await cell.call(Verb.PROCESS, do("echo", value={"a": [1, None]})) == {"a": [1, None]}
        assert await cell.call(Verb.HEALTH) == "a bit pale"
        assert await cell.call(Verb.FINAL_STATE) == {"asked": 1}
        (complaint,) = await cell.call(Verb.CLEANUP)
        assert "broken hook" in complaint
        assert await cell.call(Verb.SHUTDOWN) is None
        assert listener.signals == ["hook ran", "shut down"]

    async def test_what_the_agent_raises_reaches_its_caller(self, start: Start) -> None:
        cell = await start()
        with pytest.raises(AgentExecutionError, match="ValueError: as told") as caught:
            await cell.call(Verb.PROCESS, do("fail"))
        assert caught.value.exception_type == "ValueError"
        assert "raise ValueError" in (caught.value.stack_trace or "")
        assert await cell.call(Verb.PROCESS, do("echo", value="well")) == "well"

    async def test_plain_methods_are_answered_too(self, start: Start) -> None:
        cell = await start(PlainAgent)
        assert isinstance(await cell.call(Verb.PROCESS, do("thread")), int)
        with pytest.raises(AgentExecutionError, match="ValueError: as told"):
            await cell.call(Verb.PROCESS, do("fail"))

    async def test_calls_overlap(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        first = asyncio.ensure_future(cell.call(Verb.PROCESS, do("meet", first=True)))
        await listener.signal("began")
        assert await cell.call(Verb.PROCESS, do("meet", first=False)) == "came"
        assert await first == "met"

    async def test_many_calls_are_each_answered(self, start: Start) -> None:
        cell = await start()
        calls = (cell.call(Verb.PROCESS, do("echo", value=number)) for number in range(200))
        assert await asyncio.gather(*calls) == list(range(200))

    async def test_an_agent_that_cancels_itself_has_failed(self, start: Start) -> None:
        cell = await start()
        with pytest.raises(AgentExecutionError, match="CancelledError"):
            await cell.call(Verb.PROCESS, do("cancel_itself"))
        await cell.ping()

    async def test_cancelling_returns_when_the_work_has_stopped(
        self, start: Start, listener: RecordingListener
    ) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang")))
        await listener.signal("began")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await listener.signal("stopped")
        assert await cell.call(Verb.PROCESS, do("echo", value="alive")) == "alive"

    async def test_a_call_cancelled_at_once_leaves_nothing_behind(self, start: Start) -> None:
        cell = await start()
        for steps in range(4):
            call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang")))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await cell.call(Verb.PROCESS, do("echo", value="alive")) == "alive"

    async def test_a_plain_method_sees_that_it_is_cancelled(
        self, start: Start, listener: RecordingListener, has_own_place: bool
    ) -> None:
        if not has_own_place:
            return
        cell = await start(PlainAgent)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("obey")))
        await listener.signal("began")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await listener.signal("stopped")

    async def test_work_that_does_not_stop_is_given_up(
        self, start: Start, listener: RecordingListener, clock: ManualClock
    ) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("stubborn")))
        await listener.signal("began")
        call.cancel()
        await asyncio.sleep(0.05)
        assert not call.done(), "it came back while the work went on"
        call.cancel()  # a second time changes nothing
        await asyncio.sleep(0.01)
        assert not call.done()
        with pytest.raises(asyncio.CancelledError):
            await passing(clock, call, 10)

    async def test_one_that_blocks_blocks_only_itself(
        self, start: Start, listener: RecordingListener, has_own_place: bool, release: Callable[[], None]
    ) -> None:
        if not has_own_place:
            return
        cell, other = await start(), await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("block")))
        await listener.signal("began")
        for number in range(20):
            assert await other.call(Verb.PROCESS, do("echo", value=number)) == number
        assert not call.done()
        release()
        await call

    async def test_a_plain_method_that_blocks_does_not_block_its_agent(
        self, start: Start, listener: RecordingListener, has_own_place: bool, release: Callable[[], None]
    ) -> None:
        if not has_own_place:
            return
        cell = await start(PlainAgent)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("block")))
        await listener.signal("began")
        await cell.ping()
        assert await cell.call(Verb.PROCESS, do("thread")) != threading.get_ident()
        assert not call.done()
        release()
        assert await call == "ended"

    async def test_a_place_that_is_blocked_does_not_answer_a_ping(
        self, start: Start, listener: RecordingListener, has_own_place: bool
    ) -> None:
        cell = await start()
        await asyncio.gather(*(cell.ping() for _ in range(10)))
        if not has_own_place:
            return
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("spin")))
        await listener.signal("began")
        pings = [asyncio.ensure_future(cell.ping()) for _ in range(3)]
        await asyncio.wait(pings, timeout=0.1)
        assert not any(one.done() for one in pings)
        pings[0].cancel()
        await asyncio.wait(pings[:1])
        await cell.destroy()
        await until(lambda: all(one.done() for one in [call, *pings]))
        assert all(one.exception() is not None for one in [call, *pings[1:]])
