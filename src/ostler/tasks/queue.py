"""Works the queue: as many attempts at once as there are places, begun as soon as a place is free."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from ostler.errors import OstlerError, StoreError
from ostler.home import SETTINGS_FILE
from ostler.model.events import Event, TaskEvent
from ostler.model.task import Task, TaskState
from ostler.model.wait import WaitKind
from ostler.store import tasks as task_store
from ostler.store import waits as wait_store
from ostler.tasks.attempt import AttemptRules
from ostler.tasks.context import BY, Taker
from ostler.tasks.make_room import watch_disk
from ostler.tasks.orchestrator import TaskOrchestrator

_log = logging.getLogger("ostler.tasks")
#: Looked at again without an event: clocks jump, and other programs may write to a shared store.
LOOK_SECONDS = 30.0
_CLOSE_SECONDS = 5.0

#: Others have a time that a person is shown, and go on waiting.
END_BY_THEMSELVES = frozenset({WaitKind.QUOTA, WaitKind.BACKOFF})

Selects = Callable[[Task], bool]


class TaskQueue:
    """Claims what names an agent. `selects` leaves out tasks that others work on, such as a crew."""

    def __init__(
        self,
        orchestrator: TaskOrchestrator,
        *,
        selects: Selects = lambda task: task.agent is not None,
        rules: Callable[[Task], AttemptRules | None] = lambda _: None,
        settle: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`rules` are those of an attempt, None for a plain one; `settle` ends waits whose reason is over."""
        self._orchestrator = orchestrator
        self._rules = rules
        self._settle = settle
        self._tasks = orchestrator.tasks
        self._selects = selects
        self._wake = asyncio.Event()
        #: Attempts that are under way, with the keys of their tasks.
        self._running: dict[asyncio.Task[None], str] = {}
        self._loop: list[asyncio.Task[None]] = []
        self.draining = False

    async def open(self) -> list[Task]:
        """Take up what an earlier program left, then work the queue. Returns running tasks that are not its own."""
        recovered = await self._orchestrator.recover_agents()
        for task in filter(self._selects, recovered):
            self.work_on(task)
        self._tasks.takers.append(self._taker)
        self._tasks.on_room.append(self.wake)
        background: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "the queue": self._run,
            "its events": self._listen,
            "retention": self._orchestrator.gc_loop,
            "the disk limit": partial(watch_disk, self._tasks),
        }
        if self._orchestrator.manager.disk_limit is None:
            del background["the disk limit"]
        self._loop = [
            asyncio.get_running_loop().create_task(self._tasks.keep_running(name, work), name=f"ostler-{name}")
            for name, work in background.items()
        ]
        return [task for task in recovered if not self._selects(task)]

    async def close(self) -> None:
        """No new work. Attempts whose agents have ended write that; others are left to the next program."""
        self.draining = True
        with contextlib.suppress(ValueError):  # it was never opened
            self._tasks.takers.remove(self._taker)
            self._tasks.on_room.remove(self.wake)
        for task in self._loop:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=0.0 if self._agents_live() else _CLOSE_SECONDS)
        for task in (*self._loop, *self._running):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def wake(self) -> None:
        """Look at the queue now: which tasks are its own may have changed."""
        self._wake.set()

    def _agents_live(self) -> bool:
        return self._orchestrator.manager.keep_agents

    async def _listen(self) -> None:
        async for event in self._orchestrator.manager.observe():
            if isinstance(event, TaskEvent) or not isinstance(event, Event):
                self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            wait = LOOK_SECONDS
            try:
                if self._settle is not None:
                    await self._settle()
                wait = min(wait, await end_due_waits(self._orchestrator))
                if not self.draining:
                    await self._begin_some()
            except OstlerError as error:
                _log.warning("the queue: %s", error)
            timer = self._tasks.clock.call_later(wait, self._wake.set)
            await self._wake.wait()
            timer.cancel()

    @property
    def _places(self) -> int:
        places = self._tasks.settings.at_once
        return (os.cpu_count() or 1) if places is None else places

    def _taker(self, task: Task) -> Taker | None:
        if task.agent is None or not self._selects(task):
            return None
        return Taker(
            name="the queue",
            is_up=not self.draining,
            places=self._places,
            at_work=tuple(self._running.values()),
            cure=f"a number above 0 as `at-once` below [tasks] of {SETTINGS_FILE}",
        )

    async def _begin_some(self) -> None:
        free = self._places - len(self._running)
        if free <= 0 or not await self._tasks.manager.has_room():
            return
        space = self._orchestrator.manager.principal.workspace_id
        for task in await self._tasks.store.read(task_store.claimable_tasks, space, selects=self._selects):
            if free <= 0:
                return
            claimed = await self._tasks.store.run(task_store.claim_task, task, by=BY)
            if claimed is not None:
                free -= 1
                self.work_on(claimed)

    def work_on(self, task: Task) -> None:
        """An attempt that is claimed: a new one, or one that an earlier program left."""
        running = asyncio.get_running_loop().create_task(self._work(task), name=f"ostler-work-{task.key}")
        self._running[running] = task.key
        running.add_done_callback(self._done)

    def _done(self, running: asyncio.Task[None]) -> None:
        self._running.pop(running, None)
        self._wake.set()

    async def _work(self, task: Task) -> None:
        while task.state is TaskState.RUNNING:
            try:
                done = await self._orchestrator.work(task, self._rules(task))
            except StoreError as error:
                _log.warning("%s goes on when the store can write again: %s", task.key, error)
            except OstlerError as error:
                if self._tasks.is_closed:
                    return
                _log.warning("%s is taken up again: %s", task.key, error)
            except Exception:  # noqa: BLE001 - a fault of ours leaves no task running that nothing works on
                _log.exception("the work on %s failed; it is taken up again", task.key)
            else:
                if done.state is not TaskState.RUNNING:
                    _log.info("%s is %s", done.key, done.state)
                return
            await self._tasks.clock.sleep(LOOK_SECONDS)
            attempt, task = task.attempt, await self._tasks.reload(task)
            if task.attempt != attempt:  # requeued meanwhile, and taken up as another attempt
                return


async def end_due_waits(orchestrator: TaskOrchestrator) -> float:
    """End the waits of tasks that are due; the seconds until the next is due, or until the next look."""
    store, now, following = orchestrator.tasks.store, orchestrator.manager.now(), LOOK_SECONDS
    for wait in await store.read(wait_store.all_open_waits):
        if wait.task_id is None or wait.due_at is None or wait.kind not in END_BY_THEMSELVES:
            continue
        left = (wait.due_at - now).total_seconds()
        if left > 0:
            following = min(following, left)
        else:
            with contextlib.suppress(OstlerError):
                await store.run(task_store.end_task_wait, wait, "due")
    return following
