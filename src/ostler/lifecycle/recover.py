"""What an earlier manager left: every start that has not ended, every wait that has not. Each on its own.

Nothing here is guessed. What lives is taken up as it is; what has ended while nobody looked is told with its true
reason; what cannot be found again is lost, and its record says so. Whether it comes back is the same decision as for
any other death.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

from ostler.errors import OstlerError
from ostler.isolation.base import Cell, Exit, Isolation, Verb
from ostler.lifecycle.adopt import adopt, depth_of, level_of, life_of, look_for
from ostler.lifecycle.dying import plan_death
from ostler.lifecycle.house import House
from ostler.lifecycle.leaving import NO_GRACE, written
from ostler.lifecycle.life import Life
from ostler.lifecycle.terminate import unended
from ostler.lifecycle.waits import close_wait
from ostler.model import (
    INACTIVE_STATES,
    AgentInstance,
    AgentState,
    Attempt,
    AttemptOutcome,
    GetInstancesFilter,
    SuspendDepth,
    TerminationOptions,
    Wait,
    WaitKind,
)
from ostler.store import SYSTEM
from ostler.store.commands import AttemptEnd, Beside, EndAttempt, MoveInstance

_LOST = "the program it lived in has ended"
#: So many are looked for at a time: a thousand agents must be found again within seconds.
_AT_ONCE = 64
#: One that was asked this was on its way out.
_FAREWELL = frozenset({Verb.CLEANUP, Verb.FINAL_STATE, Verb.SHUTDOWN})
_S = AgentState


@dataclass(kw_only=True)
class _Ground:
    """What recovery goes by, and what it has come across."""

    #: By instance: the pause it is in, and what it waits for itself.
    pauses: dict[UUID | None, Wait] = field(default_factory=dict)
    asks: dict[UUID | None, list[Wait]] = field(default_factory=dict)
    #: The levels in which something was looked for.
    levels: dict[Isolation, None] = field(default_factory=dict)
    #: Starts that could not be dealt with; nothing is done to them.
    unclear: set[tuple[UUID, int]] = field(default_factory=set)


async def recover(house: House) -> int:
    """Finish or undo every open intent. One bad record does not stop the others."""
    ground = await _ground(house)
    gate = asyncio.Semaphore(_AT_ONCE)
    count, after = 0, None
    while attempts := await house.store.open_attempts(after=after):
        after = attempts[-1]
        count += sum(await asyncio.gather(*(_one(house, attempt, ground, gate) for attempt in attempts)))
    await _sweep(house, ground)
    await _finish_all(house, ground)
    await _resume_waits(house)
    return count


async def _ground(house: House) -> _Ground:
    ground, after = _Ground(), None
    while page := await house.store.open_waits(after=after):
        after = page[-1]
        for wait in page:
            if wait.kind is WaitKind.RESUME:
                ground.pauses[wait.instance_id] = wait
            elif wait.kind is WaitKind.AGENT:
                ground.asks.setdefault(wait.instance_id, []).append(wait)
    return ground


async def _one(house: House, attempt: Attempt, ground: _Ground, gate: asyncio.Semaphore) -> bool:
    async with gate:
        try:
            await _recover(house, attempt, ground)
        except Exception as error:  # noqa: BLE001 - a row that cannot even be read is one of them
            ground.unclear.add((attempt.instance_id, attempt.number))
            house.log.emit("recovery_failed", instance_id=attempt.instance_id, error=str(error))
            return False
        return True


async def _recover(house: House, attempt: Attempt, ground: _Ground) -> None:
    record = await house.store.get_instance(attempt.instance_id)
    lost = Exit(outcome=AttemptOutcome.LOST, detail=_LOST)
    if record is None or record.attempt != attempt.number or record.state in INACTIVE_STATES:
        await _end(house, attempt, lost)
        return
    pause = ground.pauses.get(record.instance_id)
    level = level_of(house, record)
    how, stopped = lost, None
    if level is not None:
        ground.levels[level] = None
        life, found = await look_for(house, record, attempt, level)
        if isinstance(found, Exit):
            await written(life)  # what it said when nobody was there
        if isinstance(found, Cell):
            if not _on_its_way_out(record, pause, found):
                await adopt(house, life, found, pause, ground.asks.get(record.instance_id, ()))
                return
            how, left = await _put_out(house, life, found)
            if left is not None and record.state is AgentState.TERMINATING and level.capabilities.kills:
                _go_on_ending(house, life, found, left)
                return
            stopped = found
        elif found.outcome is not AttemptOutcome.LOST or level.capabilities.outlives_manager:
            how = found
        left = await level.end_remains(record.instance_id) if record.state is AgentState.TERMINATING else None
        if left is not None:
            await _end(house, attempt, how)
            _go_on_ending(house, life, stopped, left)
            return
    await _tell(house, record, attempt, pause, how)
    if stopped is not None:
        await stopped.destroy()
    house.log.emit("recovered", instance_id=record.instance_id, outcome=f"it was {record.state}")


def _on_its_way_out(record: AgentInstance, pause: Wait | None, cell: Cell) -> bool:
    """Half started, or half ended: there is nothing whole to take up."""
    if record.state in {_S.INITIALIZING, _S.TERMINATING}:
        return True
    if record.state is _S.SUSPENDED and (pause is None or depth_of(pause) is SuspendDepth.PARK):
        return True
    return not _FAREWELL.isdisjoint(cell.in_flight.values())


async def _put_out(house: House, life: Life, cell: Cell) -> tuple[Exit, str | None]:
    """How that went, and what of it lives on."""
    life.left = True  # what it says now is of no account
    if life.adopted is not None:
        life.adopted.set()
    report = await cell.stop(NO_GRACE)
    doing = {_S.INITIALIZING: "started", _S.TERMINATING: "terminated", _S.SUSPENDED: "parked"}
    detail = f"its manager has ended while it was being {doing.get(life.state, 'stopped')}; it was ended by force"
    if report.left_behind is not None:
        house.log.emit("left_behind", instance_id=life.instance_id, what=report.left_behind)
        detail = f"{detail}; {report.left_behind}"
    return Exit(outcome=AttemptOutcome.STOPPED, detail=detail), report.left_behind


def _go_on_ending(house: House, life: Life, cell: Cell | None, left: str) -> None:
    """Its termination is not over as long as something of it lives; this manager goes on with it."""
    life.left, life.cell = False, cell
    house.lives[life.instance_id] = life
    unended(house, life, TerminationOptions(reason=f"{_LOST} while it was being terminated"), SYSTEM, left)


async def _tell(house: House, record: AgentInstance, attempt: Attempt, pause: Wait | None, how: Exit) -> None:
    """It does not live any more. What that means depends on what it was at."""
    quiet = how.outcome in {AttemptOutcome.LOST, AttemptOutcome.STOPPED}
    match record.state:
        case AgentState.TERMINATING:
            await _finish(house, record, how)
        case AgentState.SUSPENDED if quiet and not _was_working(pause):
            # It stood still, so nothing was cut off: it is parked now, and comes back fresh.
            detail = f"{how.detail} while it was suspended; a resume starts it fresh"
            await _end(house, attempt, Exit(outcome=how.outcome, detail=detail))
        case _:
            await _lose(house, record, attempt, pause, how)


def _was_working(wait: Wait | None) -> bool:
    detail = (wait.detail or {}) if wait else {}
    return detail.get("depth") == SuspendDepth.FREEZE and detail.get("previous_state") == AgentState.PROCESSING


async def _end(house: House, attempt: Attempt, how: Exit) -> None:
    await house.store.commit(
        EndAttempt(instance_id=attempt.instance_id, attempt=attempt.number, outcome=how.outcome, detail=how.detail)
    )


async def _finish(house: House, record: AgentInstance, how: Exit | None = None) -> None:
    ended = how or Exit(outcome=AttemptOutcome.LOST, detail=_LOST)
    reason = f"{_LOST} while it was being terminated" if ended.outcome is AttemptOutcome.LOST else ended.detail
    await house.store.commit(
        MoveInstance(
            instance_id=record.instance_id,
            to=AgentState.TERMINATED,
            reason=reason,
            beside=Beside(ended=AttemptEnd(outcome=ended.outcome, detail=ended.detail)),
        )
    )


async def _lose(house: House, record: AgentInstance, attempt: Attempt, pause: Wait | None, how: Exit) -> None:
    """Dead. The restart policy decides as for any other death."""
    # Whoever asked for it was never told that it lives, and has nothing to expect of it.
    unborn = record.state is AgentState.INITIALIZING and attempt.number == 1
    death = await plan_death(house, record, how, pause=pause.wait_id if pause else None, final=unborn)
    await house.store.commit(
        MoveInstance(instance_id=record.instance_id, attempt=record.attempt, to=AgentState.FAILED, **death.said)
    )


async def _sweep(house: House, ground: _Ground) -> None:
    """What still lives and belongs to nobody ends, before anything new is started."""
    if house.settings.outlive > timedelta(0):
        for name in house.levels.known():
            try:
                if (level := house.levels.get(name)).capabilities.outlives_manager:
                    ground.levels[level] = None
            except OstlerError:
                continue  # it is not installed
    kept = ground.unclear | {(life.instance_id, life.attempt) for life in house.living()}
    for level in ground.levels:
        try:
            await level.sweep(kept)
        except Exception as error:  # noqa: BLE001 - whatever a level cannot end now, the others can
            house.log.emit("recovery_failed", instance_id="", error=str(error))


async def _finish_all(house: House, ground: _Ground) -> None:
    """Terminations that were cut off after nothing lived any more."""
    after, open_still = None, {instance_id for instance_id, _ in ground.unclear} | house.lives.keys()
    while spaces := await house.store.list_workspaces(after=after):
        after = spaces[-1].workspace_id
        for space in spaces:
            wanted = GetInstancesFilter(state=AgentState.TERMINATING, limit=1000)
            for record in await house.store.list_instances(wanted, space.workspace_id):
                if record.instance_id in open_still:
                    continue
                try:
                    await _finish_one(house, record)
                except OstlerError as error:
                    house.log.emit("recovery_failed", instance_id=record.instance_id, error=str(error))


async def _finish_one(house: House, record: AgentInstance) -> None:
    level = level_of(house, record)
    left = None if level is None else await level.end_remains(record.instance_id)
    if level is None or left is None:
        await _finish(house, record)
    else:
        _go_on_ending(house, await life_of(house, record, level), None, left)


async def _resume_waits(house: House) -> None:
    """Waits go on where they were; those of agents that are gone end."""
    after = None
    while page := await house.store.open_waits(after=after):
        after = page[-1]
        for wait in page:
            match wait.kind:
                case WaitKind.AGENT:
                    if wait.instance_id not in house.lives:
                        await close_wait(house, wait.wait_id, "the agent is gone")
                case WaitKind.BACKOFF | WaitKind.RESUME:
                    house.timers.found(wait)
