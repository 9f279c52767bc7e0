"""Coming back: by policy when a wait is over, or by hand. One death, one restart."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

from ostler.errors import (
    AgentNotFoundError,
    ConflictError,
    InvalidOperationError,
    LicenseError,
    OstlerError,
    StoreError,
)
from ostler.lifecycle.admit import revive
from ostler.lifecycle.doors import Asker, reach, require_kind
from ostler.lifecycle.house import House
from ostler.lifecycle.introduce import introduce
from ostler.lifecycle.leaving import calls_ended, cancel_calls, clear_away, stop_cell, turn_away
from ostler.lifecycle.life import Life
from ostler.lifecycle.spawn import give_up
from ostler.lifecycle.start import start
from ostler.lifecycle.terminate import Farewell, say_goodbye
from ostler.model import (
    AgentInstance,
    AgentState,
    AttemptOutcome,
    Permission,
    TerminationOptions,
    ValidationResult,
    Wait,
    WaitKind,
)
from ostler.model.ledger import MAX_REASON
from ostler.model.text import plain_text_faults
from ostler.seams import Deadline
from ostler.store import SYSTEM, Actor
from ostler.store.commands import AttemptEnd, Beside, Restarting, RestartInstance

#: When the plan has no room, or the store no ear: how long until the next try.
_LATER = timedelta(seconds=5)
_REFUSED = frozenset({AgentState.INITIALIZING, AgentState.TERMINATING, AgentState.TERMINATED})


async def restart_due(house: House, wait: Wait) -> None:
    """The backoff is over. A definition that is not registered yet is waited for; so is room in the plan."""
    record = await house.store.get_instance(wait.instance_id) if wait.instance_id else None
    if record is None or record.state is not AgentState.FAILED:
        return
    try:
        life = await revive(house, record)
    except AgentNotFoundError:
        house.strangers.setdefault(record.definition_id, {})[wait.wait_id] = wait
        return
    except OstlerError as error:  # its level is not installed any more
        house.log.emit("restart_failed", instance_id=record.instance_id, error=str(error))
        return
    async with house.restarting.turn(life.options.priority):
        try:
            await _come_back(house, life, SYSTEM, (wait.wait_id, wait.reason))
        except (LicenseError, StoreError) as error:
            house.log.emit("restart_failed", instance_id=record.instance_id, error=str(error))
            if life.state is AgentState.FAILED and life.backoff in {None, wait.wait_id}:
                house.timers.add(wait, _LATER)
        except (InvalidOperationError, ConflictError):
            return  # somebody else has claimed it, or ended it
        except OstlerError as error:
            house.log.emit("restart_failed", instance_id=record.instance_id, error=str(error))


async def restart(house: House, asker: Asker, instance_id: UUID, reason: str | None = None) -> AgentInstance:
    """By hand: a failed one at once, a living one after an orderly stop. It counts like any other start."""
    if reason is not None:
        require_kind("reason", reason, str)  # here, and not when it has been stopped already
    ValidationResult(faults=tuple(plain_text_faults("reason", reason, MAX_REASON))).require()
    record = await reach(house, asker, instance_id, Permission.AGENTS_SPAWN)
    if record.state in _REFUSED:
        raise InvalidOperationError(
            f"instance {instance_id} is {record.state} and cannot be restarted",
            current=record.state,
            wanted=AgentState.INITIALIZING,
        )
    life = await revive(house, record)
    await introduce(house, life)  # before it is stopped for a start that cannot be
    await asyncio.shield(house.run(_restart(house, life, asker.actor, reason), "ostler-restart"))
    return life.record


async def _restart(house: House, life: Life, by: Actor, reason: str | None) -> None:
    """Once begun it is finished, whoever stops waiting for it."""
    why = reason or f"restart asked for by {by.name}"
    if life.state is not AgentState.FAILED:
        await _stop(house, life, by, why)
    await _come_back(house, life, by, (life.backoff, why))


async def _stop(house: House, life: Life, by: Actor, why: str) -> None:
    """The present start ends in order; its record says that another follows at once."""
    if life.ending is not None or life.starting is not None or life.mourned >= life.attempt:
        raise InvalidOperationError(f"instance {life.instance_id} is ending or starting already", current=life.state)
    life.mourned = life.attempt
    if life.parking is not None:
        await asyncio.wait([life.parking])  # it is on its way out already
        life.parking = None
    cancel_calls(life)
    turn_away(life, "the agent is being restarted")
    farewell, grace = Farewell(), TerminationOptions.default().graceful_timeout
    if life.cell is not None:
        try:
            async with Deadline(house.clock, grace):
                await calls_ended(house, life, grace / 2)
                await say_goodbye(life.cell, farewell, keep=False)
        except TimeoutError:
            farewell.faults.append("it did not shut down in time")
    report = await stop_cell(life, grace)
    faults = [*farewell.faults, *([report.left_behind] if report.left_behind else [])]
    wait = house.new_wait(life.record, WaitKind.BACKOFF, reason=why, due_at=house.clock.wall())
    ended = AttemptEnd(outcome=AttemptOutcome.STOPPED, detail="; ".join([why, *faults]))
    async with life.lock:
        beside = _beside(life, wait, ended, why)
        await house.insist(lambda: house.move(life, AgentState.FAILED, by=by, reason=why, beside=beside))
        # Under the lock: whoever ends it next must find what is written down.
        if life.suspension is not None:
            house.timers.drop(life.suspension)
        life.suspension = life.depth = None
        life.backoff = wait.wait_id
        house.timers.add(wait, _LATER)  # for the case that it cannot come back at once
    await clear_away(life)


def _beside(life: Life, wait: Wait, ended: AttemptEnd, why: str) -> Beside:
    policy = life.options.restart_policy
    return Beside(
        ended=ended,
        open_wait=wait,
        end_wait=life.suspension,
        wait_outcome="restarted",
        restarting=Restarting(
            attempt_number=life.record.restart_count + 1,
            max_attempts=policy.max_retries if policy else 0,
            delay=timedelta(0),
            reason=why,
        ),
    )


def _begin_anew(life: Life) -> None:
    """An end that was asked for and could not be is not this start's."""
    if life.again is not None:
        life.again.cancel()
    life.again, life.balked, life.last_words = None, False, None


async def _come_back(house: House, life: Life, by: Actor, claim: tuple[UUID | None, str | None]) -> None:
    """Claim the restart by ending its wait, in one commit with the new attempt; then start."""
    wait_id, reason = claim
    policy = life.options.restart_policy
    house.fault("restart.spawn.before")
    async with life.lock:
        house.require_open()
        await house.commit(
            life,
            RestartInstance(
                by=by,
                instance_id=life.instance_id,
                attempt=life.attempt,
                max_attempts=policy.max_retries if policy else 0,
                reason=reason,
                end_wait=wait_id,
            ),
        )
        if wait_id is not None:
            house.timers.drop(wait_id)
        life.backoff, attempt = None, life.attempt
        _begin_anew(life)
    house.fault("restart.spawn.after")
    house.metrics.count("lifecycle.restarts.count")
    try:
        await start(house, life, by=by)
    except BaseException as error:
        house.log.emit("initialization_failed", instance_id=life.instance_id, error=str(error))
        ending = house.run(give_up(house, life, attempt, error, final=False), "ostler-restart-failed")
        if not isinstance(error, StoreError):
            await ending
        raise
