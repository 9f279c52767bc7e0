"""What the user of level process relies on, shown at the manager: limits, ends, pauses and stops that hold."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from machine_ground import cpu_seconds, end_keeper, everyone, group_number, keeper_of, kill_keeper_of, lives, until
from promise_agents import Plodder
from promise_ground import Fleet, opened

from ostler import (
    AgentGoneError,
    AgentInstance,
    AgentPriority,
    AgentState,
    AttemptOutcome,
    Enforcement,
    ExecutionTimeoutError,
    ResourceLimits,
    SuspendDepth,
    TerminationOptions,
)

pytestmark = pytest.mark.anyio

BRIEF = TerminationOptions(graceful_timeout=timedelta(seconds=1))


@pytest.fixture
async def fleet(home: Path) -> AsyncIterator[Fleet]:
    async with opened(home) as found:
        yield found


# --- limits ----------------------------------------------------------------------------------------


async def test_who_takes_too_much_memory_ends_and_its_neighbours_run_on(fleet: Fleet) -> None:
    greedy = await fleet.spawn(resource_limits=ResourceLimits(max_memory_mb=64))
    fleet.require(greedy, "max_memory_mb")
    neighbours = await fleet.several(3)
    pids = [await fleet.pid(one) for one in neighbours]
    with pytest.raises(AgentGoneError):
        await fleet.do(greedy, "eat", mb=256)
    failed = await fleet.comes_to(greedy, AgentState.FAILED)
    assert "it used more memory than its limit of 64 MB" in (failed.error_message or "")
    assert await fleet.outcome(greedy) == (AttemptOutcome.OOM, "it used more memory than its limit of 64 MB")
    told = await asyncio.gather(*(fleet.do(one, "know") for one in neighbours))
    assert [one["pid"] for one in told] == pids
    assert "memory" in (await fleet.manager.why(greedy.instance_id)).to_json()


async def test_a_quarter_of_a_core_is_a_quarter_of_a_core(fleet: Fleet) -> None:
    one = await fleet.spawn(resource_limits=ResourceLimits(max_cpu_percent=25))
    fleet.require(one, "max_cpu_percent")
    pid, working = await fleet.pid(one), fleet.start(one, "spin", seconds=30)
    await until(lambda: cpu_seconds(pid) > 1)
    before, began = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(2)
    percent = 100 * (cpu_seconds(pid) - before) / (time.monotonic() - began)
    assert 5 < percent <= 30, "a busy machine may have no quarter to give"
    await fleet.manager.terminate(one.instance_id, TerminationOptions.immediate())
    await asyncio.wait((working,))
    assert working.exception() is not None


async def test_priority_is_a_share_of_a_busy_machine(fleet: Fleet) -> None:
    shares, nice = {}, {}
    for priority in (AgentPriority.LOW, AgentPriority.HIGH):
        one = await fleet.spawn(priority=priority)
        fleet.require(one, "max_cpu_percent")
        pid = await fleet.pid(one)
        nice[priority] = os.getpriority(os.PRIO_PROCESS, pid)
        shares[priority] = group_number(pid, "cpu", "cpu.shares", "cpu.weight") or 0
    assert shares[AgentPriority.HIGH] == 16 * shares[AgentPriority.LOW] > 0
    ours = os.getpriority(os.PRIO_PROCESS, 0)  # these tests may run under `nice`
    assert nice == {AgentPriority.LOW: min(ours + 10, 19), AgentPriority.HIGH: ours}


async def test_how_well_each_limit_is_held_is_on_the_record(fleet: Fleet) -> None:
    """Also of the one that nobody sets: how many processes and threads there are in a box."""
    one = await fleet.record(await fleet.spawn())
    assert one.enforcement is not None
    assert set(one.enforcement) == {*ResourceLimits.__dataclass_fields__, "processes"}
    bound = group_number(await fleet.pid(one), "pids", "pids.max")
    assert one.enforcement["processes"] is (Enforcement.APPROXIMATED if bound is None else Enforcement.ENFORCED)


async def test_no_more_plain_calls_run_at_once_than_there_may_be_workers(fleet: Fleet) -> None:
    plodder = fleet.manager.registry.register(Plodder, name="plodder").id
    limits = ResourceLimits(max_worker_threads=2, max_concurrent_tasks=8)
    one = await fleet.spawn(plodder, resource_limits=limits)
    calls = (fleet.manager.process(one.instance_id, {"seconds": 0.05}) for _ in range(8))
    assert max(await asyncio.gather(*calls)) == 2


# --- ends ------------------------------------------------------------------------------------------


async def test_every_cause_of_an_end_is_told_apart(fleet: Fleet) -> None:
    limits = ResourceLimits(max_memory_mb=64, execution_timeout=timedelta(seconds=1))
    causes: dict[AttemptOutcome, dict[str, Any]] = {
        AttemptOutcome.CLEAN: {"what": "leave", "code": 0},
        AttemptOutcome.EXIT_CODE: {"what": "leave", "code": 7},
        AttemptOutcome.SIGNAL: {"what": "die", "signal": signal.SIGSEGV},
        AttemptOutcome.OOM: {"what": "eat", "mb": 256},
        AttemptOutcome.TIMEOUT: {"what": "ignore"},
    }
    ones = dict(zip(causes, await fleet.several(len(causes), resource_limits=limits), strict=True))
    fleet.require(ones[AttemptOutcome.OOM], "max_memory_mb")
    stopped, lost = await fleet.several(2)
    calls = [fleet.do(ones[cause], **request) for cause, request in causes.items()]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, AgentGoneError | ExecutionTimeoutError)
    await fleet.manager.terminate(stopped.instance_id)
    for one in ones.values():
        await fleet.comes_to(one, AgentState.FAILED)
    kill_keeper_of(fleet.home)
    await fleet.comes_to(lost, AgentState.FAILED)
    ones |= {AttemptOutcome.STOPPED: stopped, AttemptOutcome.LOST: lost}
    found = {cause: (await fleet.outcome(one))[0] for cause, one in ones.items()}
    assert found == {cause: cause for cause in found}


async def test_the_stop_ladder_reaches_everything_that_an_agent_left(fleet: Fleet) -> None:
    one = await fleet.spawn()
    for program in ("daemon", "deaf", "stopped", "restless"):
        await fleet.do(one, "raise_one", program=program)
    assert len(fleet.tree(one)) >= 4
    result = await fleet.manager.terminate(one.instance_id, BRIEF)
    assert fleet.tree(one) == set()
    assert (result.success, result.error_message) == (True, None)
    assert (await fleet.record(one)).state is AgentState.TERMINATED


async def test_what_a_dead_agent_left_is_gone_before_its_death_is_told(fleet: Fleet) -> None:
    one = await fleet.spawn()
    for program in ("daemon", "deaf", "stopped", "restless"):
        await fleet.do(one, "raise_one", program=program)
    with pytest.raises(AgentGoneError):
        await fleet.do(one, "leave", code=3)
    await fleet.comes_to(one, AgentState.FAILED)
    assert fleet.tree(one) == set()


# --- pauses ----------------------------------------------------------------------------------------


async def frozen_family(fleet: Fleet) -> tuple[AgentInstance, set[int]]:
    one = await fleet.spawn()
    for program in ("busy", "busy", "daemon"):
        await fleet.do(one, "raise_one", program=program)
    # A daemon is born of a process that ends; it may still be there for a moment.
    await until(lambda: len(fleet.tree(one)) == 4)
    await fleet.manager.suspend(one.instance_id, SuspendDepth.FREEZE)
    family = fleet.tree(one)
    assert len(family) == 4
    return one, family


def time_used(family: set[int]) -> float:
    return sum(cpu_seconds(pid) for pid in family)


async def test_a_frozen_agent_stands_still_with_all_it_started_and_goes_on(fleet: Fleet) -> None:
    one, family = await frozen_family(fleet)
    before = time_used(family)
    await asyncio.sleep(0.3)
    assert time_used(family) == before
    await fleet.manager.resume(one.instance_id)
    await until(lambda: time_used(family) > before + 0.1)
    assert fleet.tree(one) == family
    assert await fleet.do(one, "echo", value=1) == 1


async def test_one_that_is_deaf_gets_its_grace_and_not_more(fleet: Fleet) -> None:
    one = await fleet.spawn()
    working = fleet.start(one, "spin", seconds=60)
    await until(lambda: time_used(fleet.tree(one)) > 0.3)
    result = await fleet.manager.terminate(one.instance_id, BRIEF)
    await asyncio.wait((working,))
    assert working.exception() is not None
    assert (result.success, result.was_graceful) == (True, False)
    assert result.duration < timedelta(seconds=4)
    assert fleet.tree(one) == set()


@pytest.mark.parametrize("options", [TerminationOptions(), TerminationOptions.immediate()], ids=["asked", "at_once"])
async def test_a_frozen_agent_can_be_ended(fleet: Fleet, options: TerminationOptions) -> None:
    """One that may take its leave is thawed for it; its grace is not waited out."""
    one, _ = await frozen_family(fleet)
    result = await fleet.manager.terminate(one.instance_id, options)
    assert result.success
    assert result.was_graceful == bool(options.graceful_timeout)
    assert result.duration < timedelta(seconds=5)
    assert fleet.tree(one) == set()


# --- where agents come from ------------------------------------------------------------------------

MODULE = """
from ostler.agents import Agent

class Changing(Agent):
    def process(self, request):
        return "VERSION"
"""


async def test_a_changed_file_changes_who_is_spawned_and_nobody_who_lives(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "changing_agent.py"
    file.write_text(MODULE.replace("VERSION", "first"))
    monkeypatch.syspath_prepend(tmp_path)
    manifest = fleet.manager.registry.register(importlib.import_module("changing_agent").Changing, name="changing")
    old = await fleet.spawn(manifest.id)
    file.write_text(MODULE.replace("VERSION", "second one"))
    new = await fleet.spawn(manifest.id)
    assert await fleet.manager.process(old.instance_id, None) == "first"
    assert await fleet.manager.process(new.instance_id, None) == "second one"
    monkeypatch.delitem(sys.modules, "changing_agent")


PROGRAM = """
import asyncio, os, sys
from datetime import timedelta
import ostler

class Mine(ostler.Agent):
    def process(self, request):
        if request == "daemon":
            if os.fork() == 0:
                os.setsid()
                os.execvp("sleep", ["sleep", "60"])
        return [request, os.getpid(), __name__]

async def main():
    async with ostler.open(sys.argv[1], settings=ostler.LifecycleSettings(outlive=timedelta(0))) as manager:
        known = manager.registry.register(Mine, name="mine")
        options = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.PROCESS)
        request = ostler.SpawnRequest(agent_definition_id=known.id, options=options)
        ones = [await manager.spawn(request) for _ in range(5)]
        answers = [await manager.process(one.instance_id, "hello") for one in ones]
        await manager.process(ones[0].instance_id, "daemon")
        print(*(pid for _, pid, _ in answers), flush=True)
        if sys.argv[2] == "exit":
            os._exit(3)
        if sys.argv[2] == "wait":
            await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


def embedded(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("end", ["close", "exit", "wait"])
async def test_a_program_takes_agents_with_it_that_do_not_outlive_it(home: Path, tmp_path: Path, end: str) -> None:
    """Its agents are classes of the script itself. It closes in order, leaves without a word, or is killed."""
    script = tmp_path / "my_program.py"
    script.write_text(PROGRAM)
    with embedded(script, home, end) as program:
        assert program.stdout is not None
        pids = [int(word) for word in (await asyncio.to_thread(program.stdout.readline)).split()]
        assert len(set(pids)) == 5
        assert program.pid not in pids
        if end == "wait":
            assert all(lives(pid) for pid in pids)
            program.kill()
        program.wait()
        await until(lambda: not everyone(home), "something lives on without its program", seconds=10)
        await until(lambda: not keeper_of(home), "the keeper lives on without its program", seconds=10)
    end_keeper(home)
