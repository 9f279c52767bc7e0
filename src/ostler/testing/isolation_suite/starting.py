"""The beginning: what a cell is, and what a start that fails leaves."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from ostler.agents import Agent
from ostler.errors import AgentExecutionError, InvalidOperationError
from ostler.isolation import Exit, Isolation, StartPlan, Verb
from ostler.model import AttemptOutcome, Enforcement
from ostler.testing.isolation_suite.agents import LeavingAgent, UnmadeAgent
from ostler.testing.isolation_suite.ground import (
    ATTEMPT,
    INSTANCE,
    Ear,
    IsolationGround,
    Start,
    do,
    inventory,
    until,
)

_LIMITS = ("execution_timeout", "max_concurrent_tasks", "max_worker_threads", "max_memory_mb", "max_cpu_percent")


class StartingContract(IsolationGround):
    async def test_a_level_says_what_it_can_do(self, isolation: Isolation) -> None:
        can = isolation.capabilities
        assert all(isinstance(can.holds(limit), Enforcement) for limit in _LIMITS)
        assert can.holds("something unheard of") is Enforcement.ADVISORY
        assert can.kinds

    async def test_an_agent_knows_who_it_is(self, start: Start) -> None:
        cell = await start(context={"Colour": "red"})
        told = await cell.call(Verb.PROCESS, do("tell"))
        assert told["instance_id"] == str(INSTANCE)
        assert told["attempt"] == ATTEMPT
        assert told["name"] == "somebody"
        assert told["data"] == {"Colour": "red"}

    async def test_a_handle_is_json(self, start: Start) -> None:
        handle = (await start()).handle
        assert handle
        assert json.loads(json.dumps(dict(handle))) == handle

    @pytest.mark.parametrize("agent", [UnmadeAgent, LeavingAgent])
    async def test_a_start_that_fails_leaves_nothing(
        self, isolation: Isolation, ear: Ear, plan_of: Callable[..., StartPlan], agent: type[Agent]
    ) -> None:
        plan = plan_of(agent)
        await isolation.prepare(plan)  # whatever is made once for all is made now
        before = inventory()
        with pytest.raises(AgentExecutionError) as caught:
            await isolation.start(plan, ear)
        assert caught.value.exception_type in {"ValueError", "SystemExit"}
        await isolation.discard(plan)
        await isolation.discard(plan)
        await until(lambda: inventory() <= before)
        assert not ear.exits, "nobody has heard of it, so nobody is told of its end"

    async def test_an_agent_that_refuses_to_be_initialised_says_why(self, start: Start) -> None:
        with pytest.raises(AgentExecutionError, match="ValueError: not today"):
            await start(context={"refuses": True})

    async def test_what_does_not_outlive_its_manager_is_lost_with_it(
        self, isolation: Isolation, start: Start, ear: Ear, plan_of: Callable[..., StartPlan]
    ) -> None:
        cell = await start()
        plan = replace(plan_of(), instance_id=INSTANCE)
        found = await isolation.recover(cell.handle, plan, ear)
        if isolation.capabilities.outlives_manager:
            assert not isinstance(found, Exit)
            assert await found.call(Verb.PROCESS, do("echo", value=1)) == 1
            await found.destroy()
        else:
            assert isinstance(found, Exit)
            assert found.outcome is AttemptOutcome.LOST

    async def test_freezing_is_done_or_refused(self, isolation: Isolation, start: Start) -> None:
        cell = await start()
        if not isolation.capabilities.freezes:
            with pytest.raises(InvalidOperationError):
                await cell.freeze()
            with pytest.raises(InvalidOperationError):
                await cell.thaw()
            return
        await cell.freeze()
        await cell.thaw()
        assert await cell.call(Verb.PROCESS, do("echo", value=1)) == 1

    async def test_usage_is_counted(self, start: Start) -> None:
        cell = await start()
        first = await cell.usage()
        assert first.memory_bytes > 0
        assert first.cpu_seconds >= 0
        assert (await cell.usage()).cpu_seconds >= first.cpu_seconds
