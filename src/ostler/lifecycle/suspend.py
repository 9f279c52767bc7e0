"""A pause, at one of three depths. The wait that goes with it says why and until when, and survives a restart."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

from ostler.errors import InvalidOperationError, ValidationError
from ostler.lifecycle.clocks import run_clocks, stop_clocks
from ostler.lifecycle.doors import Asker, reach, require_kind
from ostler.lifecycle.house import House
from ostler.lifecycle.leaving import cancel_calls, clear_away, stop_cell, sweep_up
from ostler.lifecycle.life import Life
from ostler.lifecycle.settle import settle
from ostler.lifecycle.terminate import Farewell, say_goodbye
from ostler.model import (
    AgentInstance,
    AgentState,
    AttemptOutcome,
    Fault,
    Permission,
    SuspendDepth,
    TerminationOptions,
    Wait,
    WaitKind,
    shown,
)
from ostler.seams import Deadline
from ostler.store import SYSTEM, Actor
from ostler.store.commands import Beside, EndAttempt

_RESTING = frozenset({AgentState.READY, AgentState.WAITING})
_LONGEST = timedelta(days=365)
_PARKED = "parked"


async def suspend(
    house: House,
    asker: Asker,
    instance_id: UUID,
    depth: SuspendDepth | None = None,
    resume_after: timedelta | None = None,
) -> AgentInstance:
    """Without a depth it is held, and only when it is at rest. To hold one that works waits for its turn to end."""
    if depth is not None and depth not in tuple(SuspendDepth):
        words = ", ".join(SuspendDepth)
        raise ValidationError([Fault(field="depth", bound=f"must be one of {words}", value=shown(depth))])
    if resume_after is not None:
        require_kind("resume_after", resume_after, timedelta)
    if resume_after is not None and not timedelta(0) < resume_after <= _LONGEST:
        raise ValidationError([Fault(field="resume_after", bound="must be more than 0 and at most 365 days")])
    record = await reach(house, asker, instance_id, Permission.AGENTS_SUSPEND)
    life = house.lives.get(instance_id)
    at_rest = record.state in _RESTING
    if life is None or not (at_rest or (depth is not None and record.state is AgentState.PROCESSING)):
        raise _not_now(record)
    chosen = SuspendDepth(depth or SuspendDepth.HOLD)
    if chosen is SuspendDepth.FREEZE:
        await house.firm(_freeze(house, life, asker.actor, resume_after))
    else:
        await _hold(house, life, asker.actor, (chosen, resume_after))
    resumes_at = house.clock.wall() + resume_after if resume_after else None
    house.log.emit("suspended", instance_id=instance_id, depth=chosen, resumes_at=resumes_at)
    return life.record


def _not_now(record: AgentInstance) -> InvalidOperationError:
    advice = "hold, freeze or park it" if record.state is AgentState.PROCESSING else "it must be ready or waiting"
    return InvalidOperationError(
        f"instance {record.instance_id} is {record.state} and cannot be suspended so; {advice}",
        current=record.state,
        wanted=AgentState.SUSPENDED,
    )


async def _hold(house: House, life: Life, by: Actor, how: tuple[SuspendDepth, timedelta | None]) -> None:
    """Take no more, finish the turn, then stand still; a parked one lets go of its process as well."""
    depth = how[0]
    if life.holding:
        raise InvalidOperationError(f"instance {life.instance_id} is being suspended already", current=life.state)
    life.holding = True
    try:
        await _until_quiet(house, life, parking=depth is SuspendDepth.PARK)
        await house.firm(_stand_still(house, life, by, how))
    finally:
        life.holding = False


async def _stand_still(house: House, life: Life, by: Actor, how: tuple[SuspendDepth, timedelta | None]) -> None:
    async with life.lock:
        if life.cell is None or life.cell.ended is not None:
            raise InvalidOperationError(
                f"instance {life.instance_id} ended before it could be suspended",
                current=life.state,
                wanted=AgentState.SUSPENDED,
            )
        if life.state not in _RESTING or life.working or life.left or life.mourned >= life.attempt:
            raise _not_now(life.record)
        await _write(house, life, by, how)
    if how[0] is SuspendDepth.PARK:
        life.parking = house.run(park(house, life), "ostler-park")
        await asyncio.shield(life.parking)


async def _until_quiet(house: House, life: Life, *, parking: bool) -> None:
    while life.working or (parking and life.calls):
        life.quiet = asyncio.Event()
        await life.quiet.wait()
    life.quiet = None
    await settle(house, life)


async def _freeze(house: House, life: Life, by: Actor, resume_after: timedelta | None) -> None:
    cell = life.cell
    level = life.options.isolation_level
    if not life.isolation.capabilities.freezes or cell is None:
        raise InvalidOperationError(
            f"the {level} level cannot freeze an agent in mid-work; hold or park it, or spawn it at a higher level",
            current=life.state,
            wanted=AgentState.SUSPENDED,
        )
    async with life.lock:
        if life.state not in _RESTING | {AgentState.PROCESSING}:
            raise _not_now(life.record)
        await cell.freeze()
        stop_clocks(house, life)
        try:
            await _write(house, life, by, (SuspendDepth.FREEZE, resume_after))
        except BaseException:
            await cell.thaw()
            run_clocks(house, life)
            raise


async def _write(house: House, life: Life, by: Actor, how: tuple[SuspendDepth, timedelta | None]) -> None:
    """State and wait in one commit. Hold the lock."""
    depth, resume_after = how
    wait = suspension(house, life, depth, resume_after)
    freezing = depth is SuspendDepth.FREEZE
    reason = f"{_PAST[depth]} by {by.name}"
    beside = Beside(open_wait=wait)
    await house.move(life, AgentState.SUSPENDED, by=by, freezing=freezing, reason=reason, beside=beside, act="suspend")
    life.suspension, life.depth = wait.wait_id, depth
    if resume_after is not None:
        house.timers.add(wait, resume_after)


_PAST = {SuspendDepth.HOLD: "held", SuspendDepth.FREEZE: "frozen", SuspendDepth.PARK: _PARKED}


def suspension(house: House, life: Life, depth: SuspendDepth, resume_after: timedelta | None) -> Wait:
    return house.new_wait(
        life.record,
        WaitKind.RESUME,
        reason=_PAST[depth],
        due_at=house.clock.wall() + resume_after if resume_after else None,
        detail={"depth": depth.value, "previous_state": life.state.value},
    )


async def park(house: House, life: Life) -> None:
    """Its process ends in order; the record stays suspended, and a resume starts it fresh."""
    cell, attempt, grace = life.cell, life.attempt, TerminationOptions.default().graceful_timeout
    life.depth = SuspendDepth.PARK
    cancel_calls(life)  # one that waits for an answer can be left when the manager closes
    if cell is not None:
        farewell = Farewell()
        try:
            async with Deadline(house.clock, grace):
                await say_goodbye(cell, farewell, keep=False)
        except TimeoutError:
            farewell.faults.append("it did not shut down in time")
        report = await stop_cell(life, grace, cell)  # this one, though another start may have followed it
        faults = [*farewell.faults, *([report.left_behind] if report.left_behind else [])]
        command = EndAttempt(
            by=SYSTEM,
            instance_id=life.instance_id,
            attempt=attempt,
            outcome=AttemptOutcome.STOPPED,
            detail="; ".join([_PARKED, *faults]),
        )
        await house.insist(lambda: house.store.commit(command))
        await clear_away(life)
    sweep_up(life)
