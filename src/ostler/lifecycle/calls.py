"""Requests: admitted into slots, bounded in time, answered when the answer is durable, each id answered once."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid5

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
from ostler.lifecycle.messages import Call, CallDue, CallEnded, CallEnding, CallerDue, NextCalls, Process
from ostler.lifecycle.operations import fail_with
from ostler.lifecycle.phases import Adopting, Backoff, Leaving, Pausing, Serving, Suspended
from ostler.lifecycle.waits import end_waits_of_call
from ostler.lifecycle.work import follow, start_clock, state_move, stop_clock
from ostler.model.faults import duration_text, fault
from ostler.model.ledger import AttemptOutcome, Request, RequestState
from ostler.model.states import SuspendDepth
from ostler.store import reports as commands
from ostler.store.instances import error_event
from ostler.store.reports import CallEnd
from ostler.store.requests import MAX_ANSWER_BYTES, RequestEnd, get_request

#: Version of the ids that are made from a request id; other calls have random ones.
_NAMED_VERSION = 5
#: Ended calls of an earlier manager whose request id is not known yet; more are given up.
_MAX_UNCLAIMED = 1000


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
    if isinstance(instance.phase, Adopting) and message.request_id is not None:
        instance.phase.deferred.append(message)  # the agent may be working on it; it will say so
        return
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
    arm_waiting(instance, call)
    if isinstance(phase, Serving):
        next_calls(instance)


async def process_leaving(instance: Instance, message: Process) -> None:
    """A failing or restarting instance comes back, so the request waits; a leaving one does not."""
    phase = instance.phase
    if isinstance(phase, Leaving) and phase.goal in {"fail", "restart"} and not phase.final:
        await process(instance, message)
    else:
        await process_closed(instance, message)


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
    limit = instance.limits.execution_timeout.total_seconds()
    request_id = message.request_id
    if request_id is None:
        call_id = instance.runtime.ids.new()
        return Call(call_id=call_id, request=message.request, callers=[message], left=limit)
    if await _join_or_answer(instance, message):
        return None
    row = await instance.runtime.store.read(get_request, instance.instance_id, request_id)
    tries = 1 if row is None else row.tries + 1
    return Call(
        call_id=call_id_for(instance, request_id, tries),
        request=message.request,
        request_id=request_id,
        digest=message.digest,
        tries=tries,
        callers=[message],
        left=limit,
    )


async def _join_or_answer(instance: Instance, message: Process) -> bool:
    """Whether the request id is under way here, or was answered."""
    request_id = message.request_id or ""
    call = instance.requests.get(request_id) or await _claim(instance, message)
    if call is not None:
        if call.digest and call.digest != message.digest:
            message.refuse(_other_input(request_id))
        elif call.ended and not call.callers:  # answered under an earlier manager, and not written yet
            call.callers.append(message)
            _write_end(instance, call)
        else:
            call.callers.append(message)
        return True
    row = await instance.runtime.store.read(get_request, instance.instance_id, request_id)
    if row is None or row.state is not RequestState.DONE:
        return False
    answer_from(row, message)
    return True


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
    last = 0 if row is None else row.tries
    for tries in (last, last + 1):
        call = instance.calls.get(call_id_for(instance, message.request_id, tries))
        if call is not None:
            call.request_id, call.digest, call.tries = message.request_id, message.digest, tries
            instance.requests[message.request_id] = call
            return call
    return None


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
    return instance.tally.tokens_wait(limit, instance.runtime.clock.mono())


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


def arm_waiting(instance: Instance, call: Call) -> None:
    """A queued request waits for a free slot as long as its caller likes, for a restart at most its own time."""
    if call.timer is not None:
        call.timer.cancel()
        call.timer = None
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
        work = cell.rejoin(call.call_id)
    else:
        work = cell.call(Verb.PROCESS, call.request, call_id=call.call_id)
        instance.runtime.metrics.count("lifecycle.process.count")
    call.began_at = instance.runtime.clock.mono()
    instance.calls[call.call_id] = call
    call.task = instance.spawn_task(_run(instance, call, work), "call")
    if not isinstance(instance.phase, Suspended):
        start_clock(instance, call)
    request = None
    if call.request_id is not None:
        instance.requests[call.request_id] = call
        request = _row(instance, call)
    move = state_move(instance)
    if request is not None or move is not None:
        instance.write_lazily(commands.begin_call, move, request)
        if move is not None:
            instance.moved_to(move.to)


async def _run(instance: Instance, call: Call, work: Coroutine[Any, Any, Any]) -> None:
    try:
        instance.post(CallEnded(call=call, result=await work))
    except BaseException as error:  # noqa: BLE001 - reported; a cancelled call reports that too
        instance.post(CallEnded(call=call, error=error))


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
    call, limit = message.call, instance.limits.execution_timeout
    if call in instance.backlog:
        instance.backlog.remove(call)
        _forget(instance, call)
        instance.drop_call(call, _not_taken(instance, limit))
        return
    if instance.calls.get(call.call_id) is call and not call.ended and call.ending is None and not call.waits:
        call.limit = limit
        _cancel(instance, call, CallEnding.TIMEOUT)


def _limit_caller(instance: Instance, caller: Process) -> None:
    """Its own limit counts from its first word, in every phase, and bounds no other caller of the same request."""
    if caller.due is None or caller.timer is not None:
        return
    clock = instance.runtime.clock
    seconds = max(caller.due - clock.mono(), 0.0)
    timer = caller.timer = clock.call_later(seconds, lambda: instance.post(CallerDue(caller=caller)))
    caller.reply.add_done_callback(lambda _: timer.cancel())


def caller_due(instance: Instance, message: CallerDue) -> None:
    """A queued request is dropped, a running one is cancelled where no other caller waits for it."""
    caller = message.caller
    limit = caller.timeout or instance.limits.execution_timeout
    if caller in instance.phase.deferred:
        instance.phase.deferred.remove(caller)
    for call in (*instance.calls.values(), *instance.backlog):
        if caller not in call.callers:
            continue
        if call.ended:
            return  # an answer in time is never called late
        if len(call.callers) == 1 and call not in instance.backlog and not isinstance(instance.phase, Leaving):
            call.limit = call.limit or limit
            _cancel(instance, call, CallEnding.TIMEOUT)
            if not _is_frozen(instance):
                return  # it is answered when the work has stopped
        call.callers.remove(caller)
        if call in instance.backlog and not call.callers:
            instance.backlog.remove(call)
            _forget(instance, call)
    caller.refuse(_not_taken(instance, limit))


def _not_taken(instance: Instance, limit: timedelta) -> ExecutionTimeoutError:
    return ExecutionTimeoutError(f"{instance.label} did not answer the request in time ({duration_text(limit)})")


def _cancel(instance: Instance, call: Call, why: CallEnding) -> None:
    """Stop its work; that of a frozen agent stops when it is thawed."""
    if call.ending is None:
        call.ending = why
        if call.task is not None and not _is_frozen(instance):
            call.task.cancel()


def cancel_withdrawn(instance: Instance) -> None:
    """The agent is thawed: what its callers have given up meanwhile stops now."""
    for call in instance.calls.values():
        if call.ending is not None and call.task is not None and not call.ended:
            call.task.cancel()


def _is_frozen(instance: Instance) -> bool:
    phase = instance.phase
    if isinstance(phase, Pausing):
        return phase.request.depth is SuspendDepth.FREEZE
    return isinstance(phase, Suspended) and phase.depth is SuspendDepth.FREEZE


def withdraw_call(instance: Instance, caller: Process) -> bool:
    """A caller was cancelled. With its last caller a call is cancelled too, and the caller waits until it stopped."""
    if caller in instance.phase.deferred:
        instance.phase.deferred.remove(caller)
        caller.reply.cancel()
        return True
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
        else:
            _cancel(instance, call, CallEnding.WITHDRAWN)
            if _is_frozen(instance):
                call.callers.remove(caller)
                caller.reply.cancel()
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
    held = [one for one in instance.calls.values() if one.ended and one.adopted and one.request_id is None]
    for old in held[: max(len(held) - _MAX_UNCLAIMED, 0)]:
        instance.calls.pop(old.call_id, None)
        if instance.cell is not None:
            instance.cell.confirm(old.call_id)
    follow(instance)


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
    end = CallEnd(request=_request_end(instance, call), error=error)
    move = state_move(instance)
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
        instance.unwritten.append(end.request)
    _answer(instance, call, outcome, confirm=written)


def _answer(instance: Instance, call: Call, outcome: BaseException | None, *, confirm: bool = True) -> None:
    _forget(instance, call)
    if confirm and instance.cell is not None:
        instance.cell.confirm(call.call_id)
    for caller in call.callers:
        if isinstance(outcome, asyncio.CancelledError):
            caller.reply.cancel()
        elif outcome is not None:
            caller.refuse(outcome)
        else:
            caller.answer(call.result)
    call.callers.clear()


def _forget(instance: Instance, call: Call) -> None:
    instance.calls.pop(call.call_id, None)
    if call.request_id is not None and instance.requests.get(call.request_id) is call:
        del instance.requests[call.request_id]
    if call.timer is not None:
        call.timer.cancel()
        call.timer = None


def _outcome(instance: Instance, call: Call) -> BaseException | None:
    """What the callers are told; None: the answer. An answer in time is never called late."""
    metrics, tally = instance.runtime.metrics, instance.tally
    if call.error is None:
        tally.completed += 1
        instance.last_answer = call.result
        instance.signs.output = instance.runtime.clock.mono()
        return None
    tally.failed += 1
    if call.ending is CallEnding.TIMEOUT:
        limit = duration_text(call.limit or instance.limits.execution_timeout)
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
    return RequestEnd(request=row, state=RequestState.CANCELLED if cancelled else RequestState.FAILED, error=text)


def _error_text(call: Call) -> str:
    if call.ending is CallEnding.TIMEOUT:
        return "it ran longer than its time"
    return str(call.error) if isinstance(call.error, OstlerError) else repr(call.error)
