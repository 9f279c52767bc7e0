"""The queue of tasks: submitted once, claimed by exactly one attempt, held, cancelled, requeued, listed, counted."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from isolation.ground import until
from tasks_ground import SHELL, T, TaskGround, ground, list_keys, opened, repository, until_async, working_queue
from workdirs_ground import git

from ostler import (
    AuthorizationError,
    ConflictError,
    IdempotencyConflictError,
    InvalidOperationError,
    Principal,
    Role,
    Task,
    TaskFilter,
    TaskNotFoundError,
    TaskSettings,
    TaskStateChangedEvent,
    ValidationError,
    Wait,
    WaitKind,
)
from ostler.cli.table import Table
from ostler.cli.tasks import COLUMNS
from ostler.model.task import TASK_TRANSITIONS
from ostler.store import tasks as rows
from ostler.testing.clock import ManualClock

__all__ = ["ground", "repository"]

pytestmark = pytest.mark.anyio


# --- submit ------------------------------------------------------------------------------------------


async def test_a_task_is_queued_with_the_next_number_and_told_to_log_and_audit(ground: TaskGround) -> None:
    first, second = await ground.add("true"), await ground.add("true", checks=["true"], tags=["Night"])
    assert [first.key, second.key] == ["T001", "T002"]
    assert (second.state, second.checks, second.tags) == (T.QUEUED, ("true",), ("night",))
    assert await ground.moves(first) == [(None, T.QUEUED)]
    assert [entry.subject for entry in await ground.audited("task.add")] == ["task:T001", "task:T002"]
    assert (await ground.get("t002")) == second


async def test_a_list_of_tasks_is_queued_as_a_whole(ground: TaskGround) -> None:
    entries: list[dict[str, object]] = [{"task": "true", "key": "parser"}, {"task": "true", "depends_on": ["parser"]}]
    added = await ground.tasks.submit_all(entries, agent=SHELL, near=ground.repository, idempotency_key="night")
    assert [(task.key, task.depends_on) for task in added] == [("parser", ()), ("T001", ("parser",))]
    again = await ground.tasks.submit_all(entries, agent=SHELL, near=ground.repository, idempotency_key="night")
    assert again == added


async def test_of_a_list_with_a_mistake_no_task_is_queued(ground: TaskGround) -> None:
    wrong: list[dict[str, object]] = [
        {"task": "true"},
        {"task": " ", "agent": "nobody"},
        {"task": "true", "tags": [""]},
    ]
    with pytest.raises(ValidationError) as caught:
        await ground.tasks.submit_all(wrong)
    fields = [fault.message.split()[0] for fault in caught.value.faults]
    assert fields == ["tasks.1.agent", "tasks.2.tags.0"]
    with pytest.raises(ValidationError, match=r"tasks\.1\.depends_on must be keys of tasks that exist"):
        await ground.tasks.submit_all([{"task": "true"}, {"task": "true", "depends_on": ["later"]}])
    with pytest.raises(ValidationError, match=r"tasks\.1\.key cannot be used: there is a task twice already"):
        await ground.tasks.submit_all([{"task": "true", "key": "twice"}] * 2)
    assert await list_keys(ground) == []


async def test_the_same_idempotency_key_gives_the_same_task(ground: TaskGround) -> None:
    first = await ground.add("true", idempotency_key="once")
    assert await ground.add("true", idempotency_key="once") == first
    with pytest.raises(IdempotencyConflictError, match="once"):
        await ground.add("false", idempotency_key="once")
    assert len(await ground.tasks.list_tasks()) == 1


async def test_a_repository_without_a_commit_is_refused_when_a_task_is_added(
    ground: TaskGround, tmp_path: Path
) -> None:
    """It used to fail three times at night, with the same sentence in the record."""
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q", "-b", "main")
    with pytest.raises(InvalidOperationError, match="has no commit; make a first one"):
        await ground.add("x", near=empty)
    assert await list_keys(ground, include_finished=True) == []


async def test_a_task_that_an_agent_adds_in_its_workdir_is_about_the_checkout_it_came_from(ground: TaskGround) -> None:
    first = await ground.done("mkdir -p sub; echo 1 > a.txt")
    second = await ground.done("echo 2 > b.txt", near=ground.place(first) / "sub")
    assert (second.near, second.workdir is not None) == (str(ground.repository), True)


@pytest.mark.parametrize(
    ("text", "more", "field"),
    [
        ("", {}, "task"),
        (" \n ", {}, "task"),
        ("x" * 100_001, {}, "task"),
        ("x", {"agent": "nobody"}, "agent"),
        ("x", {"depends_on": ["T404"]}, "depends_on"),
        ("x", {"priority": "urgent"}, "priority"),
        ("x", {"checks": [" "]}, "checks"),
        ("x", {"checks": ["true"] * 21}, "checks"),
        ("x", {"timeout": "0s"}, "timeout"),
        ("x", {"max_failures": 1001}, "max_failures"),
        ("x", {"key": "../up"}, "key"),
        ("x", {"key": "/etc"}, "key"),
        ("x", {"key": ".git"}, "key"),
        ("x", {"key": "a\0b"}, "key"),
        ("x", {"key": "a\rb"}, "key"),
        ("x", {"key": "x" * 300}, "key"),
        ("x", {"key": "\u202eT1"}, "key"),
    ],
)
async def test_what_cannot_be_a_task_is_refused_with_the_field(
    ground: TaskGround, text: str, more: dict[str, object], field: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        await ground.add(text, **more)
    assert str(caught.value).startswith(field)
    assert await ground.tasks.list_tasks() == []


async def test_a_key_of_the_caller_is_taken_once(ground: TaskGround) -> None:
    assert (await ground.add("true", key="T001")).key == "T001"
    with pytest.raises(ConflictError, match="T001"):
        await ground.add("true", key="T001")
    assert (await ground.add("true")).key == "T002"


async def test_a_cycle_of_dependencies_is_refused(ground: TaskGround) -> None:
    first = await ground.add("true")
    second = await ground.add("true", depends_on=[first.key])
    third = await ground.add("true", depends_on=[second.key])
    with pytest.raises(ValidationError, match="must not lead back to T001"):
        await ground.tasks.set_dependencies(first.key, [third.key])
    with pytest.raises(ValidationError, match="must not lead back to T001"):
        await ground.tasks.set_dependencies(first.key, [first.key])
    await ground.tasks.cancel(first.key)
    with pytest.raises(ValidationError, match="rejected"):
        await ground.add("true", depends_on=[first.key])


# --- claim -------------------------------------------------------------------------------------------


async def test_of_many_that_claim_one_gets_it(ground: TaskGround) -> None:
    task = await ground.add("true")
    claims = await asyncio.gather(*(ground.manager.store.run(rows.claim_task, task) for _ in range(20)))
    won = [one for one in claims if one is not None]
    assert [(one.state, one.attempt) for one in won] == [(T.RUNNING, 1)]
    with pytest.raises(InvalidOperationError, match="is running; only a queued task can be run"):
        await ground.tasks.run(task.key)


async def test_the_most_urgent_is_claimed_first_and_then_the_oldest(ground: TaskGround) -> None:
    for priority in ("normal", "low", "critical", "normal", "high"):
        await ground.add("true", priority=priority)
    found = await ground.manager.store.read(rows.claimable_tasks, ground.manager.principal.workspace_id)
    assert [task.key for task in found] == ["T003", "T005", "T001", "T004", "T002"]


async def test_one_that_depends_on_another_waits_until_that_is_accepted(ground: TaskGround) -> None:
    first = await ground.add("echo 1 > a.txt")
    second = await ground.add("cat a.txt", depends_on=[first.key])
    with pytest.raises(InvalidOperationError, match="T002 waits for T001"):
        await ground.tasks.run(second.key)
    await ground.tasks.run(first.key)
    assert await ground.tasks.unmet(second) == ["T001"], "completed is not accepted"
    await ground.tasks.accept(first.key)
    done = await ground.tasks.run(second.key)
    assert (done.state, done.summary) == (T.COMPLETED, "1"), "it begins with the accepted work"


async def test_a_dependency_may_be_named_in_any_case(ground: TaskGround) -> None:
    await ground.add("true")
    second = await ground.add("true", depends_on=["t001"])
    assert second.depends_on == ("T001",)
    assert await ground.tasks.unmet(second) == ["T001"]
    third = await ground.tasks.set_dependencies((await ground.add("true")).key, ["t002", "T002"])
    assert third.depends_on == ("T002",)


async def test_one_that_is_held_or_names_no_agent_is_not_run(ground: TaskGround) -> None:
    held = await ground.add("true", hold=True)
    with pytest.raises(InvalidOperationError, match="ostler task requeue T001"):
        await ground.tasks.run(held.key)
    await ground.tasks.requeue(held.key)
    assert (await ground.tasks.run(held.key)).state is T.COMPLETED
    with pytest.raises(InvalidOperationError, match="names no agent"):
        await ground.tasks.run((await ground.add("true", agent=None)).key)
    with pytest.raises(TaskNotFoundError, match="T404"):
        await ground.tasks.run("T404")


# --- the daemon's queue ------------------------------------------------------------------------------


async def test_the_queue_works_what_names_an_agent_as_places_are_free(repository: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"echo x >> {tmp_path}/begun; while ! test -e {gate}; do sleep 0.01; done"
    async with opened(repository, tmp_path / "home", settings=TaskSettings(at_once=2)) as ground:
        tasks = [await ground.add(script) for _ in range(3)]
        idle = await ground.add("true", agent=None)
        held = await ground.add("true", hold=True)
        async with working_queue(ground):
            for task in tasks[:2]:
                await ground.until_state(task, T.RUNNING)
            assert (await ground.get(tasks[2])).state is T.QUEUED, "there are two places"
            later = await ground.add(script, priority="critical")
            gate.touch()
            for task in (*tasks, later):
                await ground.until_state(task, T.COMPLETED)
        assert {(await ground.get(one)).state for one in (idle, held)} == {T.QUEUED}
        begun = sorted([later, tasks[2]], key=lambda one: one.key)
        times = [(await ground.get(one)).started_at for one in begun]
        assert times[1] < times[0], "the critical one was begun first"  # type: ignore[operator]


async def test_with_no_place_nothing_is_begun(repository: Path, tmp_path: Path) -> None:
    async with opened(repository, tmp_path / "home", settings=TaskSettings(at_once=0)) as ground:
        task = await ground.add("true")
        async with working_queue(ground) as queue:
            await queue._begin_some()  # noqa: SLF001 - what it does at each look
            assert (await ground.get(task)).state is T.QUEUED


async def test_a_wait_of_a_task_ends_when_it_is_due(repository: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", clock=clock) as ground:
        task = await ground.add("true")
        await open_wait(ground, task, due_in=timedelta(seconds=20))
        with pytest.raises(InvalidOperationError, match="T001 waits: usage limit"):
            await ground.tasks.run(task.key)
        async with working_queue(ground):
            clock.advance(19)
            await asyncio.sleep(0)
            assert [wait.reason for wait in await ground.tasks.waits(task.key)] == ["usage limit"]

            async def ended() -> bool:
                clock.advance(1)
                return (await ground.get(task)).state is T.COMPLETED

            await until_async(ended)
        assert await ground.tasks.waits(task.key) == []


async def test_a_wait_can_be_ended_by_a_person_once(ground: TaskGround) -> None:
    task = await ground.add("true")
    wait_id = await open_wait(ground, task, due_in=timedelta(hours=9))
    await ground.tasks.answer(wait_id, "go on")
    with pytest.raises(InvalidOperationError, match="ended already"):
        await ground.tasks.answer(wait_id, "go on")
    assert (await ground.tasks.run(task.key)).state is T.COMPLETED


async def open_wait(ground: TaskGround, task: Task, *, due_in: timedelta) -> UUID:
    wait = Wait(
        wait_id=ground.manager.new_id(),
        workspace_id=task.workspace_id,
        kind=WaitKind.QUOTA,
        task_id=task.task_id,
        reason="usage limit",
        created_at=ground.manager.now(),
        due_at=ground.manager.now() + due_in,
    )
    return (await ground.manager.store.run(rows.open_task_wait, task, wait)).wait_id


# --- cancel, requeue ---------------------------------------------------------------------------------


async def test_a_queued_task_is_cancelled_for_good(ground: TaskGround) -> None:
    task = await ground.add("true")
    done = await ground.tasks.cancel(task.key, reason="not needed")
    assert (done.state, done.error) == (T.REJECTED, "not needed")
    assert await ground.tasks.cancel(task.key, reason="again") == done, "the first reason stays"
    for verb in (ground.tasks.requeue, ground.tasks.run, ground.tasks.accept, ground.tasks.undo):
        with pytest.raises(InvalidOperationError, match="T001 is rejected"):
            await verb(task.key)


async def test_every_move_that_the_table_does_not_have_is_refused(ground: TaskGround) -> None:
    """From every state to every other."""
    for state in T:
        for to in T:
            task = (await ground.add("true")).evolve(state=state)
            if to is state or to in TASK_TRANSITIONS[state]:
                continue
            with pytest.raises(InvalidOperationError, match=f"is {state} and cannot become {to}"):
                await ground.manager.store.run(rows.change_task, task, to=to)


async def test_a_stale_copy_changes_nothing(ground: TaskGround) -> None:
    task = await ground.add("true")
    await ground.tasks.cancel(task.key)
    with pytest.raises(ConflictError, match="was changed meanwhile"):
        await ground.manager.store.run(rows.change_task, task, {"error": "late"})
    assert (await ground.get(task)).error == "cancelled"


# --- looking -----------------------------------------------------------------------------------------


async def test_tasks_are_listed_by_state_agent_tag_text_and_time(repository: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", clock=clock) as ground:
        begin = clock.wall()
        await ground.add("mend the Parser", tags=["bug"])
        clock.advance(60)
        await ground.add("write 100% of it", agent=None, tags=["docs"])
        await ground.tasks.cancel("T001")
        assert await list_keys(ground) == ["T002"]
        assert await list_keys(ground, include_finished=True) == ["T002", "T001"]
        assert await list_keys(ground, state="rejected") == ["T001"]
        assert await list_keys(ground, agent=SHELL, include_finished=True) == ["T001"]
        assert await list_keys(ground, tag="DOCS") == ["T002"]
        assert await list_keys(ground, text="pars", include_finished=True) == ["T001"]
        assert await list_keys(ground, text="0%") == ["T002"]
        half = begin + timedelta(seconds=30)
        assert await list_keys(ground, created_from=half.isoformat(), include_finished=True) == ["T002"]
        assert await list_keys(ground, created_until=half.isoformat(), include_finished=True) == ["T001"]
        assert await list_keys(ground, include_finished=True, limit=1, offset=1) == ["T001"]
        with pytest.raises(ValidationError, match="limit"):
            await ground.tasks.list_tasks(TaskFilter(limit=0))


async def test_statistics_know_the_success_rate_and_the_average_duration(repository: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", clock=clock) as ground:
        empty = await ground.tasks.statistics()
        assert (empty.success_rate, empty.average_duration) == (None, None)
        for seconds, end in ((10, "accept"), (30, "accept"), (50, "reject")):
            record = await ground.tasks.create_lifecycle(f"own-{seconds}", "by hand")
            record.state = T.RUNNING
            await ground.tasks.update_lifecycle(record)
            clock.advance(seconds)
            await ground.tasks.submit_result(record.agent_id, "done")
            verb = ground.tasks.accept_agentlet if end == "accept" else ground.tasks.reject_agentlet
            await verb(record.agent_id)
        await ground.add("true")
        found = await ground.tasks.statistics()
    assert found.success_rate == pytest.approx(2 / 3)
    assert found.average_duration == timedelta(seconds=30)
    assert found.by_state == {T.QUEUED: 1, T.RUNNING: 0, T.COMPLETED: 0, T.ACCEPTED: 2, T.REJECTED: 1}


# --- hooks -------------------------------------------------------------------------------------------


async def test_hooks_hear_every_move_after_its_commit_and_one_that_fails_stops_nothing(ground: TaskGround) -> None:
    heard: list[tuple[str, object, object]] = []

    def fails(event: TaskStateChangedEvent) -> None:
        raise RuntimeError(event.key)

    async def hears(event: TaskStateChangedEvent) -> None:
        kept = await ground.get(event.key)
        assert kept.version >= (event.version or 0)
        heard.append((event.key, event.previous_state, event.new_state))

    ground.tasks.on_change(fails)
    end = ground.tasks.on_change(hears)
    task = await ground.done("true")
    await ground.tasks.accept(task.key)
    moves = [(None, T.QUEUED), (T.QUEUED, T.RUNNING), (T.RUNNING, T.COMPLETED), (T.COMPLETED, T.ACCEPTED)]

    async def complete() -> bool:
        return len(heard) == len(moves)

    await until_async(complete)
    assert heard == [("T001", *move) for move in moves]
    end()
    await ground.tasks.undo(task.key)
    assert len(heard) == len(moves)


# --- who may -----------------------------------------------------------------------------------------


async def test_a_reader_may_look_and_do_nothing_else(ground: TaskGround) -> None:
    task = await ground.done("echo 1 > a.txt")
    space = ground.manager.principal.workspace_id
    reader = Principal(
        principal_id=ground.manager.new_id(),
        name="eve",
        roles=(Role.VIEWER,),
        workspace_id=space,
        created_at=ground.manager.now(),
    )
    tasks = ground.tasks.acting_as(ground.manager.acting_as(reader))
    assert (await tasks.get(task.key)).key == task.key
    assert "a.txt" in await tasks.diff(task.key)
    for refused in (
        tasks.submit("x"),
        tasks.run(task.key),
        tasks.cancel(task.key),
        tasks.requeue(task.key),
        tasks.send_back(task.key, "x"),
        tasks.accept(task.key),
        tasks.reject(task.key, reason="x"),
        tasks.undo(task.key),
        tasks.retire(task.key),
        tasks.unretire(task.key),
        tasks.cleanup_agent(task.key),
        tasks.delete_lifecycle(task.key),
        tasks.submit_result(task.key, "x"),
    ):
        with pytest.raises(AuthorizationError):
            await refused
    assert await ground.get(task) == task


async def test_a_task_reads_as_json_and_back(ground: TaskGround) -> None:
    task = await ground.done("echo 1 > a.txt", checks=["true"], timeout="45m")
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


async def test_a_queue_that_fails_by_a_fault_of_ours_is_shown_and_goes_on(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be dead, and nothing said so: tasks stayed queued for ever."""
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", clock=clock) as ground, working_queue(ground) as queue:
        with monkeypatch.context() as patch:

            async def break_down() -> None:
                raise RuntimeError("a fault")

            patch.setattr(queue, "_begin_some", break_down)
            queue.wake()
            await until(lambda: "the queue" in ground.tasks.tasks.failed_background)
        assert "RuntimeError('a fault')" in ground.tasks.tasks.failed_background["the queue"]
        task = await ground.add("true")

        async def is_done() -> bool:
            clock.advance(5)
            return (await ground.get(task)).state is T.COMPLETED

        await until_async(is_done)


# --- why ---------------------------------------------------------------------------------------------


async def test_why_says_what_a_task_waits_for_and_what_would_change_it(ground: TaskGround) -> None:
    tasks = ground.tasks
    first, held = await ground.add("exit 3", max_failures=2), await ground.add("true", hold=True)
    after, nameless = await ground.add("true", depends_on=[first.key]), await ground.add("true", agent=None)

    async def why(task: Task) -> str:
        answer = await tasks.why(task.key)
        assert answer.state is (await ground.get(task)).state
        return "\n".join((answer.verdict, *answer.evidence, *answer.what_would_change_it))

    assert await why(held) == "it is held back\n`ostler task requeue T002` releases it"
    assert (await why(after)).splitlines()[:2] == ["it waits for T001", "T001 is queued"]
    assert "nothing takes it up: it names no agent, and no crew takes it" in await why(nameless)
    assert "no queue is worked here" in await why(first)
    await tasks.run(first.key)
    assert (await why(first)).startswith("it failed and is tried again\nattempt 1 failed (1 of 2): sh failed with exit")
    assert "it goes on at" in await why(first)
    await tasks.run(first.key)
    assert (await why(first)).startswith("it waits for you\nfailed 2 times, at last: sh failed with exit code 3")
    assert "`ostler reject T001 -m WHY` ends it" in await why(first)
    await tasks.reject(first.key, reason="no")
    assert "T001 will never be accepted; `ostler task cancel T003` ends it" in await why(after)
    assert (await why(await ground.done("true"))).startswith("it is done and waits for your review")


async def test_the_list_says_first_what_to_do_with_a_parked_task_or_when_it_goes_on(ground: TaskGround) -> None:
    task = await ground.add("exit 3", max_failures=2, backoff="10m")

    async def row() -> str:
        record = await ground.get(task)
        shown = {**record.to_dict(), "title": record.title, "next": await ground.tasks.next_step(record)}
        return Table(COLUMNS, [shown], 80).lines()[1]

    await ground.tasks.run(task.key)
    assert re.search(r"  again in [\w ]+; attempt 1 failed", await row())
    await ground.tasks.run(task.key)
    assert "  go on: ostler task requeue T001; failed 2 times" in await row()


async def test_why_names_what_a_queued_task_is_behind(repository: Path, tmp_path: Path) -> None:
    async with opened(repository, tmp_path / "home", settings=TaskSettings(at_once=1)) as ground, working_queue(ground):
        first = await ground.add("while ! test -e go; do sleep 0.01; done")
        await ground.until_state(first, T.RUNNING)
        await ground.add("true", priority="high")
        last = await ground.add("true")
        answer = await ground.tasks.why(last.key)
        assert answer.verdict == "the only place of the queue is taken"
        assert answer.evidence == ("the queue works on T001", "before it is T002")
        assert ground.tasks.untaken(last) is None
        await until(ground.place(first).is_dir)
        (ground.place(first) / "go").touch()
        await ground.until_state(last, T.COMPLETED)


async def test_statistics_count_what_was_reviewed_and_what_is_parked(ground: TaskGround) -> None:
    accepted, turned_down = await ground.done("echo 1 > a.txt"), await ground.done("echo 2 > b.txt")
    await ground.tasks.accept(accepted.key)
    await ground.tasks.reject(turned_down.key, reason="no")
    await ground.tasks.cancel((await ground.add("true")).key)
    await ground.tasks.run((await ground.add("exit 3", max_failures=1)).key)
    counted = await ground.tasks.statistics()
    assert (counted.success_rate, counted.parked) == (0.5, 1), "one that was cancelled was never reviewed"
