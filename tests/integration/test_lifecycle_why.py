"""Why an instance is as it is: in every state, and when it stands still."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from lifecycle_aids import HOUR, Scene, until

from ostler.errors import AgentInitializationError, AgentNotFoundError
from ostler.lifecycle import LifecycleSettings
from ostler.model import (
    AgentInstance,
    AgentState,
    IsolationLevel,
    ResourceLimits,
    RestartPolicy,
    SuspendDepth,
    TerminationOptions,
    Why,
)

pytestmark = pytest.mark.anyio

S = AgentState
LIMITS = ResourceLimits(execution_timeout=HOUR, max_concurrent_tasks=1)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    settings = LifecycleSettings(stall_after=timedelta(seconds=30), close_grace=timedelta(0))
    return Scene(home=tmp_path, settings=settings)


async def why(scene: Scene, instance: AgentInstance) -> Why:
    answer = await scene.manager.why(instance.instance_id)
    assert (answer.instance_id, answer.state) == (instance.instance_id, await scene.state(instance))
    return answer


def told(answer: Why) -> str:
    return " | ".join((*answer.evidence, *answer.what_would_change_it))


async def test_initializing(scene: Scene) -> None:
    async with scene.open():
        scene.stage.starting.shut()
        scene.begin(scene.spawn())
        await until(lambda: bool(scene.stage.starts))
        scene.clock.advance(10)
        answer = await why(scene, await scene.only())
        assert answer.verdict == "it is being started"
        assert "for 10 s" in answer.evidence[0]
        assert "in 20 s (time-out 30 s)" in told(answer)


async def test_ready_since_it_is_ready_whatever_was_reported_since(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn()
        await scene.tick(90)
        assert (await scene.record(instance)).metrics is not None
        answer = await why(scene, instance)
        assert answer.verdict == "it is ready and has nothing to do"
        assert "for 1 min 30 s" in answer.evidence[0]
        assert "a request makes it work" in answer.what_would_change_it


async def test_processing_with_a_queue(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(resource_limits=LIMITS)
        await scene.busy(instance)
        scene.begin(manager.process(instance.instance_id, "later"))
        await scene.tick(5)
        answer = await why(scene, instance)
        assert answer.verdict == "it works on 1 request"
        assert "1 request in flight; the oldest since" in told(answer)
        assert "1 request queued behind it" in told(answer)
        assert "(execution time-out 1 h)" in told(answer)


async def test_waiting_for_the_next_request_and_for_an_answer(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.process(instance.instance_id, "hello")
        answer = await why(scene, instance)
        assert answer.verdict == "it has worked and waits for the next request"
        scene.begin(manager.process(instance.instance_id, "wait"))
        await until(lambda: len(scene.stage.begun) == 2)
        await scene.reaches(instance, S.WAITING)
        answer = await why(scene, instance)
        assert answer.verdict == "it waits for what it asked for"
        assert "a test" in told(answer)


@pytest.mark.parametrize(
    ("depth", "verdict"),
    [
        (SuspendDepth.HOLD, "it is held: it takes nothing new"),
        (SuspendDepth.PARK, "it is parked: its process has ended, its record and its files stay"),
    ],
)
async def test_suspended(scene: Scene, depth: SuspendDepth, verdict: str) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.suspend(instance.instance_id, depth, resume_after=HOUR)
        answer = await why(scene, instance)
        assert answer.verdict == verdict
        assert "it resumes by itself at" in answer.what_would_change_it[0]
        assert "in 1 h" in answer.what_would_change_it[0]
    async with scene.open():  # what was held was parked when the manager closed
        answer = await why(scene, instance)
        assert answer.verdict == "it is parked: its process has ended, its record and its files stay"


async def test_terminating_and_terminated(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        scene.stage.ending.shut()
        options = TerminationOptions(reason="the work is done")
        ending = scene.begin(manager.terminate(instance.instance_id, options))
        await scene.reaches(instance, S.TERMINATING)
        answer = await why(scene, instance)
        assert answer.verdict == "it is being terminated"
        scene.stage.ending.open()
        await ending
        answer = await why(scene, instance)
        assert answer.verdict == "it was terminated on purpose"
        assert "it ended by itself when asked" in answer.evidence


async def test_terminated_by_force(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn()
        await manager.terminate(instance.instance_id, TerminationOptions.immediate())
        answer = await why(scene, instance)
        assert "it had to be forced" in answer.evidence


async def test_why_a_failed_one_stays_down(scene: Scene) -> None:
    spent = RestartPolicy.immediate().evolve(max_retries=1)
    async with scene.open():
        plain, tried = await scene.spawn(), await scene.spawn(restart_policy=spent)
        await scene.crash(plain)
        await scene.reaches(plain, S.FAILED)
        assert "no restart: its policy is not to restart" in (await why(scene, plain)).evidence
        await scene.crash(tried)
        await scene.tick(1)
        await scene.reaches(tried, S.READY, attempt=2)
        await scene.crash(tried)
        await scene.reaches(tried, S.FAILED)
        sentence = "no restart: 1 of 1 restarts since it was last healthy are spent"
        assert sentence in (await why(scene, tried)).evidence
    async with scene.open():  # and so it is for whoever comes later
        assert sentence in (await why(scene, tried)).evidence


async def test_why_one_that_never_started_stays_down(scene: Scene) -> None:
    scene.stage.bad_starts = 1
    async with scene.open():
        with pytest.raises(AgentInitializationError):
            await scene.spawn(restart_policy=RestartPolicy.immediate())
        answer = await why(scene, await scene.only())
        assert "no restart: its first start failed, and whoever spawned it was told" in answer.evidence


async def test_failed_for_good_and_to_return(scene: Scene) -> None:
    policy = RestartPolicy(initial_delay=timedelta(seconds=30), use_jitter=False)
    async with scene.open():
        stays, returns = await scene.spawn(), await scene.spawn(restart_policy=policy)
        for instance in (stays, returns):
            await scene.crash(instance)
            await scene.reaches(instance, S.FAILED)
        answer = await why(scene, stays)
        assert answer.verdict == "it failed and stays down"
        assert "SystemExit" in told(answer)
        answer = await why(scene, returns)
        assert answer.verdict == "it failed and will be restarted"
        assert "restart 1 of 3 in 1 min" in told(answer)
        assert "it is restarted at" in answer.what_would_change_it[0]
        assert "in 1 min" in answer.what_would_change_it[0]


async def comes_to(scene: Scene, instance: AgentInstance, verdict: str) -> Why:
    """Let time pass until the answer is this."""
    pulse = scene.manager._house.lives[instance.instance_id].pulse  # noqa: SLF001 - when it last spoke stands only there
    said = pulse.output

    async def there() -> bool:
        await scene.drift(1)
        if "stalled" not in verdict:  # it speaks in real time, which is slower than ours
            await until(lambda: pulse.output > said and scene.clock.mono() - pulse.output < 2)
        return (await why(scene, instance)).verdict == verdict

    await until(there, what=f"it never is: {verdict}")
    return await why(scene, instance)


async def test_stalled(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn(IsolationLevel.THREAD, resource_limits=LIMITS)
        await scene.tick(11)
        call = await scene.busy(instance, "wall")
        await scene.drift(5)
        assert "stalled" not in (await why(scene, instance)).verdict
        answer = await comes_to(scene, instance, "it is stalled: it owes work and shows no sign of life")
        for sign in ("no heartbeat for", "no output for", "no use of CPU for"):
            assert sign in told(answer)
        assert "restart it, or terminate it" in told(answer)
        scene.stage.wall.set()
        await call


async def test_unresponsive_but_at_work(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn(IsolationLevel.THREAD, resource_limits=LIMITS)
        await scene.tick(11)
        call = await scene.busy(instance, "mumble")
        answer = await comes_to(scene, instance, "it works on 1 request, but it does not answer")
        assert "no heartbeat for" in told(answer)
        scene.stage.wall.set()
        await call


async def test_what_does_not_exist(scene: Scene) -> None:
    async with scene.open() as manager:
        with pytest.raises(AgentNotFoundError):
            await manager.why(scene.request().agent_definition_id)
