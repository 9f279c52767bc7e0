"""Level none: the agent lives on the manager's own loop. Nothing is isolated; it is the fastest and the smallest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from ostler.clock import Clock
from ostler.errors import AgentGoneError
from ostler.isolation.base import Capabilities, Cell, Isolation, Listener, Site, StartPlan, Usage
from ostler.isolation.calls import MemoryGauge, Outcome, close_code
from ostler.isolation.in_process import InProcessCell
from ostler.model.states import Enforcement, IsolationLevel

_LIMITS: Mapping[str, Enforcement] = MappingProxyType(
    {
        "execution_timeout": Enforcement.APPROXIMATED,  # cancelling asks; code that never awaits does not hear it
        "max_concurrent_tasks": Enforcement.ENFORCED,
        "max_worker_threads": Enforcement.ADVISORY,
        "max_memory_mb": Enforcement.ADVISORY,
        "max_cpu_percent": Enforcement.ADVISORY,
        "max_tokens_per_minute": Enforcement.APPROXIMATED,
    }
)
_CAPABILITIES = Capabilities(limits=_LIMITS)


class NoIsolation(Isolation):
    """Calls are tasks of the manager's loop, and plain methods run right on it: one that blocks blocks everybody."""

    level: ClassVar[IsolationLevel] = IsolationLevel.NONE

    def __init__(self, clock: Clock, site: Site | None = None) -> None:
        super().__init__(clock, site)
        self._gauge = MemoryGauge(clock)

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        cell = InlineCell(self._clock, plan, listener, None)
        cell.gauge = self._gauge
        cell.open()
        return cell


class InlineCell(InProcessCell):
    level = IsolationLevel.NONE
    LEFT_BEHIND = "its task does not end; it is cut off and ends with the program"
    _pushes = 0

    def open(self) -> None:
        self._check_made(self._make())

    async def ping(self) -> None:
        # A caller has a loop that turns, and that is all there is to know.
        if self._closing:
            raise AgentGoneError

    @property
    def is_idle(self) -> bool:
        return not self._closing

    async def usage(self) -> Usage:
        return Usage(memory_bytes=self.gauge.read(), memory_is_shared=True)

    def _post(self, action: Callable[..., object], *args: Any) -> None:
        action(*args)

    def _tell(self, action: Callable[..., object], *args: Any) -> None:
        action(*args)

    def _create_task(self, work: Coroutine[Any, Any, Outcome]) -> asyncio.Task[Outcome]:
        return self._home.create_task(work)

    @property
    def _is_gone(self) -> bool:
        return not self._running

    def _wind_up(self) -> None:
        for call in self._running:
            call.cancel()

    def _push(self) -> None:
        self._pushes += 1
        if self._pushes >= self.PUSHES - 1:
            # It was asked often enough. What waits on this loop can be closed where it waits; left alone it would
            # keep the whole program from ending.
            for call in self._running:
                close_code(call.task)
        self._wind_up()
