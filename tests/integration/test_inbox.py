"""The inbox: a row for each thing that needs a person, as long as its cause lasts, the oldest first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lifecycle_ground import THREAD, Crew, S, at, do, until
from loop_ground import LoopGround
from tasks_ground import TaskGround, ground, repository

import ostler
from ostler import AgentLifecycleManager, AgentSpawnOptions, InboxKind, InboxRow, Permission, SpawnRequest, TaskState

__all__ = ["ground", "repository"]  # fixtures
pytestmark = pytest.mark.anyio


async def only_row(manager: AgentLifecycleManager) -> InboxRow:
    (row,) = await manager.inbox()
    return row


@at(THREAD)
async def test_a_question_is_a_row_until_it_is_answered(crew: Crew) -> None:
    assert await crew.manager.inbox() == []
    agent = await crew.start(name="ada")
    call = crew.begin(agent.ask(do("ask")))
    wait = await crew.wait_of(agent)
    row = await only_row(crew.manager)
    assert row == InboxRow(
        kind=InboxKind.QUESTION,
        key="ada",
        since=wait.created_at,
        sentence="asks: which colour?",
        next="ostler answer ada yes",
    )
    assert await crew.as_principal(permissions=(Permission.AGENTS_READ,)).inbox() == [], "it is of another owner"
    await crew.manager.answer(wait.wait_id, "done", {"colour": "green"})
    await call
    assert await crew.manager.inbox() == []


@at(THREAD)
async def test_an_agent_that_asks_twice_is_answered_by_the_ids_of_its_waits(crew: Crew) -> None:
    agent = await crew.start(name="ada", resource_limits={"max_concurrent_tasks": 2})
    for _ in range(2):
        crew.begin(agent.ask(do("ask")))

    async def has_asked_twice() -> bool:
        return len(await agent.waits()) == 2

    await until(has_asked_twice)
    waits = await crew.manager.open_waits()
    steps = {f"ostler answer {wait.wait_id} yes" for wait in waits}
    assert {row.next for row in await crew.manager.inbox()} == steps


@at(THREAD)
async def test_an_agent_that_nothing_restarts_is_a_row_until_it_is_restarted_or_removed(crew: Crew) -> None:
    policy = {"type": "linear", "max_retries": 1, "initial_delay": 1}
    first = await crew.start(name="first")
    second = await crew.start(name="second", restart_policy=policy)
    await crew.crash(first)
    await crew.crash(second)
    await crew.reaches(second, S.FAILED)
    assert [row.key for row in await crew.manager.inbox()] == ["first"], "the other one comes back by itself"
    await crew.comes_back(second, 2, 5)
    await crew.crash(second)
    rows = await crew.manager.inbox()
    assert [(row.kind, row.key, row.next) for row in rows] == [
        (InboxKind.FAILED, "first", "ostler why first"),
        (InboxKind.FAILED, "second", "ostler why second"),
    ]
    assert rows[0].since == (await first.record()).terminated_at
    assert (await first.record()).error_message == rows[0].sentence
    await first.restart()
    await crew.manager.remove("second")
    assert await crew.manager.inbox() == []


async def test_what_a_terminal_has_shown_is_no_row(ground: TaskGround) -> None:
    """`ostler run` in the foreground shows how its agent ends."""
    false = ground.manager.registry.register(ostler.CommandSpec(argv=("false",)), name="false")
    for job in ({"request": "", "attended": True}, {"request": ""}):
        options = AgentSpawnOptions(isolation_level=ostler.IsolationLevel.PROCESS)
        request = SpawnRequest(agent_definition_id=false.id, options=options, job=job)
        instance = await ground.manager.spawn(request)
        await ground.manager.handle(instance.instance_id).ended()
    assert (await only_row(ground.manager)).key == instance.name


async def test_work_that_is_done_is_a_row_until_it_is_reviewed(ground: TaskGround) -> None:
    first = await ground.done("echo more >> a.txt")
    second = await ground.done("echo b2 > b.txt")
    rows = await ground.manager.inbox()
    assert [(row.kind, row.key, row.since, row.next) for row in rows] == [
        (InboxKind.REVIEW, task.key, task.completed_at, f"ostler diff {task.key}") for task in (first, second)
    ]
    assert rows[0].sentence == "is done: echo more >> a.txt"
    await ground.tasks.accept(first.key)
    await ground.tasks.reject(second.key, reason="not needed")
    assert await ground.manager.inbox() == []
    await ground.tasks.undo(first.key)
    assert (await only_row(ground.manager)).key == first.key


async def test_a_task_whose_attempts_are_used_up_is_a_row_until_it_is_released(ground: TaskGround) -> None:
    task = await ground.tasks.run((await ground.add("echo no luck >&2; exit 3", max_failures=1)).key)
    assert task.state is TaskState.QUEUED
    row = await only_row(ground.manager)
    assert (row.kind, row.key, row.next) == (InboxKind.PARKED, task.key, f"ostler task requeue {task.key}")
    assert row.sentence.startswith("failed once, at last: ")
    assert "ostler" not in row.sentence
    await ground.tasks.requeue(task.key)
    assert await ground.manager.inbox() == []


async def test_a_pull_request_is_a_row_when_ci_has_passed(loop_ground: LoopGround) -> None:
    await loop_ground.add(loop={"ci": ["true"]})
    loop_ground.steps("echo two > a.txt; pr 'please look'")
    async with loop_ground.running() as running:
        await loop_ground.wait()
        row = await only_row(loop_ground.manager)
        assert (row.kind, row.key, row.next) == (InboxKind.REVIEW, "T001", "ostler pr merge 1")
        assert row.sentence.startswith("pull request #1 waits for its merge: ")
        await loop_ground.loops.merge(1)
        await running
    assert await loop_ground.manager.inbox() == []


async def test_the_question_of_a_task_is_a_row(loop_ground: LoopGround) -> None:
    await loop_ground.add()
    loop_ground.steps("blocked 'human: may I delete it?'", "complete")
    async with loop_ground.running() as running:
        wait = await loop_ground.wait()
        row = await only_row(loop_ground.manager)
        assert (row.kind, row.key, row.sentence) == (InboxKind.QUESTION, "T001", "asks: may I delete it?")
        assert row.next == "ostler answer T001 yes"
        (task,) = await loop_ground.orchestrator.list_tasks()
        step = await loop_ground.orchestrator.next_step(task)
        assert step == "answer: ostler answer T001 yes; may I delete it?"
        await loop_ground.orchestrator.answer(wait.wait_id, "yes")
        await running
    row = await only_row(loop_ground.manager)
    assert (row.kind, row.next) == (InboxKind.REVIEW, "ostler diff T001")


async def test_broken_settings_are_a_row_until_they_are_mended(tmp_path: Path) -> None:
    settings = tmp_path / "ostler.toml"
    async with ostler.open(tmp_path / ".ostler") as manager:
        assert await manager.inbox() == []
        settings.write_text("[tasks]\nat-onec = 3\n")
        os.utime(settings, (1_700_000_000, 1_700_000_000))
        row = await only_row(manager)
        assert (row.kind, row.key, row.next) == (InboxKind.SETTINGS, "ostler.toml", "ostler agents validate")
        assert "at-onec is not known" in row.sentence
        assert row.since.timestamp() == 1_700_000_000
        settings.write_text("[tasks]\nat-once = 3\n")
        assert await manager.inbox() == []
