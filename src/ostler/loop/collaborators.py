"""The collaborators of a loop: a protocol each, with a default over Ostler's own parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ostler.model.instance import AgentInstance
from ostler.model.loop import CiResult, TaskLoop
from ostler.model.spawn import TerminationOptions
from ostler.model.states import AgentState
from ostler.model.task import Receipt, Task, TaskState
from ostler.store import loops as loop_store
from ostler.store import tasks as task_store
from ostler.tasks import attempt
from ostler.tasks.context import TaskContext
from ostler.tasks.proof import checks_of, prove
from ostler.workdirs.records import Snapshot, Workdir


class Plan(Protocol):
    """What there is to do, and what depends on what."""

    async def state_of(self, task: Task, key: str) -> TaskState | None:
        """Of the task `key`, as `task` sees it; None where there is no such task."""

    async def completed(self, task: Task) -> None:
        """It is proven done. Told again after a crash."""


class WorkspaceManager(Protocol):
    async def prepare(self, task: Task) -> tuple[Task, Workdir]:
        """Make the place of work, or find it as the last iteration left it."""


class BranchManager(Protocol):
    async def snapshot(self, task: Task, workdir: Workdir) -> Snapshot:
        """The work as it is now, as a commit."""


class TerminalManager(Protocol):
    """Runs the agent."""

    async def spawn(self, rules: attempt.AttemptRules, task: Task, workdir: Workdir) -> tuple[Task, AgentInstance]:
        """A fresh one for each attempt; asked again for the same attempt, the same one."""

    async def ended(self, instance: AgentInstance) -> None:
        """Returns when its whole process tree is gone."""

    async def stop(self, instance: AgentInstance, reason: str) -> None: ...


class CiProvider(Protocol):
    async def check(self, task: Task, workdir: Workdir, snapshot: Snapshot) -> CiResult | None:
        """What CI says of the commit; None where that is told later (`report`)."""


@dataclass
class LoopCollaborators:
    tasks: TaskContext
    plan: Plan
    workspaces: WorkspaceManager
    branches: BranchManager
    terminals: TerminalManager
    ci: CiProvider

    @classmethod
    def of(cls, tasks: TaskContext, **chosen: Any) -> LoopCollaborators:
        made = {
            "plan": TaskPlan(tasks),
            "workspaces": TaskWorkspaces(tasks),
            "branches": TaskBranches(tasks),
            "terminals": LifecycleTerminals(tasks),
            "ci": LocalCi(tasks),
        }
        return cls(tasks, **{**made, **{name: part for name, part in chosen.items() if part is not None}})


@dataclass
class TaskPlan:
    """The tasks of the store and their dependencies. Review moves a proven task on, so there is nothing to mark."""

    tasks: TaskContext

    async def state_of(self, task: Task, key: str) -> TaskState | None:
        other = await self.tasks.store.read(task_store.find_task, task.workspace_id, key)
        return None if other is None else other.state

    async def completed(self, task: Task) -> None:
        """The state of the task says it."""


@dataclass
class TaskWorkspaces:
    tasks: TaskContext

    async def prepare(self, task: Task) -> tuple[Task, Workdir]:
        return await attempt.prepare(self.tasks, task, keep=True)


@dataclass
class TaskBranches:
    tasks: TaskContext

    async def snapshot(self, task: Task, workdir: Workdir) -> Snapshot:
        return await self.tasks.workdirs.snapshot(workdir, f"{task.key}: {task.title}")


@dataclass
class LifecycleTerminals:
    tasks: TaskContext

    async def spawn(self, rules: attempt.AttemptRules, task: Task, workdir: Workdir) -> tuple[Task, AgentInstance]:
        return await attempt.spawn(rules, task, workdir)

    async def ended(self, instance: AgentInstance) -> None:
        await self.tasks.manager.handle(instance.instance_id).ended()

    async def stop(self, instance: AgentInstance, reason: str) -> None:
        record = await self.tasks.manager.get_instance(instance.instance_id)
        if record is not None and record.is_active and record.state is not AgentState.TERMINATING:
            await self.tasks.manager.terminate(instance.instance_id, TerminationOptions(reason=reason))


@dataclass
class LocalCi:
    """The declared commands, else the checks of the task, on a clean checkout of the branch."""

    tasks: TaskContext

    async def check(self, task: Task, workdir: Workdir, snapshot: Snapshot) -> CiResult | None:
        commands = self.commands(task)
        receipts: tuple[Receipt, ...] = ()
        if commands:
            receipts = await prove(self.tasks, task, workdir, snapshot, commands=commands, label="ci")
        failed = next((receipt for receipt in receipts if not receipt.passed), None)
        output = "" if failed is None else f"`{failed.command}` exit code {failed.exit_code}:\n{failed.output}"
        result = CiResult(
            workspace_id=task.workspace_id,
            commit=snapshot.commit,
            passed=failed is None,
            output=output,
            reported_at=self.tasks.manager.now(),
        )
        return await self.tasks.store.run(loop_store.report_ci, result)

    def commands(self, task: Task) -> tuple[str, ...]:
        return (task.loop or TaskLoop()).ci or checks_of(self.tasks, task)
