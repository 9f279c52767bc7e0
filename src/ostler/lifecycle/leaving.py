"""When an agent goes, by itself or by force: what must not stay behind."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

from ostler.errors import AgentGoneError
from ostler.isolation.base import Cell, StopReport
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life
from ostler.seams import Deadline

NO_GRACE = timedelta(0)
#: How long what it said may take to be written; a store that hangs must not keep it from its end.
_SAYING_SECONDS = 30.0


async def leave_cell(house: House, life: Life, why: str) -> str | None:
    """Cancel what it works on, end the cell by force, and say what could not be ended."""
    cancel_calls(life)
    turn_away(life, why)
    report = await stop_cell(life, NO_GRACE)
    if report.left_behind is not None:
        house.log.emit("left_behind", instance_id=life.instance_id, what=report.left_behind)
    return report.left_behind


async def stop_cell(life: Life, grace: timedelta, cell: Cell | None = None) -> StopReport:
    """Stop it. The cell stays with the life until it is proven gone; then write that down, and `clear_away`."""
    cell = cell or life.cell
    if cell is None:
        return StopReport(graceful=True)
    report = await hush(life, cell, grace)
    life.spent = [*(one for one in life.spent or () if one is not cell), cell]
    if life.cell is cell:
        life.cell = None
    return report


async def hush(life: Life, cell: Cell, grace: timedelta) -> StopReport:
    """Stop it, and have all written that it said: a record takes no word of a start that has ended."""
    report = await cell.stop(grace)
    await written(life)
    return report


async def written(life: Life) -> None:
    """Until all that it said is."""
    if life.saying is not None:
        await asyncio.wait([life.saying], timeout=_SAYING_SECONDS)


async def clear_away(life: Life) -> None:
    """Let go of what has ended. Not before its end is written down: the next manager might have to ask how it was."""
    spent, life.spent = life.spent or (), None
    for cell in spent:
        await cell.destroy()


async def put_out(life: Life) -> None:
    """Stop it by force and let go of it, where there is nothing more to write."""
    await stop_cell(life, NO_GRACE)
    await clear_away(life)


def cancel_calls(life: Life) -> None:
    """Outstanding operations end; their callers are told why by `process`."""
    current = asyncio.current_task()
    for task in list(life.calls):
        if task is not current:
            task.cancel()
    for future in (life.waits or {}).values():
        if not future.done():
            future.set_exception(AgentGoneError("the agent ended while it waited"))
            future.exception()  # looked at, lest nobody does


async def calls_ended(house: House, life: Life, limit: timedelta) -> None:
    """Hooks come after the work has stopped; but work that does not stop must not use up their time."""
    if life.calls:
        with contextlib.suppress(TimeoutError):
            async with Deadline(house.clock, limit):
                await asyncio.wait(list(life.calls))


def let_go(life: Life) -> None:
    """Leave it as it is, for the next manager; its work goes on, and only those who wait for it here do not."""
    life.left = True
    turn_away(life, "this manager has let go of the agent, which lives on; ask the next one")
    if life.cell is not None:
        life.cell.let_go()


def turn_away(life: Life, why: str) -> None:
    life.slots.turn_away(AgentGoneError(why))


def sweep_up(life: Life) -> None:
    """Remove the private directory if nothing is in it; what an agent has written stays until it is retired."""
    workspace = life.plan.workspace if life.plan else None
    if workspace is not None:
        with contextlib.suppress(OSError):
            workspace.rmdir()
