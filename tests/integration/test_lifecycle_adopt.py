"""Adoption: agents in processes of their own outlive their manager; the next one takes them up as they are."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from lifecycle_agents import Stage
from lifecycle_ground import HOUR, PROCESS, Crew, S, at, do, killed, logged, opened, until
from machine_ground import everyone, kill_keeper_of, lives, swept

from ostler import (
    AgentExecutionError,
    AgentGoneError,
    AgentHandle,
    AgentNotFoundError,
    AgentRegistry,
    AgentSignalEvent,
    AttemptOutcome,
    CommandSpec,
    ExecutionTimeoutError,
    IdempotencyConflictError,
    LifecycleSettings,
    RequestState,
    ResourceLimits,
    RestartPolicy,
    WaitKind,
)
from ostler.home import DATABASE_FILE
from ostler.keeper.protocol import UNSENT
from ostler.lifecycle.phases import Adopting
from ostler.store.store import Store
from ostler.store.waits import end_wait, get_wait
from ostler.testing.clock import ManualClock

pytestmark = [pytest.mark.anyio, at(PROCESS)]

IMMEDIATE = RestartPolicy.immediate()
MINUTE = ResourceLimits(execution_timeout=timedelta(minutes=1))


async def pid_of(agent: AgentHandle) -> int:
    return int((await agent.ask(do("know")))["pid"])


# --- left alone and taken up -------------------------------------------------------------------------


async def test_what_lives_is_taken_up_as_it_is(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    idle, busy, held = [await crew.start() for _ in range(3)]
    pids = [await pid_of(agent) for agent in (idle, busy, held)]
    call = await crew.busy(busy)
    await crew.reaches(busy, S.PROCESSING)
    await held.pause()
    before = [await agent.record() for agent in (idle, busy, held)]
    await crew.close(keep=True)
    with pytest.raises(AgentGoneError, match="lives on; ask the next one, under the same request id"):
        await call
    assert all(lives(pid) for pid in pids)
    caplog.set_level("INFO", "ostler.lifecycle")
    await crew.open()
    idle, busy, held = (crew.again(agent) for agent in (idle, busy, held))
    assert [one["outcome"] for one in logged(caplog, "recovered")] == ["adopted"] * 3
    after = [await agent.record() for agent in (idle, busy, held)]
    assert [(one.state, one.attempt) for one in after] == [(one.state, one.attempt) for one in before]
    assert await idle.ask(do("echo", value="hello")) == "hello"
    crew.stage.release("work")
    await crew.reaches(busy, S.WAITING)
    assert (await held.resume()).attempt == 1
    assert [await pid_of(agent) for agent in (idle, busy, held)] == pids
    for agent in (idle, busy, held):
        assert (await agent.stop()).success
    assert not any(lives(pid) for pid in pids)


async def test_without_keep_they_end_with_the_manager(crew: Crew) -> None:
    agent = await crew.start()
    pid = await pid_of(agent)
    await crew.reopen()
    assert not lives(pid)
    assert await crew.state(crew.again(agent)) is S.TERMINATED


async def test_what_lived_is_found_also_by_a_manager_whose_agents_do_not_outlive_it(crew: Crew) -> None:
    agent = await crew.start()
    pid = await pid_of(agent)
    await crew.close(keep=True)
    await crew.open(settings=LifecycleSettings(outlive=timedelta(0)))
    assert await pid_of(crew.again(agent)) == pid
    await crew.close()
    assert not lives(pid)
    await crew.open()


async def test_a_start_that_is_under_way_when_the_manager_closes_is_left_too(crew: Crew) -> None:
    spawning = crew.begin(crew.start({"slow_attempts": [1]}))
    await until(lambda: "initialize" in crew.stage.said)
    crew.begin(_released(crew.stage))
    await crew.close(keep=True)
    agent = await spawning
    await crew.open()
    assert await crew.state(crew.again(agent)) is S.READY
    assert await crew.again(agent).ask(do("echo", value=1)) == 1


async def _released(stage: Stage) -> None:
    await asyncio.sleep(0.05)
    stage.release("start")


async def test_many_are_taken_up_at_once(crew: Crew) -> None:
    agents = await asyncio.gather(*(crew.start() for _ in range(16)))
    await crew.close(keep=True)
    began = asyncio.get_running_loop().time()
    await crew.open()
    assert asyncio.get_running_loop().time() - began < 5
    answers = await asyncio.gather(*(crew.again(agent).ask(do("echo", value=1)) for agent in agents))
    assert answers == [1] * 16


# --- the record is corrected where it must be --------------------------------------------------------


async def test_what_died_meanwhile_is_told_truly(crew: Crew) -> None:
    agent, back, held = [await crew.start(restart_policy=policy) for policy in (None, IMMEDIATE, None)]
    await held.pause()
    pids = [int((one[-1].handle or {})["pid"]) for one in [await crew.attempts(each) for each in (agent, back, held)]]
    await crew.close(keep=True)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(lives(pid) for pid in pids))
    await crew.open()
    agent, back, held = (crew.again(each) for each in (agent, back, held))
    for each in (agent, held):
        failed = await crew.reaches(each, S.FAILED)
        assert failed.error_message == "killed by SIGKILL"
        (attempt,) = await crew.attempts(each)
        assert (attempt.outcome, attempt.exit_signal) == (AttemptOutcome.SIGNAL, 9)
    await crew.reaches(back, S.READY, 2)
    assert [one.outcome for one in await crew.attempts(back)] == [AttemptOutcome.SIGNAL, None]
    assert await held.waits() == []


async def test_what_cannot_be_found_is_lost(crew: Crew) -> None:
    agent, held = await crew.start(), await crew.start()
    await held.pause()
    await crew.close(keep=True)
    kill_keeper_of(crew.home)
    await crew.open()
    agent, held = crew.again(agent), crew.again(held)
    await crew.reaches(agent, S.FAILED)
    assert [one.outcome for one in await crew.attempts(agent)] == [AttemptOutcome.LOST]
    assert await crew.state(held) is S.SUSPENDED, "it stood still, so nothing was cut off"
    assert (await held.resume()).attempt == 2


async def test_what_no_record_names_is_ended_before_anything_is_started(crew: Crew) -> None:
    agent, unknown = await crew.start(), await crew.start()
    kept, lost = await pid_of(agent), await pid_of(unknown)
    await crew.close(keep=True)
    with closing(sqlite3.connect(crew.home / DATABASE_FILE)) as database, database:
        for table, column in (
            ("attempts", "instance_id"),
            ("agent_instance_tags", "instance_id"),
            ("agent_instances", "id"),
        ):
            database.execute(f"DELETE FROM {table} WHERE {column} = ?", (_bytes(unknown),))
    await crew.open()
    assert not lives(lost)
    assert await pid_of(crew.again(agent)) == kept


def _bytes(agent: AgentHandle) -> bytes:
    assert isinstance(agent.instance_id, UUID)
    return agent.instance_id.bytes


async def test_an_agent_that_was_being_shut_down_is_not_taken_for_whole(crew: Crew) -> None:
    """Its manager died while it was restarting it by hand."""
    agent = await crew.start({"shutdown": "hang"}, restart_policy=IMMEDIATE)
    crew.begin(agent.restart())
    await until(lambda: "shutdown" in crew.stage.said)
    instance = crew.runtime.instances[agent.instance_id]
    instance.cell.detach()  # as if this manager were gone in this moment
    instance.task.cancel()
    await asyncio.wait([instance.task])
    await crew.close(keep=True)
    crew.stage.release("stop")
    await crew.open()
    await crew.reaches(crew.again(agent), S.READY, 2)


# --- requests ----------------------------------------------------------------------------------------


async def test_a_request_that_was_under_way_is_joined_by_its_id(crew: Crew) -> None:
    agent = await crew.start()
    await crew.busy(agent, id="r-1")
    await crew.reaches(agent, S.PROCESSING)
    await crew.reopen(keep=True)
    agent = crew.again(agent)
    callers = [crew.begin(agent.ask(do("hang"), id="r-1")) for _ in range(3)]
    await crew.calm()
    with pytest.raises(IdempotencyConflictError):
        await agent.ask(do("echo"), id="r-1")
    crew.stage.release("work")
    assert await asyncio.gather(*callers) == ["let go"] * 3
    assert await agent.ask(do("hang"), id="r-1") == "let go"
    assert crew.stage.said.count("began") == 1
    assert [(row.state, row.tries) for row in await agent.requests()] == [(RequestState.DONE, 1)]


async def test_an_answer_that_was_given_meanwhile_is_delivered_and_not_computed_again(crew: Crew) -> None:
    agent = await crew.start()
    await crew.busy(agent, id="good")
    await crew.busy(agent, "hang_and_fail", id="bad")
    await crew.close(keep=True)
    crew.stage.release("work")
    await until(lambda: crew.stage.said.count("ended") == 2)
    await crew.open()
    agent = crew.again(agent)
    assert await agent.ask(do("hang"), id="good") == "let go"
    with pytest.raises(AgentExecutionError, match="as told"):
        await agent.ask(do("hang_and_fail"), id="bad")
    rows = {row.request_id: (row.state, row.tries) for row in await agent.requests()}
    assert rows["good"] == (RequestState.DONE, 1)
    assert rows["bad"][0] is RequestState.FAILED
    assert crew.stage.said.count("began") == 1 + rows["bad"][1], "only what failed begins again"


@pytest.mark.parametrize("returns", [False, True], ids=["fails", "comes back"])
async def test_an_answer_that_was_given_meanwhile_survives_the_death_of_its_agent(crew: Crew, *, returns: bool) -> None:
    agent = await crew.start(restart_policy=IMMEDIATE if returns else None)
    pid = await pid_of(agent)
    await crew.busy(agent, id="r-1")
    await crew.close(keep=True)
    crew.stage.release("work")
    await until(lambda: any('"let go"' in file.read_text() for file in crew.home.rglob(UNSENT)))
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not lives(pid))
    await crew.open()
    agent = crew.again(agent)
    assert await agent.ask(do("hang"), id="r-1") == "let go"
    assert crew.stage.said.count("began") == 1, "it is not computed again"
    assert [(row.state, row.tries) for row in await agent.requests()] == [(RequestState.DONE, 1)]
    if returns:
        await crew.reaches(agent, S.READY, attempt=2)
    else:
        await crew.reaches(agent, S.FAILED)
    first = (await crew.attempts(agent))[0]
    assert (first.outcome, first.detail) == (AttemptOutcome.SIGNAL, "killed by SIGKILL")


async def test_a_request_without_a_caller_ends_and_its_answer_is_kept(crew: Crew) -> None:
    agent = await crew.start()
    await crew.busy(agent, id="r-1")
    await crew.reaches(agent, S.PROCESSING)
    await crew.reopen(keep=True)
    agent = crew.again(agent)
    crew.stage.release("work")
    await crew.reaches(agent, S.WAITING)
    assert [(row.state, row.answer) for row in await agent.requests()] == [(RequestState.DONE, '"let go"')]
    await agent.stop()
    assert await agent.ask(do("hang"), id="r-1") == "let go"


async def test_the_time_of_a_request_counts_from_its_begin_over_managers(crew: Crew) -> None:
    agent = await crew.start(resource_limits={"execution_timeout": HOUR})
    await crew.busy(agent, id="r-1")
    await crew.reaches(agent, S.PROCESSING)
    for _ in range(2):
        crew.advance(25 * 60)
        await crew.reopen(keep=True)
    agent = crew.again(agent)
    joined = crew.begin(agent.ask(do("hang"), id="r-1"))
    await crew.calm()
    crew.advance(3 * 60)
    await crew.calm()
    assert not joined.done()
    crew.advance(7 * 60)
    with pytest.raises(ExecutionTimeoutError, match="1 h"):
        await joined
    assert await agent.ask(do("echo", value=1)) == 1


async def test_the_time_that_a_request_waited_or_was_frozen_does_not_count(crew: Crew) -> None:
    agent = await crew.start(resource_limits=MINUTE)
    call = crew.begin(agent.ask(do("ask"), id="r-1"))
    wait = await crew.wait_of(agent)
    crew.advance(3600)
    await crew.reopen(keep=True)
    agent = crew.again(agent)
    await crew.calm()
    joined = crew.begin(agent.ask(do("ask"), id="r-1"))
    await crew.calm()
    crew.advance(3600)
    await crew.calm()
    assert not joined.done()
    await crew.manager.answer(wait.wait_id)
    await joined
    assert call.done()


async def test_a_request_to_an_adopted_agent_that_blocks_waits_for_its_report(crew: Crew) -> None:
    agent = await crew.start()
    await crew.busy(agent, "block", id="r-1")
    await crew.reaches(agent, S.PROCESSING)
    await crew.reopen(keep=True)
    agent = crew.again(agent)
    joined, other = crew.begin(agent.ask(do("block"), id="r-1")), crew.begin(agent.ask(do("echo", value=1)))
    await crew.calm()
    assert not joined.done()
    assert not other.done()
    crew.stage.release("work")
    assert await joined == "let go"
    assert await other == 1
    assert crew.stage.said.count("began") == 1


async def test_a_frozen_agent_stays_frozen_and_goes_on_when_it_is_thawed(crew: Crew) -> None:
    agent = await crew.start(resource_limits=MINUTE)
    await crew.busy(agent, id="r-1")
    await agent.pause("freeze", resume_after=HOUR)
    pid = int(((await crew.attempts(agent))[0].handle or {})["pid"])
    await crew.reopen(keep=True)
    agent = crew.again(agent)
    assert await crew.state(agent) is S.SUSPENDED
    crew.advance(600)
    await crew.calm()
    assert await crew.state(agent) is S.SUSPENDED
    assert lives(pid)
    crew.advance(HOUR.total_seconds())

    async def thawed() -> bool:
        return await crew.state(agent) is not S.SUSPENDED

    await until(thawed)
    joined = crew.begin(agent.ask(do("hang"), id="r-1"))
    crew.stage.release("work")
    assert await joined == "let go"
    assert crew.stage.said.count("began") == 1
    assert (await agent.record()).attempt == 1


async def test_an_agent_whose_freeze_was_not_recorded_is_thawed(crew: Crew) -> None:
    agent = await crew.start()
    await crew.runtime.instances[agent.instance_id].cell.freeze()
    await crew.close(keep=True)
    await crew.passes(_opened(crew), 30)
    assert await crew.passes(crew.again(agent).ask(do("echo", value=1)), 30) == 1


async def _opened(crew: Crew) -> None:
    await crew.open()


# --- waits -------------------------------------------------------------------------------------------


async def test_a_wait_goes_on_under_the_next_manager(crew: Crew) -> None:
    agent = await crew.start()
    crew.begin(agent.ask(do("ask", seconds=3600), id="r-1"))
    wait = await crew.wait_of(agent)
    await crew.reopen(keep=True)
    agent = crew.again(agent)
    assert [one.wait_id for one in await crew.manager.open_waits()] == [wait.wait_id]
    assert await crew.state(agent) is S.WAITING
    joined = crew.begin(agent.ask(do("ask", seconds=3600), id="r-1"))
    await crew.calm()
    await crew.manager.answer(wait.wait_id, "done", {"colour": "red"})
    assert await joined == ["done", {"colour": "red"}]
    assert await agent.waits() == []


async def test_a_wait_that_was_answered_in_the_last_moment_has_its_answer(crew: Crew) -> None:
    """The answer is committed, and its manager died before the agent heard it."""
    agent = await crew.start()
    crew.begin(agent.ask(do("ask"), id="r-1"))
    wait = await crew.wait_of(agent)
    await crew.close(keep=True)
    async with Store(crew.home) as store:
        await store.run(end_wait, wait.wait_id, "done", {"colour": "blue"})
    await crew.open()
    assert await crew.again(agent).ask(do("ask"), id="r-1") == ["done", {"colour": "blue"}]


async def test_a_wait_ends_in_its_own_time_under_every_manager(crew: Crew) -> None:
    agent = await crew.start()
    crew.begin(agent.ask(do("ask", seconds=3600), id="r-1"))
    await crew.wait_of(agent)
    crew.advance(3000)
    await crew.reopen(keep=True)
    agent = crew.again(agent)
    instance = crew.runtime.instances[agent.instance_id]
    await until(lambda: not isinstance(instance.phase, Adopting))  # it has reported what it waits for
    joined = crew.begin(agent.ask(do("ask", seconds=3600), id="r-1"))
    await crew.calm()
    crew.advance(500)
    await crew.calm()
    assert not joined.done()
    crew.advance(110)
    assert await joined == ["timeout", None]


async def test_a_wait_that_the_agent_gave_up_meanwhile_ends(crew: Crew) -> None:
    agent = await crew.start()
    crew.begin(agent.ask(do("ask_briefly", seconds=0.5), id="r-1"))
    wait = await crew.wait_of(agent)
    await crew.close(keep=True)
    await until(lambda: "gave up" in crew.stage.said)
    await crew.open()
    agent = crew.again(agent)
    assert await agent.ask(do("ask_briefly", seconds=0.5), id="r-1") == "gave up"

    async def over() -> bool:
        return await agent.waits() == []

    await until(over)
    found = await crew.manager.store.read(get_wait, wait.wait_id)
    assert found is not None
    assert found.outcome
    assert found.kind is WaitKind.HUMAN


# --- signals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [False, True], ids=["lives on", "ends"])
async def test_what_is_said_while_no_manager_is_there_is_heard_by_the_next_once(crew: Crew, *, ends: bool) -> None:
    agent = await crew.start()
    await agent.ask(do("speak", signals=5))
    await agent.ask(do("speak_alone", signals=60, ends=ends))
    await crew.close(keep=True)
    crew.stage.release("speak")
    await until(lambda: "spoken" in crew.stage.said)
    for _ in range(2):  # the manager after the next hears nothing twice
        await crew.open()
        agent = crew.again(agent)
        expected = [*range(5), *range(60)]

        async def heard() -> bool:
            return len(await crew.events(agent, AgentSignalEvent)) >= len(expected)  # noqa: B023 - asked now

        await until(heard)
        assert [(event.payload or {})["number"] for event in await crew.events(agent, AgentSignalEvent)] == expected
        await crew.close(keep=True)
    await crew.open()
    if ends:
        failed = await crew.reaches(crew.again(agent), S.FAILED)
        assert failed.error_message == "exit code 3"


# --- commands ----------------------------------------------------------------------------------------


def counting(stage: Stage, *, waits: bool) -> CommandSpec:
    """Leaves a line for each run in a file, and answers when the gate is released."""
    gate = stage.directory / "go-work"
    wait = f"until [ -e {gate} ]; do sleep 0.01; done; " if waits else ""
    return CommandSpec(argv=("sh", "-c", f"echo ran {{prompt}} >> {stage.directory}/said; {wait}echo did {{prompt}}"))


async def test_the_request_of_a_command_is_joined_without_registering_it_again(crew: Crew) -> None:
    agent = await crew.start(agent=counting(crew.stage, waits=True), about={"name": "tool"})
    crew.begin(agent.ask("a", id="r-1"))
    await until(lambda: "ran a" in crew.stage.said)
    await crew.close(keep=True)
    await crew.open(registry=AgentRegistry())
    agent = crew.again(agent)
    joined = crew.begin(agent.ask("a", id="r-1"))
    await crew.calm()
    crew.stage.release("work")
    assert (await joined)["output"] == "did a\n"
    assert (await agent.ask("a", id="r-1"))["output"] == "did a\n"
    assert (await agent.ask("b", id="r-2"))["output"] == "did b\n"
    assert crew.stage.said.count("ran a") == 1


async def commands_under_way(crew: Crew) -> dict[str, Any]:
    spec = counting(crew.stage, waits=True)
    agent = await crew.start(agent=spec, about={"name": "tool"}, resource_limits={"max_concurrent_tasks": 20})
    quick = await crew.start(agent=counting(crew.stage, waits=False), about={"name": "quick"})
    for number in range(5):
        await quick.ask(f"q{number}", id=f"q{number}")
    for number in range(10):
        crew.begin(agent.ask(f"a{number}", id=f"a{number}"))
    await until(lambda: len([word for word in crew.stage.said if word.startswith("ran a")]) == 10)
    return {"agent": agent.instance_id, "quick": quick.instance_id}


async def test_request_ids_of_commands_are_answered_once_across_a_kill_of_the_manager(
    home: Path, stage: Stage, level: Any
) -> None:
    crew = Crew(home, ManualClock(datetime.now(UTC)), stage, level)
    with swept(home):
        made = await killed(commands_under_way, crew)
        stage.release("work")
        async with opened(crew):
            agent, quick = (crew.manager.handle(UUID(made[name])) for name in ("agent", "quick"))
            for number in range(10):
                answer = await agent.ask(f"a{number}", id=f"a{number}")
                assert answer["output"] == f"did a{number}\n"
            for number in range(5):
                assert (await quick.ask(f"q{number}", id=f"q{number}"))["output"] == f"did q{number}\n"
        ran = sorted(word for word in stage.said if word.startswith("ran "))
        assert ran == sorted([f"ran a{number}" for number in range(10)] + [f"ran q{number}" for number in range(5)])
        await until(lambda: not everyone(home))


# --- the keeper is gone, too ---------------------------------------------------------------------------


async def power_cut(crew: Crew) -> None:
    """No manager and no keeper; then a new manager."""
    await crew.close(keep=True)
    kill_keeper_of(crew.home)
    await crew.open()


async def start_job(crew: Crew, agent: Any, request: Any, **options: Any) -> AgentHandle:
    spawn = crew.request(agent=agent, about={"name": "job"}, **options).evolve(job={"request": request})
    return crew.manager.handle((await crew.manager.spawn(spawn)).instance_id)


async def outcomes(crew: Crew, agent: AgentHandle) -> list[AttemptOutcome | None]:
    return [attempt.outcome for attempt in await crew.attempts(agent)]


async def test_the_job_of_a_command_that_was_lost_with_its_keeper_is_not_run_again(crew: Crew) -> None:
    agent = await start_job(crew, counting(crew.stage, waits=True), "a")
    await until(lambda: "ran a" in crew.stage.said)
    await power_cut(crew)
    agent = crew.again(agent)
    record = await crew.reaches(agent, S.FAILED)
    assert "the keeper of this home ended while it worked" in (record.error_message or "")
    assert await outcomes(crew, agent) == [AttemptOutcome.LOST]
    assert [request.state for request in await agent.requests()] == [RequestState.LOST]
    await crew.calm()
    assert crew.stage.said.count("ran a") == 1


async def test_its_restart_policy_runs_a_lost_job_again_as_the_next_attempt(crew: Crew) -> None:
    agent = await start_job(crew, counting(crew.stage, waits=True), "a", restart_policy=IMMEDIATE)
    await until(lambda: "ran a" in crew.stage.said)
    await power_cut(crew)
    await until(lambda: crew.stage.said.count("ran a") == 2)
    agent = crew.again(agent)
    assert await outcomes(crew, agent) == [AttemptOutcome.LOST, None]
    crew.stage.release("work")
    await crew.reaches(agent, S.TERMINATED, 2)


async def test_a_lost_request_is_not_asked_again_by_recovery(crew: Crew) -> None:
    agent = await crew.start(agent=counting(crew.stage, waits=True), about={"name": "tool"})
    idle = await crew.start(agent=counting(crew.stage, waits=False), about={"name": "idle"})
    crew.begin(agent.ask("a", id="r-1"))
    await until(lambda: "ran a" in crew.stage.said)
    await crew.reaches(agent, S.PROCESSING)
    await power_cut(crew)
    agent = crew.again(agent)
    await crew.reaches(agent, S.FAILED)
    assert [(request.state, request.attempt) for request in await agent.requests()] == [(RequestState.LOST, 1)]
    assert crew.stage.said.count("ran a") == 1
    assert await crew.state(crew.again(idle)) is S.READY, "no run of it was lost"


async def test_a_frozen_command_that_was_lost_is_not_run_again_by_its_thaw(crew: Crew) -> None:
    agent = await start_job(crew, counting(crew.stage, waits=True), "a")
    await until(lambda: "ran a" in crew.stage.said)
    await agent.pause("freeze")
    await power_cut(crew)
    await crew.reaches(crew.again(agent), S.FAILED)
    assert await outcomes(crew, crew.again(agent)) == [AttemptOutcome.LOST]
    assert crew.stage.said.count("ran a") == 1


@pytest.mark.parametrize("failed", [False, True], ids=["done", "failed"])
async def test_a_job_that_ended_before_the_cut_is_recorded_as_it_ended(crew: Crew, *, failed: bool) -> None:
    """Its row was committed, the end of its attempt was not."""
    agent = await start_job(crew, counting(crew.stage, waits=True), "a")
    await until(lambda: "ran a" in crew.stage.said)
    await crew.reaches(agent, S.PROCESSING)
    await crew.close(keep=True)
    kill_keeper_of(crew.home)
    with closing(sqlite3.connect(crew.home / DATABASE_FILE)) as database, database:
        state, answer, error = ("failed", None, "exit code 3") if failed else ("done", '{"exit_code": 0}', None)
        database.execute("UPDATE requests SET state = ?, answer_json = ?, error = ?", (state, answer, error))
    await crew.open()
    agent = crew.again(agent)
    record = await crew.reaches(agent, S.FAILED if failed else S.TERMINATED)
    assert await outcomes(crew, agent) == [AttemptOutcome.ERROR if failed else AttemptOutcome.CLEAN]
    assert record.error_message == ("exit code 3" if failed else None)
    assert crew.stage.said.count("ran a") == 1


# --- killed managers ---------------------------------------------------------------------------------


async def at_work(crew: Crew) -> dict[str, Any]:
    """An agent in every situation that goes on without its manager."""
    idle, busy, waits, held, frozen = [await crew.start(restart_policy="none") for _ in range(5)]
    pids = [(await agent.ask(do("know")))["pid"] for agent in (idle, busy, waits, held, frozen)]
    await idle.ask(do("count", what="x"), id="done before")
    await crew.busy(busy, id="r-1")
    crew.begin(waits.ask(do("ask"), id="r-1"))
    await crew.wait_of(waits)
    await held.pause("hold", resume_after=HOUR)
    await crew.busy(frozen, id="r-1")
    await frozen.pause("freeze")
    await crew.reaches(busy, S.PROCESSING)
    ids = [agent.instance_id for agent in (idle, busy, waits, held, frozen)]
    return {"ids": ids, "pids": pids}


async def test_a_killed_manager_costs_no_work(home: Path, stage: Stage, level: Any) -> None:
    crew = Crew(home, ManualClock(datetime.now(UTC)), stage, level)
    with swept(home):
        made = await killed(at_work, crew)
        assert all(lives(pid) for pid in made["pids"])
        async with opened(crew):
            idle, busy, waits, held, frozen = (crew.manager.handle(UUID(one)) for one in made["ids"])
            await crew.reaches(idle, S.WAITING)  # its answer was durable when the manager died, its state perhaps not
            states = [(await agent.record()).state for agent in (idle, busy, waits, held, frozen)]
            assert states == [S.WAITING, S.PROCESSING, S.WAITING, S.SUSPENDED, S.SUSPENDED]
            assert await idle.ask(do("count", what="x"), id="done before") == 1
            joined = [crew.begin(agent.ask(do(what), id="r-1")) for agent, what in ((busy, "hang"), (waits, "ask"))]
            wait = await crew.wait_of(waits)
            await crew.manager.answer(wait.wait_id, "go")
            assert await joined[1] == ["go", None]
            await frozen.resume()
            thawed = crew.begin(frozen.ask(do("hang"), id="r-1"))
            await held.resume()
            crew.stage.release("work")
            assert [await joined[0], await thawed] == ["let go", "let go"]
            assert [await pid_of(agent) for agent in (idle, busy, waits, held, frozen)] == made["pids"]
            assert stage.said.count("initialize") == 5
            assert stage.said.count("began") == 2
            assert stage.said.count("executed x") == 1
        assert not any(lives(pid) for pid in made["pids"])


# --- definitions that are not here -------------------------------------------------------------------

_MODULE = """
from lifecycle_agents import Actor

class Elsewhere(Actor):
    agent_name = "elsewhere"
"""


async def test_an_agent_whose_class_cannot_be_imported_lives_on_and_waits_for_it_to_come_back(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "elsewhere_agents.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(str(folder))
    found = __import__("elsewhere_agents").Elsewhere
    agent = await crew.start(agent=found, restart_policy=IMMEDIATE)
    await crew.close(keep=True)
    sys.modules.pop("elsewhere_agents")
    sys.path.remove(str(folder))
    registry = AgentRegistry()
    await crew.open(registry=registry)
    agent = crew.again(agent)
    assert await agent.ask(do("echo", value=1)) == 1
    with pytest.raises(AgentNotFoundError, match="register it, then try again"):
        await agent.restart()
    assert await agent.ask(do("echo", value=1)) == 1, "it was refused before anything was stopped"
    await crew.crash(agent)
    assert await crew.state(agent) is S.FAILED
    assert "not registered" in " ".join((await agent.why()).evidence)
    sys.path.insert(0, str(folder))
    registry.register(__import__("elsewhere_agents").Elsewhere)
    await crew.reaches(agent, S.READY, 2)
    await agent.stop()
    shutil.rmtree(folder)
