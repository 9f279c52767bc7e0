"""An agent that an earlier manager started: its calls are rejoined, its waits go on, nothing is done twice."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from ostler.isolation.base import Cell, Exit, Verb
from ostler.lifecycle import calls, job, pause, waits
from ostler.lifecycle.instance import Instance
from ostler.lifecycle.messages import Call, Due, Phase, Registered, Reported
from ostler.lifecycle.operations import begin_leave
from ostler.lifecycle.phases import Adopting, Backoff, Goal, Leaving, OpenWait, Suspended
from ostler.lifecycle.waits import sync_state
from ostler.model.attempt import AttemptOutcome, Request, RequestState
from ostler.model.instance import AgentInstance
from ostler.model.states import AgentState, SuspendDepth
from ostler.model.wait import Wait, WaitKind
from ostler.store import waits as stored_waits
from ostler.store.requests import list_requests

_LEAVING_VERBS = frozenset({Verb.CLEANUP, Verb.FINAL_STATE, Verb.SHUTDOWN})
#: An adopted call has at least so long to deliver the answer that it may have.
_LEAST_SECONDS = 2.0
_LOST = Exit(outcome=AttemptOutcome.LOST, detail="its manager has ended")
_CUT_OFF = "its manager ended while it was being {}"


def first_phase(
    record: AgentInstance,
    present: Cell | Exit | None,
    pause_wait: Wait | None,
    backoff: Wait | None,
    job_end: Exit | None = None,
) -> Phase:
    """The phase that follows from the record and from what was found of its attempt. Nothing half done is adopted.

    `job_end` is how the job of this attempt ended, by its row.
    """
    how = present if isinstance(present, Exit) else None
    match record.state:
        case AgentState.FAILED:
            return Backoff(wait=backoff)
        case AgentState.TERMINATING:
            return Leaving(
                goal=Goal.TERMINATE, exit=how, reason=_CUT_OFF.format("terminated"), forced=present is not how
            )
        case AgentState.INITIALIZING:
            ended = how or Exit(outcome=AttemptOutcome.STOPPED, detail=_CUT_OFF.format("started"))
            return Leaving(goal=Goal.FAIL, exit=ended, final=record.attempt == 1)
        case AgentState.SUSPENDED:
            return _first_suspended(present, pause_wait, how)
    if isinstance(present, Cell):
        return Adopting()
    return _leave_ended(how or _LOST, job_end)


def _leave_ended(how: Exit, job_end: Exit | None) -> Leaving:
    """What follows from the end of an agent that was not suspended; the end of its job says more than its own."""
    if job_end is not None and job_end.outcome is AttemptOutcome.CLEAN:
        return Leaving(goal=Goal.TERMINATE, exit=job_end, reason=job.DONE)
    return Leaving(goal=Goal.FAIL, exit=job_end or how)


def _first_suspended(present: Cell | Exit | None, wait: Wait | None, how: Exit | None) -> Phase:
    depth = depth_of(wait)
    if isinstance(present, Cell):
        if depth is SuspendDepth.PARK:
            return Leaving(goal=Goal.PARK, exit=Exit(outcome=AttemptOutcome.STOPPED, detail=_CUT_OFF.format("parked")))
        return Suspended(depth=depth, wait=wait, adopted=True)
    if how is None:
        return Suspended(depth=SuspendDepth.PARK, wait=wait)
    return _leave_suspended(how, depth, wait)


def _leave_suspended(how: Exit, depth: SuspendDepth, wait: Wait | None) -> Leaving:
    was_working = depth is SuspendDepth.FREEZE and (wait is None or previous_state(wait) == AgentState.PROCESSING)
    if how.outcome in {AttemptOutcome.LOST, AttemptOutcome.STOPPED} and not was_working:
        # It stood still, so nothing was cut off: it is parked now, and resuming starts it fresh.
        return Leaving(goal=Goal.PARK, exit=how)
    return Leaving(goal=Goal.FAIL, exit=how)


def previous_state(wait: Wait | None) -> str:
    """The state that a suspension has interrupted."""
    return "" if wait is None else str((wait.detail or {}).get("previous_state", ""))


def depth_of(wait: Wait | None) -> SuspendDepth:
    return SuspendDepth((wait.detail or {}).get("depth", SuspendDepth.PARK)) if wait is not None else SuspendDepth.PARK


def begin_adopted(instance: Instance, phase: Phase, cell: Cell | None, open_waits: list[Wait]) -> None:
    """Enter the first phase of an instance that was found."""
    instance.cell = cell
    instance.liveness.health = instance.record.health
    instance.counters.take_over(instance.record.metrics)
    for wait in open_waits:
        waiting = instance.waits[wait.wait_id] = OpenWait(wait=wait)
        waits.set_wait_timer(instance, waiting)
    if isinstance(phase, Leaving):
        begin_leave(instance, phase)
        return
    instance.enter(phase)
    if isinstance(phase, Suspended | Backoff) and phase.wait is not None:
        instance.set_timer_until(phase.wait)
    if cell is None:
        return
    frozen = isinstance(phase, Suspended) and phase.depth is SuspendDepth.FREEZE
    if instance.level.capabilities.freezes and not frozen:
        # Its manager may have died between the freeze and the word of it.
        instance.operate("thaw", cell.thaw())


async def reported(instance: Instance, message: Reported) -> None:
    """What it works on is known: rejoin its calls, end the waits that it has dropped, serve."""
    cell = instance.cell
    if message.attempt != instance.attempt or cell is None:
        return
    if await _has_lost_work(instance, cell, message):
        begin_leave(instance, _leave_ended(_lost_at_work(instance), await job.ended_job(instance)))
        return
    if isinstance(instance.phase, Adopting) and not _LEAVING_VERBS.isdisjoint(message.calls.values()):
        stopped = Exit(outcome=AttemptOutcome.STOPPED, detail=_CUT_OFF.format("restarted"))
        begin_leave(instance, Leaving(goal=Goal.RESTART, exit=stopped, reason=stopped.detail))
        return
    rows = await instance.runtime.store.read(list_requests, instance.instance_id, RequestState.RUNNING)
    named = {calls.call_id_for(instance, row.request_id, row.tries): row for row in rows}
    waiting = _waits_by_call(instance)
    for call_id, verb in list(message.calls.items()):
        if verb is not Verb.PROCESS or call_id in instance.calls:
            continue
        row = named.get(call_id)
        limit = instance.limits.execution_timeout
        call = Call(
            call_id=call_id,
            request_id=None if row is None else row.request_id,
            digest="" if row is None else row.input_digest,
            tries=1 if row is None else row.tries,
            limit=limit,
            # Without a row it is not known when it began; then it has its whole time again.
            left=limit.total_seconds() if row is None else await _seconds_left(instance, row, call_id),
            waits=waiting.get(call_id, set()),
            adopted=True,
        )
        for wait_id in call.waits:
            instance.waits[wait_id].call = call
        calls.begin(instance, call, rejoin=True)
    waits.end_unasked_waits(instance, frozenset(message.questions))
    calls.join_adopted(instance)
    if isinstance(instance.phase, Adopting):
        calls.serve(instance)
    else:
        sync_state(instance)
    pause.pause_if_quiet(instance)


async def _seconds_left(instance: Instance, row: Request, call_id: UUID) -> float:
    """Of its execution time, which counts from its begin over every manager, without the time that it stood still."""
    runtime = instance.runtime
    now = runtime.clock.wall()
    stood_still = timedelta()
    counted_until = row.begun_at
    past_waits = await runtime.store.read(stored_waits.waits_since, instance.instance_id, row.begun_at)
    for wait in sorted(past_waits, key=lambda wait: wait.created_at):
        detail = wait.detail or {}
        frozen = wait.kind is WaitKind.RESUME and detail.get("depth") == SuspendDepth.FREEZE
        if frozen or detail.get("call_id") == str(call_id):
            end = min(wait.ended_at or now, now)
            stood_still += max(end - max(wait.created_at, counted_until), timedelta())
            counted_until = max(counted_until, end)
    spent = max(now - row.begun_at - stood_still, timedelta())
    # An answer that was given meanwhile is on its way, and is never called late.
    return max((instance.limits.execution_timeout - spent).total_seconds(), _LEAST_SECONDS)


def _waits_by_call(instance: Instance) -> dict[UUID, set[UUID]]:
    by_call: dict[UUID, set[UUID]] = {}
    for wait_id, waiting in instance.waits.items():
        call_id = (waiting.wait.detail or {}).get("call_id")
        if call_id is not None:
            by_call.setdefault(UUID(call_id), set()).add(wait_id)
    return by_call


async def reported_suspended(instance: Instance, message: Reported) -> None:
    phase, cell = instance.phase, instance.cell
    if not isinstance(phase, Suspended) or message.attempt != instance.attempt or cell is None:
        return
    if await _has_lost_work(instance, cell, message):
        begin_leave(instance, _leave_suspended(_lost_at_work(instance), phase.depth, phase.wait))
        return
    phase.reported = message


async def _has_lost_work(instance: Instance, cell: Cell, message: Reported) -> bool:
    """Whether a run was under way that ended unseen, with its keeper. It is not begun again under this attempt.

    The row of a request is written shortly after its run has begun, so a job that has not ended counts as begun.
    """
    if not cell.may_have_lost_calls:
        return False
    rows = await instance.runtime.store.read(list_requests, instance.instance_id, RequestState.RUNNING)
    if any(calls.call_id_for(instance, row.request_id, row.tries) not in message.calls for row in rows):
        return True
    if message.calls:
        return False
    interrupted = previous_state(instance.phase.wait) if isinstance(instance.phase, Suspended) else ""
    if AgentState.PROCESSING in {instance.record.state, interrupted}:
        return True
    return instance.record.job is not None and await job.ended_job(instance) is None


def _lost_at_work(instance: Instance) -> Exit:
    return Exit(
        outcome=AttemptOutcome.LOST,
        detail="the manager and the keeper of this home ended while it worked; how its run ended is not known",
        ended_at=instance.runtime.last_owned,  # the time without a manager is no uptime
    )


async def registered_suspended(instance: Instance, message: Registered) -> None:
    """A parked instance whose resumption is due may have waited for its definition."""
    del message
    phase = instance.phase
    if isinstance(phase, Suspended) and phase.held_because is not None:
        phase.held_because = None
        await pause.resume_due(instance, Due(phase=phase))
