"""Between processing and waiting: the record follows what the agent does."""

from __future__ import annotations

from ostler.errors import OstlerError, StoreError
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life
from ostler.model import AgentState
from ostler.store import SYSTEM, Actor

_WORKING = frozenset({AgentState.READY, AgentState.WAITING, AgentState.PROCESSING})


async def settle(house: House, life: Life, by: Actor = SYSTEM) -> None:
    """Write down whether it works or waits. What the store cannot take now is tried again by the watch.

    A result is never lost because of this: the work is done, whatever the disk says.
    """
    if not due(life):
        life.unsettled = False
        return
    try:
        async with life.lock:
            while due(life):  # what is so now may be over when it is written
                to = AgentState.PROCESSING if life.working else AgentState.WAITING
                await house.move(life, to, by=by)
        life.unsettled = False
    except StoreError:
        life.unsettled = True
    except OstlerError as error:
        house.log.emit("settle_refused", instance_id=life.instance_id, error=str(error))


def due(life: Life) -> bool:
    """Whether the record says something else than what is."""
    if (
        life.left
        or life.is_riddle
        or life.state not in _WORKING
        or (life.cell is not None and life.cell.ended is not None)
    ):
        return False  # what has ended neither works nor waits; whoever tells of its end tells so
    if life.working:
        return life.state is not AgentState.PROCESSING
    return life.state is AgentState.PROCESSING
