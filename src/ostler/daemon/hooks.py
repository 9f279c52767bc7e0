"""Runs commands of the user's when a person is needed, something failed, the work is over, or a task changes its state.

Where no command is named and the session has a desktop, a notification is shown instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import logging
import os
import shutil
import signal
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from ostler.definitions.project import DaemonSettings
from ostler.errors import OstlerError
from ostler.home import project_of
from ostler.model.access import OWNER
from ostler.model.events import (
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    AgentWaitOpenedEvent,
    EventsMissed,
    TaskStateChangedEvent,
    TaskWaitOpenedEvent,
)
from ostler.model.query import GetInstancesFilter
from ostler.model.states import AgentState
from ostler.model.task import Task, TaskState
from ostler.model.wait import WORKDIR_GONE, WaitKind
from ostler.store import tasks as task_store
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.retry import first_line

_log = logging.getLogger("ostler.daemon")
_LIMIT_SECONDS = 30.0
_IDLE = "the queue is empty and nobody works"
#: A failed one is listed only while it waits for its restart.
_AT_WORK = frozenset({AgentState.INITIALIZING, AgentState.PROCESSING, AgentState.TERMINATING, AgentState.FAILED})
#: Why a task is parked because it failed; others have reached a limit.
_FAILURES = frozenset({"max_failures", "max_retries", "lost", "hopeless", WORKDIR_GONE})
_LIVING = GetInstancesFilter(include_restarting=True, limit=1000)
_BUS_VARIABLE = "DBUS_SESSION_BUS_ADDRESS"
#: AppleScript that shows its second argument under its first.
_SCRIPT = ("on run argv", "display notification (item 2 of argv) with title (item 1 of argv)", "end run")


class Hooks:
    """Commands that a shell runs in the project at an event, with its details in the environment.

    A failure is logged, and in the inbox until the command succeeds.
    """

    def __init__(self, orchestrator: TaskOrchestrator, settings: DaemonSettings, on_change: str | None) -> None:
        self._orchestrator = orchestrator
        self._manager = orchestrator.manager
        lines = {
            "on-wait": settings.on_wait,
            "on-failed": settings.on_failed,
            "on-idle": settings.on_idle,
            "on-change": on_change,
        }
        self._commands = {name: line for name, line in lines.items() if line is not None}
        self._project = project_of(self._manager.require_home())
        self._notifier = find_notifier(os.environ) if settings.notify else None
        #: Whether a task was worked on since nobody worked.
        self._has_worked = False
        #: The daemon ends its agents, so that nobody works says nothing of the queue.
        self.is_stopping = False
        self._task: asyncio.Task[None] | None = None
        #: Process ids of the commands that run now.
        self.running: set[int] = set()

    def start(self) -> None:
        if self._commands or self._notifier:
            self._task = asyncio.create_task(self._watch(), name="ostler-hooks")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        stream = self._manager.observe()
        self._has_worked = bool(await self._manager.store.read(task_store.tasks_in, {TaskState.RUNNING}))
        async for event in stream:
            try:
                await self._tell(event)
            except OstlerError as error:
                _log.warning("a hook could not be run: %s", error)

    async def _tell(self, event: Any) -> None:
        match event:
            case AgentWaitOpenedEvent(kind=WaitKind.HUMAN):
                await self._agent_waits(event)
            case TaskWaitOpenedEvent(kind=WaitKind.HUMAN):
                await self._task_waits(event)
            case TaskStateChangedEvent():
                self._has_worked |= event.new_state is TaskState.RUNNING
                await self._task_moved(event)
            case AgentStateChangedEvent(new_state=AgentState.FAILED, is_final=True):
                await self._agent_failed(event)
            case _:
                pass
        ends_work = TaskStateChangedEvent | TaskWaitOpenedEvent | AgentStateChangedEvent | AgentTerminatedEvent
        may_be_idle = self._has_worked and isinstance(event, ends_work | EventsMissed) and not self.is_stopping
        if may_be_idle and await self._is_idle():
            self._has_worked = False
            await self._run("on-idle", _IDLE, OSTLER_REASON=_IDLE)

    async def _agent_waits(self, event: AgentWaitOpenedEvent) -> None:
        name, reason = await self._name_of(event.instance_id), event.reason or ""
        await self._run(
            "on-wait",
            f"{name} asks: {reason}",
            OSTLER_WAIT=str(event.wait_id),
            OSTLER_INSTANCE=str(event.instance_id),
            OSTLER_AGENT=name,
            OSTLER_REASON=reason,
        )

    async def _task_waits(self, event: TaskWaitOpenedEvent) -> None:
        """One that is parked because it failed also waits for a person; a notification tells of it once."""
        reason = event.reason or ""
        variables = {"OSTLER_WAIT": str(event.wait_id), "OSTLER_TASK": event.key, "OSTLER_REASON": reason}
        has_failed = event.cause in _FAILURES
        await self._run("on-wait", "" if has_failed else f"{event.key}: {reason}", **variables)
        if has_failed:
            await self._run("on-failed", f"{event.key} {reason}", **variables)

    async def _task_moved(self, event: TaskStateChangedEvent) -> None:
        await self._run(
            "on-change",
            "",
            OSTLER_TASK=event.key,
            OSTLER_STATE=event.new_state,
            OSTLER_PREVIOUS_STATE=event.previous_state or "",
            OSTLER_REASON=event.reason or "",
        )

    async def _agent_failed(self, event: AgentStateChangedEvent) -> None:
        """Tasks and crews act on the failures of their agents; what a terminal has shown is not told again."""
        instance = await self._manager.get_instance(event.instance_id)
        if instance is None or instance.task_id or instance.crew or (instance.job or {}).get("attended"):
            return
        name = instance.name or str(event.instance_id)
        reason = first_line(instance.error_message or event.reason or "")
        await self._run(
            "on-failed",
            f"{name} failed: {reason}",
            OSTLER_INSTANCE=str(event.instance_id),
            OSTLER_AGENT=name,
            OSTLER_REASON=reason,
        )

    async def _name_of(self, instance_id: UUID) -> str:
        instance = await self._manager.get_instance(instance_id)
        return (instance.name if instance is not None else None) or str(instance_id)

    # --- nobody works ----------------------------------------------------------------------------

    async def _is_idle(self) -> bool:
        """No task is worked on or would be begun by itself, and no agent works or comes back."""
        store = self._manager.store
        if await store.read(task_store.tasks_in, {TaskState.RUNNING}):
            return False
        for task in await store.read(task_store.tasks_in, {TaskState.QUEUED}):
            if not await self._waits_for_a_person(task):
                return False
        instances = await self._manager.acting_as(OWNER).get_active_instances(_LIVING)
        return not any(instance.state in _AT_WORK for instance in instances) and not self.is_stopping

    async def _waits_for_a_person(self, task: Task) -> bool:
        """Whether a queued task stays where it is until a person does something."""
        if task.is_held or self._orchestrator.untaken(task) is not None or await self._orchestrator.unmet(task):
            return True
        waits = await self._manager.store.read(task_store.task_waits, task.task_id)
        return any(wait.kind is WaitKind.HUMAN for wait in waits)

    # --- running ---------------------------------------------------------------------------------

    async def _run(self, name: str, sentence: str, **variables: str) -> None:
        command = self._commands.get(name)
        if command is not None:
            failure = await self._end_of(["sh", "-c", command], variables)
            self._manager.note_hook(name, failure)
        elif self._notifier is not None and sentence:
            failure = await self._end_of([*self._notifier, html.escape(sentence, quote=False)], variables)
        else:
            return
        if failure is not None:
            _log.warning("%s %s", name, failure)

    async def _end_of(self, words: list[str], variables: Mapping[str, str]) -> str | None:
        """Why the command failed; None where it succeeded."""
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                cwd=self._project,
                env={**os.environ, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # one that takes too long is ended with what it has started
            )
        except OSError as error:
            return f"cannot be run: {error}"
        self.running.add(process.pid)
        try:
            async with asyncio.timeout(_LIMIT_SECONDS):
                code = await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return f"took longer than {_LIMIT_SECONDS:g} s and was ended"
        finally:
            self.running.discard(process.pid)
        if code < 0:
            return f"was ended by signal {-code}"
        return f"ended with exit code {code}" if code else None


def find_notifier(environment: Mapping[str, str]) -> list[str] | None:
    """The words of a program that shows a notification, but for its text; None where there is no desktop."""
    path = environment.get("PATH")
    if (program := shutil.which("osascript", path=path)) is not None:
        return [program, *(word for line in _SCRIPT for word in ("-e", line)), "Ostler"]
    if environment.get(_BUS_VARIABLE) and (program := shutil.which("notify-send", path=path)) is not None:
        return [program, "--app-name=Ostler", "--", "Ostler"]
    return None
