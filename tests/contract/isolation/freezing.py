"""Freezing: nothing of it goes on, and what is frozen can be let go on, or ended."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from isolation.ground import IsolationGround, RecordingListener, Start, do, passing, until
from ostler.errors import AgentGoneError
from ostler.isolation import Isolation, Verb
from ostler.testing.clock import ManualClock

#: Real seconds in which something that goes on would show; it says something every 5 ms.
_LOOK_SECONDS = 0.15


class FreezingContract(IsolationGround):
    async def test_what_is_frozen_stands_still_and_goes_on_where_it_was(
        self, isolation: Isolation, start: Start, listener: RecordingListener
    ) -> None:
        if not isolation.capabilities.freezes:
            return
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("tick")))
        await listener.signal("tick")
        await cell.freeze()
        await cell.freeze()  # a second time changes nothing
        await asyncio.sleep(_LOOK_SECONDS)  # what it had said before arrives
        heard = len(listener.signals)
        await asyncio.sleep(_LOOK_SECONDS)
        assert len(listener.signals) == heard, "it went on"
        echo = asyncio.ensure_future(cell.call(Verb.PROCESS, do("echo", value=1)))
        await asyncio.wait((echo,), timeout=_LOOK_SECONDS)
        assert not echo.done()
        await cell.thaw()
        assert await echo == 1
        await until(lambda: len(listener.signals) > heard)
        assert not call.done()
        call.cancel()
        await asyncio.wait((call,))

    async def test_what_is_frozen_is_forced_without_grace(
        self, isolation: Isolation, start: Start, listener: RecordingListener, clock: ManualClock
    ) -> None:
        if not isolation.capabilities.freezes:
            return
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang")))
        await listener.signal("began")
        await cell.freeze()
        report = await passing(clock, cell.stop(timedelta(0)), 5)
        assert not report.graceful
        assert report.left_behind is None
        with pytest.raises(AgentGoneError):
            await call
        assert not listener.exits

    async def test_what_is_frozen_ends_in_order_with_grace(
        self, isolation: Isolation, start: Start, listener: RecordingListener
    ) -> None:
        if not isolation.capabilities.freezes:
            return
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang")))
        await listener.signal("began")
        await cell.freeze()
        report = await cell.stop(timedelta(seconds=30))
        assert report.graceful
        assert "stopped" in listener.signals
        with pytest.raises(AgentGoneError):
            await call
