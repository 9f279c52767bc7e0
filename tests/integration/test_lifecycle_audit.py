"""What is left to read: the audit of every act and refusal, the statistics, the metrics and the log."""

from __future__ import annotations

import logging
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from lifecycle_ground import LEVELS, Crew, logged

from ostler import (
    AgentGoneError,
    AgentInitializationError,
    AgentNotFoundError,
    AgentState,
    AuditEntry,
    InvalidOperationError,
    IsolationLevel,
    LicenseError,
    OstlerError,
    RestartPolicy,
    Role,
    SpawnRequest,
    TerminationOptions,
    Tier,
    ValidationError,
)
from ostler.testing.isolation_suite.ground import passing

pytestmark = pytest.mark.anyio

_A = AgentState
QUICK = TerminationOptions(graceful_timeout=timedelta(seconds=1))


async def by(crew: Crew, actor: str) -> list[AuditEntry]:
    return [entry for entry in await crew.audit() if entry.actor == actor]


# --- audit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [*LEVELS, IsolationLevel.PROCESS], ids=str)
async def test_all_lifecycle_operations_appear_in_the_audit_log(crew: Crew) -> None:
    somebody = await crew.as_somebody(Role.OPERATOR)
    one = await somebody.spawn(crew.request())
    await somebody.process(one.instance_id, {"do": "echo"})
    call = crew.start(one, "ask")
    wait = await crew.wait_of(one)
    await somebody.answer(wait.wait_id)
    await call
    await somebody.suspend(one.instance_id)
    await somebody.resume(one.instance_id)
    await somebody.restart(one.instance_id)
    await somebody.terminate(one.instance_id)
    entries = await by(crew, "somebody")
    assert {entry.outcome for entry in entries} == {"ok"}
    assert {entry.correlation_id for entry in entries} == {"request-7"}
    acts = [entry.action for entry in entries]
    for act in ("spawn", "process", "wait.end", "suspend", "resume", "restart", "terminate"):
        assert act in acts, f"{act} is not among {acts}"
    assert {entry.subject for entry in entries if not entry.action.startswith("wait.")} == {
        f"instance:{one.instance_id}"
    }
    report = await crew.manager.store.verify_audit()
    assert report.is_sound, report.faults
    assert report.entries == len(await crew.audit())


async def test_every_request_is_audited_also_those_that_overlap(crew: Crew) -> None:
    one = await crew.spawn()
    calls = [crew.start(one, "hang") for _ in range(3)]
    await crew.stage.heard("began", times=3)
    crew.stage.let_go.set()
    for call in calls:
        await call
    entries = [entry for entry in await by(crew, "owner") if entry.action == "process"]
    assert len(entries) == 3
    assert {entry.subject for entry in entries} == {f"instance:{one.instance_id}"}


async def test_every_refusal_is_audited_once(crew: Crew) -> None:
    one = await crew.spawn()
    await crew.manager.terminate(one.instance_id)
    before = len(await crew.audit())
    manager, unknown = crew.manager, uuid4()
    refused: list[tuple[str, str, type[OstlerError]]] = []

    async def expect(act: str, about: str, kind: type[OstlerError], work: object) -> None:
        with pytest.raises(kind):
            await work  # type: ignore[misc]  # any awaitable
        refused.append((act, about, kind))

    ended, gone = f"instance:{one.instance_id}", InvalidOperationError
    for wrong, kind in ((unknown, AgentNotFoundError), (UUID(int=0), ValidationError)):
        await expect("spawn", f"definition:{wrong}", kind, manager.spawn(SpawnRequest(agent_definition_id=wrong)))
    await expect("process", ended, gone, manager.process(one.instance_id, {}))
    await expect("suspend", ended, gone, manager.suspend(one.instance_id))
    await expect("resume", ended, gone, manager.resume(one.instance_id))
    await expect("restart", ended, gone, manager.restart(one.instance_id))
    await expect("terminate", ended, gone, manager.terminate(one.instance_id))
    await expect("terminate", f"instance:{unknown}", AgentNotFoundError, manager.terminate(unknown))
    await expect("answer", f"wait:{unknown}", gone, manager.answer(unknown))
    entries = (await crew.audit())[before:]
    assert [(entry.action, entry.subject, entry.outcome) for entry in entries] == [
        (act, about, kind.__name__) for act, about, kind in refused
    ]
    assert {entry.actor for entry in entries} == {"owner"}
    assert (await manager.store.verify_audit()).is_sound


async def test_what_the_plan_refuses_is_audited_and_counted_once(crew: Crew) -> None:
    await crew.set_tier(Tier.CORE)
    await crew.spawn()
    await crew.spawn()
    before = len(await crew.audit())
    with pytest.raises(LicenseError):
        await crew.spawn()
    with pytest.raises(LicenseError):
        await crew.spawn(restart_policy=RestartPolicy())
    entries = [entry for entry in (await crew.audit())[before:] if entry.action == "spawn"]
    assert [entry.outcome for entry in entries] == ["LicenseError"] * 2
    assert "2 are active" in (entries[0].detail or "")
    assert crew.counted("ostler_lifecycle_license_rejections_total") == 2
    assert crew.counted("ostler_lifecycle_spawn_failures_total") == 2


# --- statistics and metrics --------------------------------------------------------------------------


async def test_statistics(crew: Crew) -> None:
    await crew.set_tier(Tier.TEAMS)
    ready, suspended, ended, failed = [await crew.spawn() for _ in range(4)]
    await crew.manager.suspend(suspended.instance_id)
    crew.clock.advance(10)
    await crew.manager.terminate(ended.instance_id)
    with pytest.raises(AgentGoneError):
        await crew.do(failed, "exit")
    await crew.comes_to(failed, _A.FAILED)
    await crew.manager.restart(failed.instance_id)
    told = await crew.manager.get_statistics()
    assert told.active_instances == 3
    assert told.by_state[_A.READY] == 2
    assert told.by_state[_A.SUSPENDED] == 1
    assert told.max_concurrent == 20
    assert (told.total_spawned, told.total_terminated, told.total_restarts) == (4, 1, 1)
    assert told.average_uptime >= timedelta(seconds=10)
    assert await crew.state(ready) is _A.READY


NAMES = (
    "ostler_lifecycle_instances_active",
    'ostler_lifecycle_instances_by_state{state="ready"}',
    "ostler_lifecycle_spawn_duration_seconds_count",
    "ostler_lifecycle_spawn_count_total",
    "ostler_lifecycle_spawn_failures_total",
    "ostler_lifecycle_terminate_duration_seconds_count",
    "ostler_lifecycle_terminate_count_total",
    "ostler_lifecycle_terminate_forced_total",
    "ostler_lifecycle_restarts_count_total",
    "ostler_lifecycle_license_rejections_total",
)


async def test_metrics_under_the_names_that_were_asked_for(crew: Crew) -> None:
    ones = [await crew.spawn() for _ in range(3)]
    with pytest.raises(AgentInitializationError):
        await crew.spawn({"initialize": "fail"})
    await crew.manager.terminate(ones[0].instance_id)
    await crew.manager.terminate(ones[1].instance_id, TerminationOptions.immediate())
    await crew.manager.restart(ones[2].instance_id)
    for _ in range(1000):  # gauges are set when the watch looks
        crew.clock.advance(1)
        await crew.manager.get_statistics()
        if crew.counted(NAMES[0]) == 1 and crew.counted(NAMES[1]) == 1:
            break
    assert [crew.counted(name) for name in NAMES] == [1, 1, 3, 3, 1, 2, 2, 1, 1, 0]


# --- log ---------------------------------------------------------------------------------------------


async def test_the_story_of_a_life_in_the_log(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ostler.lifecycle")
    one = await crew.spawn()
    crew.clock.advance(5)
    await crew.manager.terminate(one.instance_id)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "ostler.lifecycle"]
    who = f"InstanceId: {one.instance_id}"
    assert lines[0][0] == "DEBUG"
    assert lines[0][1].startswith(f"[LCM] Spawn request received. DefinitionId: {one.definition_id}, Options: {{")
    assert lines[1:] == [
        ("INFO", f"[LCM] Agent state changed. {who}, From: initializing, To: ready"),
        ("INFO", f"[LCM] Agent spawned. {who}, DefinitionId: {one.definition_id}, Isolation: {crew.level}"),
        ("INFO", f"[LCM] Agent state changed. {who}, From: ready, To: terminating"),
        ("INFO", f"[LCM] Agent state changed. {who}, From: terminating, To: terminated"),
        ("INFO", f"[LCM] Agent terminated. {who}, WasGraceful: true, Uptime: 5 s"),
    ]


async def test_what_goes_wrong_in_the_log(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ostler.lifecycle")
    with pytest.raises(AgentInitializationError):
        await crew.spawn({"initialize": "fail"})
    crashed = await crew.spawn()
    with pytest.raises(AgentGoneError):
        await crew.do(crashed, "exit")
    await crew.comes_to(crashed, _A.FAILED)
    slow = await crew.spawn({"shutdown": "hang"})
    await passing(crew.clock, crew.manager.terminate(slow.instance_id, QUICK), 10)
    await crew.set_tier(Tier.CORE)
    await crew.spawn()
    await crew.spawn()
    with pytest.raises(LicenseError):
        await crew.spawn()
    lines = "\n".join(f"{record.levelname} {record.getMessage()}" for record in caplog.records)
    assert "ERROR [LCM] Agent initialization failed. InstanceId: " in lines
    assert "Error: its initialisation failed: ValueError: not today" in lines
    assert f"ERROR [LCM] Agent crashed. InstanceId: {crashed.instance_id}, Error: SystemExit: 3, StackTrace: " in lines
    assert f"WARNING [LCM] Graceful shutdown timeout. InstanceId: {slow.instance_id}, Forcing termination." in lines
    assert "WARNING [LCM] Spawn rejected: concurrent limit exceeded. Current: 2, Max: 2" in lines
    assert all("\n" not in record.getMessage() for record in caplog.records)


async def test_the_end_of_a_dead_one_is_in_the_log_too(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ostler.lifecycle")
    gone = await crew.spawn()
    pending = await crew.spawn(restart_policy=RestartPolicy(initial_delay=timedelta(minutes=1)))
    for one in (gone, pending):
        with pytest.raises(AgentGoneError):
            await crew.do(one, "exit")
        await crew.comes_to(one, _A.FAILED)
        await crew.manager.terminate(one.instance_id)
    ends = logged(caplog, "terminated")
    assert [(end["instance_id"], end["was_graceful"]) for end in ends] == [
        (gone.instance_id, False),
        (pending.instance_id, False),
    ]
