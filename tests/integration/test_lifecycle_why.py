"""`why`: what an instance is doing, the evidence for it, and what would change it, in every state."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
from lifecycle_ground import HOUR, LEVELS, NONE, PROCESS, THREAD, Crew, S, at, do, until

from ostler import (
    AgentHandle,
    AgentInitializationError,
    AgentNotFoundError,
    AttemptOutcome,
    CommandSpec,
    LifecycleSettings,
    ResourceLimits,
    RestartPolicy,
    SystemClock,
    TerminationOptions,
    Why,
)

pytestmark = pytest.mark.anyio

LIMITS = ResourceLimits(execution_timeout=HOUR, max_concurrent_tasks=1)
STALLS = LifecycleSettings(stall_after=timedelta(seconds=30), close_grace=timedelta(minutes=1))


async def asked(crew: Crew, agent: AgentHandle) -> Why:
    answer = await agent.why()
    assert (answer.instance_id, answer.state) == (agent.instance_id, await crew.state(agent))
    return answer


def told(answer: Why) -> str:
    return " | ".join((*answer.evidence, *answer.what_would_change_it))


@at(*LEVELS)
async def test_initializing(crew: Crew) -> None:
    crew.begin(crew.start({"initialize": "hang"}))
    await until(lambda: "initialize" in crew.stage.said)
    crew.advance(10)
    answer = await asked(crew, await crew.only())
    assert answer.verdict == "it is being started"
    assert "for 10 s" in answer.evidence[0]
    assert "in 20 s (time-out 30 s)" in told(answer)


async def test_ready_since_it_is_ready_whatever_was_reported_since(crew: Crew) -> None:
    agent = await crew.start()
    await crew.tick(90)
    assert (await agent.record()).health.checked_at is not None
    answer = await asked(crew, agent)
    assert answer.verdict == "it is ready and has nothing to do"
    assert "for 1 min 30 s" in answer.evidence[0]
    assert "a request makes it work" in answer.what_would_change_it


async def test_processing_with_a_queue(crew: Crew) -> None:
    agent = await crew.start(resource_limits=LIMITS)
    await crew.busy(agent)
    crew.begin(agent.ask(do("echo")))
    await crew.tick(5)
    answer = await asked(crew, agent)
    assert answer.verdict == "it works on 1 request"
    assert "1 request in flight; the oldest since" in told(answer)
    assert "1 request queued behind it" in told(answer)
    assert "(execution time-out 1 h)" in told(answer)


async def test_waiting_for_the_next_request_and_for_an_answer(crew: Crew) -> None:
    agent = await crew.start()
    await agent.ask(do("echo"))
    assert (await asked(crew, agent)).verdict == "it has worked and waits for the next request"
    crew.begin(agent.ask(do("ask")))
    await crew.wait_of(agent)
    answer = await asked(crew, agent)
    assert answer.verdict == "it waits for an answer from a person"
    assert "which colour?" in told(answer)


@pytest.mark.parametrize(
    ("depth", "verdict"),
    [
        ("hold", "it is held: it takes nothing new"),
        ("freeze", "it is frozen in mid-work"),
        ("park", "it is parked: its process has ended, its record and its files stay"),
    ],
)
@at(PROCESS)
async def test_suspended_with_the_reason_of_the_caller(crew: Crew, depth: str, verdict: str) -> None:
    agent = await crew.start()
    await crew.manager.suspend(agent.instance_id, depth, resume_after=HOUR, reason="it is too dear")
    answer = await asked(crew, agent)
    assert answer.verdict == verdict
    assert "it is too dear" in told(answer)
    assert "it resumes by itself at" in answer.what_would_change_it[0]
    assert "in 1 h" in answer.what_would_change_it[0]
    await crew.reopen()  # what was suspended was parked when the manager closed
    answer = await asked(crew, crew.again(agent))
    assert answer.verdict == "it is parked: its process has ended, its record and its files stay"
    assert "it is too dear" in told(answer)


async def test_terminating_and_terminated_with_the_reason_of_the_caller(crew: Crew) -> None:
    agent = await crew.start({"shutdown": "hang"})
    ending = crew.begin(agent.stop(reason="the work is done"))
    await until(lambda: "shutdown" in crew.stage.said)
    answer = await asked(crew, agent)
    assert answer.verdict == "it is being terminated"
    assert "the work is done" in told(answer)
    assert "(grace 10 s)" in told(answer)
    crew.stage.release("stop")
    await ending
    answer = await asked(crew, agent)
    assert answer.verdict == "it was terminated on purpose"
    assert "it ended when it was asked to" in answer.evidence
    assert "the work is done" in told(answer)


async def test_terminated_by_force(crew: Crew) -> None:
    agent = await crew.start()
    await crew.manager.terminate(agent.instance_id, TerminationOptions.immediate())
    answer = await asked(crew, agent)
    assert "it had to be forced" in answer.evidence
    assert "Immediate termination requested" in told(answer)


async def test_failed_for_good_and_to_return(crew: Crew) -> None:
    stays = await crew.start()
    returns = await crew.start(restart_policy=RestartPolicy(initial_delay=timedelta(seconds=30), use_jitter=False))
    for agent in (stays, returns):
        await crew.crash(agent)
    answer = await asked(crew, stays)
    assert answer.verdict == "it failed and stays down"
    assert "SystemExit" in told(answer)
    assert "no restart: its policy is not to restart" in answer.evidence
    answer = await asked(crew, returns)
    assert answer.verdict == "it failed and will be restarted"
    assert "restart 1 of 3 in 30 s" in told(answer)
    assert "it is restarted at" in answer.what_would_change_it[0]


async def test_why_a_failed_instance_stays_down_also_under_the_next_manager(crew: Crew) -> None:
    agent = await crew.start(restart_policy=RestartPolicy.immediate().evolve(max_retries=1))
    await crew.crash(agent)
    await crew.reaches(agent, S.READY, 2)
    await crew.crash(agent)
    sentence = "no restart: 1 of 1 restarts since it was last healthy are spent"
    assert sentence in (await asked(crew, agent)).evidence
    await crew.reopen()
    assert sentence in (await asked(crew, crew.again(agent))).evidence


async def test_why_one_that_never_started_stays_down(crew: Crew) -> None:
    with pytest.raises(AgentInitializationError):
        await crew.start({"initialize": "fail"}, restart_policy=RestartPolicy.immediate())
    answer = await asked(crew, await crew.only())
    assert "no restart: its first start failed, and its caller was told" in answer.evidence


async def comes_to(crew: Crew, agent: AgentHandle, verdict: str) -> Why:
    """Let time pass until the answer is this."""
    liveness = crew.runtime.instances[agent.instance_id].liveness
    said = liveness.output

    async def there() -> bool:
        await crew.drift(1)
        if "stalled" not in verdict:  # it speaks in real time, which is slower than ours
            await until(lambda: liveness.output > said and crew.clock.mono() - liveness.output < 2)
        return (await asked(crew, agent)).verdict == verdict

    await until(there, f"it never is: {verdict}")
    return await asked(crew, agent)


@at(THREAD, PROCESS)
async def test_stalled(crew: Crew) -> None:
    await crew.reopen(settings=STALLS)
    agent = await crew.start(resource_limits=LIMITS)
    await crew.tick(11)
    call = await crew.busy(agent, "stand_still")
    await crew.drift(5)
    assert "stalled" not in (await asked(crew, agent)).verdict
    answer = await comes_to(crew, agent, "it is stalled: it owes work and shows no sign of life")
    for sign in ("no heartbeat for", "no output for", "no use of CPU for"):
        assert sign in told(answer)
    assert "restart it, or terminate it" in told(answer)
    crew.stage.release("work")
    await call


@at(THREAD, PROCESS)
async def test_without_a_heartbeat_but_at_work_it_is_not_stalled(crew: Crew) -> None:
    await crew.reopen(settings=STALLS)
    agent = await crew.start(resource_limits=LIMITS)
    await crew.tick(11)
    call = await crew.busy(agent, "mumble")
    answer = await comes_to(crew, agent, "it works on 1 request, but it does not answer")
    assert "no heartbeat for" in told(answer)
    crew.stage.release("work")
    await call


@at(PROCESS)
async def test_the_last_output_is_what_it_printed_last(crew: Crew) -> None:
    """With the real clock: the time of what is printed is that of the machine."""
    await crew.close()
    crew.clock = SystemClock()
    await crew.open()
    printing = f"while [ ! -e {crew.stage.directory}/go-work ]; do echo on; sleep 0.05; done"
    agent = await crew.start(agent=CommandSpec(argv=("sh", "-c", printing)), about={"name": "printer"})
    crew.begin(agent.ask(""))
    live = crew.runtime.instances[agent.instance_id]

    async def is_fresh() -> bool:
        await agent.why()
        return bool(crew.clock.mono() - live.liveness.output < 0.5)

    await crew.reaches(agent, S.PROCESSING)
    began = crew.clock.mono()
    await until(lambda: crew.clock.mono() - began > 1)
    await until(is_fresh)
    crew.stage.release("work")


@at(PROCESS)
async def test_a_command_that_used_too_much_memory_is_oom_in_the_record_and_in_why(crew: Crew) -> None:
    code = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    spec = CommandSpec(argv=(sys.executable, "-c", code))
    request = crew.request(agent=spec, about={"name": "hungry"}, resource_limits={"max_memory_mb": 64})
    record = await crew.manager.spawn(request.evolve(job={"request": ""}))
    agent = crew.manager.handle(record.instance_id)
    await crew.reaches(agent, S.FAILED)
    (attempt,) = await crew.attempts(agent)
    assert attempt.outcome is AttemptOutcome.OOM
    assert "more memory than its limit of 64 MB and was killed (oom)" in told(await asked(crew, agent))


@at(NONE)
async def test_what_does_not_exist(crew: Crew) -> None:
    with pytest.raises(AgentNotFoundError):
        await crew.manager.why((await (await crew.start()).record()).definition_id)
