"""The beginning: what a cell is, and what a start that fails leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isolation.agents import LeavingAgent, UnmadeAgent, double, greet
from isolation.ground import (
    ATTEMPT,
    INSTANCE,
    IsolationGround,
    RecordingListener,
    Start,
    do,
    inventory,
    until,
)
from ostler.agents import Agent, AgentKind
from ostler.agents.base import FunctionMaker
from ostler.errors import AgentExecutionError, AgentInitializationError, InvalidOperationError
from ostler.isolation import Cell, Exit, Isolation, StartPlan, Verb
from ostler.model.attempt import AttemptOutcome
from ostler.model.spawn import ResourceLimits
from ostler.model.states import Enforcement, IsolationLevel

_LIMITS = ("execution_timeout", "max_concurrent_tasks", "max_worker_threads", "max_memory_mb", "max_cpu_percent")


class StartingContract(IsolationGround):
    async def test_a_level_says_what_it_can_do(self, isolation: Isolation) -> None:
        can = isolation.capabilities
        assert all(isinstance(can.holds(limit), Enforcement) for limit in _LIMITS)
        assert can.holds("something unheard of") is Enforcement.ADVISORY
        assert AgentKind.PYTHON in can.kinds
        assert AgentKind.COMMAND not in can.kinds or isolation.level not in {IsolationLevel.NONE, IsolationLevel.THREAD}

    async def test_an_agent_knows_who_it_is(self, start: Start) -> None:
        cell = await start(context={"Colour": "red"})
        told = await cell.call(Verb.PROCESS, do("tell"))
        assert told["instance_id"] == str(INSTANCE)
        assert told["attempt"] == ATTEMPT
        assert told["name"] == "somebody"
        assert told["data"] == {"Colour": "red"}

    async def test_a_private_workdir_is_made_when_it_is_asked_for(self, start: Start, tmp_path: Path) -> None:
        cell = await start()
        assert not (tmp_path / "workdir").exists()
        assert (await cell.call(Verb.PROCESS, do("where")))["workdir"] == str(tmp_path / "workdir")
        assert (tmp_path / "workdir").is_dir()

    async def test_a_workdir_that_was_given_is_neither_made_nor_removed(
        self, isolation: Isolation, listener: RecordingListener, plan_of: Callable[..., StartPlan], tmp_path: Path
    ) -> None:
        given = tmp_path / "given"
        given.mkdir()
        (given / "note").write_text("mine")
        cell = await self._started(isolation, listener, replace(plan_of(), workdir=given, owns_workdir=False))
        told = await cell.call(Verb.PROCESS, do("where"))
        assert told["workdir"] == str(given)
        assert told["cwd"] == str(given if isolation.capabilities.has_own_process else Path.cwd())
        await cell.destroy()
        assert (given / "note").read_text() == "mine"
        missing = replace(plan_of(), workdir=tmp_path / "missing", owns_workdir=False)
        if isolation.capabilities.has_own_process:
            with pytest.raises(AgentInitializationError, match="is not a directory; make it first"):
                await self._started(isolation, listener, missing)
        else:
            cell = await self._started(isolation, listener, missing)
            assert (await cell.call(Verb.PROCESS, do("where")))["workdir"] == str(tmp_path / "missing")
            await cell.destroy()
        assert not (tmp_path / "missing").exists()

    async def test_the_variables_of_a_spawn_are_its_own(
        self, isolation: Isolation, listener: RecordingListener, plan_of: Callable[..., StartPlan]
    ) -> None:
        names = ["COLOUR", "HOME", "OSTLER_MAX_WORKER_THREADS"]
        for env in ({"COLOUR": "red", "HOME": "/nowhere"}, {"COLOUR": "blue"}, {}):
            limits = ResourceLimits(max_worker_threads=3)
            cell = await self._started(isolation, listener, replace(plan_of(), env=env, limits=limits))
            told = await cell.call(Verb.PROCESS, do("where", names=names))
            assert told["env"] == env
            if isolation.capabilities.has_own_process:
                passed_on = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
                assert told["environ"] == {**passed_on, **env, "OSTLER_MAX_WORKER_THREADS": "3"}
            await cell.destroy()

    async def test_a_function_is_an_agent(
        self, isolation: Isolation, listener: RecordingListener, plan_of: Callable[..., StartPlan]
    ) -> None:
        cell = await self._started(isolation, listener, replace(plan_of(), maker=FunctionMaker(greet)))
        assert await cell.call(Verb.PROCESS, "you") == "somebody greets you"
        assert await cell.call(Verb.HEALTH) is None
        await cell.destroy()
        cell = await self._started(isolation, listener, replace(plan_of(), maker=FunctionMaker(double)))
        assert await cell.call(Verb.PROCESS, 21) == 42
        await cell.destroy()

    async def test_what_only_this_program_can_find_is_refused_outside_of_it(
        self, isolation: Isolation, listener: RecordingListener, plan_of: Callable[..., StartPlan]
    ) -> None:
        def local(request: Any) -> Any:
            return request

        for maker in (FunctionMaker(local), FunctionMaker(lambda request: request)):
            plan = replace(plan_of(), maker=maker)
            if isolation.level in {IsolationLevel.NONE, IsolationLevel.THREAD}:
                cell = await self._started(isolation, listener, plan)
                assert await cell.call(Verb.PROCESS, 1) == 1
                await cell.destroy()
            else:
                with pytest.raises(AgentInitializationError, match="define it at the top of a module"):
                    await isolation.prepare(plan)

    @staticmethod
    async def _started(isolation: Isolation, listener: RecordingListener, plan: StartPlan) -> Cell:
        await isolation.prepare(plan)
        cell = await isolation.start(plan, listener)
        await cell.call(Verb.INITIALIZE)
        return cell

    async def test_a_handle_is_json(self, start: Start) -> None:
        handle = (await start()).handle
        assert handle
        assert json.loads(json.dumps(dict(handle))) == handle

    @pytest.mark.parametrize("agent", [UnmadeAgent, LeavingAgent])
    async def test_a_start_that_fails_leaves_nothing(
        self, isolation: Isolation, listener: RecordingListener, plan_of: Callable[..., StartPlan], agent: type[Agent]
    ) -> None:
        plan = plan_of(agent)
        await isolation.prepare(plan)  # whatever is made once for all is made now
        before = inventory()
        with pytest.raises(AgentExecutionError) as caught:
            await isolation.start(plan, listener)
        assert caught.value.exception_type in {"ValueError", "SystemExit"}
        await until(lambda: inventory() <= before)
        assert not listener.exits, "nobody has heard of it, so nobody is told of its end"

    async def test_an_agent_that_refuses_to_be_initialised_says_why(self, start: Start) -> None:
        with pytest.raises(AgentExecutionError, match="ValueError: not today"):
            await start(context={"refuses": True})

    async def test_what_does_not_outlive_its_manager_is_lost_with_it(
        self, isolation: Isolation, start: Start, listener: RecordingListener, plan_of: Callable[..., StartPlan]
    ) -> None:
        cell = await start()
        plan = replace(plan_of(), instance_id=INSTANCE)
        found = await isolation.adopt(cell.handle, plan, listener)
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
