"""What is left when a cell is destroyed: nothing, of agents that behave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta

import pytest

from isolation.agents import PlainAgent, ScriptedAgent
from isolation.ground import IsolationGround, RecordingListener, Start, do, inventory, until
from ostler.errors import AgentGoneError
from ostler.isolation import Isolation, StartPlan, Verb


class LeavingContract(IsolationGround):
    async def test_lives_leave_nothing_behind(
        self, isolation: Isolation, listener: RecordingListener, plan_of: Callable[..., StartPlan]
    ) -> None:
        async def life(number: int) -> None:
            cell = await isolation.start(plan_of(PlainAgent if number % 3 == 0 else ScriptedAgent), listener)
            await cell.call(Verb.INITIALIZE)
            if number % 3 == 0:
                await cell.call(Verb.PROCESS, do("thread"))
            elif number % 3 == 1:
                with contextlib.suppress(AgentGoneError):
                    await cell.call(Verb.PROCESS, do("exit"))
            else:
                call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang")))
                await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait((call,))
            if number % 2:
                await cell.stop(timedelta(seconds=30))
            await cell.destroy()

        await life(0)  # whatever is made once for all is made now
        before = inventory()
        await asyncio.gather(*(life(number) for number in range(12)))
        await until(lambda: all(now <= then for now, then in zip(inventory(), before, strict=True)))

    async def test_destroying_is_safe_at_any_time(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang")))
        await listener.signal("began")
        await cell.destroy()
        await cell.destroy()
        with pytest.raises(AgentGoneError):
            await call
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, do("echo"))
        await asyncio.gather(cell.stop(timedelta(0)), cell.destroy())
