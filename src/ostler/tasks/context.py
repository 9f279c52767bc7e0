"""What the parts of `tasks` share: one object per home."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import os
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.agents.registry import AgentManifest
from ostler.errors import DefinitionError
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.access import HOME_WORKSPACE_ID, Actor
from ostler.model.attempt import AttemptOutcome
from ostler.model.events import TaskStateChangedEvent
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.states import AgentState
from ostler.model.task import Task, TaskSettings
from ostler.store import tasks as task_store
from ostler.store.attempts import get_attempt
from ostler.store.queries import list_instances
from ostler.store.store import Store
from ostler.workdirs.records import Workdir
from ostler.workdirs.workdirs import Workdirs

_log = logging.getLogger("ostler.tasks")
_HOOK_SECONDS = 30.0
#: Before background work that failed is begun again.
_RESTART_SECONDS = 5.0
#: How a start ends whose manager ended first; one that was begun has a handle.
_CUT_OFF = frozenset({AttemptOutcome.STOPPED, AttemptOutcome.LOST})
#: How often in a row the same work may be lost with the machine before a person has to look.
MAX_LOST = 3
#: Who moves tasks on when no person does.
BY = Actor(name="tasks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Taker:
    """What takes queued tasks up, the queue or a crew, as `why` tells of it."""

    name: str
    is_up: bool = True
    #: How many tasks it works on at the same time.
    places: int
    #: The keys of those that it works on.
    at_work: tuple[str, ...] = ()
    #: Why it cannot begin anything at present.
    trouble: str | None = None
    #: What brings it up or gives it places.
    cure: str


class TaskContext:
    """The tasks of one home, below the verbs of `TaskOrchestrator`."""

    def __init__(self, manager: AgentLifecycleManager, home: Path, settings: TaskSettings) -> None:
        self.manager = manager
        self.settings = settings
        self.clock = manager.seams.clock
        self.chance = manager.seams.chance or random.Random(os.urandom(32))  # noqa: S311 - jitter, no secrets
        self.workdirs = Workdirs(home, manager.seams)
        self.home = home
        #: Key to open workdir of every task that is not cleaned up; a cache that no decision reads.
        self.active: dict[str, Workdir] = {}
        #: Attempts that are under way in this program, by key.
        self.running: dict[str, asyncio.Task[Any]] = {}
        #: Each says whether it takes a task up: the queue and the crews of this program, while they work.
        self.takers: list[Callable[[Task], Taker | None]] = []
        #: Called when a home that had reached its limit has room again.
        self.on_room: list[Callable[[], None]] = []
        #: What failed among the work that runs as long as the program, by name; see `keep_running`.
        self.failed_background: dict[str, str] = {}
        self.is_closed = False
        self._background: set[asyncio.Task[Any]] = set()
        self.hooks = Hooks(self)

    @property
    def store(self) -> Store:
        return self.manager.store

    def definition_of(self, task: Task) -> AgentManifest:
        """Of its agent, from the files of its project as they are now. Raises `AgentNotFoundError`."""
        if task.project is not None:
            self.manager.projects.at(task.project).refresh()
        return self.manager.registry.find(task.agent or "", task.project)

    def settings_of(self, project: str | None) -> TaskSettings:
        """The table `[tasks]` that is in force for the tasks of a project."""
        scope = self.manager.projects.at(project).scope
        if scope is None:
            return self.settings
        try:
            return self.manager.projects.at(scope).settings().tasks
        except DefinitionError:  # never good; commands in that project say so
            return self.settings

    async def change(self, task: Task, changes: dict[str, Any] | None = None, **how: Any) -> Task:
        return await self.store.run(task_store.change_task, task, changes, **how)

    async def reload(self, task: Task) -> Task:
        current = await self.store.read(task_store.get_task, task.task_id)
        return task if current is None else current

    def takers_of(self, task: Task) -> tuple[Taker, ...]:
        return tuple(taker for ask in self.takers if (taker := ask(task)) is not None)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Held until it has ended: the loop itself holds tasks only weakly."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Work that lasts as long as the program. Where it fails or returns, that is logged and shown by
        `ostler status`, and it is begun again a little later.
        """
        while True:
            try:
                await work()
                error = "it returned"
                _log.error("%s returned; it is begun again", name)
            except Exception as exception:  # noqa: BLE001 - a fault of ours must not stop the queue for ever
                error = repr(exception)
                _log.exception("%s failed; it is begun again", name)
            when = self.manager.now().astimezone().isoformat(sep=" ", timespec="seconds")
            self.failed_background[name] = f"failed at {when} and was begun again: {error}"
            await self.clock.sleep(_RESTART_SECONDS)

    async def close(self) -> None:
        """What is under way is left as it stands; the next program takes it up."""
        self.is_closed = True
        for task in tuple(self._background):
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        await self.workdirs.close()


class Hooks:
    """Callables that are told of every change of state, after its commit. One that fails or hangs stops nothing."""

    def __init__(self, tasks: TaskContext) -> None:
        self._tasks = tasks
        self._hooks: list[Callable[[TaskStateChangedEvent], Any]] = []
        self._is_watching = False

    def add(self, hook: Callable[[TaskStateChangedEvent], Any]) -> Callable[[], None]:
        self._hooks.append(hook)
        if not self._is_watching:
            self._is_watching = True
            self._tasks.spawn(self._tasks.keep_running("the hooks of tasks", self._watch), "ostler-task-hooks")
        return lambda: self._hooks.remove(hook)

    async def _watch(self) -> None:
        async for event in self._tasks.manager.observe():
            if isinstance(event, TaskStateChangedEvent):
                for hook in tuple(self._hooks):
                    await self._call(hook, event)

    async def _call(self, hook: Callable[[TaskStateChangedEvent], Any], event: TaskStateChangedEvent) -> None:
        try:
            async with asyncio.timeout(_HOOK_SECONDS):
                answer = hook(event)
                if inspect.isawaitable(answer):
                    await answer
        except Exception:  # noqa: BLE001 - a hook is foreign code
            _log.exception("a hook failed on %s becoming %s", event.key, event.new_state)


async def find_instance(
    tasks: TaskContext, task: Task, name: str, *, again_after_loss: bool = False
) -> tuple[AgentInstance | None, int]:
    """The instance that was spawned under this name for a task, also one that a killed program did not note; and how
    many starts were cut off with their program, which count for nothing. With `again_after_loss` what was lost while
    it ran counts among these.
    """
    of_task = GetInstancesFilter(task_id=task.task_id, include_terminated=True, limit=1000)
    instances = await tasks.store.read(list_instances, of_task, task.workspace_id)
    named = [instance for instance in instances if instance.name == name]
    for instance in named:
        last = await tasks.store.read(get_attempt, instance.instance_id, instance.attempt)
        is_lost = again_after_loss and last is not None and last.outcome is AttemptOutcome.LOST
        is_cut_off = is_lost or (last is not None and last.outcome in _CUT_OFF and not last.handle)
        if instance.state is not AgentState.FAILED or not is_cut_off:
            return instance, len(named) - 1
    return None, len(named)


def workdir_key(workspace_id: UUID, key: str) -> str:
    """The key of the workdir of a task, which is unique in the home; that of the task is so in its workspace only."""
    if workspace_id == HOME_WORKSPACE_ID:
        return key
    return f"{key[:50]}_{hashlib.sha256(f'{workspace_id} {key}'.encode()).hexdigest()[:12]}"


def environment_of(task: Task) -> dict[str, str]:
    """What its agent, its setup, its checks and a person who looks at its workdir see of it."""
    port = {} if task.port is None else {"OSTLER_PORT": str(task.port)}
    return {"OSTLER_TASK": task.key, "OSTLER_SLUG": task.slug, **port}


def source_directory_of(task: Task) -> Path | None:
    return None if task.near is None else Path(task.near)


def exists(workdir: Workdir) -> bool:
    return Path(workdir.path).is_dir()


def workdir_of(task: Task) -> Workdir | None:
    return None if task.workdir is None else Workdir.from_dict(task.workdir)
