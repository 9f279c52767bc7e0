"""The work on one request: entered into the record, bounded in time, and what comes of each way it can end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from ostler.errors import (
    AgentExecutionError,
    AgentGoneError,
    ExecutionTimeoutError,
    InvalidOperationError,
    OstlerError,
)
from ostler.isolation.base import Cell, Exit, Verb
from ostler.lifecycle.clocks import CURRENT_RUN, arm, pause
from ostler.lifecycle.ear import tokens_wait
from ostler.lifecycle.fail import died
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life, Run
from ostler.lifecycle.orders import take_order
from ostler.lifecycle.settle import settle
from ostler.model import HOME_WORKSPACE_ID, AgentInstance, AgentState, AttemptOutcome, SuspendDepth
from ostler.store import Actor, AgentError
from ostler.store.commands import RecordAudit, ReportError

_OPEN = frozenset({AgentState.READY, AgentState.PROCESSING, AgentState.WAITING})
_ADVICE = {
    AgentState.INITIALIZING: "wait until it is ready",
    AgentState.SUSPENDED: "resume it first",
    AgentState.TERMINATING: "spawn another",
    AgentState.TERMINATED: "spawn another",
    AgentState.FAILED: "restart it, or look at why",
}


def begin(house: House, life: Life, run: Run, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """The work of one request, in a place that is taken already."""
    run.since = house.clock.mono()
    task = run.task = house.run(work, "ostler-process")
    life.calls[task] = run
    # Also for one that is cancelled before its first step, whose `finally` never comes.
    task.add_done_callback(partial(_left, life))
    return task


def let_go_error(life: Life) -> AgentGoneError:
    return AgentGoneError(
        f"this manager has let go of instance {life.instance_id}, which lives on; "
        "ask the next one, under the same request_id"
    )


def require_open(life: Life) -> None:
    if life.left:
        raise let_go_error(life)
    if life.holding or life.state not in _OPEN or life.cell is None:
        raise closed(life.record, holding=life.holding)


def closed(record: AgentInstance, *, holding: bool = False) -> InvalidOperationError:
    state = record.state
    advice = _ADVICE.get(state, "try again")
    if holding:
        advice = "it is being suspended; resume it first"
    return InvalidOperationError(
        f"instance {record.instance_id} is {state} and takes no request; {advice}",
        current=state,
        wanted=AgentState.PROCESSING,
    )


async def work(house: House, life: Life, request: Any, by: Actor, run: Run) -> Any:
    """All that belongs to one request, in a task of its own, so that its end is tidy whoever gives up on it."""
    began = house.clock.mono()
    CURRENT_RUN.set(run)
    try:
        cell = await _enter(house, life, by)
        house.metrics.count("lifecycle.process.count")
        run.began = True
        return await _bounded(house, life, cell, cell.call(Verb.PROCESS, request, call_id=run.call_id), run)
    finally:
        await _over(house, life, run, began)


def rejoin(house: House, life: Life) -> None:
    """Take up the requests that an earlier manager had begun: each has its place, its clock and its name again."""
    cell = life.cell
    if cell is None or life.is_riddle:
        return
    for call_id, verb in list(cell.in_flight.items()):
        if verb is not Verb.PROCESS or call_id in (life.orders or {}):
            continue
        run = Run(call_id=call_id, left=life.limits.execution_timeout.total_seconds())
        run.frozen = life.depth is SuspendDepth.FREEZE
        life.slots.occupy()
        take_order(life, run, begin(house, life, run, _rejoined(house, life, cell, run)))


async def _rejoined(house: House, life: Life, cell: Cell, run: Run) -> Any:
    """The rest of a request that an earlier manager had begun. It has its whole time again: nobody knows how much of
    it is gone.
    """
    began = house.clock.mono()
    CURRENT_RUN.set(run)
    run.began = True
    try:
        return await _bounded(house, life, cell, cell.rejoin(run.call_id), run)
    finally:
        await _over(house, life, run, began)


async def _over(house: House, life: Life, run: Run, began: float) -> None:
    if run.task is not None:
        _left(life, run.task)
    await settle(house, life)
    house.metrics.observe("lifecycle.process.duration", house.clock.mono() - began)


def _left(life: Life, task: asyncio.Task[Any]) -> None:
    """Its place is free again; said twice, it is so once."""
    if life.calls.pop(task, None) is not None:
        life.slots.release()
        life.note_quiet()


async def _enter(house: House, life: Life, by: Actor) -> Cell:
    """Written down before it begins: a disk that takes no record takes no work either."""
    full = tokens_wait(life, house.clock.mono())
    if full:
        await house.clock.sleep(full.total_seconds())
    async with life.lock:
        require_open(life)
        overlapping = life.state is AgentState.PROCESSING
        if not overlapping:
            await house.move(life, AgentState.PROCESSING, by=by, act="process")
    if overlapping:
        # The state says it already; that it was asked for once more is for the audit. Not under the lock, so that
        # many who ask at once share one commit.
        space = life.record.workspace_id or HOME_WORKSPACE_ID
        about = f"instance:{life.instance_id}"
        await house.store.commit(RecordAudit(by=by, workspace_id=space, what="process", about=about))
        require_open(life)
    cell = life.cell
    if cell is None:
        raise AgentGoneError(f"instance {life.instance_id} ended before it could be asked")
    return cell


async def _bounded(house: House, life: Life, cell: Cell, calling: Coroutine[Any, Any, Any], run: Run) -> Any:
    attempt = life.attempt
    if run.timer is None and not run.frozen and not run.waits:  # one that was found again may be frozen, or wait
        arm(house, run)
    try:
        answer = await calling
    except asyncio.CancelledError:
        if not run.expired:
            if cell.is_stuck:  # nobody waits for it any more, but it works on and would keep others from their turn
                detail = "a request was called off and did not heed that"
                how = Exit(outcome=AttemptOutcome.TIMEOUT, detail=detail)
                house.run(died(house, life, attempt, how), "ostler-died")
            raise
        raise await _timed_out(house, life, cell, attempt) from None
    except AgentGoneError as error:
        how = cell.ended or Exit(outcome=AttemptOutcome.LOST, detail=str(error))
        house.run(died(house, life, attempt, how), "ostler-died")
        raise
    except AgentExecutionError as error:
        await _erred(house, life, attempt, error)
        raise
    finally:
        pause(house, run)
    if run.expired:  # it finished all the same, but nobody counts on a late answer
        raise await _timed_out(house, life, cell, attempt)
    life.tally.completed += 1
    life.pulse.output = house.clock.mono()
    return answer


async def _timed_out(house: House, life: Life, cell: Cell, attempt: int) -> ExecutionTimeoutError:
    """It was cancelled. If it does not heed that, it is ended."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        task.uncancel()
    limit = f"{life.limits.execution_timeout.total_seconds():g} s"
    house.metrics.count("lifecycle.process.timeouts")
    house.log.emit("execution_timeout", instance_id=life.instance_id, limit=limit)
    life.tally.failed += 1
    if cell.is_stuck:
        detail = f"a request ran longer than {limit} and did not heed its cancellation"
        # Not awaited: dealing with the death waits for this very request to leave.
        house.run(died(house, life, attempt, Exit(outcome=AttemptOutcome.TIMEOUT, detail=detail)), "ostler-died")
        return ExecutionTimeoutError(f"{detail}; the agent was ended")
    return ExecutionTimeoutError(f"the request ran longer than {limit} and was cancelled")


async def _erred(house: House, life: Life, attempt: int, error: AgentExecutionError) -> None:
    life.tally.failed += 1
    house.metrics.count("lifecycle.process.failures")
    if life.manifest.fail_on_error:
        how = Exit(
            outcome=AttemptOutcome.ERROR,
            detail=str(error),
            exception_type=error.exception_type,
            stack_trace=error.stack_trace,
        )
        house.run(died(house, life, attempt, how), "ostler-died")
        return
    told = AgentError(
        message=str(error),
        exception_type=error.exception_type,
        stack_trace=error.stack_trace,
        is_recoverable=True,
    )
    try:
        await house.store.commit(ReportError(instance_id=life.instance_id, attempt=attempt, error=told))
    except OstlerError as failure:
        house.log.emit("report_lost", instance_id=life.instance_id, error=str(failure))
