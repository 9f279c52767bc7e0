"""Level none: the agent lives on the manager's own loop. Nothing is isolated; it is the fastest and the smallest."""

from __future__ import annotations

from ostler.errors import AgentGoneError
from ostler.isolation.base import Capabilities, Cell, Isolation, Listener, StartPlan, Usage
from ostler.isolation.calls import Outcome, wake
from ostler.isolation.in_process import LIMITS, InProcessCell, TaskCall, drop_task, program_memory
from ostler.model.states import IsolationLevel


class NoIsolation(Isolation):
    """Calls are tasks of the manager's loop, and plain methods run right on it: one that blocks blocks everybody."""

    level = IsolationLevel.NONE
    capabilities = Capabilities(limits=LIMITS)

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        cell = InlineCell(self._clock, plan, listener)
        cell.open()
        return cell


class InlineCell(InProcessCell):
    level = IsolationLevel.NONE
    LEFT_BEHIND = "its task does not end; it is cut off and ends with the program"
    _pushes = 0

    def open(self) -> None:
        self._make().result(is_closing=False)

    async def ping(self) -> None:
        # A caller has a loop that turns, and that is all there is to know.
        if self._closing:
            raise AgentGoneError

    @property
    def is_idle(self) -> bool:
        return not self._closing

    async def usage(self) -> Usage:
        return Usage(memory_bytes=program_memory(), memory_is_shared=True)

    def _settle(self, call: TaskCall, outcome: Outcome) -> None:
        super()._settle(call, outcome)
        self._check_gone()

    def _check_gone(self) -> None:
        if self._closing and not self._running:
            wake(self._gone)

    def _wind_up(self) -> None:
        for call in self._running:
            call.cancel()
        self._check_gone()

    def _push(self) -> None:
        self._pushes += 1
        if self._pushes >= self.PUSHES - 1:
            # It was asked often enough. What waits on this loop can be closed where it waits; left alone it would
            # keep the whole program from ending.
            for call in self._running:
                if call.task is not None:
                    drop_task(call.task)
        self._wind_up()
