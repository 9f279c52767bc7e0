"""A job: the request that an instance was spawned for. Its answer ends the instance, its failure fails it.

The instance asks it of itself, under an id of its own, whenever it begins to serve. So a job that is under way is
joined, one that is done is known by its row, and one that was lost begins again.
"""

from __future__ import annotations

import asyncio
import json
import signal
from functools import partial
from typing import Any

from ostler.errors import AgentExecutionError, ExecutionTimeoutError, InvalidOperationError, StoreError
from ostler.isolation.base import Exit
from ostler.lifecycle.calls import failed_here, request_digest
from ostler.lifecycle.instance import RETRY_SECONDS, Instance
from ostler.lifecycle.messages import JobEnded, Process, ReadyToServe, Terminate
from ostler.lifecycle.operations import fail_with
from ostler.model.attempt import AttemptOutcome, RequestState
from ostler.model.spawn import TerminationOptions
from ostler.store.requests import get_request

#: The request id of a job.
JOB_ID = "job"
DONE = "its job is done"


def ask_job(instance: Instance, message: ReadyToServe | None = None) -> None:
    del message
    job, before = instance.record.job, instance.job
    if job is None or (before is not None and not before.reply.done()):
        return
    request = job.get("request")
    instance.job = Process(request=request, request_id=JOB_ID, digest=request_digest(request))
    instance.job.reply.add_done_callback(partial(_answered, instance))
    instance.post(instance.job)


def _answered(instance: Instance, reply: asyncio.Future[Any]) -> None:
    instance.post(JobEnded(reply=reply))


async def job_ended(instance: Instance, message: JobEnded) -> None:
    reply = message.reply
    error = asyncio.CancelledError() if reply.cancelled() else reply.exception()
    match error:
        case None:
            _finish(instance, _exit_code(reply.result()))
        case AgentExecutionError() | ExecutionTimeoutError():
            fail_with(instance, _exit_of(error))
        case StoreError():
            instance.runtime.clock.call_later(RETRY_SECONDS, lambda: instance.post(ReadyToServe()))
        case InvalidOperationError():  # it is suspended, and asked again when it serves; or its answer is not kept
            row = await instance.runtime.store.read(get_request, instance.instance_id, JOB_ID)
            if row is not None and row.state is RequestState.DONE:
                _finish(instance, None)


async def ended_job(instance: Instance) -> Exit | None:
    """How the job ended in this attempt, by its row; None where there is no job, or it has not ended."""
    if instance.record.job is None:
        return None
    row = await instance.runtime.store.read(get_request, instance.instance_id, JOB_ID)
    if row is None:
        return None
    if row.state is RequestState.DONE:
        answer = None if row.answer is None else json.loads(row.answer)
        return Exit(outcome=AttemptOutcome.CLEAN, code=_exit_code(answer))
    error = failed_here(instance, row)
    return None if error is None else _exit_of(error)


def _exit_code(answer: Any) -> int | None:
    code = answer.get("exit_code") if isinstance(answer, dict) else None
    return code if isinstance(code, int) else None


def _exit_of(error: AgentExecutionError | ExecutionTimeoutError) -> Exit:
    if isinstance(error, ExecutionTimeoutError):
        return Exit(outcome=AttemptOutcome.TIMEOUT, detail="its job ran longer than its time")
    number = None if error.signal is None else getattr(signal.Signals, error.signal, None)
    outcome = AttemptOutcome.ERROR
    if error.out_of_memory:
        outcome = AttemptOutcome.OOM
    elif number is not None:
        outcome = AttemptOutcome.SIGNAL
    elif error.exit_code:  # a coding agent may fail with 0
        outcome = AttemptOutcome.EXIT_CODE
    return Exit(
        outcome=outcome,
        detail=str(error),
        exception_type=error.exception_type,
        stack_trace=error.stack_trace,
        code=error.exit_code or None,
        signal=number,
    )


def _finish(instance: Instance, code: int | None) -> None:
    """Terminated in order, with the exit of its job."""
    how = Exit(outcome=AttemptOutcome.CLEAN, code=code)
    instance.post(Terminate(options=TerminationOptions(reason=DONE), exit=how))
