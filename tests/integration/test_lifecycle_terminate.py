"""Termination: in order within its grace, by force after it, from every state, shared by its callers; and close."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lifecycle_ground import LEVELS, PROCESS, THREAD, Crew, S, agent_threads, at, do, logged, until
from machine_ground import lives

from ostler import (
    AgentGoneError,
    AgentHandle,
    AgentInitializationError,
    AgentNotFoundError,
    AgentTerminatedEvent,
    AttemptOutcome,
    CommandSpec,
    InvalidOperationError,
    PromptBy,
    RestartPolicy,
    RestartPolicyType,
    TerminationOptions,
    ValidationError,
)
from ostler.store.attempts import open_attempts
from ostler.store.store import Store

pytestmark = pytest.mark.anyio

QUICK = TerminationOptions(graceful_timeout=timedelta(seconds=1))
LATER = RestartPolicy(type=RestartPolicyType.LINEAR, initial_delay=timedelta(minutes=1), use_jitter=False)


async def told(crew: Crew, agent: AgentHandle) -> AgentTerminatedEvent:
    (event,) = await crew.events(agent, AgentTerminatedEvent)
    return event


async def terminate(crew: Crew, agent: AgentHandle, options: TerminationOptions, seconds: float = 30) -> Any:
    return await crew.passes(crew.manager.terminate(agent.instance_id, options), seconds)


# --- in order ----------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_hooks_in_reverse_then_the_final_state_then_shutdown(crew: Crew) -> None:
    agent = await crew.start()
    await agent.ask(do("hook", hooks={"first": None, "second": None, "third": None}))
    result = await agent.stop(keep_state=True)
    order = [word for word in crew.stage.said if word not in {"initialize", "attempt 1"}]
    assert order == ["hook third", "hook second", "hook first", "final_state", "shutdown"]
    assert (result.success, result.was_graceful, result.error_message) == (True, True, None)
    assert result.final_instance is not None
    assert result.final_instance.state is S.TERMINATED
    event = await told(crew, agent)
    assert (event.was_graceful, event.final_state) == (True, S.TERMINATED)
    assert (await crew.moves(agent))[-2:] == [S.TERMINATING, S.TERMINATED]


@at(*LEVELS)
async def test_outstanding_work_is_cancelled_before_the_hooks(crew: Crew) -> None:
    agent = await crew.start()
    await agent.ask(do("hook", hooks={"hook": None}))
    call = await crew.busy(agent)
    assert (await agent.stop()).was_graceful
    with pytest.raises(AgentGoneError, match="was terminated"):
        await call
    assert crew.stage.said[-3:] == ["cancelled", "hook hook", "shutdown"]


@at(*LEVELS)
async def test_the_final_state_is_kept_with_the_context_only_when_asked_for(crew: Crew) -> None:
    silent, kept = await crew.start(), await crew.start({"depth": "deep"})
    await silent.stop()
    assert "final_state" not in crew.stage.said
    result = await kept.stop(keep_state=True)
    assert result.final_instance is not None
    left = result.final_instance.final_state
    assert left is not None
    assert left["notes"] == 2
    assert left["context"]["depth"] == "deep"
    await crew.reopen()
    assert (await crew.again(silent).record()).final_state is None
    assert (await crew.again(kept).record()).final_state == left


@at(PROCESS)
async def test_the_final_state_of_a_command_is_its_last_answer(crew: Crew) -> None:
    spec = CommandSpec(argv=("cat",), prompt_by=PromptBy.STDIN)
    agent = await crew.start(agent=spec, about={"name": "cat"})
    for word in ("first", "second"):
        await agent.ask(word)
    result = await agent.stop(keep_state=True)
    assert result.final_instance is not None
    assert (result.final_instance.final_state or {})["answer"]["output"] == "second"


@at(*LEVELS)
async def test_resources_are_released(crew: Crew) -> None:
    agent = await crew.start()
    pid = (await agent.ask(do("know")))["pid"]
    result = await agent.stop(reason="the day is over")
    assert result.duration >= timedelta(0)
    assert agent_threads() == []
    assert not lives(pid) or crew.level is not PROCESS
    assert (await crew.manager.get_statistics()).active_instances == 0
    (attempt,) = await crew.attempts(agent)
    assert (attempt.outcome, attempt.is_open) == (AttemptOutcome.STOPPED, False)
    assert (await told(crew, agent)).reason == "the day is over"


# --- what does not go well ---------------------------------------------------------------------------


@at(*LEVELS)
async def test_a_hook_that_fails_is_a_warning_and_still_graceful(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    agent = await crew.start()
    await agent.ask(do("hook", hooks={"first": None, "second": "fail"}))
    result = await agent.stop()
    assert crew.stage.said[-3:] == ["hook second", "hook first", "shutdown"]
    assert (result.success, result.was_graceful) == (True, True)
    (warning,) = logged(caplog, "cleanup_failed")
    assert "second failed: ValueError: dirty" in warning["error"]
    assert crew.metric("ostler_lifecycle_terminate_forced_total") == 0


@pytest.mark.parametrize("quirk", ["hang", "stubborn"])
async def test_each_hook_has_a_time_of_its_own(crew: Crew, caplog: pytest.LogCaptureFixture, quirk: str) -> None:
    agent = await crew.start()
    await agent.ask(do("hook", hooks={"first": None, "second": quirk}))
    result = await crew.passes(agent.stop(), 20)
    assert [word for word in crew.stage.said if word != "cancelled"][-3:] == ["hook second", "hook first", "shutdown"]
    assert result.success
    assert any("second took longer than 1 s" in one["error"] for one in logged(caplog, "cleanup_failed"))
    assert result.was_graceful or quirk == "stubborn"


@at(*LEVELS)
async def test_a_shutdown_that_raises_is_a_warning_and_still_graceful(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await crew.start({"shutdown": "fail"})
    result = await agent.stop()
    assert (result.success, result.was_graceful) == (True, True)
    assert (await told(crew, agent)).was_graceful
    (warning,) = logged(caplog, "cleanup_failed")
    assert "shutdown failed: ValueError: it does not close" in warning["error"]


@pytest.mark.parametrize("quirk", ["hang", "stubborn"])
@at(*LEVELS)
async def test_a_shutdown_that_does_not_end_is_forced(crew: Crew, caplog: pytest.LogCaptureFixture, quirk: str) -> None:
    agent = await crew.start({"shutdown": quirk})
    result = await terminate(crew, agent, QUICK)
    assert (result.success, result.was_graceful) == (True, False)
    assert await crew.state(agent) is S.TERMINATED
    assert not (await told(crew, agent)).was_graceful
    assert len(logged(caplog, "shutdown_timeout")) == 1
    assert crew.metric("ostler_lifecycle_terminate_forced_total") == 1


@at(*LEVELS)
async def test_work_that_ignores_its_cancellation_is_forced(crew: Crew) -> None:
    agent = await crew.start()
    call = await crew.busy(agent, "stubborn")
    result = await terminate(crew, agent, QUICK)
    assert (result.success, result.was_graceful) == (True, False)
    with pytest.raises(AgentGoneError):
        await call
    assert await crew.state(agent) is S.TERMINATED


@at(*LEVELS)
async def test_without_force_it_stays_terminating_and_a_second_call_forces(crew: Crew) -> None:
    agent = await crew.start({"shutdown": "hang"})
    result = await terminate(crew, agent, QUICK.evolve(force_if_timeout=False))
    assert (result.success, result.was_graceful) == (False, False)
    assert "did not end within 1 s; terminate it again to force it" in (result.error_message or "")
    assert result.final_instance is not None
    assert result.final_instance.state is S.TERMINATING
    assert (await crew.manager.get_statistics()).active_instances == 1
    with pytest.raises(InvalidOperationError, match="is terminating and cannot be asked; spawn another"):
        await agent.ask(do("echo"))
    second = await terminate(crew, agent, QUICK)
    assert (second.success, second.was_graceful) == (True, False)
    assert await crew.state(agent) is S.TERMINATED


@at(*LEVELS)
async def test_immediate_runs_no_code_of_the_agent(crew: Crew) -> None:
    agent = await crew.start({"shutdown": "stubborn"})
    await agent.ask(do("hook", hooks={"hook": None}))
    result = await crew.manager.terminate(agent.instance_id, TerminationOptions.immediate())
    assert (result.success, result.was_graceful) == (True, False)
    assert crew.stage.said == ["initialize", "attempt 1"]
    assert (await told(crew, agent)).reason == "Immediate termination requested"
    assert agent_threads() == []


async def test_options_out_of_range_end_nothing(crew: Crew) -> None:
    agent = await crew.start()
    for grace in (timedelta(milliseconds=1), timedelta(hours=1), timedelta(seconds=-1)):
        with pytest.raises(ValidationError, match="graceful_timeout must be"):
            await agent.stop(grace=grace)
    for reason in ("x" * 200_000, "a\0b", 5):
        with pytest.raises(ValidationError, match="reason"):
            await agent.stop(reason=reason)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(ValidationError, match="reason"):
            await agent.restart(reason=reason)  # type: ignore[arg-type]  # wrong on purpose
    wrong: Any
    for wrong in ("", 5, {}, []):
        with pytest.raises(ValidationError, match="options must be of type TerminationOptions"):
            await crew.manager.terminate(agent.instance_id, wrong)
    assert await crew.state(agent) is S.READY


# --- at any time -------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_many_at_once_share_one_end(crew: Crew) -> None:
    agent = await crew.start()
    results = await asyncio.gather(*(agent.stop() for _ in range(5)))
    assert len({result.to_json() for result in results}) == 1
    assert results[0].success
    assert crew.stage.said.count("shutdown") == 1
    assert (await crew.manager.get_statistics()).total_terminated == 1


@at(*LEVELS)
async def test_the_least_patient_caller_decides_the_grace(crew: Crew) -> None:
    agent = await crew.start({"shutdown": "hang"})
    patient = crew.begin(agent.stop())
    await until(lambda: "shutdown" in crew.stage.said)
    hasty = await terminate(crew, agent, TerminationOptions.immediate(), 3)
    assert (hasty.success, hasty.was_graceful) == (True, False)
    assert await patient == hasty
    assert await crew.state(agent) is S.TERMINATED


async def test_a_termination_goes_on_without_its_caller(crew: Crew) -> None:
    agent = await crew.start({"shutdown": "hang"})
    ending = crew.begin(agent.stop())
    await until(lambda: "shutdown" in crew.stage.said)
    ending.cancel()
    await asyncio.wait([ending])
    assert ending.cancelled()
    crew.stage.release("stop")
    await crew.reaches(agent, S.TERMINATED)
    assert (await told(crew, agent)).was_graceful


async def test_what_is_terminated_cannot_be_terminated(crew: Crew) -> None:
    agent = await crew.start()
    await agent.stop()
    with pytest.raises(InvalidOperationError, match="is terminated and cannot be terminated") as refused:
        await agent.stop()
    assert refused.value.current == S.TERMINATED
    with pytest.raises(AgentNotFoundError, match="there is no instance"):
        await crew.manager.terminate((await agent.record()).definition_id)


@at(*LEVELS)
async def test_while_it_initialises(crew: Crew) -> None:
    spawning = crew.begin(crew.start({"initialize": "hang"}))
    await until(lambda: "initialize" in crew.stage.said)
    agent = await crew.only()
    assert await crew.state(agent) is S.INITIALIZING
    assert (await agent.stop()).success
    with pytest.raises(AgentInitializationError, match="it was terminated while it was starting"):
        await spawning
    assert await crew.state(agent) is S.TERMINATED
    assert agent_threads() == []
    assert (await crew.manager.get_statistics()).active_instances == 0


@pytest.mark.parametrize("depth", ["hold", "park"])
async def test_while_it_is_suspended(crew: Crew, depth: str) -> None:
    agent = await crew.start()
    await agent.pause(depth, resume_after=60)
    result = await agent.stop()
    assert (result.success, result.was_graceful) == (True, True)
    assert await agent.waits() == []
    crew.advance(120)
    await crew.calm()
    assert await crew.state(agent) is S.TERMINATED
    assert crew.stage.said.count("initialize") == 1


async def test_a_restart_that_was_pending_is_called_off(crew: Crew) -> None:
    agent = await crew.start(restart_policy=LATER)
    await crew.crash(agent)
    assert len(await agent.waits()) == 1
    assert (await agent.stop()).success
    assert await agent.waits() == []
    crew.advance(300)
    await crew.calm()
    assert await crew.state(agent) is S.TERMINATED
    assert crew.stage.said.count("initialize") == 1


async def test_one_that_failed_for_good_can_be_put_away_by_several(crew: Crew) -> None:
    agent = await crew.start()
    await crew.crash(agent)
    uptime = (await agent.record()).uptime(crew.clock.wall())
    crew.advance(60)
    results = await asyncio.gather(*(agent.stop() for _ in range(8)))
    assert all(result.success for result in results)
    assert (await told(crew, agent)).uptime == uptime, "it did not live on after it failed"
    with pytest.raises(InvalidOperationError, match="is terminated"):
        await agent.stop()


@at(*LEVELS)
async def test_a_termination_replaces_a_restart_and_a_park(crew: Crew) -> None:
    for verb in ("restart", "pause"):
        agent = await crew.start({"shutdown": "hang"})
        before = crew.stage.said.count("shutdown")
        cut: asyncio.Task[Any] = crew.begin(agent.restart() if verb == "restart" else agent.pause("park"))
        await until(lambda before=before: crew.stage.said.count("shutdown") > before)  # type: ignore[misc]  # bound now
        ended = await terminate(crew, agent, QUICK)
        assert ended.success
        with pytest.raises(InvalidOperationError):
            await cut
        assert await crew.state(agent) is S.TERMINATED
        assert (await agent.record()).attempt == 1


# --- closing -----------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_closing_the_manager_ends_all_in_order(crew: Crew) -> None:
    idle, busy, waits, held = [await crew.start() for _ in range(4)]
    failed = await crew.start(restart_policy=LATER)
    await crew.crash(failed)
    calls = [await crew.busy(busy), crew.begin(waits.ask(do("ask")))]
    await crew.wait_of(waits)
    await held.pause()
    await crew.close()
    for call in calls:
        with pytest.raises(AgentGoneError):
            await call
    assert crew.stage.said.count("shutdown") == 4
    assert agent_threads() == []
    with pytest.raises(InvalidOperationError, match="closed"):
        await idle.stop()
    await crew.open()
    for agent in (idle, busy, waits):
        ended = await told(crew, crew.again(agent))
        assert (ended.was_graceful, ended.reason) == (True, "the manager was closed")
    assert await crew.state(crew.again(held)) is S.SUSPENDED
    failed = crew.again(failed)
    assert await crew.state(failed) is S.FAILED
    (backoff,) = await failed.waits()
    assert backoff.due_at is not None
    await crew.comes_back(failed, 2, 60)


@at(*LEVELS)
async def test_closing_the_manager_forces_what_does_not_end(crew: Crew) -> None:
    agent = await crew.start({"shutdown": "stubborn"})
    await crew.close()
    crew.stage.release()
    await crew.open()
    assert await crew.state(crew.again(agent)) is S.TERMINATED
    assert not (await told(crew, crew.again(agent))).was_graceful


@at(*LEVELS)
async def test_spawns_under_way_when_the_manager_closes_end_with_it(crew: Crew) -> None:
    count = 4 if crew.level is PROCESS else 20
    spawns = [crew.begin(crew.start()) for _ in range(count)]
    await asyncio.sleep(0)
    await crew.close()
    await asyncio.gather(*spawns, return_exceptions=True)
    async with Store(crew.home) as store:
        assert await store.read(open_attempts) == []
    await crew.open()
    assert (await crew.manager.get_statistics()).active_instances == 0


@at(THREAD, PROCESS)
async def test_a_start_under_way_when_the_manager_closes_is_called_off(crew: Crew) -> None:
    spawning = crew.begin(crew.start({"initialize": "hang"}))
    await until(lambda: "initialize" in crew.stage.said)
    await crew.close()
    with pytest.raises(AgentInitializationError):
        await spawning
    await crew.open()
    assert (await crew.manager.get_statistics()).active_instances == 0


_DEAF = """
import asyncio, sys
import ostler

class Deaf(ostler.Agent):
    async def process(self, request):
        began.set()
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

async def main():
    global began
    began = asyncio.Event()
    async with ostler.open(sys.argv[1]) as manager:
        one = await manager.start(Deaf, isolation="none")
        asked = asyncio.ensure_future(one.ask(1))
        await began.wait()
        result = await manager.terminate(one.instance_id, ostler.TerminationOptions.immediate())
        await asyncio.wait([asked])
        print(result.was_graceful, type(asked.exception()).__name__)

asyncio.run(main())
"""


def test_a_task_that_ignores_every_cancellation_does_not_keep_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _DEAF, str(tmp_path / "home")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "False AgentGoneError\n"), done.stderr
