"""One death, told once: what ended it, whether it comes back, and when. All of it in one commit."""

from __future__ import annotations

from datetime import timedelta

from ostler.errors import InvalidOperationError, OstlerError, StaleWriterError, StoreError
from ostler.isolation.base import Exit
from ostler.lifecycle.dying import Death, plan_death
from ostler.lifecycle.house import House
from ostler.lifecycle.leaving import clear_away, leave_cell, turn_away
from ostler.lifecycle.life import Life
from ostler.model import INACTIVE_STATES, AgentState, SuspendDepth, Wait
from ostler.policy import RestartDecision

_OVER = INACTIVE_STATES | {AgentState.TERMINATING}


async def died(house: House, life: Life, attempt: int, how: Exit) -> None:
    """However many signals announce it: the first claims it, the rest find it claimed."""
    if life.left or life.mourned >= attempt or life.attempt != attempt or life.state in _OVER:
        return
    if life.starting is not None:
        return  # whoever starts it sees it end, and tells
    if life.state is AgentState.SUSPENDED and life.depth is SuspendDepth.PARK:
        return  # it ends because it is parked, which is no death
    life.mourned = attempt
    house.log.emit(
        "crashed", instance_id=life.instance_id, error=how.detail or how.outcome, stack_trace=how.stack_trace
    )
    left = await leave_cell(house, life, f"the agent has ended ({how.detail or how.outcome})")
    if left is not None:
        how = Exit(
            outcome=how.outcome,
            detail=f"{how.detail or how.outcome}; {left}",
            exception_type=how.exception_type,
            stack_trace=how.stack_trace,
        )
    async with life.lock:
        if life.state not in _OVER:
            await write_failure(house, life, how)
    if life.state in INACTIVE_STATES:
        await clear_away(life)


async def write_failure(house: House, life: Life, how: Exit, *, final: bool = False) -> None:
    """To failed, with the reason; and, where the policy says so, with the wait for its return. Hold the lock."""

    async def write() -> Death:
        death = await plan_death(house, life.record, how, pause=life.suspension, final=final)
        house.fault("restart.decide.after")
        await house.move(life, AgentState.FAILED, **death.said)
        return death

    try:
        death = await house.insist(write)
    except (StaleWriterError, InvalidOperationError, StoreError):
        house.drop(life)  # the next manager finds a start that has not ended, and tells
        return
    _after(house, life, death.decision, death.wait)


def _after(house: House, life: Life, decision: RestartDecision, wait: Wait | None) -> None:
    if life.suspension is not None:
        house.timers.drop(life.suspension)
    life.suspension = life.depth = None
    turn_away(life, f"the agent has failed ({life.record.error_message})")
    if wait is None:
        house.log.emit("restart_given_up", instance_id=life.instance_id, reason=decision.sentence)
        house.drop(life)
        return
    life.backoff = wait.wait_id
    house.log.emit(
        "restart_scheduled",
        instance_id=life.instance_id,
        attempt=decision.attempt_number,
        delay=decision.delay,
        reason=decision.sentence,
    )
    house.timers.add(wait, max(decision.delay, timedelta(0)))


def explained(error: BaseException) -> str:
    """What an error says, for a record."""
    return str(error) if isinstance(error, OstlerError) else f"{type(error).__name__}: {error}"
