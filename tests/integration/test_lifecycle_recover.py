"""After `kill -9` of the manager: every record is made true, what is due comes back, what cannot be done is shown."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from lifecycle_agents import NeverMade, Stage
from lifecycle_ground import HOUR, PROCESS, THREAD, Crew, S, at, do, killed, logged, opened, until
from machine_ground import assert_nothing_left, everyone, keeper_of, kill_keeper_of, lives, swept

from ostler import (
    AgentGoneError,
    AgentHandle,
    AgentRegistry,
    AgentTerminatedEvent,
    AttemptOutcome,
    GetInstancesFilter,
    InvalidOperationError,
    LifecycleSettings,
    RestartPolicy,
    Seams,
    TerminationOptions,
    WaitKind,
)
from ostler.failpoints import FaultPlan
from ostler.home import DATABASE_FILE, IDENTITY_FILE
from ostler.isolation.base import StopReport
from ostler.isolation.held.python_cell import PythonCell
from ostler.isolation.process import keeper_client
from ostler.lifecycle import open as open_
from ostler.store.attempts import open_attempts
from ostler.store.waits import all_open_waits
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

SLOW = RestartPolicy(initial_delay=timedelta(seconds=30), use_jitter=False)
IMMEDIATE = RestartPolicy.immediate()
AT_ONCE = TerminationOptions.immediate()
LOST, STOPPED, ERROR = AttemptOutcome.LOST, AttemptOutcome.STOPPED, AttemptOutcome.ERROR


async def every_state(crew: Crew) -> dict[str, Any]:
    """Agents that live inside the program, so that they end with it."""
    crew.level = THREAD
    made: dict[str, AgentHandle] = {}
    for name, policy in (("ready", None), ("returns", IMMEDIATE), ("returns_later", SLOW)):
        made[name] = await crew.start(restart_policy=policy)
    made["terminated"] = await crew.start()
    await made["terminated"].stop()
    for name, policy in (("failed", None), ("failed_returns", SLOW)):
        made[name] = await crew.start(restart_policy=policy)
        await crew.crash(made[name])
    made["held"] = await crew.start(restart_policy=IMMEDIATE)
    await made["held"].pause(resume_after=HOUR)
    made["parked"] = await crew.start()
    await made["parked"].pause("park")
    made["idle"] = await crew.start()
    await made["idle"].ask(do("echo"))
    made["waiting"] = await crew.start()
    crew.begin(made["waiting"].ask(do("ask")))
    await crew.wait_of(made["waiting"])
    made["processing"] = await crew.start()
    await crew.busy(made["processing"])
    await crew.reaches(made["processing"], S.PROCESSING)
    made["terminating"] = await crew.start({"shutdown": "hang"})
    crew.begin(made["terminating"].stop(reason="it is time", grace="5min"))
    await crew.reaches(made["terminating"], S.TERMINATING)
    crew.begin(crew.start({"initialize": "hang"}, name="unborn", restart_policy=IMMEDIATE))

    async def unborn() -> bool:
        return await crew.manager.get_instance("unborn") is not None

    await until(unborn)
    made["initializing"] = crew.manager.handle("unborn")
    return {name: (await agent.record()).instance_id for name, agent in made.items()}


@pytest.fixture(scope="module")
async def wreck(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], datetime]:
    """A home whose manager was killed with agents in every state. Use a copy."""
    place = tmp_path_factory.mktemp("wreck")
    crew = Crew(place / "home", ManualClock(), Stage(place / "stage"))
    names = await killed(every_state, crew)
    return crew.home, names, datetime.now(UTC)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Copy(Crew):
    """The wreck, opened again."""

    names: dict[str, str]

    def named(self, name: str) -> AgentHandle:
        return self.manager.handle(UUID(self.names[name]))


@pytest.fixture
async def copy(wreck: tuple[Path, dict[str, str], datetime], home: Path, stage: Stage) -> AsyncIterator[Copy]:
    wrecked, names, then = wreck
    home.mkdir()
    for file in wrecked.iterdir():
        if file.is_file() and file.name != IDENTITY_FILE:  # else it would be a copy, which takes up nothing
            (home / file.name).write_bytes(file.read_bytes())
    crew = Copy(home, ManualClock(then), stage, THREAD)
    crew.names = dict(names)
    yield crew
    await crew.finish()


async def test_every_record_is_true_after_a_kill(copy: Copy) -> None:
    expected = {
        "ready": (S.FAILED, 1, [LOST]),
        "idle": (S.FAILED, 1, [LOST]),
        "waiting": (S.FAILED, 1, [LOST]),
        "processing": (S.FAILED, 1, [LOST]),
        "initializing": (S.FAILED, 1, [LOST]),
        "returns": (S.READY, 2, [LOST, None]),
        "returns_later": (S.FAILED, 1, [LOST]),
        "terminated": (S.TERMINATED, 1, [STOPPED]),
        "terminating": (S.TERMINATED, 1, [LOST]),
        "failed": (S.FAILED, 1, [ERROR]),
        "failed_returns": (S.FAILED, 1, [ERROR]),
        "held": (S.SUSPENDED, 1, [LOST]),
        "parked": (S.SUSPENDED, 1, [STOPPED]),
    }
    assert copy.names.keys() == expected.keys()
    manager = await copy.open()
    await copy.reaches(copy.named("returns"), S.READY, 2)
    await copy.reaches(copy.named("terminating"), S.TERMINATED)
    for name in ("ready", "processing", "initializing", "waiting"):
        await copy.reaches(copy.named(name), S.FAILED)
    for name, (state, attempt, outcomes) in expected.items():
        record = await copy.named(name).record()
        assert (record.state, record.attempt) == (state, attempt), name
        assert [one.outcome for one in await copy.attempts(copy.named(name))] == outcomes, name
    lost = await copy.named("processing").record()
    assert "lived inside a program that has ended" in (lost.error_message or "")
    # What does not live holds no place in the plan, and what no one waits for does not wait.
    living = {UUID(copy.names[name]) for name in ("returns", "held", "parked")}
    assert {one.instance_id for one in await manager.get_active_instances()} == living
    assert (await manager.get_statistics()).active_instances == 3
    waits = {str(one.instance_id): one.kind for one in await manager.store.read(all_open_waits)}
    assert waits == {
        copy.names["held"]: WaitKind.RESUME,
        copy.names["parked"]: WaitKind.RESUME,
        copy.names["returns_later"]: WaitKind.BACKOFF,
        copy.names["failed_returns"]: WaitKind.BACKOFF,
    }
    assert [str(one.instance_id) for one in await manager.store.read(open_attempts)] == [copy.names["returns"]]


async def test_what_recovery_does_is_logged(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ostler.lifecycle")
    await copy.open()
    await copy.reaches(copy.named("returns"), S.READY, 2)
    await copy.reaches(copy.named("terminating"), S.TERMINATED)
    recovered = {str(one["instance_id"]) for one in logged(caplog, "recovered")}
    assert {copy.names[name] for name in ("ready", "processing", "waiting", "terminating")} <= recovered
    moves = {(str(one["instance_id"]), str(one["to_state"])) for one in logged(caplog, "state_changed")}
    assert (copy.names["processing"], "failed") in moves
    assert (copy.names["returns"], "initializing") in moves
    assert [str(one["instance_id"]) for one in logged(caplog, "terminated")] == [copy.names["terminating"]]
    (event,) = await copy.events(copy.named("terminating"), AgentTerminatedEvent)
    assert event.uptime < timedelta(minutes=5)


async def test_the_time_without_a_manager_is_no_uptime(copy: Copy) -> None:
    copy.advance(24 * 3600)
    await copy.open()
    failed = await copy.reaches(copy.named("processing"), S.FAILED)
    assert failed.uptime(copy.clock.wall()) < timedelta(minutes=5)


async def test_what_should_come_back_does_when_it_is_due(copy: Copy) -> None:
    await copy.open()
    for name in ("returns_later", "failed_returns"):
        await copy.comes_back(copy.named(name), 2, 61)
    held = copy.named("held")
    assert await copy.state(held) is S.SUSPENDED
    copy.advance(3500)
    await copy.passes(copy.reaches(held, S.READY, 2), 120, step=1)
    assert (await copy.named("parked").resume()).state is S.READY
    assert (await copy.named("processing").restart()).state is S.READY
    assert await copy.named("processing").ask(do("echo", value=1)) == 1


async def test_recovering_twice_changes_nothing_more(copy: Copy) -> None:
    def quiet() -> bool:
        return not [one for one in copy.runtime.instances.values() if type(one.phase).__name__ == "Leaving"]

    registry = AgentRegistry()
    await copy.open(registry=registry)
    await copy.reaches(copy.named("returns"), S.READY, 2)
    await until(quiet)
    await copy.named("returns").stop()
    before: int = (await copy.events(None))[-1].sequence
    await copy.reopen(registry=registry)
    await copy.calm()
    assert (await copy.events(None))[-1].sequence == before


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE agent_instances SET spawn_options_json = '{' WHERE id = ?",
        "UPDATE agent_instances SET health_json = 'no' WHERE id = ?",
        "UPDATE agent_instances SET state = 'dreaming' WHERE id = ?",
    ],
    ids=["options", "health", "state"],
)
async def test_one_bad_record_does_not_stop_the_others(
    copy: Copy, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = copy.names.pop("processing")
    with closing(sqlite3.connect(copy.home / DATABASE_FILE)) as database, database:
        assert database.execute(damage, (UUID(bad).bytes,)).rowcount == 1
    manager = await copy.open()
    await copy.reaches(copy.named("returns"), S.READY, 2)
    for name in ("ready", "waiting", "idle"):
        await copy.reaches(copy.named(name), S.FAILED)
    assert await copy.state(await copy.start()) is S.READY
    assert bad in {str(one["instance_id"]) for one in logged(caplog, "recovery_failed")}
    assert bad in manager.unrecovered()


async def test_a_pause_survives_a_kill_and_no_jump_makes_it_longer(copy: Copy) -> None:
    copy.clock.jump(-timedelta(days=365))  # type: ignore[attr-defined]  # a manual clock
    await copy.open()
    held = copy.named("held")
    await until(lambda: type(copy.runtime.instances[held.instance_id].phase).__name__ == "Suspended")
    copy.advance(3400)
    await copy.calm()
    assert await copy.state(held) is S.SUSPENDED
    await copy.passes(copy.reaches(held, S.READY, 2), 300, step=1)


# --- half done ---------------------------------------------------------------------------------------


async def dies_at(crew: Crew, point: str, verb: str) -> dict[str, Any]:
    """Killed by itself at this point of this verb, of an agent in a process of its own."""
    await crew.close()
    plan = FaultPlan()
    await crew.open(seams=Seams(fault=plan))
    agent = None if verb == "start" else await crew.start(restart_policy=IMMEDIATE)
    plan.name, plan.action = point, "kill"
    if agent is None:
        await crew.start(restart_policy=IMMEDIATE)
    else:
        await getattr(agent, verb)()
    raise AssertionError(f"it did not pass {point}")


POINTS = [
    ("spawn.intent.after", "start", S.FAILED),
    ("spawn.start.after", "start", S.FAILED),
    ("spawn.ready.before", "start", S.FAILED),
    ("spawn.ready.after", "start", S.READY),
    ("stop.intent.before", "stop", S.READY),
    ("stop.intent.after", "stop", S.TERMINATED),
    ("stop.kill.after", "stop", S.TERMINATED),
    ("stop.final.before", "stop", S.TERMINATED),
]


@pytest.mark.parametrize(("point", "verb", "state"), POINTS, ids=[point for point, _, _ in POINTS])
async def test_what_was_half_started_or_half_ended_is_brought_to_its_end(
    home: Path, stage: Stage, clock: ManualClock, point: str, verb: str, state: S
) -> None:
    crew = Crew(home, clock, stage, PROCESS)
    with swept(home):
        with pytest.raises(AssertionError, match="it ended with -9"):
            await killed(dies_at, crew, point=point, verb=verb)
        async with opened(crew):
            (record,) = await crew.manager.get_active_instances(GetInstancesFilter(include_terminated=True))
            agent = crew.manager.handle(record.instance_id)
            await crew.reaches(agent, state)
            attempts = await crew.attempts(agent)
            assert [one.is_open for one in attempts] == [state is S.READY]
            if state is S.READY:
                assert await agent.ask(do("echo", value=1)) == 1
            else:
                assert attempts[0].outcome in {STOPPED, LOST, AttemptOutcome.CLEAN}
            assert (await crew.manager.get_statistics()).active_instances == (state is S.READY)
        await until(lambda: not everyone(home), "the keeper or a template was left")
        assert_nothing_left(home)


# --- what could not be done --------------------------------------------------------------------------


def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that does not answer is given up sooner."""
    monkeypatch.setattr(keeper_client, "_TURN_SECONDS", 0.05)
    monkeypatch.setattr(keeper_client, "_CONNECT_SECONDS", 0.5)


async def two_alive(crew: Crew) -> dict[str, Any]:
    agents = [await crew.start() for _ in range(2)]
    pids = [(await agent.ask(do("know")))["pid"] for agent in agents]
    return {"ids": [agent.instance_id for agent in agents], "pids": pids}


@at(PROCESS)
async def test_recovery_waits_for_the_keeper_and_shows_what_it_could_not_do(
    home: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: Any
) -> None:
    crew = Crew(home, ManualClock(datetime.now(UTC)), stage, level)
    with swept(home):
        made = await killed(two_alive, crew)
        keeper = keeper_of(home)
        os.kill(keeper, signal.SIGSTOP)
        hasty(monkeypatch)
        try:
            manager = await crew.open()
            agents = [manager.handle(UUID(one)) for one in made["ids"]]
            assert set(manager.unrecovered()) == set(made["ids"])
            for agent in agents:
                record = await agent.record()
                assert record.state in {S.READY, S.WAITING, S.PROCESSING}, "what could not be looked for is as it was"
                assert "could not be recovered" in " ".join((await agent.why()).evidence)
                for verb in (agent.ask(do("echo")), agent.stop()):
                    with pytest.raises(InvalidOperationError, match="could not be recovered"):
                        await verb
            assert len(logged(caplog, "recovery_failed")) >= 2
        finally:
            os.kill(keeper, signal.SIGCONT)
        monkeypatch.undo()
        await crew.passes(until(lambda: not manager.unrecovered()), 60, step=1)
        for agent, pid in zip(agents, made["pids"], strict=True):
            assert (await agent.ask(do("know")))["pid"] == pid
            assert lives(pid)
        await crew.finish()


@at(PROCESS)
async def test_a_keeper_that_hangs_does_not_make_a_living_agent_terminated(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await crew.start()
    pid = (await agent.ask(do("know")))["pid"]
    working = await crew.busy(agent, "stubborn")
    hasty(monkeypatch)
    keeper = keeper_of(crew.home)
    os.kill(keeper, signal.SIGSTOP)
    try:
        result = await crew.manager.terminate(agent.instance_id, AT_ONCE)
        assert not result.success
        assert "it is tried again every 5 s" in (result.error_message or "")
        assert await crew.state(agent) is S.TERMINATING
        assert "does not answer" in " ".join((await agent.why()).evidence)
        assert lives(pid)
    finally:
        os.kill(keeper, signal.SIGCONT)
    monkeypatch.undo()
    assert (await crew.manager.terminate(agent.instance_id, AT_ONCE)).success
    assert not lives(pid)
    with pytest.raises(AgentGoneError):
        await working


def clings(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Stopping leaves something behind so many times; what was tried is counted."""
    tries: list[int] = []
    stop = PythonCell.stop

    async def stopping(cell: PythonCell, grace: timedelta) -> StopReport:
        tries.append(1)
        if len(tries) <= times:
            return StopReport(graceful=False, left_behind="process 7 (state D)")
        return await stop(cell, grace)

    monkeypatch.setattr(PythonCell, "stop", stopping)
    return tries


@at(PROCESS)
async def test_nothing_is_called_terminated_that_lives(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await crew.start()
    clings(monkeypatch, 2)
    for _ in range(2):
        result = await crew.manager.terminate(agent.instance_id, AT_ONCE)
        assert not result.success
        assert "process 7 (state D)" in (result.error_message or "")
        assert "tried again" in (result.error_message or "")
        assert await crew.state(agent) is S.TERMINATING
    assert (await crew.manager.terminate(agent.instance_id, AT_ONCE)).success
    assert await crew.state(agent) is S.TERMINATED


@at(PROCESS)
async def test_a_start_that_cannot_be_undone_is_not_called_terminated(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawning = crew.begin(crew.start(agent=NeverMade))
    agent = await crew.only()
    cell = f"{UUID(str(agent.instance_id)).hex}.1"
    await until(lambda: bool(everyone(crew.home, cell)))
    clings(monkeypatch, 3)
    result = await crew.manager.terminate(agent.instance_id, AT_ONCE)
    assert not result.success
    assert "process 7 (state D)" in (result.error_message or "")
    assert await crew.state(agent) is S.TERMINATING
    await crew.passes(crew.reaches(agent, S.TERMINATED), 60, step=1)
    assert not everyone(crew.home, cell)
    with pytest.raises(InvalidOperationError):
        await spawning


@at(PROCESS)
async def test_its_end_is_tried_again_until_nothing_lives(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await crew.start()
    tries = clings(monkeypatch, 3)
    for _ in range(2):  # callers that ask again do not multiply the tries
        assert not (await crew.manager.terminate(agent.instance_id, AT_ONCE)).success
    for count in (3, 4):
        await crew.calm()
        crew.advance(5)
        await until(lambda count=count: len(tries) == count)  # type: ignore[misc]  # bound now
    await crew.reaches(agent, S.TERMINATED)
    (event,) = await crew.events(agent, AgentTerminatedEvent)
    assert not event.was_graceful


@at(PROCESS)
async def test_a_failed_agent_that_left_something_is_not_restarted_before_it_is_gone(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await crew.start(restart_policy=IMMEDIATE)
    tries = clings(monkeypatch, 2)
    call = crew.begin(agent.ask(do("exit")))
    await until(lambda: len(tries) >= 1)  # the notice of its exit and that of its broken call begin a try each
    await crew.calm()
    assert (await agent.record()).attempt == 1
    assert "process 7" in " ".join((await agent.why()).evidence)
    await crew.passes(until(lambda: len(tries) >= 3), 60, step=1)
    await crew.reaches(agent, S.READY, 2)
    with pytest.raises(AgentGoneError):
        await call


@at(PROCESS)
async def test_the_next_manager_goes_on_with_what_could_not_be_ended(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await crew.start()
    pid = (await agent.ask(do("know")))["pid"]
    clings(monkeypatch, 1000)
    assert not (await crew.manager.terminate(agent.instance_id, AT_ONCE)).success
    monkeypatch.setattr(open_, "_CLOSE_SECONDS", 0.2)
    crew.runtime.settings = LifecycleSettings(close_grace=timedelta(0))
    await crew.close(keep=True)
    monkeypatch.undo()
    await crew.open()
    await crew.passes(crew.reaches(crew.again(agent), S.TERMINATED), 30, step=1)
    assert not lives(pid)


# --- the true exit -----------------------------------------------------------------------------------


async def one_alive(crew: Crew, outlive: float) -> dict[str, Any]:
    await crew.close()
    await crew.open(settings=LifecycleSettings(outlive=timedelta(seconds=outlive)))
    agent = await crew.start()
    know = await agent.ask(do("know"))
    return {"id": agent.instance_id, "pid": know["pid"]}


async def test_the_true_exit_is_known_of_agents_that_end_with_their_manager(
    home: Path, stage: Stage, clock: ManualClock
) -> None:
    crew = Crew(home, clock, stage, PROCESS)
    with swept(home):
        made = await killed(one_alive, crew, outlive=0)
        await until(lambda: not lives(made["pid"]))
        async with opened(crew):
            agent = crew.manager.handle(UUID(made["id"]))
            await crew.reaches(agent, S.FAILED)
            (attempt,) = await crew.attempts(agent)
            assert attempt.outcome is STOPPED
            assert attempt.detail
            assert attempt.ended_at is not None


async def test_what_a_dead_keeper_left_is_gone_before_anything_is_said_of_it(
    home: Path, stage: Stage, clock: ManualClock
) -> None:
    crew = Crew(home, clock, stage, PROCESS)
    with swept(home):
        made = await killed(one_alive, crew, outlive=600)
        kill_keeper_of(home)
        async with opened(crew):
            agent = crew.manager.handle(UUID(made["id"]))
            await crew.reaches(agent, S.FAILED)
            assert not lives(made["pid"])
            (attempt,) = await crew.attempts(agent)
            assert attempt.outcome is LOST
        await asyncio.sleep(0)
