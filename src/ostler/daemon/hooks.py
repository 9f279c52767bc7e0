"""Runs a command of the user's when an agent begins to wait for a person."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex

from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.events import AgentWaitOpenedEvent
from ostler.model.ledger import WaitKind

_log = logging.getLogger("ostler.daemon")
_LIMIT_SECONDS = 30.0


class WaitHook:
    """`on-wait` of ostler.toml: the words of a command, no shell. It finds who waits and why in its environment."""

    def __init__(self, manager: AgentLifecycleManager, command: str | None) -> None:
        self._manager = manager
        self._command = command
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._command is not None:
            self._task = asyncio.create_task(self._watch(shlex.split(self._command)), name="ostler-on-wait")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self, words: list[str]) -> None:
        async for event in self._manager.observe():
            if isinstance(event, AgentWaitOpenedEvent) and event.kind is WaitKind.HUMAN:
                await self._run(words, event)

    async def _run(self, words: list[str], event: AgentWaitOpenedEvent) -> None:
        found = await self._manager.get_instance(event.instance_id)
        environment = {
            **os.environ,
            "OSTLER_WAIT": str(event.wait_id),
            "OSTLER_INSTANCE": str(event.instance_id),
            "OSTLER_AGENT": (found.name if found is not None else None) or str(event.instance_id),
            "OSTLER_REASON": event.reason or "",
        }
        try:
            process = await asyncio.create_subprocess_exec(*words, env=environment, stdin=asyncio.subprocess.DEVNULL)
            async with asyncio.timeout(_LIMIT_SECONDS):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            _log.warning("on-wait took longer than %g s and was ended", _LIMIT_SECONDS)
        except OSError as error:
            _log.warning("on-wait cannot be run: %s", error)
        else:
            if code:
                _log.warning("on-wait ended with exit code %d", code)
