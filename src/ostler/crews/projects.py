"""The crews of all projects that one daemon serves: a supervisor for each project that declares some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ostler.crews.supervisor import Supervisor
from ostler.loop.service import Loops
from ostler.model.task import Task
from ostler.store.crews import projects_at_work
from ostler.tasks.orchestrator import TaskOrchestrator


class ProjectCrews:
    """Opened with the daemon. The supervisor of a project is made when the project is first used, and stays."""

    def __init__(self, orchestrator: TaskOrchestrator, loops: Loops) -> None:
        self._orchestrator = orchestrator
        self._loops = loops
        #: Called when the settings declare other crews than before: which tasks belong to one may have changed.
        self.on_settings: Callable[[], None] = lambda: None
        self._projects = orchestrator.manager.projects
        #: By the key of the project whose `ostler.toml` declares the crews.
        self._by_scope: dict[str | None, Supervisor] = {None: self._made(None)}
        self._is_open = False
        self._opening = asyncio.Lock()

    def _made(self, scope: str | None) -> Supervisor:
        project = self._projects.at(scope)
        supervisor = Supervisor(
            self._orchestrator, get_config=project.config, refresh=project.refresh, loops=self._loops, project=scope
        )
        supervisor.on_settings = self._settings_changed
        return supervisor

    def _settings_changed(self) -> None:
        self.on_settings()

    async def prepare(self) -> None:
        """Before the queue looks for tasks: which of them are for crews is known from then on."""
        manager = self._orchestrator.manager
        for key in await manager.store.read(projects_at_work, manager.principal.workspace_id):
            await self.of(self._projects.at(key).scope)

    async def open(self, recovered: Sequence[Task]) -> None:
        """Bring up again what was up, in every project, and go on with what members were at."""
        self._is_open = True
        for supervisor in tuple(self._by_scope.values()):
            await supervisor.open(recovered)

    async def of(self, scope: str | None) -> Supervisor:
        """The supervisor of the crews that a project declares."""
        async with self._opening:
            supervisor = self._by_scope.get(scope)
            if supervisor is None:
                supervisor = self._made(scope)
                if self._is_open:
                    await supervisor.open(())
                self._by_scope[scope] = supervisor
        return supervisor

    def owns(self, task: Task) -> bool:
        """Whether a crew works on it, so that the plain queue leaves it alone."""
        return any(supervisor.owns(task) for supervisor in tuple(self._by_scope.values()))

    async def reload(self) -> None:
        for supervisor in tuple(self._by_scope.values()):
            await supervisor.reload()

    def drain(self, reason: str) -> None:
        for supervisor in self._by_scope.values():
            supervisor.drain(reason)

    async def close(self) -> None:
        for supervisor in self._by_scope.values():
            await supervisor.close()
