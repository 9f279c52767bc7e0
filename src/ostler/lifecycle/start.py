"""The end of a start: ready, or failed with nothing left of it."""

from __future__ import annotations

import asyncio

from ostler.errors import (
    AgentGoneError,
    AgentInitializationError,
    InitializationTimeoutError,
    OstlerError,
    StaleWriterError,
    StoreError,
)
from ostler.isolation.base import Exit
from ostler.lifecycle import calls
from ostler.lifecycle.instance import Instance, Runtime
from ostler.lifecycle.messages import MANAGER_CLOSED, Close, Join, OperationDone, OwnerLost, Terminate, Verb
from ostler.lifecycle.operations import begin_leave, enforcement_of
from ostler.lifecycle.phases import Goal, Leaving, Serving, Starting
from ostler.lifecycle.retry_writes import write_intent
from ostler.model.attempt import AttemptOutcome
from ostler.model.instance import AgentInstance
from ostler.model.spawn import TerminationOptions
from ostler.model.states import AgentState
from ostler.store import attempts, instances

TERMINATED_STARTING = "it was terminated while it was starting"
_CALLED_OFF = "its spawn was called off"


def join(instance: Instance, message: Join) -> None:
    """Another caller with the same idempotency key shares the start."""
    if isinstance(instance.phase, Starting):
        instance.phase.callers.append(message)


async def joined(instance: Instance, message: Join) -> None:
    """Answered with one that became ready, whatever became of it since; else with why it did not."""
    if isinstance(instance.phase, Serving) and instance.phase.spawned_by:
        instance.phase.spawned_by.append(message)  # it is this caller's too
    error = await why_not_ready(instance.runtime, instance.record)
    if error is None:
        message.answer(instance.record)
    else:
        message.refuse(error)


async def why_not_ready(runtime: Runtime, record: AgentInstance) -> OstlerError | None:
    """What its first caller was told of a start that failed; None of one that became ready, or may yet."""
    if record.enforcement is not None or record.is_active:
        return None
    tried = await runtime.store.read(attempts.list_attempts, record.instance_id, after=record.attempt - 1)
    late = bool(tried) and tried[-1].outcome is AttemptOutcome.TIMEOUT
    kind = InitializationTimeoutError if late else AgentInitializationError
    return kind(record.error_message or TERMINATED_STARTING)


async def join_leaving(instance: Instance, message: Join) -> None:
    """A start that has just failed: its caller is told the same."""
    phase = instance.phase
    if isinstance(phase, Leaving) and phase.caller_error is not None:
        phase.callers.append(message)
    else:
        await joined(instance, message)


async def started(instance: Instance, message: OperationDone) -> None:
    phase = instance.phase
    if not isinstance(phase, Starting) or message.operation is not phase.operation:
        return
    if message.error is None and phase.cancelled_because is None:
        await _ready(instance, phase, message)
        return
    # It may have become ready in the very moment in which it was called off, or the undo could not end it.
    instance.cell = message.result or instance.cell
    _failed(instance, phase, message.error)


async def _ready(instance: Instance, phase: Starting, message: OperationDone) -> None:
    runtime = instance.runtime
    cell = instance.cell = message.result
    runtime.fault("spawn.ready.before")
    enforcement = enforcement_of(instance, cell)
    try:
        await instance.commit(instances.ready_instance, cell.handle, enforcement, by=phase.by)
    except StaleWriterError:
        raise
    except StoreError as error:
        how = Exit(outcome=AttemptOutcome.STOPPED, detail=str(error))
        final = instance.attempt == 1
        begin_leave(instance, Leaving(goal=Goal.FAIL, exit=how, callers=phase.callers, caller_error=error, final=final))
        return
    runtime.fault("spawn.ready.after")
    spawned = [caller for caller in phase.callers if isinstance(caller, Join)]
    for caller in phase.callers:
        caller.answer(instance.record)
    calls.serve(instance, Serving(spawned_by=spawned))


def _failed(instance: Instance, phase: Starting, error: BaseException | None) -> None:
    """Its callers are told when the record says failed. A first start that failed is final: its caller was told."""
    if instance.state is AgentState.TERMINATING:
        caller_error: BaseException = AgentInitializationError(TERMINATED_STARTING)
        goal = Goal.TERMINATE
    else:
        why = phase.cancelled_because
        caller_error = error if isinstance(error, OstlerError) else AgentInitializationError(why or str(error))
        goal = Goal.FAIL
    how = start_exit(error, phase.cancelled_because)
    if goal is Goal.FAIL and not isinstance(error, asyncio.CancelledError):
        instance.runtime.log.emit("initialization_failed", instance_id=instance.instance_id, error=str(caller_error))
    options = _least_patient(phase.terminations)
    begin_leave(
        instance,
        Leaving(
            goal=goal,
            exit=how,
            grace=options.graceful_timeout,
            intent=phase.intent,
            reason=options.reason,
            terminations=phase.terminations,
            callers=phase.callers,
            caller_error=caller_error,
            final=instance.attempt == 1 or phase.cancelled_because is not None,
            by=phase.terminations[0].by if phase.terminations else phase.by,
        ),
    )


def _least_patient(terminations: list[Terminate]) -> TerminationOptions:
    if not terminations:
        return TerminationOptions.immediate().evolve(reason=None)
    return min((termination.options for termination in terminations), key=lambda options: options.graceful_timeout)


def start_exit(error: BaseException | None, cancelled_because: str | None) -> Exit:
    """How a start that failed is recorded."""
    if cancelled_because is not None or error is None or isinstance(error, asyncio.CancelledError):
        return Exit(outcome=AttemptOutcome.STOPPED, detail=cancelled_because or "its start was called off")
    outcome = AttemptOutcome.UNKNOWN
    if isinstance(error, InitializationTimeoutError):
        outcome = AttemptOutcome.TIMEOUT
    elif isinstance(error, StoreError):
        outcome = AttemptOutcome.STOPPED
    elif isinstance(error, AgentInitializationError | AgentGoneError):
        word = getattr(error, "outcome", None)
        outcome = next((outcome_ for outcome_ in AttemptOutcome if outcome_ == word), AttemptOutcome.ERROR)
    return Exit(
        outcome=outcome,
        detail=str(error),
        exception_type=getattr(error, "exception_type", None),
        stack_trace=getattr(error, "stack_trace", None),
    )


async def terminate_starting(instance: Instance, message: Terminate) -> None:
    """Write the intent, call the start off; its own undo leaves nothing."""
    phase = instance.phase
    if not isinstance(phase, Starting):
        return
    if instance.state is not AgentState.TERMINATING:
        phase.intent = await write_intent(instance, message)
    phase.terminations.append(message)
    call_off(phase, TERMINATED_STARTING)


async def close_starting(instance: Instance, message: Close) -> None:
    options = TerminationOptions(graceful_timeout=message.grace, reason=MANAGER_CLOSED)
    await terminate_starting(instance, Terminate(by=message.by, options=options, reply=message.reply))


def owner_lost_starting(instance: Instance, message: OwnerLost) -> None:
    """What is half started is undone; then the write of its failure finds that it is not ours."""
    if isinstance(instance.phase, Starting):
        call_off(instance.phase, str(message.error))


def withdraw_join(instance: Instance, caller: Join) -> Verb | None:
    """The only caller of a spawn has gone: leave nothing but the record. Answers what the caller waits for."""
    phase = instance.phase
    if isinstance(phase, Starting) and caller in phase.callers and len(phase.callers) == 1:
        call_off(phase, _CALLED_OFF)
        return caller
    if isinstance(phase, Starting) and caller in phase.callers:
        phase.callers.remove(caller)
    if isinstance(phase, Serving) and caller in phase.spawned_by:
        # The reply was on its way: the caller does not know the id of what it has started.
        phase.spawned_by.remove(caller)
        if not phase.spawned_by:
            ending = Terminate(options=TerminationOptions(reason=_CALLED_OFF))
            instance.post(ending)
            return ending
    return None


def call_off_reserved(instance: Instance) -> None:
    """Its caller went before anything was started."""
    how = Exit(outcome=AttemptOutcome.STOPPED, detail=_CALLED_OFF)
    begin_leave(instance, Leaving(goal=Goal.FAIL, exit=how, final=True))


def call_off(phase: Starting, why: str) -> None:
    if phase.cancelled_because is None and phase.operation is not None:
        phase.operation.cancel()
    phase.cancelled_because = phase.cancelled_because or why
