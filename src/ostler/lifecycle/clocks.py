"""The time that each request has. It stands still while the agent is frozen, and while the request waits."""

from __future__ import annotations

from contextvars import ContextVar

from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life, Run

#: The request on whose behalf something is done; it follows the work into the agent and back.
CURRENT_RUN: ContextVar[Run | None] = ContextVar("ostler_run", default=None)


def arm(house: House, run: Run) -> None:
    """Let its clock run, on from where it stood."""

    def expire() -> None:
        run.expired = True
        if run.task is not None:
            run.task.cancel()

    run.armed = house.clock.mono()
    run.timer = house.clock.call_later(run.left, expire)


def pause(house: House, run: Run) -> None:
    """Stop its clock; harmless where it stands already."""
    if run.timer is not None:
        run.left = max(run.left - (house.clock.mono() - run.armed), 0.0)
        run.timer.cancel()
        run.timer = None


def stop_clocks(house: House, life: Life) -> None:
    """Time does not count while it is frozen."""
    for run in life.calls.values():
        run.frozen = run.timer is not None
        pause(house, run)


def run_clocks(house: House, life: Life) -> None:
    """It goes on; and what it did not say while it was frozen is no silence."""
    for run in life.calls.values():
        if run.frozen:
            run.frozen = False
            arm(house, run)
    life.pulse.heartbeat = life.pulse.output = life.pulse.cpu_change = house.clock.mono()
