"""What cannot be ended at once: nothing is called terminated that lives, and its end is tried again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from defect_ground import plan_for
from lifecycle_aids import until
from lifecycle_haven import HavenIsolation, Managers
from machine_ground import everyone, keeper_of, lives, swept
from promise_agents import Doer
from promise_ground import opened

from ostler import TerminationOptions
from ostler.errors import AgentGoneError, InvalidOperationError
from ostler.isolation import Exit, Site
from ostler.isolation.process import link
from ostler.isolation.process.level import ProcessIsolation
from ostler.model.ledger import AttemptOutcome
from ostler.model.states import AgentState, IsolationLevel
from ostler.seams import SystemClock
from ostler.testing.isolation_suite.ground import RecordingListener as Ear

pytestmark = pytest.mark.anyio

S, P = AgentState, IsolationLevel.PROCESS
AT_ONCE = TerminationOptions.immediate()


@pytest.fixture
def scene(tmp_path: Any) -> Managers:
    return Managers(home=tmp_path)


async def test_nothing_is_called_terminated_that_lives(scene: Managers) -> None:
    async with scene.open() as manager:
        one = await scene.spawn(P)
        scene.soul(one).clings = 2
        result = await manager.terminate(one.instance_id, AT_ONCE)
        assert not result.success
        assert "process 7 (state D)" in (result.error_message or "")
        assert "tried again" in (result.error_message or "")
        assert (await scene.record(one)).state is S.TERMINATING
        assert not (await manager.terminate(one.instance_id, AT_ONCE)).success
        assert (await manager.terminate(one.instance_id, AT_ONCE)).success
        assert (await scene.record(one)).state is S.TERMINATED
    assert scene.soul(one).dead


async def test_its_end_is_tried_again_until_nothing_lives(scene: Managers) -> None:
    async with scene.open() as manager:
        one = await scene.spawn(P)
        scene.soul(one).clings = 3
        for _ in range(2):  # whoever asks again does not multiply the tries
            assert not (await manager.terminate(one.instance_id, AT_ONCE)).success
        for stops in (3, 4):
            scene.clock.advance(5)
            await until(lambda: scene.soul(one).stops == stops)  # noqa: B023 - asked at once
        await scene.reaches(one, S.TERMINATED)
        assert scene.soul(one).stops == 4
        kept = [event.was_graceful for event in await scene.events(one) if hasattr(event, "was_graceful")]
        assert kept == [False]


async def test_the_next_manager_goes_on_with_it(scene: Managers) -> None:
    async with scene.open() as manager:
        one = await scene.spawn(P)
        scene.soul(one).clings = 50
        assert not (await manager.terminate(one.instance_id, AT_ONCE)).success
    async with scene.open() as manager:
        assert (await scene.record(one)).state is S.TERMINATING
        scene.soul(one).clings = 0
        scene.clock.advance(5)
        await scene.reaches(one, S.TERMINATED)
        (attempt,) = await manager.store.list_attempts(one.instance_id)
        assert attempt.outcome is AttemptOutcome.STOPPED
    assert scene.soul(one).dead


async def test_one_that_could_not_be_looked_for_is_not_called_terminated(
    scene: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene.open() as manager:
        one = await scene.spawn(P)
        scene.soul(one).clings = 50
        assert not (await manager.terminate(one.instance_id, AT_ONCE)).success

    async def silent(*_: Any) -> Any:
        raise InvalidOperationError("the keeper says nothing")

    recover = HavenIsolation.recover
    monkeypatch.setattr(HavenIsolation, "recover", silent)
    async with scene.open() as manager:
        assert (await scene.record(one)).state is S.TERMINATING
        with pytest.raises(InvalidOperationError, match="the keeper says nothing"):
            await manager.terminate(one.instance_id, AT_ONCE)
        assert (await scene.record(one)).state is S.TERMINATING
        monkeypatch.setattr(HavenIsolation, "recover", recover)
        assert not (await manager.terminate(one.instance_id, AT_ONCE)).success
        scene.soul(one).clings = 0
        assert (await manager.terminate(one.instance_id, AT_ONCE)).success
        (attempt,) = await manager.store.list_attempts(one.instance_id)
        assert attempt.outcome is AttemptOutcome.STOPPED
    assert scene.soul(one).dead


# --- with a keeper -----------------------------------------------------------------------------------


async def test_a_keeper_that_hangs_does_not_make_a_living_one_terminated(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(home) as fleet:
        one = await fleet.spawn()
        pid, working = await fleet.pid(one), fleet.start(one, "ignore")
        await fleet.comes_to(one, S.PROCESSING)
        monkeypatch.setattr(link, "_SECONDS", 0.3)
        monkeypatch.setattr(link, "_SILENT_SECONDS", 0.2)
        keeper = keeper_of(home)
        os.kill(keeper, signal.SIGSTOP)
        try:
            result = await fleet.manager.terminate(one.instance_id, AT_ONCE)
            assert not result.success
            assert "left stop unanswered" in (result.error_message or "")
            assert (await fleet.record(one)).state is S.TERMINATING
            assert lives(pid)
        finally:
            os.kill(keeper, signal.SIGCONT)
        monkeypatch.undo()
        assert (await fleet.manager.terminate(one.instance_id, AT_ONCE)).success
        assert not lives(pid)
        await asyncio.wait((working,))
        assert isinstance(working.exception(), AgentGoneError)


_VICTIM = """
import asyncio, sys
sys.path[:0] = [sys.argv[2]]
import ostler
from promise_agents import Doer

async def main():
    async with ostler.open(sys.argv[1]) as manager:
        doer = manager.registry.register(Doer, name="doer")
        options = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.PROCESS)
        one = await manager.spawn(ostler.SpawnRequest(agent_definition_id=doer.id, options=options))
        await manager.process(one.instance_id, {"do": sys.argv[3], "program": "daemon"})
        print(one.instance_id.hex, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def _killed(home: Path, deed: str, *, keeper_too: bool = False) -> str:
    """The instance of a manager that was killed without `outlive`."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", _VICTIM, str(home), here, deed]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        name = victim.stdout.readline().strip()
        if keeper_too:  # before it can end anybody, or be missed
            victim.send_signal(signal.SIGSTOP)
            os.kill(keeper_of(home), signal.SIGKILL)
        victim.kill()
    assert name
    return name


async def test_the_true_exit_is_known_of_those_that_end_with_their_manager(home: Path) -> None:
    name = _killed(home, "leave_on_term")
    async with opened(home) as fleet:
        fleet.manager.registry.register(Doer, name="doer", replace=True)
        (attempt,) = await fleet.manager.store.list_attempts(UUID(hex=name))
    assert attempt.outcome is AttemptOutcome.STOPPED
    assert (attempt.detail or "").endswith("exit code 7")


async def test_what_a_dead_keeper_left_is_gone_before_anything_is_said_of_it(home: Path) -> None:
    with swept(home):
        name = _killed(home, "raise_one", keeper_too=True)
        await until(lambda: not keeper_of(home))
        level = ProcessIsolation(SystemClock(), Site(directory=home, epoch=2))
        plan = replace(plan_for(), instance_id=UUID(hex=name))
        found = await level.recover(None, plan, Ear())
        assert everyone(home) == set()
        assert isinstance(found, Exit)
        assert found.outcome is AttemptOutcome.LOST
