"""The two long operations on an attempt: starting it, and ending it until nothing of it lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from ostler.agents.command import remove_without_work
from ostler.clock import Deadline
from ostler.durations import duration_text
from ostler.errors import (
    AgentExecutionError,
    AgentGoneError,
    AgentInitializationError,
    InitializationTimeoutError,
    InvalidOperationError,
    OstlerError,
)
from ostler.isolation.base import LAST_CALL, Cell, Exit, Isolation, LeftBehindError, StartPlan, Verb
from ostler.isolation.process.logs import start_log
from ostler.lifecycle.instance import Instance, Runtime
from ostler.lifecycle.liveness import Counters, ObservedLiveness
from ostler.lifecycle.messages import Verb as Caller
from ostler.lifecycle.phases import Goal, Leaving, Pausing, Starting
from ostler.lifecycle.reports import Listener
from ostler.model.access import SYSTEM, Actor
from ostler.model.spawn import ResourceLimits
from ostler.model.states import Enforcement

#: Where the private workdirs of instances are, inside a home.
WORKDIRS = "work"
LIMITS = tuple(field.name for field in dataclass_fields(ResourceLimits))
NO_GRACE = timedelta(0)
#: Others wait this long for a start that takes its time.
_LONGEST_TURN_SECONDS = 0.25
#: How long a start that was called off may take to undo itself.
_UNDO_SECONDS = 5.0


# --- starting ----------------------------------------------------------------------------------------


def begin_start(
    instance: Instance, callers: list[Caller] | None = None, *, by: Actor = SYSTEM, restart: bool = False
) -> None:
    """Enter `Starting`. The intent, the attempt of the record, is committed."""
    instance.liveness = ObservedLiveness(instance.runtime.clock, instance.runtime.chance, instance.check)
    instance.counters = Counters()
    instance.enter(Starting(callers=callers or [], by=by))
    phase = instance.phase
    if isinstance(phase, Starting):
        phase.operation = instance.operate("start", _start(instance, restart=restart))


def plan_for(instance: Instance, maker: Any) -> StartPlan:
    record, options, home = instance.record, instance.options, instance.runtime.home
    private = None if home is None else home / WORKDIRS / str(record.instance_id)
    return StartPlan(
        instance_id=record.instance_id,
        attempt=record.attempt,
        name=record.name or str(record.instance_id),
        manifest=instance.manifest,
        maker=maker,
        limits=instance.limits,
        context=record.context or {},
        workdir=private if options.workdir is None else Path(options.workdir),
        owns_workdir=options.workdir is None,
        env={**_passed_on(instance.manifest.env or {}), **(options.env or {})},
        log=None if home is None else start_log(home, record.instance_id, record.attempt),
        priority=options.priority,
        terminal=None if options.terminal is None else (options.terminal.rows, options.terminal.columns),
        open_stdin=options.stdin,
    )


def _passed_on(env: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a definition; a name without a value has the manager's, if that has one."""
    values = {name: os.environ.get(name) if value is None else value for name, value in env.items()}
    return {name: value for name, value in values.items() if value is not None}


async def _start(instance: Instance, *, restart: bool) -> Cell:
    """The living, initialised cell; or an error, and nothing is left of this start."""
    runtime = instance.runtime
    plan = plan_for(instance, runtime.definitions.maker(instance.manifest))
    limit = instance.options.initialization_timeout
    cell: Cell | None = None
    try:
        # Waiting for a turn is not part of the time to initialise. Only processes take a core each to start.
        async with contextlib.AsyncExitStack() as turns:
            if restart:
                await turns.enter_async_context(runtime.restart_gate.turn(instance.options.priority))
            began = None
            if instance.level.capabilities.has_own_process:
                turn = runtime.start_gate.turn(instance.options.priority, _LONGEST_TURN_SECONDS)
                began = await turns.enter_async_context(turn)
            async with Deadline(runtime.clock, limit):
                runtime.fault("spawn.start.before")
                await instance.level.prepare(plan)
                cell = await _start_cell(instance, plan)
                runtime.fault("spawn.start.after")
                if began is not None:
                    began()
                await _initialize(cell)
    except BaseException as error:
        # What the undo cannot end, the end of the attempt tries again.
        cell = instance.cell = cell or instance.cell
        # In a task of its own: a start that is called off twice must still be undone.
        undo = runtime.run(_undo(instance, plan, cell), "ostler-undo-start")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([undo], timeout=_UNDO_SECONDS)
        start_error = _start_error(error, limit)
        if start_error is error:
            raise
        raise start_error from error
    return cell


async def _start_cell(instance: Instance, plan: StartPlan) -> Cell:
    try:
        return await instance.level.start(plan, Listener(instance, plan.attempt))
    except LeftBehindError as error:
        instance.cell = error.cell
        failure = error.__cause__ or error
    raise failure


async def _initialize(cell: Cell) -> None:
    try:
        await cell.call(Verb.INITIALIZE)
    except AgentGoneError as error:
        when = "it ended while it was initialising"
        if cell.ended is not None:
            raise cell.ended.before_ready(when) from error
        raise AgentInitializationError(f"{when}: {error}") from error


def _start_error(error: BaseException, limit: timedelta) -> BaseException:
    match error:
        case OstlerError() if not isinstance(error, AgentExecutionError):
            return error
        case TimeoutError():
            return InitializationTimeoutError(
                f"it was not ready within {duration_text(limit)}; raise initialization_timeout if it needs longer"
            )
        case AgentExecutionError():
            return AgentInitializationError(
                f"its initialisation failed: {error}",
                exception_type=error.exception_type,
                stack_trace=error.stack_trace,
            )
        case Exception():
            return AgentInitializationError(f"it could not be started: {type(error).__name__}: {error}")
        case _:
            return error  # cancelled


async def _undo(instance: Instance, plan: StartPlan, cell: Cell | None) -> None:
    """Leave no process, socket or directory of this start."""
    if cell is not None:
        report = await cell.stop(NO_GRACE)
        if report.left_behind is not None and instance.level.capabilities.kills:
            return
        await cell.destroy()
        instance.cell = None if instance.cell is cell else instance.cell
    if plan.attempt == 1 and plan.owns_workdir and plan.workdir is not None:
        remove_without_work(plan.workdir)


def enforcement_of(instance: Instance, cell: Cell) -> Mapping[str, Enforcement]:
    """How well each limit of this very cell is held."""
    if cell.enforcement is not None:
        return {**dict.fromkeys(LIMITS, Enforcement.ADVISORY), **cell.enforcement}
    return {name: instance.level.capabilities.holds(name) for name in LIMITS}


async def sweep(runtime: Runtime) -> None:
    """End what lives without a record, and forget how attempts ended whose end is committed."""
    keep = set(runtime.unfinished)
    keep |= {
        (instance.instance_id, instance.attempt)
        for instance in runtime.instances.values()
        if isinstance(instance.phase, Starting)
    }
    levels: dict[Isolation, None] = {}
    for name in runtime.levels.known():
        with contextlib.suppress(OstlerError):  # it is not installed
            levels[runtime.levels.get(name)] = None
    for level in levels:
        try:
            if level.capabilities.outlives_manager:
                await level.sweep(keep)
        except Exception as error:  # noqa: BLE001 - what one level cannot end now, the others can
            runtime.log.emit("recovery_failed", instance_id="", error=str(error))


# --- leaving -----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class StopResult:
    """How the end of an attempt went."""

    #: The agent went through hooks and shutdown within its grace.
    complete: bool = False
    #: Force was needed.
    forced: bool = False
    #: It did not end in time, and force is not allowed.
    refused: bool = False
    warnings: list[str] = field(default_factory=list)
    final_state: dict[str, Any] | None = None
    #: What lives on.
    left_behind: str | None = None
    exit: Exit | None = None


def begin_leave(instance: Instance, phase: Leaving) -> None:
    """Enter `Leaving`: end the calls, the agent and all that it started; then its goal decides what is written."""
    before = instance.phase
    if isinstance(before, Pausing) and before.request not in phase.callers:
        before.request.refuse(instance.refusal("suspended", "it ended first; look at why"))
    instance.enter(phase)
    phase.began = phase.began or instance.runtime.clock.mono()
    calls = [call.task for call in instance.calls.values() if call.task is not None]
    phase.operation = instance.operate("leave", _leave(instance, phase, calls))


async def _leave(instance: Instance, phase: Leaving, calls: list[asyncio.Task[None]]) -> StopResult:
    runtime, cell = instance.runtime, instance.cell
    result = StopResult(exit=phase.exit)
    for call in calls:
        call.cancel()
    if cell is not None:
        await _stop_in_order(instance, phase, cell, calls, result)
        if not result.complete and not phase.force:
            result.refused = True
            return result
        runtime.fault("stop.kill.before")
        used = runtime.clock.mono() - phase.began
        left = max(phase.grace - timedelta(seconds=used), NO_GRACE) if result.complete else _last_call(instance, phase)
        if phase.grace and not result.complete:
            runtime.log.emit("shutdown_timeout", instance_id=instance.instance_id)
        report = await cell.stop(left)
        runtime.fault("stop.kill.after")
        result.forced = not (result.complete and report.graceful)
        result.left_behind = report.left_behind
        result.exit = result.exit or cell.ended
    return result


def _last_call(instance: Instance, phase: Leaving) -> timedelta:
    """An agent that ignores words may heed a signal, unless it is to end at once."""
    return LAST_CALL if phase.grace and instance.level.capabilities.kills else NO_GRACE


async def _stop_in_order(
    instance: Instance, phase: Leaving, cell: Cell, calls: list[asyncio.Task[None]], result: StopResult
) -> None:
    """Calls stop, hooks run in reverse order, the final state is kept, the agent shuts down; within one grace."""
    result.complete = cell.ended is not None
    if result.complete or cell.is_stuck or not phase.grace:
        return
    try:
        async with Deadline(instance.runtime.clock, phase.grace):
            if instance.level.capabilities.freezes:
                await cell.thaw()  # or it could not heed anything
            if calls:
                with contextlib.suppress(TimeoutError):
                    async with Deadline(instance.runtime.clock, phase.grace / 2):
                        await asyncio.wait(calls)
            for complaint in await cell.call(Verb.CLEANUP) or ():
                result.warnings.append(str(complaint))
            if phase.keep_final_state:
                result.final_state = await _call_or_warn(cell, Verb.FINAL_STATE, result)
            await _call_or_warn(cell, Verb.SHUTDOWN, result)
            result.complete = True
    except TimeoutError:
        result.warnings.append(f"it did not shut down within {duration_text(phase.grace)}")
    except (AgentGoneError, InvalidOperationError) as error:  # it went in the middle of it, or cannot be thawed
        result.warnings.append(str(error))
        result.complete = cell.ended is not None


async def _call_or_warn(cell: Cell, verb: Verb, result: StopResult) -> Any:
    try:
        return await cell.call(verb)
    except AgentExecutionError as error:
        result.warnings.append(f"{verb} failed: {error}")
        return None


def fail_with(instance: Instance, how: Exit) -> None:
    """The agent has ended, or must be ended because it does not work."""
    begin_leave(instance, Leaving(goal=Goal.FAIL, exit=how))
