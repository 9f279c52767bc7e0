"""The end that was asked for: bounded, whatever the agent does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from isolation.agents import PlainAgent
from isolation.ground import IsolationGround, RecordingListener, Start, do, passing, until
from ostler.errors import AgentGoneError
from ostler.isolation import Isolation, Verb
from ostler.testing.clock import ManualClock

GRACE = timedelta(seconds=30)


class StoppingContract(IsolationGround):
    async def test_an_idle_agent_ends_at_once(self, start: Start) -> None:
        cell = await start()
        report = await cell.stop(GRACE)
        assert report.graceful
        assert report.left_behind is None
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, do("echo"))
        with pytest.raises(AgentGoneError):
            await cell.ping()

    async def test_work_is_cancelled_and_may_tidy_up(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        calls = [asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang"))) for _ in range(3)]
        await until(lambda: listener.signals.count("began") == 3)
        report = await cell.stop(GRACE)
        assert report.graceful
        assert listener.signals.count("stopped") == 3
        for call in calls:
            with pytest.raises(AgentGoneError):
                await call

    async def test_a_plain_method_sees_that_it_should_stop(
        self, start: Start, listener: RecordingListener, has_own_place: bool
    ) -> None:
        if not has_own_place:
            return
        cell = await start(PlainAgent)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("obey")))
        await listener.signal("began")
        assert (await cell.stop(GRACE)).graceful
        with pytest.raises(AgentGoneError):
            await call
        assert "stopped" in listener.signals

    @pytest.mark.parametrize("what", ["stubborn", "block", "spin"])
    async def test_one_that_does_not_want_to_end_is_forced(
        self,
        isolation: Isolation,
        start: Start,
        listener: RecordingListener,
        clock: ManualClock,
        has_own_place: bool,
        what: str,
    ) -> None:
        if what != "stubborn" and not has_own_place:
            return
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do(what)))
        await listener.signal("began")
        began = clock.mono()
        report = await passing(clock, cell.stop(timedelta(seconds=3)), 10)
        assert clock.mono() - began >= 3, "it was not given its grace"
        assert not report.graceful
        if isolation.capabilities.kills:
            assert report.left_behind is None
        with pytest.raises(AgentGoneError):
            await call

    async def test_no_grace_means_force(self, start: Start, listener: RecordingListener, clock: ManualClock) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("stubborn")))
        await listener.signal("began")
        report = await passing(clock, cell.stop(timedelta(0)), 3)
        assert not report.graceful
        with pytest.raises(AgentGoneError):
            await call

    async def test_one_that_was_given_up_gets_no_second_grace(
        self, start: Start, listener: RecordingListener, clock: ManualClock
    ) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("stubborn")))
        await listener.signal("began")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await passing(clock, call, 10)
        report = await passing(clock, cell.stop(timedelta(hours=1)), 5)
        assert not report.graceful

    async def test_all_who_stop_it_hear_the_same(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang")))
        await listener.signal("began")
        reports = await asyncio.gather(*(cell.stop(GRACE) for _ in range(5)))
        assert len(set(map(repr, reports))) == 1
        assert await cell.stop(timedelta(0)) == reports[0]
        with pytest.raises(AgentGoneError):
            await call

    async def test_the_least_patient_counts(
        self, start: Start, listener: RecordingListener, clock: ManualClock
    ) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("stubborn")))
        await listener.signal("began")
        patient = asyncio.ensure_future(cell.stop(timedelta(hours=1)))
        await asyncio.sleep(0)
        hasty = await passing(clock, cell.stop(timedelta(seconds=1)), 5)
        assert not hasty.graceful
        assert await patient == hasty
        with pytest.raises(AgentGoneError):
            await call

    async def test_a_stop_goes_on_without_whoever_asked(
        self, start: Start, listener: RecordingListener, release: Callable[[], None]
    ) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("stubborn")))
        await listener.signal("began")
        stopping = asyncio.ensure_future(cell.stop(GRACE))
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait((stopping,))
        assert stopping.cancelled()
        release()
        assert (await cell.stop(GRACE)).graceful
        await asyncio.wait((call,))
