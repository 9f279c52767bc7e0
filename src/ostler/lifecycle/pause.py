"""Suspension in three depths: hold finishes the work, freeze stops it where it is, park ends the process."""

from __future__ import annotations

from datetime import timedelta

from ostler.durations import duration_text
from ostler.errors import (
    AgentNotFoundError,
    DeadlineError,
    InvalidOperationError,
    OstlerError,
    StaleWriterError,
    StoreError,
)
from ostler.isolation.base import Exit
from ostler.lifecycle import calls, waits
from ostler.lifecycle.instance import Instance
from ostler.lifecycle.messages import (
    CallEnded,
    Due,
    Operation,
    OperationDone,
    Resume,
    Suspend,
    WaitCancelled,
    WaitRequested,
)
from ostler.lifecycle.operations import begin_leave, begin_start, fail_with
from ostler.lifecycle.phases import Adopting, Goal, Leaving, Pausing, Suspended
from ostler.lifecycle.waits import start_clock, stop_clock
from ostler.model.access import SYSTEM
from ostler.model.attempt import AttemptOutcome
from ostler.model.states import AgentState, SuspendDepth
from ostler.model.wait import Wait, WaitKind
from ostler.store import instances

_PARK_GRACE = timedelta(seconds=10)


def suspend(instance: Instance, message: Suspend) -> None:
    if message.depth is SuspendDepth.FREEZE and not instance.level.capabilities.freezes:
        level = instance.options.isolation_level
        message.refuse(
            InvalidOperationError(
                f"{instance.label} lives at level {level}, which cannot freeze; use hold or park, or level process",
                current=instance.state,
            )
        )
        return
    phase = Pausing(request=message)
    instance.enter(phase)
    if message.depth is SuspendDepth.FREEZE and instance.cell is not None:
        phase.operation = instance.operate("freeze", instance.cell.freeze())
        return
    limit = message.timeout or instance.runtime.settings.hold_timeout
    instance.set_timer(limit.total_seconds())
    pause_if_quiet(instance)


async def suspend_deeper(instance: Instance, message: Suspend) -> None:
    """A held or frozen instance may be parked; nothing else changes the depth of a suspension."""
    phase = instance.phase
    if not isinstance(phase, Suspended) or phase.depth is SuspendDepth.PARK or message.depth is not SuspendDepth.PARK:
        message.refuse(instance.refusal("suspended", "it is suspended already; resume it first"))
        return
    wait = _pause_of(instance, message)
    await instance.commit(instances.suspend_instance, wait, by=message.by)
    begin_leave(instance, Leaving(goal=Goal.PARK, grace=_PARK_GRACE, callers=[message], by=message.by))


def pause_if_quiet(instance: Instance) -> None:
    """Hold waits for the calls that work, park for all of them. A finished wait is reported as an operation."""
    phase = instance.phase
    if not isinstance(phase, Pausing) or phase.operation is not None:
        return
    depth = phase.request.depth
    if depth is SuspendDepth.FREEZE:
        return
    parks = depth is SuspendDepth.PARK
    if any(call.works or (parks and not call.ended) for call in instance.calls.values()):
        return
    phase.operation = Operation("quiet", instance.attempt)
    instance.post(OperationDone(operation=phase.operation))


def call_ended_pausing(instance: Instance, message: CallEnded) -> None:
    calls.call_ended(instance, message)
    pause_if_quiet(instance)


async def wait_requested_pausing(instance: Instance, message: WaitRequested) -> None:
    await waits.wait_requested(instance, message)
    pause_if_quiet(instance)


def wait_cancelled_pausing(instance: Instance, message: WaitCancelled) -> None:
    waits.wait_cancelled(instance, message)
    pause_if_quiet(instance)


async def paused(instance: Instance, message: OperationDone) -> None:
    """Its work has ended, or it is frozen: write that. Frozen first, written then; so a frozen one is never unknown."""
    phase = instance.phase
    if not isinstance(phase, Pausing) or message.operation is not phase.operation:
        return
    request, error, wait = phase.request, message.error, _pause_of(instance, phase.request)
    if error is None:
        try:
            await instance.commit(instances.suspend_instance, wait, by=request.by, catch_up=True)
        except StaleWriterError:
            raise
        except OstlerError as refused:
            error = refused
    if error is not None:
        calls.serve(instance)
        if request.depth is SuspendDepth.FREEZE and instance.cell is not None:
            instance.operate("thaw", instance.cell.thaw())
        is_ours = isinstance(error, OstlerError)
        request.refuse(error if is_ours else instance.refusal("suspended", f"try again ({error!r})"))
        return
    instance.runtime.log.emit(
        "suspended", instance_id=instance.instance_id, depth=request.depth, resumes_at=wait.due_at
    )
    if request.depth is SuspendDepth.PARK:
        begin_leave(instance, Leaving(goal=Goal.PARK, grace=_PARK_GRACE, callers=[request], by=request.by))
        return
    for call in instance.calls.values():
        stop_clock(instance, call)
    instance.enter(Suspended(depth=request.depth, wait=wait))
    if request.resume_after is not None:
        instance.set_timer(request.resume_after.total_seconds())
    request.answer(instance.record)


def _pause_of(instance: Instance, request: Suspend) -> Wait:
    runtime = instance.runtime
    now = runtime.clock.wall()
    return Wait(
        wait_id=runtime.ids.new(),
        workspace_id=instance.record.workspace_id,
        kind=WaitKind.RESUME,
        instance_id=instance.instance_id,
        reason=request.reason,
        detail={"depth": request.depth.value, "previous_state": instance.state.value},
        created_at=now,
        due_at=None if request.resume_after is None else now + request.resume_after,
    )


def pause_timed_out(instance: Instance, message: Due) -> None:
    phase = instance.phase
    if not isinstance(phase, Pausing) or message.phase is not phase:
        return
    limit = duration_text(phase.request.timeout or instance.runtime.settings.hold_timeout)
    calls.serve(instance)
    phase.request.refuse(
        DeadlineError(f"{instance.label} did not finish its work within {limit}; it goes on. Freeze it, or wait longer")
    )


def cancel_pause(instance: Instance, message: Suspend) -> None:
    """The caller has gone, or resumes: a hold or a park that has not happened is dropped; a freeze is not."""
    phase = instance.phase
    if isinstance(phase, Pausing) and phase.request is message and phase.operation is None:
        calls.serve(instance)
        message.reply.cancel()


def resume_pausing(instance: Instance, message: Resume) -> None:
    phase = instance.phase
    if not isinstance(phase, Pausing) or phase.operation is not None:
        message.refuse(instance.refusal("resumed", "it is being suspended; try again"))
        return
    calls.serve(instance)
    phase.request.refuse(instance.refusal("suspended", "it was resumed first"))
    message.answer(instance.record)


async def resume(instance: Instance, message: Resume | Due) -> None:
    phase = instance.phase
    if not isinstance(phase, Suspended) or (isinstance(message, Due) and message.phase is not phase):
        return
    by = message.by if isinstance(message, Resume) else SYSTEM
    if phase.depth is SuspendDepth.PARK:
        await unpark(instance, [message] if isinstance(message, Resume) else [])
        return
    frozen = phase.depth is SuspendDepth.FREEZE
    works = any(call.works for call in instance.calls.values())
    to = AgentState.PROCESSING if frozen and works else AgentState.READY
    reason = "resumed" if isinstance(message, Resume) else "its suspension is over"
    await instance.commit(instances.resume_instance, to, by=by, reason=reason)
    instance.runtime.log.emit("resumed", instance_id=instance.instance_id, to_state=to)
    if frozen and instance.cell is not None:
        instance.operate("thaw", instance.cell.thaw())
    if isinstance(message, Resume):
        message.answer(instance.record)
    if phase.adopted:
        instance.enter(Adopting())  # what it works on is known only when it has reported, a frozen one after its thaw
        if phase.reported is not None:
            instance.post(phase.reported)
    _go_on(instance, phase)
    if not phase.adopted:
        calls.serve(instance)


def _go_on(instance: Instance, phase: Suspended) -> None:
    for call in instance.calls.values():
        if call.ending is None:
            start_clock(instance, call)
    for wait_id, answer in phase.undelivered:
        waits.deliver(instance, wait_id, answer)


async def resume_due(instance: Instance, message: Due) -> None:
    """As `resume`; a store that cannot write is asked again, and a definition is waited for."""
    try:
        await resume(instance, message)
    except AgentNotFoundError as error:
        if isinstance(instance.phase, Suspended):
            instance.phase.held_because = str(error)
    except StoreError as error:
        instance.runtime.log.emit("resume_failed", instance_id=instance.instance_id, error=str(error))
        instance.set_timer(1.0)


async def unpark(instance: Instance, callers: list[Resume]) -> None:
    """Claim a new attempt in one commit; only then start it."""
    instance.runtime.definitions.maker(instance.manifest)  # before anything is claimed
    actor = callers[0].by if callers else SYSTEM
    await instance.commit(instances.unpark_instance, by=actor)
    begin_start(instance, list(callers), by=actor)


def thawed(instance: Instance, message: OperationDone) -> None:
    """A thaw that failed leaves an agent that cannot work."""
    operation = message.operation
    if operation.name == "thaw" and operation.attempt == instance.attempt and isinstance(message.error, Exception):
        detail = f"it could not be thawed: {message.error}"
        fail_with(instance, Exit(outcome=AttemptOutcome.ERROR, detail=detail))
