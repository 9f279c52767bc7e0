"""Requests: admitted into slots, bounded in time, answered when the answer is durable, each id answered once."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid5

from ostler.durations import duration_text
from ostler.errors import (
    AgentBusyError,
    AgentExecutionError,
    AgentGoneError,
    ExecutionTimeoutError,
    IdempotencyConflictError,
    InvalidOperationError,
    OstlerError,
)
from ostler.isolation.base import Exit, Verb
from ostler.lifecycle import reports
from ostler.lifecycle.instance import Instance
from ostler.lifecycle.messages import Call, CallDue, CallEnded, CallEnding, CallerDue, NextCalls, Process, ReadyToServe
from ostler.lifecycle.operations import fail_with
from ostler.lifecycle.phases import Backoff, Leaving, Pausing, Serving, Suspended
from ostler.lifecycle.waits import end_waits_of_call, move_for_calls, start_clock, stop_clock, sync_state
from ostler.model.attempt import AttemptOutcome, Request, RequestState
from ostler.model.states import SuspendDepth
from ostler.model.validation import fault
from ostler.store import reports as commands
from ostler.store.instances import error_event
from ostler.store.reports import CallEnd
from ostler.store.requests import MAX_ANSWER_BYTES, RequestEnd, get_request

#: Version of the ids that are made from a request id; other calls have random ones.
_NAMED_VERSION = 5
#: Ended calls of an earlier manager whose request id is not known yet; more are given up.
_MAX_UNCLAIMED = 1000
#: The error in the row of a request that ran longer than it may.
_TIMED_OUT = "it ran longer than its time"


def request_digest(request: Any) -> str:
    """Of a request that has an id; raises `ValidationError` for one that is no JSON."""
    try:
        text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise fault("request", f"must be JSON to have an id ({error})", request) from None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def call_id_for(instance: Instance, request_id: str, tries: int) -> UUID:
    """The id of a call at the agent. The next manager finds it again by the request id alone."""
    return uuid5(instance.instance_id, f"{instance.attempt}:{tries}:{request_id}")


# --- asking ------------------------------------------------------------------------------------------


async def process(instance: Instance, message: Process) -> None:
    """Run it, or queue it, or answer it from its row, or join the call that is under way."""
    _limit_caller(instance, message)
    call = await _call_for(instance, message)
    if call is None:
        return
    phase = instance.phase
    if isinstance(phase, Serving):
        if not instance.backlog and _has_slot(instance) and not _tokens_wait(instance):
            begin(instance, call)
            return
        if not message.wait:
            message.refuse(AgentBusyError(f"{instance.label} is busy with {len(instance.calls)} requests"))
            return
    if len(instance.backlog) >= _queue_size(instance):
        message.refuse(
            AgentBusyError(f"{instance.label} has {len(instance.backlog)} requests waiting; try again later")
        )
        return
    instance.backlog.append(call)
    if call.request_id is not None:
        instance.requests[call.request_id] = call
    set_queue_timer(instance, call)
    if isinstance(phase, Serving):
        next_calls(instance)


async def process_leaving(instance: Instance, message: Process) -> None:
    """A failing or restarting instance comes back, so the request waits; a leaving one does not."""
    phase = instance.phase
    if isinstance(phase, Leaving) and phase.unwritten is not None:
        message.refuse(ended_unrecorded(instance, phase))
    elif isinstance(phase, Leaving) and phase.goal in {"fail", "restart"} and not phase.final:
        await process(instance, message)
    else:
        await process_closed(instance, message)


def ended_unrecorded(instance: Instance, phase: Leaving) -> AgentGoneError:
    """For requests to an agent that has ended while nothing can be written; whether it comes back is not decided."""
    detail = None if phase.exit is None else phase.exit.detail
    ended = f"has ended: {detail}" if detail else "has ended"
    return AgentGoneError(
        f"{instance.label} {ended}. That could not be recorded yet ({phase.unwritten}); ask again when it is"
    )


async def process_backoff(instance: Instance, message: Process) -> None:
    """A request to an instance whose restart is pending waits for it, within its own time."""
    if isinstance(instance.phase, Backoff) and instance.phase.wait is not None:
        await process(instance, message)
    elif message.request_id is None or not await _join_or_answer(instance, message):
        message.refuse(instance.refusal("asked", "restart it, or look at why"))


async def process_closed(instance: Instance, message: Process) -> None:
    """No request is begun in this phase, but one that was answered is answered from its row."""
    if message.request_id is not None and await _join_or_answer(instance, message):
        return
    advice = "spawn another"
    if isinstance(instance.phase, Suspended | Pausing):
        advice = (
            "resume it first" if isinstance(instance.phase, Suspended) else "it is being suspended; resume it first"
        )
    message.refuse(instance.refusal("asked", advice))


async def _call_for(instance: Instance, message: Process) -> Call | None:
    """A new call; None where the message was answered or has joined one."""
    limit = instance.limits.execution_timeout
    call = Call(
        call_id=instance.runtime.ids.new(),
        request=message.request,
        callers=[message],
        limit=limit,
        left=limit.total_seconds(),
    )
    if message.request_id is not None:
        if await _join_or_answer(instance, message):
            return None
        row = await instance.runtime.store.read(get_request, instance.instance_id, message.request_id)
        if message is instance.job and row is not None and (failure := failed_here(instance, row)) is not None:
            message.refuse(failure)
            return None
        call.request_id, call.digest = message.request_id, message.digest
        call.tries = 1 if row is None else row.tries + 1
    return call


def failed_here(instance: Instance, row: Request) -> AgentExecutionError | ExecutionTimeoutError | None:
    """The failure of a request in the present attempt, by its row; None of one that did not fail in it."""
    if row.state is not RequestState.FAILED or row.attempt != instance.attempt:
        return None
    return ExecutionTimeoutError(row.error) if row.error == _TIMED_OUT else AgentExecutionError(row.error)


async def _join_or_answer(instance: Instance, message: Process) -> bool:
    """Whether the request id is under way here, or was answered."""
    request_id = message.request_id or ""
    call = instance.requests.get(request_id) or await _claim(instance, message)
    if call is not None:
        _join(instance, call, message)
        return True
    pending_ends = instance.pending_ends.get(request_id)
    if pending_ends is not None and pending_ends.state is RequestState.DONE:
        answer_from(pending_ends.row, message)
        return True
    row = await instance.runtime.store.read(get_request, instance.instance_id, request_id)
    if row is None or row.state is not RequestState.DONE:
        return False
    answer_from(row, message)
    return True


def _join(instance: Instance, call: Call, message: Process) -> None:
    if call.digest and call.digest != message.digest:
        message.refuse(_other_input(message.request_id or ""))
        return
    # An unclaimed answer of an earlier manager is written now that its request id is known.
    unclaimed = call.ended and not call.callers
    call.callers.append(message)
    if call.ending is CallEnding.WITHDRAWN and isinstance(instance.phase, Suspended):
        call.ending = None  # it stands still, and was not cancelled yet
    if unclaimed:
        _write_end(instance, call)


def answer_from(row: Request, message: Process) -> None:
    """Answer a request from its row."""
    if row.input_digest != message.digest:
        message.refuse(_other_input(row.request_id))
    elif row.answer is None:
        why = row.error or f"it was larger than {MAX_ANSWER_BYTES // 1024} KiB"
        message.refuse(
            InvalidOperationError(f"request {row.request_id!a} was answered, but the answer is not kept: {why}")
        )
    else:
        message.answer(json.loads(row.answer))


def _other_input(request_id: str) -> IdempotencyConflictError:
    return IdempotencyConflictError(f"request id {request_id!a} was used with another request; use a new id")


async def _claim(instance: Instance, message: Process) -> Call | None:
    """A call of an earlier manager whose row was not written: it is known by the id that its request id makes."""
    unknown = [call for call in instance.calls.values() if call.adopted and call.request_id is None]
    if not unknown or message.request_id is None:
        return None
    row = await instance.runtime.store.read(get_request, instance.instance_id, message.request_id)
    return _claim_call(instance, message.request_id, message.digest, 1 if row is None else row.tries + 1)


def _claim_call(instance: Instance, request_id: str, digest: str, next_try: int) -> Call | None:
    for tries in (next_try - 1, next_try):
        call = instance.calls.get(call_id_for(instance, request_id, tries))
        if call is not None and call.request_id is None:
            call.request_id, call.digest, call.tries = request_id, digest, tries
            instance.requests[request_id] = call
            return call
    return None


def join_adopted(instance: Instance) -> None:
    """Requests that were queued before an adopted agent said what it works on join the calls that it is at."""
    for queued in tuple(instance.backlog):
        if queued.request_id is None:
            continue
        call = instance.requests.get(queued.request_id)
        if call is queued:
            call = _claim_call(instance, queued.request_id, queued.digest, queued.tries)
        if call is not None:
            instance.backlog.remove(queued)
            _cancel_timer(queued)
            for caller in queued.callers:
                _join(instance, call, caller)


# --- slots -------------------------------------------------------------------------------------------


def _running(instance: Instance) -> int:
    return sum(not call.ended for call in instance.calls.values())


def _has_slot(instance: Instance) -> bool:
    return _running(instance) < instance.limits.max_concurrent_tasks


def _queue_size(instance: Instance) -> int:
    return instance.limits.max_concurrent_tasks * instance.runtime.settings.queue_per_slot


def _tokens_wait(instance: Instance) -> float:
    limit = instance.limits.max_tokens_per_minute
    if not limit:
        space = instance.runtime.workspaces.get(instance.record.workspace_id)
        limit = 0 if space is None else space.max_tokens_per_minute
    return instance.counters.tokens_wait(limit, instance.runtime.clock.mono())


def serve(instance: Instance, phase: Serving | None = None) -> None:
    """Answer requests from now on."""
    instance.enter(phase or Serving())
    if instance.record.job is not None:
        instance.post(ReadyToServe())
    cancel_given_up(instance)
    for call in instance.backlog:
        set_queue_timer(instance, call)
    sync_state(instance)
    next_calls(instance)


def next_calls(instance: Instance, _message: NextCalls | None = None) -> None:
    """Hand waiting requests to the agent, first come first served."""
    if not isinstance(instance.phase, Serving):
        return
    while instance.backlog and _has_slot(instance):
        if (wait := _tokens_wait(instance)) > 0:
            instance.runtime.clock.call_later(wait, lambda: instance.post(NextCalls()))
            return
        call = instance.backlog.popleft()
        if call.callers:
            begin(instance, call)


def set_queue_timer(instance: Instance, call: Call) -> None:
    """A queued request waits for a free slot as long as its caller likes, for a restart at most its own time."""
    _cancel_timer(call)
    if not isinstance(instance.phase, Serving):
        call.timer = instance.runtime.clock.call_later(call.left, lambda: instance.post(CallDue(call=call)))


# --- one call ----------------------------------------------------------------------------------------


def begin(instance: Instance, call: Call, *, rejoin: bool = False) -> None:
    """Hand it to the agent. That it runs is written with the next commit; its answer is what counts."""
    cell = instance.cell
    if cell is None:
        instance.drop_call(call, AgentGoneError(f"{instance.label} ended before it could be asked"))
        return
    if rejoin:
        work = cell.call(Verb.PROCESS, call_id=call.call_id)
    else:
        if call.request_id is not None:
            call.call_id = call_id_for(instance, call.request_id, call.tries)
        work = cell.call(Verb.PROCESS, call.request, call_id=call.call_id)
        instance.runtime.metrics.count("lifecycle.process.count")
    call.began_at = instance.runtime.clock.mono()
    instance.calls[call.call_id] = call
    call.task = instance.run_beside(
        work, "call", lambda result, error: CallEnded(call=call, result=result, error=error)
    )
    if not isinstance(instance.phase, Suspended):
        start_clock(instance, call)
    request = None
    if call.request_id is not None:
        instance.requests[call.request_id] = call
        # A call that is rejoined has its row, with the time of its begin.
        request = None if rejoin else _row(instance, call)
    move = move_for_calls(instance)
    if request is not None or move is not None:
        instance.write_lazily(commands.begin_call, move, request)
        if move is not None:
            instance.moved_to(move.to)


def _row(instance: Instance, call: Call) -> Request:
    return Request(
        instance_id=instance.instance_id,
        request_id=call.request_id or "",
        workspace_id=instance.record.workspace_id,
        attempt=instance.attempt,
        tries=call.tries,
        input_digest=call.digest,
        begun_at=instance.runtime.clock.wall(),
    )


# --- its end -----------------------------------------------------------------------------------------


def call_due(instance: Instance, message: CallDue) -> None:
    """Its time is over: a queued one fails, a running one is cancelled."""
    queued_call_due(instance, message)
    call = message.call
    if instance.calls.get(call.call_id) is call and not call.ended and call.ending is None and not call.waits:
        call.ending = CallEnding.TIMEOUT
        if call.task is not None:
            call.task.cancel()


def queued_call_due(instance: Instance, message: CallDue) -> None:
    """Work that stands still, or is being ended, is not cancelled for its time."""
    call = message.call
    if call in instance.backlog:
        instance.backlog.remove(call)
        _forget(instance, call)
        instance.drop_call(call, _not_answered(instance, call.limit))


def _limit_caller(instance: Instance, caller: Process) -> None:
    """Its own limit counts from its first word, in every phase, and bounds no other caller of the same request."""
    if caller.timeout is None or caller.timer is not None:
        return
    clock = instance.runtime.clock
    caller.due = caller.due or clock.mono() + caller.timeout.total_seconds()
    seconds = max(caller.due - clock.mono(), 0.0)
    timer = caller.timer = clock.call_later(seconds, lambda: instance.post(CallerDue(caller=caller)))
    caller.reply.add_done_callback(lambda _: timer.cancel())


def caller_due(instance: Instance, message: CallerDue) -> None:
    """A queued request is dropped, a running one is cancelled where no other caller waits for it."""
    caller = message.caller
    limit = caller.timeout or instance.limits.execution_timeout
    for call in (*instance.calls.values(), *instance.backlog):
        if caller not in call.callers:
            continue
        if call.ended:
            return  # an answer in time is never called late
        last, queued = len(call.callers) == 1, call in instance.backlog
        if last and not queued and call.ending is None and not isinstance(instance.phase, Leaving):
            call.ending, call.limit = CallEnding.TIMEOUT, limit
            if call.task is not None and not _stands_still(instance):
                call.task.cancel()
                return  # it is answered when the work has stopped
        call.callers.remove(caller)
        if queued and last:
            instance.backlog.remove(call)
            _forget(instance, call)
    caller.refuse(_not_answered(instance, limit))


def _not_answered(instance: Instance, limit: timedelta) -> ExecutionTimeoutError:
    return ExecutionTimeoutError(f"{instance.label} did not answer the request in time ({duration_text(limit)})")


def _stands_still(instance: Instance) -> bool:
    """Work that is suspended is cancelled when it goes on: what is frozen cannot heed that now."""
    phase = instance.phase
    return isinstance(phase, Suspended) or (isinstance(phase, Pausing) and phase.request.depth is SuspendDepth.FREEZE)


def cancel_given_up(instance: Instance) -> None:
    """The agent goes on: what its callers have given up meanwhile stops now."""
    for call in instance.calls.values():
        if call.ending is not None and call.task is not None and not call.ended:
            call.task.cancel()


def withdraw_call(instance: Instance, caller: Process) -> bool:
    """A caller was cancelled. With its last caller a call is cancelled too, and the caller waits until it stopped."""
    for call in (*instance.calls.values(), *instance.backlog):
        if caller not in call.callers:
            continue
        if len(call.callers) > 1 or call.ended:
            call.callers.remove(caller)
            caller.reply.cancel()
        elif call in instance.backlog:
            instance.backlog.remove(call)
            _forget(instance, call)
            caller.reply.cancel()
        elif _stands_still(instance) or isinstance(instance.phase, Leaving):
            if not isinstance(instance.phase, Leaving):
                call.ending = call.ending or CallEnding.WITHDRAWN
            call.callers.remove(caller)
            caller.reply.cancel()
        else:
            call.callers.remove(caller)
            call.withdrawn.append(caller)
            if call.ending is None and call.task is not None:
                call.ending = CallEnding.WITHDRAWN
                call.task.cancel()
        return True
    return False


def call_ended(instance: Instance, message: CallEnded) -> None:
    call, error = message.call, message.error
    if instance.calls.get(call.call_id) is not call or call.ended:
        return
    stop_clock(instance, call)
    cell = instance.cell
    stuck = cell is not None and cell.is_stuck
    gone = isinstance(error, AgentGoneError) or (isinstance(error, asyncio.CancelledError) and call.ending is None)
    if isinstance(instance.phase, Leaving) and (gone or stuck):
        return  # its callers are answered when the record says what happened
    if gone or (stuck and isinstance(error, asyncio.CancelledError)):
        fail_with(instance, _exit_of(instance, call, stuck=stuck))
        return
    end_waits_of_call(instance, call)
    call.ended, call.result, call.error = True, message.result, error
    instance.runtime.metrics.observe("lifecycle.process.duration", instance.runtime.clock.mono() - call.began_at)
    if call.adopted and call.request_id is None and call.call_id.version == _NAMED_VERSION:
        _hold_unclaimed(instance)
    else:
        _write_end(instance, call)
    if isinstance(error, AgentExecutionError) and call.ending is None and instance.manifest.fail_on_error:
        fail_with(instance, _exit_of_error(error))
        return
    next_calls(instance)


def _exit_of(instance: Instance, call: Call, *, stuck: bool) -> Exit:
    limit = duration_text(call.limit or instance.limits.execution_timeout)
    if stuck and call.ending is CallEnding.TIMEOUT:
        detail = f"a request ran longer than {limit} and ignored its cancellation"
        return Exit(outcome=AttemptOutcome.TIMEOUT, detail=detail)
    if stuck:
        return Exit(outcome=AttemptOutcome.TIMEOUT, detail="a request was cancelled and ignored that")
    ended = None if instance.cell is None else instance.cell.ended
    return ended or Exit(outcome=AttemptOutcome.LOST, detail="it ended in the middle of a request")


def _exit_of_error(error: AgentExecutionError) -> Exit:
    return Exit(
        outcome=AttemptOutcome.ERROR,
        detail=str(error),
        exception_type=error.exception_type,
        stack_trace=error.stack_trace,
    )


def _hold_unclaimed(instance: Instance) -> None:
    """Answered under an earlier manager; the agent keeps the answer until the request id is asked for again."""
    held = [call for call in instance.calls.values() if call.ended and call.adopted and call.request_id is None]
    for old in held[: max(len(held) - _MAX_UNCLAIMED, 0)]:
        instance.calls.pop(old.call_id, None)
        if instance.cell is not None:
            instance.cell.ack([old.call_id])
    sync_state(instance)


def _write_end(instance: Instance, call: Call) -> None:
    """What the agent said before goes first; the callers are answered when the answer is durable."""
    outcome = _outcome(instance, call)
    reports.flush(instance, now=True)
    error = None
    if isinstance(call.error, AgentExecutionError) and call.ending is None and not instance.manifest.fail_on_error:
        error = error_event(
            instance.current(),
            str(call.error),
            exception_type=call.error.exception_type,
            stack_trace=call.error.stack_trace,
            is_recoverable=True,
        )
    end = CallEnd(request=_request_end(instance, call), error=error, after=instance.outbox.pending)
    move = move_for_calls(instance)
    if end.request is None and end.error is None and move is None:
        _answer(instance, call, outcome)
        return
    writing = instance.write(commands.end_call, move, end)
    if move is not None:
        instance.moved_to(move.to)
    writing.add_done_callback(partial(_end_written, instance, call, end, outcome))


def _end_written(
    instance: Instance, call: Call, end: CallEnd, outcome: BaseException | None, writing: asyncio.Future[Any]
) -> None:
    """The work is done, whatever the disk says: the callers are answered also where it could not be written."""
    written = not writing.cancelled() and writing.exception() is None
    if not written and end.request is not None:
        instance.pending_ends[end.request.request.request_id] = end.request
    _answer(instance, call, outcome, confirm=written)


def _answer(instance: Instance, call: Call, outcome: BaseException | None, *, confirm: bool = True) -> None:
    _forget(instance, call)
    if confirm and instance.cell is not None:
        instance.cell.ack([call.call_id])
    for caller in call.withdrawn:
        caller.reply.cancel()
    for caller in call.callers:
        if isinstance(outcome, asyncio.CancelledError):
            instance.post(caller)  # it has joined a request that was being withdrawn: it begins again
        elif outcome is not None:
            caller.refuse(outcome)
        else:
            caller.answer(call.result)
    call.callers.clear()


def _forget(instance: Instance, call: Call) -> None:
    instance.calls.pop(call.call_id, None)
    if call.request_id is not None and instance.requests.get(call.request_id) is call:
        del instance.requests[call.request_id]
    _cancel_timer(call)


def _cancel_timer(call: Call) -> None:
    if call.timer is not None:
        call.timer.cancel()
        call.timer = None


def _outcome(instance: Instance, call: Call) -> BaseException | None:
    """What the callers are told; None: the answer. An answer in time is never called late."""
    metrics, counters = instance.runtime.metrics, instance.counters
    if call.error is None:
        counters.completed += 1
        instance.last_answer = call.result
        instance.liveness.output = instance.runtime.clock.mono()
        return None
    counters.failed += 1
    if call.ending is CallEnding.TIMEOUT:
        limit = duration_text(call.limit)
        metrics.count("lifecycle.process.timeouts")
        instance.runtime.log.emit("execution_timeout", instance_id=instance.instance_id, limit=limit)
        return ExecutionTimeoutError(f"the request ran longer than its time ({limit}) and was cancelled")
    if call.ending is CallEnding.WITHDRAWN:
        return asyncio.CancelledError()
    metrics.count("lifecycle.process.failures")
    return call.error


def _request_end(instance: Instance, call: Call) -> RequestEnd | None:
    if call.request_id is None:
        return None
    row = _row(instance, call)
    if call.error is None:
        try:
            answer = json.dumps(call.result, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return RequestEnd(request=row, state=RequestState.DONE, error=f"it is no JSON ({error})")
        return RequestEnd(request=row, state=RequestState.DONE, answer=answer)
    cancelled = call.ending is CallEnding.WITHDRAWN
    text = "cancelled" if cancelled else _error_text(call)
    state = RequestState.CANCELLED if cancelled else RequestState.FAILED
    # What a run that failed has used is known, too; only an answered one is answered from its row.
    used = call.error.answer if isinstance(call.error, AgentExecutionError) else None
    return RequestEnd(request=row, state=state, answer=None if used is None else json.dumps(used), error=text)


def _error_text(call: Call) -> str:
    if call.ending is CallEnding.TIMEOUT:
        return _TIMED_OUT
    return str(call.error) if isinstance(call.error, OstlerError) else repr(call.error)
