"""The end of a pause: by hand, or by itself when its time is over."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

from ostler.errors import AgentNotFoundError, InvalidOperationError, OstlerError, StoreError
from ostler.lifecycle.admit import revive
from ostler.lifecycle.clocks import run_clocks
from ostler.lifecycle.doors import Asker, reach
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life
from ostler.lifecycle.settle import settle
from ostler.lifecycle.spawn import give_up
from ostler.lifecycle.start import start
from ostler.lifecycle.working import rejoin
from ostler.model import AgentInstance, AgentState, Permission, SuspendDepth, Wait
from ostler.store import SYSTEM, Actor
from ostler.store.commands import Beside, NewAttempt

_LATER = timedelta(seconds=5)


async def resume(house: House, asker: Asker, instance_id: UUID) -> AgentInstance:
    record = await reach(house, asker, instance_id, Permission.AGENTS_SUSPEND)
    if record.state is not AgentState.SUSPENDED:
        raise _not_suspended(record)
    life = await revive(house, record)
    await house.firm(_resume(house, life, asker.actor))
    return life.record


async def resume_due(house: House, wait: Wait) -> None:
    """Its pause is over. Where the definition is not registered yet, it waits for that."""
    record = await house.store.get_instance(wait.instance_id) if wait.instance_id else None
    if record is None or record.state is not AgentState.SUSPENDED:
        return
    try:
        life = await revive(house, record)
        if life.suspension == wait.wait_id:  # else this is another pause, with an end of its own
            await _resume(house, life, SYSTEM)
    except AgentNotFoundError:
        house.strangers.setdefault(record.definition_id, {})[wait.wait_id] = wait
    except StoreError:
        house.timers.add(wait, _LATER)
    except OstlerError as error:
        house.log.emit("resume_failed", instance_id=record.instance_id, error=str(error))


async def _resume(house: House, life: Life, by: Actor) -> None:
    if life.parking is not None:
        await asyncio.wait([life.parking])  # first it must be gone; then it can come back
        life.parking = None
    pause = life.suspension
    beside = Beside(end_wait=pause, wait_outcome="resumed") if pause else Beside()
    if life.depth is SuspendDepth.PARK or life.cell is None:
        await _fresh(house, life, by, beside)
    else:
        async with life.lock:
            if life.state is not AgentState.SUSPENDED:
                raise _not_suspended(life.record)
            if life.depth is SuspendDepth.FREEZE:
                await _thaw(house, life, by, beside)
            else:
                await house.move(
                    life, AgentState.READY, by=by, reason=f"resumed by {by.name}", beside=beside, act="resume"
                )
            life.suspension = life.depth = None  # under the lock: whoever ends it next must not end the pause again
    _awake(house, life, pause)
    await settle(house, life)
    house.log.emit("resumed", instance_id=life.instance_id, to_state=life.state)


async def _thaw(house: House, life: Life, by: Actor, beside: Beside) -> None:
    """It goes on where it stood, and so do the clocks of its requests. Hold the lock."""
    to = AgentState.PROCESSING if life.working else AgentState.READY
    cell = life.cell
    await house.move(life, to, by=by, freezing=True, reason=f"thawed by {by.name}", beside=beside, act="resume")
    if cell is not None:
        await cell.thaw()
    run_clocks(house, life)
    rejoin(house, life)  # one that was found again frozen may tell only now what it works on


async def _fresh(house: House, life: Life, by: Actor, beside: Beside) -> None:
    """A parked one comes back as a new start of the same instance."""
    async with life.lock:
        if life.state is not AgentState.SUSPENDED or life.starting is not None:
            raise _not_suspended(life.record)
        await house.commit(life, NewAttempt(by=by, instance_id=life.instance_id, attempt=life.attempt))
        attempt = life.attempt
    try:
        await start(house, life, by=by, beside=beside)
    except BaseException as error:
        ending = give_up(house, life, attempt, error, final=False)
        if isinstance(error, StoreError):
            house.run(ending, "ostler-resume-failed")
        else:
            await house.run(ending, "ostler-resume-failed")
        raise


def _awake(house: House, life: Life, pause: UUID | None) -> None:
    if pause is not None:
        house.timers.drop(pause)
    if life.resumed is not None:
        life.resumed.set()


def _not_suspended(record: AgentInstance) -> InvalidOperationError:
    return InvalidOperationError(
        f"instance {record.instance_id} is {record.state}, not suspended", current=record.state, wanted=AgentState.READY
    )
