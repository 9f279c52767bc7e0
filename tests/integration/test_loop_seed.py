"""Seed 004's sample, and its collaborators and settings by their names."""

from __future__ import annotations

import asyncio
import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from loop_ground import LoopGround

from ostler.loop import (
    AgentLifecycleLoop,
    BranchManager,
    CiProvider,
    LoopResult,
    LoopResultType,
    Plan,
    TerminalManager,
    WorkspaceManager,
)
from ostler.loop.collaborators import LifecycleTerminals, LocalCi, TaskBranches, TaskPlan, TaskWorkspaces
from ostler.model.loop import LoopSettings
from ostler.model.task import TaskState

pytestmark = pytest.mark.anyio


class Recorded:
    """Hands everything on to a part of Ostler's own, and remembers what it was asked."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self._part, name)


async def test_004_017_the_sample_of_the_seed(loop_ground: LoopGround, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = loop_ground.orchestrator.tasks
    plan, branch_manager = Recorded(TaskPlan(tasks)), Recorded(TaskBranches(tasks))
    workspace_manager, terminal_manager = Recorded(TaskWorkspaces(tasks)), Recorded(LifecycleTerminals(tasks))
    ci_provider = Recorded(LocalCi(tasks))
    repo_dir, agent = loop_ground.repository, "fixer"
    await loop_ground.orchestrator.submit("Write the calculator")
    await loop_ground.orchestrator.submit("Write the schema")
    task = "T001"
    say = f"""put "$(entry @)" {repo_dir}/communications.json"""
    loop_ground.steps(
        say.replace("@", """blocked blocked waits ', "blocked_on": "T002"'"""),
        say.replace("@", "waiting_pr pr_created look"),
    )
    loop_ground.steps(say.replace("@", "complete task_complete made"), key="T002")

    async def run(task: str, *, wait: bool = False) -> LoopResult:
        loop = AgentLifecycleLoop(
            loop_ground.manager,
            repo_dir=repo_dir,
            plan=plan,
            ci_provider=ci_provider,
            terminal_manager=terminal_manager,
            branch_manager=branch_manager,
            workspace_manager=workspace_manager,
            comm_file_path=repo_dir / "communications.json",
            max_retries=100,
            retry_interval=30.0,
        )

        result = await loop.run_agent_loop(agent, task, wait=wait)

        if result.result_type == LoopResultType.TASK_COMPLETE:
            print(f"Task {result.task_id} completed!")  # noqa: T201 - as the seed has it
        elif result.result_type == LoopResultType.BLOCKED:
            print(f"Blocked on: {result.blocked_on}")  # noqa: T201 - as above
        elif result.result_type == LoopResultType.PR_CREATED:
            print(f"PR created: {result.pr_url}")  # noqa: T201 - as above
        return result

    async with asyncio.timeout(30):
        await run(task)
        await run("T002")
        await loop_ground.orchestrator.accept("T002")
        await run(task)
        await loop_ground.loops.merge(1)
        await run(task, wait=True)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "Blocked on: ('T002',)",
        "Task T002 completed!",
        "PR created: ostler:pr/1",
        "Task T001 completed!",
    ]
    assert {"state_of", "completed"} <= set(plan.asked)
    assert {"spawn", "ended"} <= set(terminal_manager.asked)
    assert "snapshot" in branch_manager.asked
    assert "prepare" in workspace_manager.asked
    assert "check" in ci_provider.asked
    found = await loop_ground.task()
    assert found.workdir is not None
    assert found.workdir["repository"], "repo_dir is where a task is worked on that names no place itself"


def test_004_042_the_defaults_are_those_of_the_seed() -> None:
    settings = LoopSettings()
    assert settings.max_retries == 100
    assert settings.retry_interval == timedelta(seconds=30)
    assert settings.breakpoint_check_interval == timedelta(seconds=1)
    assert settings.pr_merge_timeout == timedelta(seconds=3600)
    names = list(inspect.signature(AgentLifecycleLoop).parameters)
    assert names[0] == "manager"
    assert {"plan", "ci_provider", "terminal_manager", "branch_manager", "workspace_manager"} <= set(names)
    assert list(inspect.signature(AgentLifecycleLoop.run_agent_loop).parameters)[1:3] == ["agent", "task"]


def test_004_021_each_collaborator_is_a_protocol() -> None:
    own: list[Plan | CiProvider | TerminalManager | BranchManager | WorkspaceManager] = []
    for protocol, part in (
        (Plan, TaskPlan),
        (CiProvider, LocalCi),
        (TerminalManager, LifecycleTerminals),
        (BranchManager, TaskBranches),
        (WorkspaceManager, TaskWorkspaces),
    ):
        verbs = {name for name in vars(protocol) if not name.startswith("_")}
        assert verbs
        assert verbs <= {name for name, _ in inspect.getmembers(part, inspect.isfunction)}
    assert own == []


async def test_004_042_settings_come_from_the_file_and_arguments_win(loop_ground: LoopGround) -> None:
    (loop_ground.repository / "ostler.toml").write_text(
        '[loop]\nmax-retries = 1\nretry-interval = "0s"\ngrace = "0s"\non-close = "send-back"\n'
    )
    await loop_ground.orchestrator.submit("Mend it", near=loop_ground.repository)
    loop_ground.steps("exit 1")
    found = await loop_ground.run()
    assert (found.result_type, found.iterations) == (LoopResultType.MAX_RETRIES, 2)
    await loop_ground.orchestrator.submit("Mend it", near=loop_ground.repository)
    loop_ground.steps("exit 1", key="T002")
    assert (await loop_ground.run("T002", max_retries=0)).iterations == 1
    task = await loop_ground.task("T002")
    assert task.loop is not None
    assert (task.loop.max_retries, task.loop.on_close) == (0, "send-back")


async def test_004_024_a_task_may_be_named_by_its_words(loop_ground: LoopGround) -> None:
    loop_ground.steps("complete")
    loop = loop_ground.loop(repo_dir=loop_ground.repository)
    result = await loop.run_agent_loop("fixer", "Write down what is known")
    assert (result.result_type, result.task_id) == (LoopResultType.TASK_COMPLETE, "T001")
    again = await loop.run_agent_loop("fixer", await loop_ground.task())
    assert again == result


async def test_004_023_without_a_manager_it_opens_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ground = LoopGround(tmp_path)
    folder = ground.home / "agents"
    folder.mkdir()
    (folder / "fixer.md").write_text(f"---\nlifecycle:\n  driver: {{command: [sh, {ground.program}]}}\n---\n")
    ground.steps("touch made; complete")
    monkeypatch.chdir(ground.repository)
    monkeypatch.delenv("OSTLER_HOME", raising=False)
    async with asyncio.timeout(60):
        result = await AgentLifecycleLoop().run_agent_loop("fixer", "Make it so")
    assert result.result_type is LoopResultType.TASK_COMPLETE
    await ground.open()
    assert (await ground.task()).state is TaskState.COMPLETED
    await ground.close()


async def test_004_019_the_plan_decides_what_a_blocker_is(loop_ground: LoopGround) -> None:
    class Elsewhere:
        state: TaskState | None = TaskState.RUNNING

        async def state_of(self, task: object, key: str) -> TaskState | None:  # noqa: ARG002 - of the protocol
            return self.state if key == "JIRA-7" else None

        async def completed(self, task: object) -> None: ...

    plan = Elsewhere()
    await loop_ground.add()
    loop_ground.steps("blocked JIRA-7", "complete")
    async with loop_ground.running(plan=plan) as running:
        assert (await loop_ground.wait()).reason == "waits for JIRA-7"
        await loop_ground.settled()
        assert not running.done(), "a task that the store does not know is not taken for resolved"
        plan.state = TaskState.ACCEPTED
        await loop_ground.add("wakes it")
        assert (await running).result_type is LoopResultType.TASK_COMPLETE
    assert "JIRA-7 was accepted" in loop_ground.prompt(2)
