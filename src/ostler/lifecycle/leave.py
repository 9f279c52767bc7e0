"""The end of an attempt: terminate, fail, restart and park are one operation with different goals."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ostler.agents.command import remove_without_work
from ostler.agents.registry import AgentKind
from ostler.errors import (
    AgentGoneError,
    AgentNotFoundError,
    DamagedRowError,
    InvalidOperationError,
    LicenseError,
    StaleWriterError,
    StoreError,
    StoreFailedError,
)
from ostler.isolation.base import Exit
from ostler.lifecycle import calls, reports
from ostler.lifecycle.instance import RETRY_SECONDS, Instance
from ostler.lifecycle.messages import (
    MANAGER_CLOSED,
    Close,
    Detach,
    Due,
    Exited,
    OperationDone,
    OwnerLost,
    Probed,
    Registered,
    Restart,
    Resume,
    Terminate,
)
from ostler.lifecycle.operations import WORKDIRS, StopResult, begin_leave, begin_start, fail_with, sweep
from ostler.lifecycle.phases import Backoff, Detached, Ended, Goal, Leaving, Suspended
from ostler.lifecycle.retry_writes import write_intent, write_rest
from ostler.model.access import SYSTEM
from ostler.model.attempt import AttemptOutcome
from ostler.model.instance import TerminationResult
from ostler.model.spawn import TerminationOptions
from ostler.model.states import AgentState, SuspendDepth
from ostler.model.wait import Wait, WaitKind
from ostler.policy.restart import RestartDecision, RestartFacts, decide_restart
from ostler.store import attempts, instances
from ostler.store.attempts import AttemptEnd
from ostler.store.instances import Failure, Finish
from ostler.store.waits import open_waits

#: How long until an end that left something alive is tried again.
AGAIN_SECONDS = 5.0
#: How long until a restart that found no room is tried again.
_LATER_SECONDS = 5.0
#: How often a closing manager tries to write an end; with the pauses in between that takes about 2 s.
_CLOSING_WRITES = 3
_RESTART_GRACE = TerminationOptions.default().graceful_timeout
#: The number of latest starts that a restart decision looks at; no burst window holds more.
_STARTS = 100
_SIGNIFICANCE = {AttemptOutcome.LOST: 0, AttemptOutcome.STOPPED: 1, AttemptOutcome.UNKNOWN: 1}


# --- deaths ------------------------------------------------------------------------------------------


def exited(instance: Instance, message: Exited) -> None:
    """One death, one failure: the first notice leaves the phase, later ones only improve the reason."""
    if message.attempt == instance.attempt:
        fail_with(instance, message.how)


def exited_suspended(instance: Instance, message: Exited) -> None:
    phase = instance.phase
    if isinstance(phase, Suspended) and phase.depth is not SuspendDepth.PARK:
        exited(instance, message)


def note_exit(instance: Instance, message: Exited) -> None:
    phase = instance.phase
    if not isinstance(phase, Leaving) or message.attempt != instance.attempt:
        return
    phase.exit = better_exit(phase.exit, message.how)
    if phase.operation is None and not phase.empty:  # between two tries, or refused without force
        begin_leave(instance, _retry_stop(phase))


def better_exit(first: Exit | None, second: Exit | None) -> Exit | None:
    """The one that says more."""
    if first is None or second is None:
        return first or second
    rank = _SIGNIFICANCE
    return second if rank.get(second.outcome, 2) > rank.get(first.outcome, 2) else first


def gone(instance: Instance, message: Probed) -> None:
    if message.attempt == instance.attempt and message.gone is not None:
        fail_with(instance, message.gone)


# --- terminate, restart, close -----------------------------------------------------------------------


async def terminate(instance: Instance, message: Terminate) -> None:
    """Write the intent, then act. Ending never needs the disk: what cannot be written now is written later."""
    options = message.options
    runtime = instance.runtime
    runtime.fault("stop.intent.before")
    intent = await write_intent(instance, message)
    runtime.fault("stop.intent.after")
    begin_leave(
        instance,
        Leaving(
            goal=Goal.TERMINATE,
            intent=intent,
            grace=options.graceful_timeout,
            force=options.force_if_timeout,
            keep_final_state=options.persist_final_state,
            reason=options.reason,
            exit=message.exit,
            terminations=[message],
            by=message.by,
        ),
    )


async def terminate_leaving(instance: Instance, message: Terminate) -> None:
    """Callers share one end; the least patient of them decides its grace. A termination replaces any other goal."""
    phase = instance.phase
    if not isinstance(phase, Leaving):
        return
    options = message.options
    if phase.goal is not Goal.TERMINATE:
        phase.intent = await write_intent(instance, message)
        for caller in phase.callers:
            caller.refuse(instance.refusal("used", "it is being terminated"))
        phase.callers, phase.goal = [], Goal.TERMINATE
        phase.reason, phase.by = options.reason, message.by
    phase.terminations.append(message)
    phase.keep_final_state = phase.keep_final_state or options.persist_final_state
    if phase.empty:
        return  # nothing lives any more; only the writing is left
    if phase.operation is None:  # between two tries, or refused without force
        phase.force = options.force_if_timeout
        phase.grace = options.graceful_timeout
        phase.began = 0.0
        begin_leave(instance, _retry_stop(phase))
    elif options.graceful_timeout < phase.grace:
        phase.grace = options.graceful_timeout
        phase.operation.cancel()


def _retry_stop(phase: Leaving, **changes: Any) -> Leaving:
    """The same end as a new phase, so that results of its earlier operation are dropped."""
    changes = {"force": phase.force or not phase.grace, **changes}
    return replace(phase, operation=None, timer=None, deferred=[], left_behind=None, unwritten=None, **changes)


async def terminate_failed(instance: Instance, message: Terminate) -> None:
    """It is dead; what an attempt left behind is ended, its return is called off, its record is closed."""
    begin_leave(
        instance,
        Leaving(goal=Goal.TERMINATE, terminations=[message], reason=message.options.reason, by=message.by),
    )


def restart(instance: Instance, message: Restart) -> None:
    instance.runtime.definitions.maker(instance.manifest)  # before anything is stopped
    how = Exit(outcome=AttemptOutcome.STOPPED, detail=message.reason)
    phase = Leaving(
        goal=Goal.RESTART, grace=_RESTART_GRACE, callers=[message], exit=how, reason=message.reason, by=message.by
    )
    begin_leave(instance, phase)


async def restart_suspended(instance: Instance, message: Restart) -> None:
    phase = instance.phase
    if not isinstance(phase, Suspended) or phase.depth is not SuspendDepth.PARK:
        restart(instance, message)
        return
    instance.runtime.definitions.maker(instance.manifest)  # before anything is claimed
    end = AttemptEnd(outcome=AttemptOutcome.STOPPED, detail=message.reason)
    await instance.commit(instances.restart_instance, end, by=message.by, reason=message.reason)
    _count_restart(instance)
    begin_start(instance, [message], by=message.by, restart=True)


def restart_leaving(instance: Instance, message: Restart) -> None:
    phase = instance.phase
    if isinstance(phase, Leaving) and phase.goal is Goal.PARK:
        instance.runtime.definitions.maker(instance.manifest)
        for caller in phase.callers:
            caller.refuse(instance.refusal("parked", "it is being restarted"))
        phase.goal, phase.callers, phase.reason, phase.by = Goal.RESTART, [message], message.reason, message.by
        phase.exit = Exit(outcome=AttemptOutcome.STOPPED, detail=message.reason)
    else:
        message.refuse(instance.refusal("restarted", "it is ending already; look at why"))


async def restart_failed(instance: Instance, message: Restart) -> None:
    """By hand, at once."""
    instance.runtime.definitions.maker(instance.manifest)  # before anything is claimed
    await instance.commit(instances.new_attempt, by=message.by, reason=message.reason)
    _count_restart(instance)
    begin_start(instance, [message], by=message.by, restart=True)


async def close(instance: Instance, message: Close) -> None:
    """The manager closes: a living instance is terminated, a suspended one parked."""
    options = TerminationOptions(graceful_timeout=message.grace, reason=MANAGER_CLOSED)
    inner = Terminate(by=message.by, options=options, reply=message.reply)
    await terminate(instance, inner)


async def close_suspended(instance: Instance, message: Close) -> None:
    phase = instance.phase
    if isinstance(phase, Suspended) and phase.depth is SuspendDepth.PARK:
        detach(instance, message)
        return
    begin_leave(instance, Leaving(goal=Goal.PARK, grace=message.grace, by=message.by, deferred=[message]))


async def close_leaving(instance: Instance, message: Close) -> None:
    """What is ending ends first; what would start again is terminated instead."""
    phase = instance.phase
    if isinstance(phase, Leaving) and phase.goal is Goal.RESTART:
        options = TerminationOptions(graceful_timeout=message.grace, reason=MANAGER_CLOSED)
        await terminate_leaving(instance, Terminate(by=message.by, options=options, reply=message.reply))
    else:
        defer(instance, message)


def detach(instance: Instance, message: Detach | Close) -> None:
    """Leave the agent alive for the next manager; requests go on there under their ids."""
    cell, instance.cell = instance.cell, None
    reports.flush(instance, now=True)
    if cell is not None:
        cell.detach()
    left = AgentGoneError(
        f"this manager has let go of {instance.label}, which lives on; ask the next one, under the same request id"
    )
    for call in (*instance.calls.values(), *instance.backlog):
        instance.drop_call(call, left)
    instance.enter(Detached())
    message.answer(instance.record)


def defer(instance: Instance, message: Detach | Close | Resume) -> None:
    """What is under way is finished first; the next phase handles it."""
    instance.phase.deferred.append(message)


def owner_lost(instance: Instance, message: OwnerLost) -> None:
    instance.lose_ownership(message.error)


def resume_leaving(instance: Instance, message: Resume) -> None:
    phase = instance.phase
    if isinstance(phase, Leaving) and phase.goal is Goal.PARK:
        defer(instance, message)
    else:
        message.refuse(instance.refusal("resumed", "it is ending; look at why"))


# --- when nothing lives any more ---------------------------------------------------------------------


async def left(instance: Instance, message: OperationDone) -> None:
    phase = instance.phase
    if not isinstance(phase, Leaving) or message.operation is not phase.operation:
        return
    phase.operation = None
    if isinstance(message.error, asyncio.CancelledError):  # a less patient caller
        begin_leave(instance, _retry_stop(phase))
        return
    result = message.result if isinstance(message.result, StopResult) else None
    if result is None:
        result = StopResult(left_behind=f"its end failed: {message.error!r}")
    phase.final_state = phase.final_state or result.final_state
    phase.forced = phase.forced or result.forced
    if result.refused:
        _report_unended(
            instance, phase, f"it did not end within {phase.grace.total_seconds():g} s; terminate it again to force it"
        )
        return
    if result.left_behind is not None and instance.level.capabilities.kills:
        phase.left_behind = result.left_behind
        instance.runtime.log.emit("left_behind", instance_id=instance.instance_id, what=result.left_behind)
        _report_unended(instance, phase, f"it could not be ended: {result.left_behind}; it is tried again every 5 s")
        instance.set_timer(AGAIN_SECONDS)
        return
    for warning in result.warnings:
        instance.runtime.log.emit("cleanup_failed", instance_id=instance.instance_id, error=warning)
    phase.exit = better_exit(phase.exit, result.exit)
    phase.left_behind, phase.empty = None, True
    if result.left_behind is not None:  # levels inside the program cannot kill; it is cut off
        instance.runtime.log.emit("left_behind", instance_id=instance.instance_id, what=result.left_behind)
    await finish(instance, phase)


def _report_unended(instance: Instance, phase: Leaving, why: str) -> None:
    """Something lives on: the state stays, the callers are told."""
    for termination in phase.terminations:
        termination.answer(TerminationResult.failed(why).evolve(final_instance=instance.record))
    for caller in phase.callers:
        caller.refuse(InvalidOperationError(f"{instance.label}: {why}", current=instance.state))
    _answer_calls(instance, AgentGoneError(f"{instance.label} has ended: {why}"))
    phase.terminations, phase.callers, phase.forced = [], [], True


async def retry_leave(instance: Instance, message: Due) -> None:
    """Try again to end it, or to write that it has ended."""
    phase = instance.phase
    if not isinstance(phase, Leaving) or message.phase is not phase or phase.operation is not None:
        return
    if phase.empty:
        await finish(instance, phase)
    else:
        begin_leave(instance, _retry_stop(phase, grace=timedelta(0), force=True))


async def finish(instance: Instance, phase: Leaving) -> None:
    """Write what the end means. A store that cannot is asked again, and meanwhile messages are served."""
    try:
        await write_rest(instance)
        match phase.goal:
            case Goal.TERMINATE:
                await _finish_terminate(instance, phase)
            case Goal.PARK:
                await _finish_park(instance, phase)
            case Goal.RESTART:
                await _finish_restart(instance, phase)
            case Goal.FAIL:
                await _finish_fail(instance, phase)
    except StaleWriterError:
        raise
    except StoreError as error:
        phase.unwritten = str(error)
        instance.runtime.log.emit("death_unwritten", instance_id=instance.instance_id, error=str(error))
        _tell_unwritten(instance, phase, error)
        if instance.runtime.closing is not None and _gives_up_writing(phase, error):
            _leave_unrecorded(instance)
            return
        instance.set_timer(RETRY_SECONDS)


def _gives_up_writing(phase: Leaving, error: StoreError) -> bool:
    """A closing manager does not wait for the user to make room on the disk."""
    phase.writes_while_closing += 1
    return isinstance(error, StoreFailedError | DamagedRowError) or phase.writes_while_closing >= _CLOSING_WRITES


def _leave_unrecorded(instance: Instance) -> None:
    """The next manager records it, by what the keeper has written down of its end."""
    cell = instance.cell
    if cell is not None and instance.level.capabilities.outlives_manager:
        instance.cell = None
        cell.detach()
    else:
        _release(instance, instance.attempt)
    instance.enter(Detached())


def _tell_unwritten(instance: Instance, phase: Leaving, error: StoreError) -> None:
    """Ended now, recorded when it can be; every caller is told so, and none waits for the disk."""
    sentence = f"it has ended, but that could not be recorded yet ({error}); it is recorded when the store can write"
    duration = timedelta(seconds=instance.runtime.clock.mono() - phase.began)
    for termination in phase.terminations:
        result = TerminationResult.successful(instance.record, not phase.forced, duration)
        termination.answer(result.evolve(error_message=sentence))
    for caller in phase.callers:
        caller.refuse(phase.caller_error or error)
    phase.terminations, phase.callers = [], []
    _answer_calls(instance, calls.ended_unrecorded(instance, phase), backlog=True)


def _attempt_end(phase: Leaving) -> AttemptEnd:
    how = phase.exit or Exit(outcome=AttemptOutcome.STOPPED)
    return AttemptEnd(
        outcome=how.outcome,
        detail=how.detail or ("ended by force" if phase.forced else None),
        exit_code=how.code,
        exit_signal=how.signal,
        ended_at=how.ended_at,
    )


def _release(instance: Instance, attempt: int) -> None:
    """The end of this attempt is committed."""
    cell, instance.cell = instance.cell, None
    if cell is not None:
        instance.runtime.run(cell.destroy(), "ostler-let-go")
    unfinished = instance.runtime.unfinished
    if (instance.instance_id, attempt) in unfinished:
        unfinished.remove((instance.instance_id, attempt))
        if not unfinished:  # one sweep for all the exit records that recovery has found
            instance.runtime.run(sweep(instance.runtime), "ostler-sweep")
    for waiting in instance.waits.values():
        if waiting.timer is not None:
            waiting.timer.cancel()
        if waiting.reply is not None and not waiting.reply.done():
            waiting.reply.set_exception(AgentGoneError("the agent has ended"))
            waiting.reply.exception()
    instance.waits.clear()


def _answer_calls(instance: Instance, error: AgentGoneError, *, backlog: bool = False) -> None:
    for call in tuple(instance.calls.values()):
        instance.calls.pop(call.call_id, None)
        if call.request_id is not None:
            instance.requests.pop(call.request_id, None)
        instance.drop_call(call, error)
    if backlog:
        for call in instance.backlog:
            if call.request_id is not None:
                instance.requests.pop(call.request_id, None)
            instance.drop_call(call, error)
        instance.backlog.clear()


async def _finish_terminate(instance: Instance, phase: Leaving) -> None:
    runtime = instance.runtime
    runtime.fault("stop.final.before")
    failed = instance.state is AgentState.FAILED
    finish_ = Finish(
        end=None if failed else _attempt_end(phase),
        act=None if instance.record.state is AgentState.TERMINATING else "terminate",
        was_graceful=not phase.forced,
        by=phase.by,
        reason=phase.reason,
        final_state=_final_state(instance, phase),
        metrics=instance.metrics_now(),
    )
    await instance.commit(instances.finish_instance, finish_, catch_up=True)
    runtime.fault("stop.final.after")
    duration = runtime.clock.mono() - phase.began
    runtime.metrics.count("lifecycle.terminate.count")
    runtime.metrics.observe("lifecycle.terminate.duration", duration)
    if phase.forced:
        runtime.metrics.count("lifecycle.terminate.forced")
    runtime.log.emit(
        "terminated",
        instance_id=instance.instance_id,
        was_graceful=finish_.was_graceful,
        uptime=instance.record.uptime(runtime.clock.wall()),
    )
    _release(instance, instance.attempt)
    _remove_empty_workdir(instance)
    _answer_calls(instance, AgentGoneError(f"{instance.label} was terminated"), backlog=True)
    for caller in phase.callers:
        caller.refuse(phase.caller_error or instance.refusal("used", "it was terminated"))
    instance.enter(Ended())
    result = TerminationResult.successful(instance.record, finish_.was_graceful, timedelta(seconds=duration))
    for termination in phase.terminations:
        termination.answer(result)


def _final_state(instance: Instance, phase: Leaving) -> dict[str, object] | None:
    """Its final state and the context of its spawn."""
    if not phase.keep_final_state:
        return None
    kept: dict[str, object] = dict(phase.final_state or {})
    if instance.manifest.kind is AgentKind.COMMAND and instance.last_answer is not None:
        kept["answer"] = instance.last_answer
    if instance.record.context:
        kept.setdefault("context", dict(instance.record.context))
    return kept


def _remove_empty_workdir(instance: Instance) -> None:
    """Only the private one, and only where nothing is in it; what an agent wrote is kept."""
    home = instance.runtime.home
    if home is not None and instance.options.workdir is None:
        remove_without_work(home / WORKDIRS / str(instance.instance_id))


async def _finish_park(instance: Instance, phase: Leaving) -> None:
    store = instance.runtime.store
    await store.run(instances.park_instance, instance.current(), _attempt_end(phase))
    _release(instance, instance.attempt)
    _answer_calls(instance, AgentGoneError(f"{instance.label} was parked"), backlog=True)
    pause = await _open_pause(instance)
    instance.enter(Suspended(depth=SuspendDepth.PARK, wait=pause))
    for caller in phase.callers:
        caller.answer(instance.record)
    if pause is not None:
        instance.set_timer_until(pause)


async def _open_pause(instance: Instance) -> Wait | None:
    waits = await instance.runtime.store.read(open_waits, instance_id=instance.instance_id)
    return next((wait for wait in waits if wait.kind is WaitKind.RESUME), None)


async def _finish_restart(instance: Instance, phase: Leaving) -> None:
    """Through failed into the next attempt, in one commit."""
    why, attempt = phase.reason or "restarted by hand", instance.attempt
    await instance.commit(instances.restart_instance, _attempt_end(phase), by=phase.by, reason=why, catch_up=True)
    _release(instance, attempt)
    _answer_calls(instance, AgentGoneError(f"{instance.label} was restarted before it answered; ask it again"))
    _count_restart(instance)
    begin_start(instance, list(phase.callers), by=phase.by, restart=True)


def _count_restart(instance: Instance) -> None:
    instance.runtime.metrics.count("lifecycle.restarts.count")


# --- failed ------------------------------------------------------------------------------------------


async def _finish_fail(instance: Instance, phase: Leaving) -> None:
    """What ended it, whether it comes back and when: one commit."""
    runtime = instance.runtime
    how = phase.exit or Exit(outcome=AttemptOutcome.UNKNOWN, detail="it ended, and how is not known")
    text = how.detail or how.outcome.value
    if instance.record.enforcement is not None:
        runtime.log.emit("crashed", instance_id=instance.instance_id, error=text, stack_trace=how.stack_trace)
    decision = await _decide(instance, phase, text)
    runtime.fault("restart.decide.after")
    backoff = _backoff(instance, decision) if decision.restart else None
    current = instance.current()
    failure = Failure(
        end=_attempt_end(phase),
        error=instances.error_event(
            current,
            text,
            exception_type=how.exception_type,
            stack_trace=how.stack_trace,
            is_recoverable=backoff is not None,
        ),
        reason=text if phase.final else decision.sentence,
        backoff=backoff,
        restarting=None
        if backoff is None
        else instances.restarting_event(
            current,
            attempt_number=decision.attempt_number,
            max_attempts=decision.max_attempts,
            delay_before_retry=decision.delay,
            reason=decision.sentence,
        ),
    )
    await instance.commit(instances.fail_instance, failure, catch_up=True)
    _release(instance, instance.attempt)
    ended = AgentGoneError(f"{instance.label} has ended: {text}")
    _answer_calls(instance, ended, backlog=backoff is None)
    _wait_for_restart(instance, decision, backoff)
    for caller in phase.callers:
        caller.refuse(phase.caller_error or ended)


async def _decide(instance: Instance, phase: Leaving, cause: str) -> RestartDecision:
    record, runtime = instance.record, instance.runtime
    starts = await runtime.store.read(
        attempts.list_attempts, record.instance_id, after=max(record.attempt - _STARTS, 0)
    )
    facts = RestartFacts(
        restart_count=record.restart_count,
        lifetime_restarts=record.lifetime_restarts,
        recent_starts=tuple(attempt.intended_at for attempt in starts),
        failing_since=record.failing_since,
        cause=cause[:1000],
    )
    policy = None if phase.final else instance.options.restart_policy
    return decide_restart(policy, facts, runtime.clock.wall(), runtime.chance)


def _backoff(instance: Instance, decision: RestartDecision) -> Wait:
    runtime = instance.runtime
    now = runtime.clock.wall()
    return Wait(
        wait_id=runtime.ids.new(),
        workspace_id=instance.record.workspace_id,
        kind=WaitKind.BACKOFF,
        instance_id=instance.instance_id,
        reason=decision.sentence,
        detail={"attempt": instance.attempt, "max_attempts": decision.max_attempts},
        created_at=now,
        due_at=now + decision.delay,
    )


def _wait_for_restart(instance: Instance, decision: RestartDecision, backoff: Wait | None) -> None:
    log = instance.runtime.log
    instance.enter(Backoff(wait=backoff))
    if backoff is None:
        log.emit("restart_given_up", instance_id=instance.instance_id, reason=decision.sentence)
        return
    log.emit(
        "restart_scheduled",
        instance_id=instance.instance_id,
        attempt=decision.attempt_number,
        delay=decision.delay,
        reason=decision.sentence,
    )
    for call in instance.backlog:
        calls.set_queue_timer(instance, call)
    instance.set_timer(decision.delay.total_seconds())


async def restart_due(instance: Instance, message: Due) -> None:
    """The backoff is over. Room in the plan and the definition are waited for."""
    phase = instance.phase
    if isinstance(phase, Backoff) and message.phase is phase and phase.wait is not None:
        await _restart_now(instance, phase, phase.wait)


async def definition_registered(instance: Instance, message: Registered) -> None:
    del message
    phase = instance.phase
    if isinstance(phase, Backoff) and phase.wait is not None and phase.held_because is not None:
        await _restart_now(instance, phase, phase.wait)


async def _restart_now(instance: Instance, phase: Backoff, wait: Wait) -> None:
    runtime = instance.runtime
    runtime.fault("restart.spawn.before")
    try:
        runtime.require_open()
        runtime.definitions.maker(instance.manifest)
        await instance.commit(
            instances.new_attempt, by=SYSTEM, reason=wait.reason or "restarted by its policy", wait_id=wait.wait_id
        )
    except AgentNotFoundError as error:
        phase.held_because = str(error)  # it comes back when its definition is registered
        return
    except (LicenseError, StoreError) as error:
        phase.held_because = str(error)
        runtime.log.emit("restart_failed", instance_id=instance.instance_id, error=str(error))
        instance.set_timer(_LATER_SECONDS)
        return
    except InvalidOperationError as error:
        # Its wait was ended by another hand; the record says what is so.
        runtime.log.emit("restart_failed", instance_id=instance.instance_id, error=str(error))
        instance.enter(Ended())
        return
    runtime.fault("restart.spawn.after")
    _count_restart(instance)
    begin_start(instance, restart=True)
