"""Runs commands of the user's: when an agent or a task waits for a person, and when a task changes its state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex

from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.events import AgentWaitOpenedEvent, TaskStateChangedEvent, TaskWaitOpenedEvent
from ostler.model.wait import WaitKind

_log = logging.getLogger("ostler.daemon")
_LIMIT_SECONDS = 30.0


class Hooks:
    """Commands that run at an event, without a shell, with its details in the environment. A failure is logged."""

    def __init__(self, manager: AgentLifecycleManager, on_wait: str | None, on_change: str | None) -> None:
        self._manager = manager
        self._on_wait = None if on_wait is None else shlex.split(on_wait)
        self._on_change = None if on_change is None else shlex.split(on_change)
        self._task: asyncio.Task[None] | None = None
        #: Process ids of the commands that run now.
        self.running: set[int] = set()

    def start(self) -> None:
        if self._on_wait or self._on_change:
            self._task = asyncio.create_task(self._watch(), name="ostler-hooks")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        async for event in self._manager.observe():
            match event:
                case AgentWaitOpenedEvent(kind=WaitKind.HUMAN) if self._on_wait:
                    instance = await self._manager.get_instance(event.instance_id)
                    name = (instance.name if instance is not None else None) or str(event.instance_id)
                    await self._run(
                        "on-wait",
                        self._on_wait,
                        OSTLER_WAIT=str(event.wait_id),
                        OSTLER_INSTANCE=str(event.instance_id),
                        OSTLER_AGENT=name,
                        OSTLER_REASON=event.reason or "",
                    )
                case TaskWaitOpenedEvent(kind=WaitKind.HUMAN) if self._on_wait:
                    reason = event.reason or ""
                    await self._run(
                        "on-wait",
                        self._on_wait,
                        OSTLER_WAIT=str(event.wait_id),
                        OSTLER_TASK=event.key,
                        OSTLER_REASON=reason,
                    )
                case TaskStateChangedEvent() if self._on_change:
                    await self._run(
                        "on-change",
                        self._on_change,
                        OSTLER_TASK=event.key,
                        OSTLER_STATE=event.new_state,
                        OSTLER_PREVIOUS_STATE=event.previous_state or "",
                        OSTLER_REASON=event.reason or "",
                    )
                case _:
                    pass

    async def _run(self, name: str, words: list[str], **variables: str) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, env={**os.environ, **variables}, stdin=asyncio.subprocess.DEVNULL
            )
        except OSError as error:
            _log.warning("%s cannot be run: %s", name, error)
            return
        self.running.add(process.pid)
        try:
            async with asyncio.timeout(_LIMIT_SECONDS):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            _log.warning("%s took longer than %g s and was ended", name, _LIMIT_SECONDS)
        else:
            if code:
                _log.warning("%s ended with exit code %d", name, code)
        finally:
            self.running.discard(process.pid)
