"""The end of a life: ask, clean up, wait, force, and write down what it came to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError, VersionConflictError
from ostler.isolation.base import LAST_CALL, Cell, Exit, Verb
from ostler.lifecycle.adopt import level_of, look_for
from ostler.lifecycle.doors import Asker, reach, require_kind
from ostler.lifecycle.house import House, Parting
from ostler.lifecycle.leaving import (
    NO_GRACE,
    calls_ended,
    cancel_calls,
    clear_away,
    stop_cell,
    sweep_up,
    turn_away,
    written,
)
from ostler.lifecycle.life import Life
from ostler.lifecycle.waits import close_wait
from ostler.model import (
    AgentInstance,
    AgentState,
    AttemptOutcome,
    Permission,
    TerminationOptions,
    TerminationResult,
    Wait,
    WaitKind,
)
from ostler.seams import Deadline
from ostler.store import SYSTEM, Actor
from ostler.store.commands import AttemptEnd, Beside, MoveInstance

#: What the audit calls it.
_ACT = "terminate"
#: How long after an end that left something it is tried again.
_AGAIN_SECONDS = 5.0


@dataclass(slots=True, kw_only=True)
class Farewell:
    """How the agent took it."""

    #: It went through all of it within its grace.
    complete: bool = False
    faults: list[str] = field(default_factory=list)
    final_state: Mapping[str, Any] | None = None
    left_behind: str | None = None

    @property
    def graceful(self) -> bool:
        return self.complete and not self.faults and self.left_behind is None


async def terminate(
    house: House, asker: Asker, instance_id: UUID, options: TerminationOptions | None = None
) -> TerminationResult:
    """Safe to ask twice, at once from several, and of one that is still starting: they share one end."""
    require_kind("instance_id", instance_id, UUID)
    chosen = TerminationOptions.default() if options is None else options
    require_kind("options", chosen, TerminationOptions)
    chosen.validate().require()
    with house.parting(instance_id) as parting:
        return await _part(house, asker, chosen, parting)


async def _part(house: House, asker: Asker, chosen: TerminationOptions, parting: Parting) -> TerminationResult:
    instance_id = parting.instance_id
    record = await reach(house, asker, instance_id, Permission.AGENTS_TERMINATE)
    if parting.result is not None:  # it ended while this caller was on the way
        return parting.result
    life = house.lives.get(instance_id)
    if life is not None and life.ending is not None:
        ending, cell = life.ending, life.cell
        if cell is not None and not chosen.graceful_timeout:
            await cell.stop(NO_GRACE)  # who comes later may have less patience than the first
        return await asyncio.shield(ending)
    if record.state is AgentState.TERMINATED and instance_id not in house.burials:
        raise InvalidOperationError(
            f"instance {instance_id} is terminated already",
            current=AgentState.TERMINATED,
            wanted=AgentState.TERMINATING,
        )
    if life is None:
        burial = house.burials.get(instance_id)
        if burial is None:
            burial = house.run(_bury(house, asker.actor, record, chosen), "ostler-bury")
            house.burials[instance_id] = burial
            burial.add_done_callback(lambda _: house.burials.pop(instance_id, None))
        try:
            return await asyncio.shield(burial)
        except VersionConflictError:  # it came back, or was ended, in between: look again
            return await _part(house, asker, chosen, parting)
    return await asyncio.shield(end(house, life, chosen, asker.actor))


def end(house: House, life: Life, options: TerminationOptions, by: Actor = SYSTEM) -> asyncio.Task[TerminationResult]:
    """Begin the end, or join it. It goes on whoever stops waiting for it."""
    if life.ending is None:
        life.ending = house.run(_end(house, life, options, by), "ostler-terminate")
    return life.ending


async def _end(house: House, life: Life, options: TerminationOptions, by: Actor) -> TerminationResult:
    began = house.clock.mono()
    try:
        house.fault("stop.intent.before")
        async with life.lock:
            if life.state is AgentState.FAILED:
                return await _end_failed(house, life, options, by)
            if life.state is not AgentState.TERMINATING:
                beside = Beside(end_wait=life.suspension, wait_outcome="terminated") if life.suspension else None
                await house.move(life, AgentState.TERMINATING, by=by, reason=options.reason, beside=beside, act=_ACT)
                _forget_suspension(house, life)
        house.fault("stop.intent.after")
        await _call_off(life)
        farewell = await _take_leave(house, life, options)
        if not farewell.complete and not options.force_if_timeout and farewell.left_behind is None:
            limit = options.graceful_timeout.total_seconds()
            life.ending, life.balked = None, True
            return TerminationResult.failed(
                f"it did not end within {limit:g} s and is left terminating; terminate it again to force it"
            ).evolve(final_instance=life.record)
        if life.isolation.capabilities.kills:
            left = farewell.left_behind or await life.isolation.end_remains(life.instance_id)
            if left is not None:
                life.last_words = farewell.final_state
                return unended(house, life, options, by, left)
        return await _final(house, life, options, by, (farewell, began))
    except BaseException:
        life.ending = None
        raise


def unended(house: House, life: Life, options: TerminationOptions, by: Actor, what: str) -> TerminationResult:
    """Something of it lives, so it is not called terminated: its end is tried again, until it is one."""
    house.log.emit("left_behind", instance_id=life.instance_id, what=what)
    life.ending, life.balked = None, True
    if life.again is None and house.shut is None:
        brief = options.evolve(graceful_timeout=NO_GRACE, force_if_timeout=True)
        # By a timer, not by a task: a house that closes does not wait for it.
        again = partial(_end_again, house, life, (life.attempt, brief, by))
        life.again = house.clock.call_later(_AGAIN_SECONDS, again)
    why = f"it could not be ended: {what}; it is left {life.state}, and tried again every {_AGAIN_SECONDS:g} s"
    if life.state is AgentState.FAILED:
        why += " by this manager; it does not come back"
    return TerminationResult.failed(why).evolve(final_instance=life.record)


def _end_again(house: House, life: Life, how: tuple[int, TerminationOptions, Actor]) -> None:
    attempt, options, by = how
    life.again = None
    if house.shut is None and house.lives.get(life.instance_id) is life and life.attempt == attempt:
        end(house, life, options, by)


async def _call_off(life: Life) -> None:
    """Cancel what is outstanding: its start, if it is at that, and every request."""
    if life.starting is not None:
        life.starting.cancel()
        await asyncio.wait([life.starting])
    cancel_calls(life)
    turn_away(life, f"instance {life.instance_id} is being terminated")


async def _take_leave(house: House, life: Life, options: TerminationOptions) -> Farewell:
    """Hooks, last words, shutdown, and the end of the cell; all within one grace, or by force."""
    farewell, cell = Farewell(final_state=life.last_words), life.cell
    if life.balked:
        farewell.faults.append("it did not end when it was first asked to")
    if cell is None:
        farewell.complete = True
        return farewell
    grace = options.graceful_timeout
    limit = house.clock.mono() + grace.total_seconds()
    if grace and not cell.is_stuck:
        try:
            async with Deadline(house.clock, grace):
                await calls_ended(house, life, grace / 2)
                await say_goodbye(cell, farewell, keep=options.persist_final_state)
                farewell.complete = True
        except TimeoutError:
            farewell.faults.append(f"it did not shut down within {grace.total_seconds():g} s")
    if not farewell.complete:
        if not options.force_if_timeout:
            return farewell
        if grace:
            house.log.emit("shutdown_timeout", instance_id=life.instance_id)
    house.fault("stop.kill.before")
    left = timedelta(seconds=max(limit - house.clock.mono(), 0.0))
    report = await stop_cell(life, left if farewell.complete else _last_call(life, grace))
    house.fault("stop.kill.after")
    farewell.left_behind = report.left_behind
    if report.left_behind is not None and life.isolation.capabilities.kills:
        life.cell = cell  # the next try is with the same one
    if not report.graceful and not farewell.faults:
        farewell.faults.append("it was ended at once" if not grace else "it did not end by itself and was forced")
    farewell.complete = farewell.complete and report.graceful
    return farewell


def _last_call(life: Life, grace: timedelta) -> timedelta:
    """Who hears no words may hear a signal, where there are any; unless it is to end at once."""
    return LAST_CALL if grace and life.isolation.capabilities.kills else NO_GRACE


async def say_goodbye(cell: Cell, farewell: Farewell, *, keep: bool) -> None:
    """In the seed's order: hooks, then what is to be kept, then shutdown. One that fails does not stop the others."""
    try:
        farewell.faults += [str(fault) for fault in await cell.call(Verb.CLEANUP) or ()]
        if keep:
            farewell.final_state = await _asked(cell, Verb.FINAL_STATE, farewell)
        await _asked(cell, Verb.SHUTDOWN, farewell)
    except AgentGoneError as error:
        farewell.faults.append(str(error))


async def _asked(cell: Cell, verb: Verb, farewell: Farewell) -> Any:
    try:
        return await cell.call(verb)
    except AgentExecutionError as error:
        farewell.faults.append(f"{verb} failed: {error}")
        return None


async def _final(
    house: House, life: Life, options: TerminationOptions, by: Actor, ended: tuple[Farewell, float]
) -> TerminationResult:
    farewell, began = ended
    if farewell.left_behind is not None:
        house.log.emit("left_behind", instance_id=life.instance_id, what=farewell.left_behind)
    sweep_up(life)
    detail = "; ".join([*farewell.faults, *([farewell.left_behind] if farewell.left_behind else [])]) or None
    how = AttemptEnd(outcome=AttemptOutcome.STOPPED, detail=detail or (None if farewell.graceful else "ended by force"))
    beside = Beside(ended=how, final_state=farewell.final_state)
    house.fault("stop.final.before")
    said: dict[str, Any] = {"reason": options.reason, "was_graceful": farewell.graceful, "act": _ACT}
    async with life.lock:
        await house.insist(lambda: house.move(life, AgentState.TERMINATED, by=by, beside=beside, **said))
    if life.again is not None:
        life.again.cancel()
    await clear_away(life)
    house.drop(life)
    house.fault("stop.final.after")
    duration = house.clock.mono() - began
    house.metrics.observe("lifecycle.terminate.duration", duration)
    if not farewell.graceful:
        house.metrics.count("lifecycle.terminate.forced")
    _tell(house, life.record, graceful=farewell.graceful)
    result = TerminationResult.successful(life.record, farewell.graceful, timedelta(seconds=duration))
    return house.parted(result.evolve(error_message=detail))


async def _end_failed(house: House, life: Life, options: TerminationOptions, by: Actor) -> TerminationResult:
    """It is dead already; only its return is called off, and what it left is ended. Hold the lock."""
    left = await life.isolation.end_remains(life.instance_id)
    if left is not None:
        return await _hold_back(house, life, options, by, left)
    beside = Beside(end_wait=life.backoff, wait_outcome="terminated") if life.backoff else None
    await house.move(life, AgentState.TERMINATED, by=by, reason=options.reason, beside=beside, act=_ACT)
    if life.backoff is not None:
        house.timers.drop(life.backoff)
    sweep_up(life)
    house.drop(life)
    _tell(house, life.record, graceful=False)
    result = TerminationResult.successful(life.record, was_graceful=False, duration=timedelta(seconds=0))
    return house.parted(result)


async def _hold_back(house: House, life: Life, options: TerminationOptions, by: Actor, left: str) -> TerminationResult:
    """It is not at its end as long as something of it lives; but it does not come back any more. Hold the lock."""
    if life.backoff is not None:
        backoff, life.backoff = life.backoff, None
        house.timers.drop(backoff)
        await close_wait(house, backoff, "terminated")
    return unended(house, life, options, by, left)


async def _bury(house: House, by: Actor, record: AgentInstance, options: TerminationOptions) -> TerminationResult:
    """One without a life here: failed for good, or parked by an earlier manager, or one that nobody could find."""
    ended, left = await _put_out(house, record)
    if ended is not None:
        record = await _as_it_is(house, record)
    level = level_of(house, record)
    if left is None and level is not None:
        left = await level.end_remains(record.instance_id)
    wait = await _open_wait(house, record)
    if left is not None:
        if wait is not None and record.state is AgentState.FAILED:  # it does not come back any more
            house.timers.drop(wait.wait_id)
            house.forget_stranger(wait)
            await close_wait(house, wait.wait_id, "terminated")
        why = f"it could not be ended: {left}; it is left {record.state}, terminate it again"
        return TerminationResult.failed(why).evolve(final_instance=record)
    beside = Beside(end_wait=wait.wait_id, wait_outcome="terminated") if wait else None
    if wait is not None:
        house.timers.drop(wait.wait_id)
        house.forget_stranger(wait)
    said: dict[str, Any] = {"by": by, "instance_id": record.instance_id, "reason": options.reason, "act": _ACT}
    graceful, seen = record.state is not AgentState.FAILED, record.version
    if record.state not in {AgentState.FAILED, AgentState.TERMINATING}:
        going = MoveInstance(**said, to=AgentState.TERMINATING, beside=beside, expected_version=seen)
        beside, seen = None, (await house.store.commit(going)).version
    if ended is not None:
        beside, graceful = replace(beside or Beside(), ended=ended), False
    last = MoveInstance(**said, to=AgentState.TERMINATED, was_graceful=graceful, beside=beside, expected_version=seen)
    final = await house.insist(lambda: house.store.commit(last))
    _tell(house, final, graceful=graceful)
    return house.parted(TerminationResult.successful(final, was_graceful=graceful, duration=timedelta(seconds=0)))


async def _put_out(house: House, record: AgentInstance) -> tuple[AttemptEnd | None, str | None]:
    """One whom recovery could not look for may live: now it is found and ended. How its start ended; what is left."""
    level = level_of(house, record) if record.is_active else None
    if level is None or not level.capabilities.kills:
        return None, None
    starts = await house.store.list_attempts(record.instance_id, 1, after=record.attempt - 1)
    if not starts or starts[0].outcome is not None:
        return None, None
    life, found = await look_for(house, record, starts[0], level)
    await written(life)
    if isinstance(found, Exit):
        return AttemptEnd(outcome=found.outcome, detail=found.detail), None
    report = await found.stop(NO_GRACE)
    await found.destroy()
    return AttemptEnd(outcome=AttemptOutcome.STOPPED, detail="ended by force"), report.left_behind


def _tell(house: House, record: AgentInstance, *, graceful: bool) -> None:
    house.metrics.count("lifecycle.terminate.count")
    uptime = record.uptime(house.clock.wall())
    house.log.emit("terminated", instance_id=record.instance_id, was_graceful=graceful, uptime=uptime)


async def _as_it_is(house: House, record: AgentInstance) -> AgentInstance:
    """What it had said meanwhile is written, which makes it another version but not another one."""
    now = await house.store.get_instance(record.instance_id)
    same = now is not None and (now.attempt, now.state) == (record.attempt, record.state)
    return now if now is not None and same else record


async def _open_wait(house: House, record: AgentInstance) -> Wait | None:
    waits = await house.store.open_waits(instance_id=record.instance_id)
    return next((one for one in waits if one.kind in {WaitKind.BACKOFF, WaitKind.RESUME}), None)


def _forget_suspension(house: House, life: Life) -> None:
    if life.suspension is not None:
        house.timers.drop(life.suspension)
    life.suspension = life.depth = None
    life.holding = False
