"""A job: the request that an instance was spawned for. Its answer ends the instance, its failure fails it."""

from __future__ import annotations

import signal

from ostler.errors import AgentExecutionError
from ostler.isolation.base import Exit
from ostler.lifecycle import calls, pause, start
from ostler.lifecycle.instance import Instance
from ostler.lifecycle.messages import Call, CallEnded, CallEnding, OperationDone, Terminate
from ostler.lifecycle.operations import fail_with
from ostler.lifecycle.phases import Leaving, Serving
from ostler.model.ledger import AttemptOutcome, RequestState
from ostler.model.spawn import TerminationOptions
from ostler.store.requests import get_request

#: The request id of a job.
JOB_ID = "job"
_DONE = "its job is done"


async def started(instance: Instance, message: OperationDone) -> None:
    """As `start.started`; one that is ready begins its job."""
    await start.started(instance, message)
    job = instance.record.job
    if job is None or not isinstance(instance.phase, Serving) or JOB_ID in instance.requests:
        return
    row = await instance.runtime.store.read(get_request, instance.instance_id, JOB_ID)
    if row is not None and row.state is RequestState.DONE:
        _finish(instance, Exit(outcome=AttemptOutcome.CLEAN))
        return
    tries = 1 if row is None else row.tries + 1
    call = Call(
        call_id=calls.call_id_for(instance, JOB_ID, tries),
        request=job.get("request"),
        request_id=JOB_ID,
        digest=calls.request_digest(job.get("request")),
        tries=tries,
        left=instance.limits.execution_timeout.total_seconds(),
    )
    calls.begin(instance, call)


def call_ended(instance: Instance, message: CallEnded) -> None:
    call = message.call
    was_running = instance.calls.get(call.call_id) is call and not call.ended
    calls.call_ended(instance, message)
    pause.pause_if_quiet(instance)
    if not was_running or not call.ended or call.request_id != JOB_ID or instance.record.job is None:
        return
    if isinstance(instance.phase, Leaving) or call.ending is CallEnding.WITHDRAWN:
        return
    if call.error is None:
        code = call.result.get("exit_code") if isinstance(call.result, dict) else None
        _finish(instance, Exit(outcome=AttemptOutcome.CLEAN, code=code if isinstance(code, int) else None))
    else:
        fail_with(instance, _exit_of(call))


def _exit_of(call: Call) -> Exit:
    error = call.error
    if call.ending is CallEnding.TIMEOUT:
        return Exit(outcome=AttemptOutcome.TIMEOUT, detail="its job ran longer than its time")
    if not isinstance(error, AgentExecutionError):
        return Exit(outcome=AttemptOutcome.ERROR, detail=str(error))
    number = None if error.signal is None else getattr(signal.Signals, error.signal, None)
    outcome = AttemptOutcome.ERROR
    if number is not None:
        outcome = AttemptOutcome.SIGNAL
    elif error.exit_code is not None:
        outcome = AttemptOutcome.EXIT_CODE
    return Exit(
        outcome=outcome,
        detail=str(error),
        exception_type=error.exception_type,
        stack_trace=error.stack_trace,
        code=error.exit_code,
        signal=number,
    )


def _finish(instance: Instance, how: Exit) -> None:
    """Terminated in order, with the exit of its job."""
    instance.post(Terminate(options=TerminationOptions(reason=_DONE), exit=how))
