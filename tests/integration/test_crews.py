"""Crews, line by line: how members are made, replaced and stopped, where they work, and what follows."""

from __future__ import annotations

import asyncio
import itertools
import random
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from crew_ground import Ground, coder, member, opened, register, repository, until

from ostler import (
    Agent,
    AgentNotFoundError,
    CrewAction,
    CrewPolicy,
    CrewStrategy,
    MemberState,
    Supervisor,
    TaskState,
    ValidationError,
)
from ostler.crews.factory import MemberFactory
from ostler.tasks.attempt import DAEMON_STOPPED

pytestmark = pytest.mark.anyio
_T = TaskState


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    async with opened(tmp_path) as ground:
        yield ground


async def view(supervisor: Supervisor, name: str = "coder") -> dict[str, object]:
    crew = next(one for one in await supervisor.list_crews() if one.name == name)
    return {one.member: (one.state, one.generation) for one in crew.members}


class Typist(Agent):
    async def process(self, request: Any) -> Any:
        return request


# --- creation, 1 to 7 --------------------------------------------------------------------------------


async def test_a_member_is_made_from_its_id_and_its_type(ground: Ground) -> None:
    factory = MemberFactory(
        ground.manager.registry, ground.supervisor().factory.get_config, ground.project, crews={"coder": coder()}
    )
    plan = factory.plan("coder-1", "coder")
    assert (plan.agent_id, plan.settings.agent) == ("coder-1", "fixer")
    ground.manager.registry.register(Typist, name="typist")
    assert factory.new_agent("coder-1", "typist").agent_id == "coder-1"
    with pytest.raises(AgentNotFoundError, match="did you mean fixer"):
        factory.new_agent("coder-1", "fixr")
    for bad in ("../coder", "a/b", "..", ""):
        with pytest.raises(ValidationError):
            factory.plan(bad, "coder")


async def test_a_member_reads_model_and_directory_from_the_settings(ground: Ground) -> None:
    (ground.project / "ostler.toml").write_text(
        '[orchestrator]\nworkdir = "desks"\n[crew.coder]\nagent = "fixer"\nmodel = "small"\nbackoff = "0s"\n'
    )
    key = await ground.add("write")
    async with ground.supervisor():
        task = await ground.becomes(key, _T.COMPLETED)
    (instance,) = await ground.instances()
    assert instance.job is not None
    assert instance.job["request"]["model"] == "small"
    assert task.workdir is not None
    assert task.workdir["path"] == str(ground.project / ".ostler" / "desks" / "coder-1")


async def test_the_directory_is_fresh_before_the_agent_starts(ground: Ground) -> None:
    place = ground.project / ".ostler" / "work" / "coder-1"
    place.mkdir(parents=True)
    (place / "stale.txt").write_text("of somebody")
    key = await ground.add("write")
    async with ground.supervisor({"coder": coder()}):
        await ground.becomes(key, _T.COMPLETED)
    assert (ground.stage / f"{key}.found").read_text() == "", "it is new and empty"
    assert (place / "made.txt").read_text() == f"{key} by coder-1\n"
    assert stat.S_IMODE(place.stat().st_mode) == 0o755
    entry = await ground.tasks.tasks.workdirs.find("coder-1")
    assert entry is not None
    assert entry.files == 1, "what was there is in the vault"


async def test_each_member_has_its_own_scope_and_they_work_side_by_side(ground: Ground) -> None:
    keys = [await ground.add("gate") for _ in range(2)]
    async with ground.supervisor({"coder": coder(2)}) as supervisor:
        for key in keys:
            await until(ground.begun(key))
        assert supervisor.agent_types == {"coder-1": "coder", "coder-2": "coder"}
        assert set(supervisor.agent_contexts) == set(supervisor.agents) == {"coder-1", "coder-2"}
        live = await supervisor.agents["coder-1"].record()
        assert (live.crew, live.agent_id, live.generation) == ("coder", "coder-1", 1)
        assert any("coder-1 of crew coder" in line for line in (await ground.manager.why(live.instance_id)).evidence)
        for key in keys:
            ground.let_go(key)
            await ground.becomes(key, _T.COMPLETED)
    assert {(await ground.task(key)).member for key in keys} == {"coder-1", "coder-2"}


# --- restart, 1 to 7 ---------------------------------------------------------------------------------


async def test_done_leads_to_a_fresh_instance_of_the_same_id(ground: Ground) -> None:
    keys = [await ground.add("write") for _ in range(3)]
    async with ground.supervisor({"coder": coder()}) as supervisor:
        for key in keys:
            await ground.becomes(key, _T.COMPLETED)
        await until(lambda: not supervisor.agents)
        assert await view(supervisor) == {"coder-1": (MemberState.IDLE, 3)}
    found = await ground.instances()
    assert [(one.agent_id, one.generation) for one in found] == [("coder-1", 1), ("coder-1", 2), ("coder-1", 3)]
    assert len({one.instance_id for one in found}) == 3
    assert [(ground.stage / f"{key}.found").read_text() for key in keys] == ["", "", ""]
    first = await ground.task(keys[0])
    assert first.workdir is None
    assert first.vault is not None, "what the last generation left is in the vault, under the key of its task"
    assert "made.txt" in await ground.tasks.diff(keys[0])
    back = await ground.tasks.unretire(keys[0])
    assert back.workdir is not None
    assert Path(back.workdir["path"], "made.txt").exists()


async def test_an_error_puts_the_task_back_and_another_member_does_it(ground: Ground) -> None:
    key = await ground.add("fail-once", near=repository(ground.project / "repo"))
    async with ground.supervisor({"coder": coder(2)}) as supervisor:
        task = await ground.becomes(key, _T.COMPLETED)
        await until(lambda: len(supervisor.agent_contexts) == 2)
    assert len(set(ground.members_of(key))) == 2, "a retried task prefers another member"
    assert (task.attempt, task.failures) == (2, 0)
    assert "it broke" in task.comments[0]
    assert "made.txt" in (task.changed_files or ())


async def test_alone_its_next_generation_tries_again(ground: Ground) -> None:
    key = await ground.add("fail-once")
    async with ground.supervisor({"coder": coder(1)}):
        await ground.becomes(key, _T.COMPLETED)
    assert ground.members_of(key) == ["coder-1", "coder-1"]
    assert [one.generation for one in await ground.instances()] == [1, 2]


@pytest.mark.parametrize("way", ["fail", "crash"])
async def test_every_death_is_one_restart(ground: Ground, way: str) -> None:
    """The origin raised two signals for one death, and started two twins with one id."""
    key = await ground.add(way, max_failures=3)
    async with ground.supervisor({"coder": coder(1)}) as supervisor:
        await ground.parked(key)
        await until(lambda: not supervisor.agents)
        assert await view(supervisor) == {"coder-1": (MemberState.IDLE, 3)}
    found = await ground.instances()
    assert [one.generation for one in found] == [1, 2, 3], "as many generations as deaths, and no twin"
    for earlier, later in itertools.pairwise(found):
        assert earlier.terminated_at is not None
        assert earlier.terminated_at <= later.created_at, "the old one was gone before the next began"


async def test_a_clean_up_that_meets_a_restart_strands_nothing(ground: Ground) -> None:
    """The origin forgot the type of a member before its restart had read it."""
    keys = [await ground.add("fail-once") for _ in range(4)]
    async with ground.supervisor({"coder": coder(3)}) as supervisor:
        for count in (0, 3, 1, 3, 0, 2):
            await supervisor.scale("coder", count)
            await asyncio.sleep(0)
        for key in keys:
            await ground.becomes(key, _T.COMPLETED)
        await until(lambda: len(supervisor.agent_types) == 2)
        assert set(supervisor.agent_types) == {"coder-1", "coder-2"}


async def test_a_task_that_times_out_is_an_error(ground: Ground) -> None:
    key = await ground.add("hang", timeout=1, max_failures=1)
    async with ground.supervisor({"coder": coder(1)}) as supervisor:
        wait = await ground.parked(key)
        crew = (await supervisor.list_crews())[0]
    assert member(crew, "coder-1").error == "its job ran longer than its time"
    assert wait.detail["attempts"][0]["outcome"] == "timeout"


async def test_refused_too_often_is_an_error_but_refused_once_is_none(ground: Ground) -> None:
    key = await ground.add("write", checks=["false"], max_failures=2)
    async with ground.supervisor({"coder": coder(1, on_error="stop")}) as supervisor:
        await ground.parked(key)
        await until(lambda: _is(supervisor, "coder-1", MemberState.STOPPED))
    assert ground.members_of(key) == ["coder-1", "coder-1"], "the first refusal did not stop the member"


async def _is(supervisor: Supervisor, name: str, state: MemberState) -> bool:
    return member((await supervisor.list_crews())[0], name).state is state


# --- Ctrl+C, 1 to 5, and the tree of scopes ----------------------------------------------------------


async def test_stopping_ends_every_agent_and_gives_its_task_back(ground: Ground) -> None:
    keys = [await ground.add("hang") for _ in range(2)]
    waiting = await ground.add("write")
    async with ground.supervisor({"coder": coder(2)}) as supervisor:
        for key in keys:
            await until(ground.begun(key))
        stopped = await supervisor.stop()
        assert [(one.is_up, one.members) for one in stopped] == [(False, ())]
        assert len({**supervisor.agents, **supervisor.agent_contexts, **supervisor.agent_types}) == 0
        assert await ground.living() == [], "no process is left"
        for key in (*keys, waiting):
            task = await ground.task(key)
            assert (task.state, task.failures, task.is_held) == (_T.QUEUED, 0, False), "and nothing was spent"
        assert ground.members_of(waiting) == [], "no new work while it drained"
        assert (ground.project / ".ostler" / "work" / "coder-1" / "made.txt").exists(), "the directory is kept"


async def test_a_second_request_forces_at_once(ground: Ground) -> None:
    key = await ground.add("deaf")
    async with ground.supervisor({"coder": coder(1)}) as supervisor:
        await until(ground.begun(key))
        first = asyncio.create_task(supervisor.stop())
        await until(lambda: _is(supervisor, "coder-1", MemberState.STOPPING))
        async with asyncio.timeout(60):  # it would be asked for 10 s
            await supervisor.stop(force=True)
            await first
        assert await ground.living() == []
    assert (await ground.task(key)).state is _T.QUEUED


async def test_a_stop_does_not_wait_for_long_checks(ground: Ground) -> None:
    key = await ground.add("write", checks=[f"touch {ground.stage}/checking; tail -f /dev/null"])
    async with ground.supervisor({"coder": coder(1)}) as supervisor:
        await until((ground.stage / "checking").exists)
        await supervisor.stop(force=True)
        task = await ground.task(key)
        assert (task.state, task.failures) == (_T.QUEUED, 0)
        assert await ground.manager.get_active_instances() == [], "the check was ended with it"


async def test_cancelling_one_member_leaves_the_others(ground: Ground) -> None:
    keys = [await ground.add("gate") for _ in range(2)]
    async with ground.supervisor({"coder": coder(2)}) as supervisor:
        for key in keys:
            await until(ground.begun(key))
        other = supervisor.agents["coder-2"].instance_id
        ours = str((await supervisor.agents["coder-1"].record()).task_id)
        supervisor.agent_contexts["coder-1"].cancel()
        await until(lambda: member_generation(supervisor, "coder-1", 2))
        assert supervisor.agents["coder-2"].instance_id == other
        for key in keys:
            ground.let_go(key)
            task = await ground.becomes(key, _T.COMPLETED)
            assert task.failures == 0
            assert task.attempt == (2 if str(task.task_id) == ours else 1)


async def member_generation(supervisor: Supervisor, name: str, generation: int) -> bool:
    return member((await supervisor.list_crews())[0], name).generation == generation


async def test_a_person_who_cancels_a_task_frees_its_member(ground: Ground) -> None:
    hung, after = await ground.add("hang"), await ground.add("write")
    async with ground.supervisor({"coder": coder(1)}):
        await until(ground.begun(hung))
        assert (await ground.tasks.cancel(hung)).state is _T.REJECTED
        await ground.becomes(after, _T.COMPLETED)
    assert ground.members_of(hung) == ["coder-1"]
    assert await ground.living() == []


async def test_a_task_that_somebody_edits_meanwhile_is_finished(ground: Ground) -> None:
    key, needed = await ground.add("gate"), await ground.add("write", agent=None)
    async with ground.supervisor({"coder": coder(1)}):
        await until(ground.begun(key))
        await ground.tasks.set_dependencies(key, [needed])
        await ground.tasks.set_dependencies(key, [])
        ground.let_go(key)
        assert (await ground.becomes(key, _T.COMPLETED)).attempt == 1


async def test_everything_drains_when_the_program_is_told_to_stop(ground: Ground) -> None:
    key = await ground.add("hang")
    supervisor = ground.supervisor({"coder": coder(1)})
    await supervisor.open()
    await supervisor.up()
    await until(ground.begun(key))
    supervisor.drain(DAEMON_STOPPED)
    await ground.becomes(key, _T.QUEUED)
    await supervisor.close()
    assert await ground.living() == []
    assert (await ground.task(key)).is_held is False
    again = ground.supervisor({"coder": coder(1)})
    await again.open()
    await until(lambda: "coder-1" in again.agents)
    await again.stop(force=True)
    await again.close()


# --- what the policies of the seed do ----------------------------------------------------------------


async def test_the_presets_are_those_of_coders_and_architects() -> None:
    done, error = CrewAction.RESTART, CrewAction.REQUEUE
    assert (CrewPolicy.coder().on_done, CrewPolicy.coder().on_error) == (done, error)
    assert (CrewPolicy.architect().on_done, CrewPolicy.architect().on_error) == (done, CrewAction.SHUTDOWN)


async def test_an_architect_that_is_done_takes_the_next_specification(ground: Ground) -> None:
    keys = [await ground.add("write", agent=None, tags=["spec"]) for _ in range(2)]
    other = await ground.add("write", agent=None)
    async with ground.supervisor({"architect": coder(1, tasks="tag:spec", on_error="shutdown")}):
        for key in keys:
            assert (await ground.becomes(key, _T.COMPLETED)).member == "architect-1"
    assert (await ground.task(other)).state is _T.QUEUED


async def test_an_architect_that_errs_stops_everything_in_order(ground: Ground) -> None:
    register(ground.manager, ground.stage, "thinker")
    running, done = await ground.add("hang"), await ground.add("write")
    crews = {"coder": coder(2), "architect": coder(1, agent="thinker", on_error="shutdown")}
    async with ground.supervisor(crews) as supervisor:
        await until(ground.begun(running))
        await ground.becomes(done, _T.COMPLETED)
        bad = await ground.add("fail", agent="thinker")
        await asyncio.wait_for(supervisor.is_shut_down.wait(), 60)
        assert str(supervisor.shutdown_reason).startswith(
            f"manual intervention required: architect-1 erred on {bad}: "
        ), supervisor.shutdown_reason
        assert await ground.living() == []
        found = {one.name: (one.is_up, one.reason) for one in await supervisor.list_crews()}
        assert found == dict.fromkeys(crews, (False, supervisor.shutdown_reason))
    assert (await ground.task(running)).state is _T.QUEUED, "what the others did is kept"
    assert (await ground.task(done)).state is _T.COMPLETED
    assert (await ground.task(bad)).state is _T.QUEUED


async def test_a_task_that_kills_its_attempts_is_parked_with_the_evidence(ground: Ground) -> None:
    key, after = await ground.add("fail", max_failures=2), await ground.add("write")
    async with ground.supervisor({"coder": coder(2)}):
        wait = await ground.parked(key)
        await ground.becomes(after, _T.COMPLETED)
        task = await ground.task(key)
        assert task.state is _T.QUEUED
        assert wait.kind == "human"
        assert wait.reason.startswith("failed 2 times, at last: ")
        assert f"ostler task requeue {key}" in wait.reason
        evidence = wait.detail["attempts"]
        assert {one["member"] for one in evidence} == set(ground.members_of(key))
        assert all("exit code 3" in one["error"] for one in evidence)
        assert all("it broke" in _log_text(one["log"]) for one in evidence)
        (ground.stage / "agent.sh").write_text("echo mended\n")
        await ground.tasks.requeue(key)
        await ground.becomes(key, _T.COMPLETED)


def _log_text(folder: str) -> str:
    return "".join(file.read_text(errors="replace") for file in Path(folder).iterdir())


# --- work directory ----------------------------------------------------------------------------------


async def test_a_task_about_a_repository_is_worked_on_in_its_worktree(ground: Ground) -> None:
    repo = repository(ground.project / "repo")
    key = await ground.add("write", near=repo)
    async with ground.supervisor({"coder": coder(1)}):
        task = await ground.becomes(key, _T.COMPLETED)
        assert (ground.stage / f"{key}.found").read_text().split() == [".git", "readme.txt"]
        assert task.workdir is not None
        assert task.workdir["path"] == str(ground.project / ".ostler" / "tasks" / key)
        await ground.tasks.accept(key)
    assert (repo / "made.txt").read_text() == f"{key} by coder-1\n"


async def test_a_directory_that_became_a_link_is_not_followed(ground: Ground, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "letter.txt").write_text("dear")
    place = ground.project / ".ostler" / "work" / "coder-1"
    place.parent.mkdir(parents=True)
    place.symlink_to(precious)
    key = await ground.add("write")
    async with ground.supervisor({"coder": coder(1)}):
        await ground.becomes(key, _T.COMPLETED)
    assert not place.is_symlink()
    assert [one.name for one in precious.iterdir()] == ["letter.txt"]


# --- all of it at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 12])
async def test_whatever_is_asked_meanwhile_no_task_is_stranded_and_no_generation_is_begun_twice(
    ground: Ground, seed: int
) -> None:
    chance = random.Random(seed)
    keys = [await ground.add(chance.choice(["write", "fail-once", "fail", "crash"])) for _ in range(10)]
    strategy = chance.choice(list(CrewStrategy))
    async with ground.supervisor({"coder": coder(3, strategy=strategy, max_errors=1000)}) as supervisor:
        for _ in range(6):
            await asyncio.sleep(chance.random() * 0.3)
            match chance.choice(["scale", "stop", "force", "cancel"]):
                case "scale":
                    await supervisor.scale("coder", chance.randint(0, 4))
                case "cancel":
                    for scope in list(supervisor.agent_contexts.values())[:1]:
                        scope.cancel()
                case how:
                    await supervisor.stop(force=how == "force")
                    await supervisor.up()
        await supervisor.up()
        for key in keys:
            await until(lambda: _is_settled(ground, key), seconds=40)  # noqa: B023 - awaited in its turn
        assert await ground.living() == []
        assert set(supervisor.agent_types) == {"coder-1", "coder-2", "coder-3"}
    begun = [(one.agent_id, one.generation) for one in await ground.instances()]
    assert len(set(begun)) == len(begun)


async def _is_settled(ground: Ground, key: str) -> bool:
    return (await ground.task(key)).state is _T.COMPLETED or bool(await ground.tasks.waits(key))


# --- a program that ends ------------------------------------------------------------------------------


async def test_generations_rise_over_restarts_and_agents_are_taken_up(tmp_path: Path) -> None:
    crews = {"coder": coder(1)}
    async with opened(tmp_path) as ground:
        (ground.project / "ostler.toml").write_text('[orchestrator]\nworkdir = "desks"\n')
        first, second = await ground.add("write"), await ground.add("gate")
        supervisor = ground.supervisor(crews)
        await supervisor.open()
        await supervisor.up()
        await ground.becomes(first, _T.COMPLETED)
        await until(ground.begun(second))
        before = supervisor.agents["coder-1"].instance_id
        ground.manager.keep_agents = True
        await supervisor.close()
    async with opened(tmp_path) as ground:
        supervisor = ground.supervisor(crews)
        await supervisor.open()
        assert (await supervisor.list_crews())[0].is_up, "a crew that was up comes up again"
        await until(lambda: "coder-1" in supervisor.agents)
        assert supervisor.agents["coder-1"].instance_id == before, "and its member goes on with its agent"
        ground.let_go(second)
        assert (await ground.becomes(second, _T.COMPLETED)).attempt == 1
        third = await ground.add("write")
        await ground.becomes(third, _T.COMPLETED)
        assert [one.generation for one in await ground.instances()] == [1, 2, 3]
        await supervisor.stop()
        await supervisor.close()
