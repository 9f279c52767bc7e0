"""What the tests of tasks stand on: a user's repository, a home, agents that are shell commands, and their records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from workdirs_ground import commit_all, git, make_repository

import ostler
from ostler import (
    AgentLifecycleManager,
    AuditEntry,
    Clock,
    CommandSpec,
    LifecycleSettings,
    PromptBy,
    RetentionPolicy,
    Seams,
    SystemClock,
    Task,
    TaskFilter,
    TaskSettings,
    TaskState,
    TaskStateChangedEvent,
)
from ostler.failpoints import FaultPoint, no_fault
from ostler.store.audit import last_entries
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.queue import TaskQueue

T = TaskState
#: Runs the text of its task as a shell script, but not the comments below it.
SHELL = "shell"
_SCRIPT = """eval "$(sed '/^$/,$d' "$OSTLER_PROMPT_FILE")" """
#: Appends its whole prompt to `said.txt`, and changes a file.
ECHO = "echo"
FILES = {"a.txt": "one\ntwo\nthree\n", "b.txt": "b\n", "sub/c.txt": "c\n"}
_SECONDS = 60.0


def register_agents(manager: AgentLifecycleManager) -> None:
    shell = CommandSpec(argv=("sh", "-ec", _SCRIPT), env=("PATH",))
    manager.registry.register(shell, name=SHELL, replace=True)
    echo = CommandSpec(argv=("sh", "-ec", "cat >> said.txt"), prompt_by=PromptBy.STDIN, env=("PATH",))
    manager.registry.register(echo, name=ECHO, replace=True)


@dataclass
class TaskGround:
    """One user with one repository and one home."""

    manager: AgentLifecycleManager
    tasks: TaskOrchestrator
    repository: Path
    home: Path

    async def add(self, script: str, **more: Any) -> Task:
        """A task whose text is the script that its agent runs, in the repository unless `near` says otherwise."""
        values: dict[str, Any] = {"agent": SHELL, "near": self.repository, **more}
        return await self.tasks.submit(script, **values)

    async def done(self, script: str, **more: Any) -> Task:
        """One that was run and waits for its review."""
        task = await self.tasks.run((await self.add(script, **more)).key)
        assert task.state is T.COMPLETED, task.error
        return task

    async def get(self, task: Task | str) -> Task:
        return await self.tasks.get(task if isinstance(task, str) else task.key)

    def place(self, task: Task | str) -> Path:
        return self.home / "tasks" / (task if isinstance(task, str) else task.key)

    async def moves(self, task: Task) -> list[tuple[TaskState | None, TaskState]]:
        """Every move of a task, from the log."""
        events = await self.manager.list_events(after=0, limit=1000)
        return [
            (one.previous_state, one.new_state)
            for one in events
            if isinstance(one, TaskStateChangedEvent) and one.task_id == task.task_id
        ]

    async def audited(self, act: str) -> list[AuditEntry]:
        entries = await self.manager.store.read(last_entries, self.manager.principal.workspace_id, 1000)
        return [one for one in entries if one.action == act]

    async def until_state(self, task: Task | str, *states: TaskState) -> Task:
        """Wait until it is in one of these states."""
        key = task if isinstance(task, str) else task.key
        found = await self.tasks.get(key)

        async def reached() -> bool:
            nonlocal found
            found = await self.tasks.get(key)
            return found.state in states

        await until_async(reached, lambda: f"{key} is {found.state} ({found.error}), not {states}")
        return found

    def git(self, *arguments: str) -> str:
        return git(self.repository, *arguments)

    def tip(self, branch: str = "main") -> str:
        return self.git("rev-parse", branch).strip()

    def shown(self, path: str, branch: str = "main") -> str:
        return self.git("show", f"{branch}:{path}")

    def commit(self, **files: str) -> str:
        """The user commits. `a_txt` stands for `a.txt`."""
        for name, text in files.items():
            (self.repository / name.replace("_", ".")).write_text(text)
        return commit_all(self.repository)


async def until_async(holds: Callable[[], Awaitable[bool]], told: Callable[[], str] = lambda: "it never came") -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + _SECONDS
    while not await holds():
        assert loop.time() < end, told()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(
    repository: Path,
    home: Path,
    *,
    settings: TaskSettings | None = None,
    clock: Clock | None = None,
    fault: FaultPoint = no_fault,
    disk: str | None = None,
) -> AsyncIterator[TaskGround]:
    """A manager with its tasks. What it leaves is found by the next one of the same home."""
    retention = RetentionPolicy.from_dict({} if disk is None else {"disk": disk})
    lifecycle = LifecycleSettings(outlive=timedelta(minutes=2), retention=retention)
    seams = Seams(clock=clock or SystemClock(), fault=fault)
    async with ostler.open(home, seams=seams, settings=lifecycle) as manager:
        register_agents(manager)
        async with TaskOrchestrator(manager, settings=settings) as tasks:
            yield TaskGround(manager, tasks, repository, home)


@asynccontextmanager
async def working_queue(ground: TaskGround) -> AsyncIterator[TaskQueue]:
    """As the daemon does: what names an agent is run."""
    queue = TaskQueue(ground.tasks)
    await queue.open()
    try:
        yield queue
    finally:
        await queue.close()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "project", FILES)


@pytest.fixture
async def ground(repository: Path, tmp_path: Path) -> AsyncIterator[TaskGround]:
    async with opened(repository, tmp_path / "home") as ground:
        yield ground


async def list_keys(ground: TaskGround, **wanted: Any) -> list[str]:
    return [task.key for task in await ground.tasks.list_tasks(TaskFilter.from_dict(wanted))]
