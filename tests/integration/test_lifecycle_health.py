"""Health: heartbeats and probes with thresholds, stalls, shared memory, samples; and what follows from being unwell."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from lifecycle_ground import LEVELS, NONE, PROCESS, THREAD, Crew, S, at, do, logged, take, until

from ostler import (
    AgentGoneError,
    AgentHandle,
    AgentHealthChangedEvent,
    AgentInstance,
    AgentMetricsUpdatedEvent,
    AttemptOutcome,
    HealthCheckConfig,
    HealthState,
    LifecycleSettings,
    ObservationOptions,
    ProbeType,
    ResourceLimits,
    RestartPolicy,
)
from ostler.isolation.base import Verb
from ostler.lifecycle.reports import Listener
from ostler.store import reports

pytestmark = pytest.mark.anyio

H = HealthState
SECOND = timedelta(seconds=1)
CUSTOM = HealthCheckConfig(probe=ProbeType.CUSTOM, interval=SECOND, timeout=SECOND)
MISSPELT = CUSTOM.evolve(probe=ProbeType.COMMAND, target="no-such-program --check")


def says(crew: Crew, word: str) -> None:
    """What the agents answer to a custom probe from now on; nothing is well."""
    new = crew.stage.directory / "health.new"
    new.write_text(word)
    new.replace(crew.stage.directory / "health")


async def healths(crew: Crew, agent: AgentHandle) -> list[HealthState]:
    return [one.new_health for one in await crew.events(agent, AgentHealthChangedEvent)]


async def turns(crew: Crew, agent: AgentHandle, state: HealthState, *, hangs: bool = False) -> AgentInstance:
    """Let time pass until its health is this; each probe is waited for, unless probes hang."""

    async def there() -> bool:
        await (crew.drift(1) if hangs else crew.tick(1))
        return (await agent.record()).health.state is state

    await until(there, f"it is not {state}")
    return await agent.record()


# --- the heartbeat -----------------------------------------------------------------------------------


@at(*LEVELS)
async def test_the_heartbeat_is_the_default(crew: Crew) -> None:
    agent = await crew.start()
    assert (await agent.record()).health.state is H.UNKNOWN
    healthy = await turns(crew, agent, H.HEALTHY)
    assert healthy.health.consecutive_successes == 2, "one good answer is no health yet"
    assert healthy.health.checked_at is not None
    await crew.tick(60)
    assert await healths(crew, agent) == [H.HEALTHY]


@at(THREAD, PROCESS)
async def test_an_agent_that_blocks_misses_its_heartbeats_and_no_other_does(crew: Crew) -> None:
    agent, other = await crew.start(), await crew.start()
    await turns(crew, agent, H.HEALTHY)
    call = await crew.busy(agent, "block")
    sick = await turns(crew, agent, H.UNHEALTHY, hangs=True)
    assert "no answer within 3 s" in (sick.health.details or "")
    assert (await other.record()).health.state is H.HEALTHY
    assert await other.ask(do("echo", value=1)) == 1
    crew.stage.release("work")
    assert await call == "let go"
    await turns(crew, agent, H.HEALTHY)
    assert await healths(crew, agent) == [H.HEALTHY, H.DEGRADED, H.UNHEALTHY, H.HEALTHY]


@at(NONE)
async def test_a_death_whose_notice_was_lost_is_found_by_the_next_probe(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await crew.start(restart_policy=RestartPolicy.immediate(), health_check=CUSTOM)
    instance = crew.runtime.instances[agent.instance_id]
    monkeypatch.setattr(Listener, "on_exit", lambda *_: None)  # the notice is lost
    crew.begin(instance.cell.call(Verb.PROCESS, do("exit")))
    await until(lambda: instance.cell is None or instance.cell.ended is not None)

    async def back() -> bool:
        await crew.tick(1)
        return (await agent.record()).attempt == 2

    await until(back)
    await crew.reaches(agent, S.READY, 2)


# --- the agent's own word ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "details"),
    [("the model is gone", "the model is gone"), ("raise", "ValueError: no idea"), ("hang", "no answer within 1 s")],
    ids=["text", "raise", "hang"],
)
@at(*LEVELS)
async def test_an_agent_that_says_it_is_unwell(crew: Crew, answer: str, details: str) -> None:
    says(crew, answer)
    agent = await crew.start(health_check=CUSTOM)
    sick = await turns(crew, agent, H.UNHEALTHY, hangs=answer == "hang")
    assert details in (sick.health.details or "")
    assert sick.state is S.READY
    assert await agent.ask(do("echo", value=1)) == 1


async def test_the_thresholds_hold_in_both_directions(crew: Crew) -> None:
    agent = await crew.start(health_check=CUSTOM.evolve(failure_threshold=3, success_threshold=2))
    await turns(crew, agent, H.HEALTHY)
    says(crew, "unwell")
    before = crew.stage.said.count("health")
    assert (await turns(crew, agent, H.DEGRADED)).health.details == "unwell"
    await turns(crew, agent, H.UNHEALTHY)
    assert crew.stage.said.count("health") == before + 3
    says(crew, "")
    await turns(crew, agent, H.HEALTHY)
    assert crew.stage.said.count("health") == before + 5
    changes = await crew.events(agent, AgentHealthChangedEvent)
    assert [(one.previous_health, one.new_health) for one in changes] == [
        (H.UNKNOWN, H.HEALTHY),
        (H.HEALTHY, H.DEGRADED),
        (H.DEGRADED, H.UNHEALTHY),
        (H.UNHEALTHY, H.HEALTHY),
    ]
    assert (await crew.manager.get_statistics()).by_health[H.HEALTHY] == 1


async def test_failures_right_after_a_start_do_not_count(crew: Crew) -> None:
    says(crew, "warming up")
    agent = await crew.start(health_check=CUSTOM.evolve(start_period=timedelta(seconds=30)))
    crew.clock.jump(timedelta(days=365))  # type: ignore[attr-defined]  # a manual clock
    await crew.tick(28)
    assert crew.stage.said.count("health") > 20
    assert (await agent.record()).health.state is H.UNKNOWN
    await crew.tick(7)
    assert (await agent.record()).health.state is H.UNHEALTHY


async def test_a_suspended_agent_is_not_probed(crew: Crew) -> None:
    agent = await crew.start(health_check=CUSTOM)
    await agent.pause()
    await crew.tick(20)
    assert "health" not in crew.stage.said
    await agent.resume()
    await turns(crew, agent, H.HEALTHY)


# --- probes from outside -----------------------------------------------------------------------------


@asynccontextmanager
async def serving(answers: list[bytes]) -> AsyncIterator[int]:
    """Says the first of these to every client; nothing, where it is empty."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answers[0]:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers[0])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@at(NONE)
async def test_an_http_probe(crew: Crew) -> None:
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
    async with serving(answers) as port:
        check = CUSTOM.evolve(probe=ProbeType.HTTP, target=f"http://127.0.0.1:{port}/health")
        agent = await crew.start(health_check=check)
        await turns(crew, agent, H.HEALTHY)
        answers[0] = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"
        sick = await turns(crew, agent, H.UNHEALTHY)
        assert sick.health.details == "HTTP status 503"


@at(NONE)
async def test_a_tcp_probe(crew: Crew) -> None:
    async with serving([b""]) as port:
        agent = await crew.start(health_check=CUSTOM.evolve(probe=ProbeType.TCP, target=f"127.0.0.1:{port}"))
        await turns(crew, agent, H.HEALTHY)
    await turns(crew, agent, H.UNHEALTHY)


@at(NONE)
async def test_a_command_probe(crew: Crew, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    program = f"import os, sys; sys.exit(os.path.exists({str(sick)!r}))"
    check = CUSTOM.evolve(probe=ProbeType.COMMAND, target=f'{sys.executable} -c "{program}"', failure_threshold=1)
    agent = await crew.start(health_check=check)
    await turns(crew, agent, H.HEALTHY)
    sick.touch()
    await turns(crew, agent, H.UNHEALTHY)


@at(NONE)
async def test_a_probe_that_could_not_run_says_nothing_and_is_told_once(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await crew.start(health_check=MISSPELT)
    await crew.tick(10)
    health = (await agent.record()).health
    assert health.state is H.UNKNOWN
    assert health.details == "the probe could not run: cannot run no-such-program: No such file or directory"
    assert [line["error"] for line in logged(caplog, "look_failed")] == [health.details]
    assert health.details in " ".join((await agent.why()).evidence)


@at(NONE)
async def test_closing_does_not_wait_for_a_slow_probe(crew: Crew) -> None:
    asked = asyncio.Event()

    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answers, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await crew.start(health_check=CUSTOM.evolve(probe=ProbeType.HTTP, target=f"http://127.0.0.1:{port}/"))
    while not asked.is_set():
        await crew.drift(1)
    await crew.close()
    server.close()


# --- reasons -----------------------------------------------------------------------------------------


async def test_a_new_reason_for_the_same_health_is_kept(crew: Crew) -> None:
    says(crew, "first reason")
    agent = await crew.start(health_check=CUSTOM)
    await crew.tick(6)
    before = (await agent.record()).health
    assert (before.state, before.details) == (H.UNHEALTHY, "first reason")
    says(crew, "second reason")
    await crew.tick(2)
    after = (await agent.record()).health
    assert after.details == "second reason"
    assert after.consecutive_failures > before.consecutive_failures
    assert len(await crew.events(agent, AgentHealthChangedEvent)) == 1


async def test_a_reason_that_changes_with_every_probe_is_not_written_with_every_probe(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(crew, "unwell")
    agent = await crew.start(health_check=CUSTOM)
    await crew.tick(6)
    written = 0
    report = reports.report_health

    def counting(*given: object) -> object:
        nonlocal written
        written += 1
        return report(*given)  # type: ignore[arg-type]  # as they come

    monkeypatch.setattr(reports, "report_health", counting)
    for number in range(60):
        says(crew, f"{number} requests wait")
        await crew.tick(1)
    assert 4 <= written <= 7
    assert "59 requests wait" in " ".join((await agent.why()).evidence), "who asks why is told of the latest probe"
    assert (await agent.record()).health.details != "59 requests wait"


# --- memory ------------------------------------------------------------------------------------------


async def test_memory_above_the_limit_degrades_the_health_of_an_agent_inside_the_program(crew: Crew) -> None:
    """The program of the tests takes more than 64 MB, and each of its agents shares it."""
    agent = await crew.start(resource_limits=ResourceLimits(max_memory_mb=64))
    roomy = await crew.start(resource_limits=ResourceLimits(max_memory_mb=4096))
    sick = await turns(crew, agent, H.DEGRADED)
    assert "MB of memory, its limit is 64 MB" in (sick.health.details or "")
    assert "its limit is 64 MB" in " ".join((await agent.why()).evidence)
    assert await agent.ask(do("echo", value=1)) == 1, "advisory: it goes on"
    await turns(crew, roomy, H.HEALTHY)
    await crew.tick(20)
    assert (await agent.record()).attempt == 1
    assert (await agent.record()).health.state is H.DEGRADED


@at(PROCESS)
async def test_memory_above_the_limit_kills_a_process(crew: Crew) -> None:
    agent = await crew.start(resource_limits=ResourceLimits(max_memory_mb=64))
    held = (await agent.record()).enforcement
    assert held is not None
    if held["max_memory_mb"] != "enforced":
        pytest.skip("this machine does not hold the memory of a process")
    with pytest.raises(AgentGoneError):
        await agent.ask(do("grow", megabytes=200))
    failed = await agent.record()
    assert failed.state is S.FAILED
    (attempt,) = await crew.attempts(agent)
    assert attempt.outcome is AttemptOutcome.OOM


# --- what follows ------------------------------------------------------------------------------------


@at(*LEVELS)
async def test_an_unhealthy_agent_is_restarted_where_a_policy_says_so(crew: Crew) -> None:
    stays = await crew.start(health_check=CUSTOM)
    never = await crew.start(health_check=CUSTOM, restart_policy=RestartPolicy.none())
    comes = await crew.start(health_check=CUSTOM, restart_policy=RestartPolicy.immediate())
    await turns(crew, comes, H.HEALTHY)
    call = await crew.busy(comes)
    says(crew, "unwell")

    async def back() -> bool:
        await crew.drift(1)
        return (await comes.record()).attempt == 2

    await until(back)
    says(crew, "")
    with pytest.raises(AgentGoneError):
        await call
    first, *_ = await crew.attempts(comes)
    assert (first.outcome, first.detail) == (AttemptOutcome.STOPPED, "unhealthy: unwell")
    for agent in (stays, never):
        record = await agent.record()
        assert (record.state, record.attempt) == (S.READY, 1)
    await crew.reaches(comes, S.READY, 2)
    healthy = await turns(crew, comes, H.HEALTHY)
    assert (healthy.restart_count, healthy.lifetime_restarts) == (0, 1)


# --- samples -----------------------------------------------------------------------------------------

METRICS = ObservationOptions(include_metrics=True, include_state_changes=False, include_health_checks=False)


@at(*LEVELS)
async def test_metrics_are_published_at_every_interval_live_and_without_a_number(crew: Crew) -> None:
    agent = await crew.start()
    stream = agent.events(options=METRICS)
    first = crew.begin(take(stream, 1))
    await crew.passes(first, 30, step=1)
    before = first.result()[0]
    assert (before.sequence, before.metrics.completed_tasks) == (0, 0)
    await agent.ask(do("speak", tokens=42, metrics={"files read": 3}))
    later = await crew.passes(take(stream, 2), 60, step=1)
    metrics = later[-1].metrics
    assert (metrics.completed_tasks, metrics.tokens_used, metrics.open_tasks) == (1, 42, 0)
    assert metrics.custom == {"files read": 3}
    assert metrics.memory_bytes > 0
    assert metrics.memory_is_shared is (crew.level is not PROCESS)
    assert (later[1].occurred_at - later[0].occurred_at) >= timedelta(seconds=5)
    assert await crew.events(agent, AgentMetricsUpdatedEvent) == [], "they are no part of the log"
    call = await crew.busy(agent)
    await crew.reaches(agent, S.PROCESSING)
    kept = (await agent.record()).metrics
    assert kept is not None
    assert (kept.tokens_used, kept.open_tasks) == (42, 1), "the last sample is kept with the next change"
    crew.stage.release("work")
    await call
    await stream.aclose()


@at(THREAD)
async def test_the_interval_of_samples_can_be_set(crew: Crew) -> None:
    await crew.reopen(settings=LifecycleSettings(metrics_interval=SECOND))
    agent = await crew.start()
    stream = agent.events(options=METRICS)
    seen = await crew.passes(take(stream, 5), 20, step=1)
    steps = [later.occurred_at - one.occurred_at for one, later in pairwise(seen)]
    assert max(steps) <= timedelta(seconds=2)
    await stream.aclose()


async def test_tokens_and_counts_are_in_the_record(crew: Crew) -> None:
    agent = await crew.start()
    await agent.ask(do("speak", tokens=120))
    await agent.ask(do("speak", tokens=3))
    with pytest.raises(Exception, match="as told"):
        await agent.ask(do("fail"))
    metrics = (await agent.record()).metrics
    assert metrics is not None
    assert (metrics.tokens_used, metrics.completed_tasks, metrics.failed_tasks) == (123, 2, 1)
