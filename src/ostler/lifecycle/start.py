"""How an instance comes to life: isolate, initialise, ready. For a spawn, a restart and a return from parking."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields, replace

from ostler.agents import AgentMaker
from ostler.errors import (
    AgentExecutionError,
    AgentGoneError,
    AgentInitializationError,
    InitializationTimeoutError,
    InvalidOperationError,
    OstlerError,
)
from ostler.isolation.base import Cell, StartPlan, Verb
from ostler.lifecycle.ear import Ear
from ostler.lifecycle.house import House
from ostler.lifecycle.leaving import NO_GRACE, hush
from ostler.lifecycle.life import Life, Pulse, Tally
from ostler.model import AgentState, Enforcement, ResourceLimits
from ostler.seams import Deadline
from ostler.store import SYSTEM, Actor
from ostler.store.commands import Beside

LIMITS = tuple(field.name for field in fields(ResourceLimits))
#: So long others wait for a start that takes its time.
_LONGEST_TURN_SECONDS = 0.25


async def start(house: House, life: Life, *, by: Actor = SYSTEM, beside: Beside | None = None) -> None:
    """Bring it to ready. Raises a typed error after leaving nothing behind; the record is then still as it was."""
    house.require_open()
    life.starting = house.run(_start(house, life, by, beside or Beside()), "ostler-start")
    try:
        await asyncio.shield(life.starting)
    except asyncio.CancelledError:
        if life.starting.cancelled():
            raise AgentInitializationError("it was terminated while it was starting") from None
        await house.firm(_called_off(life, life.starting))
        raise
    except InvalidOperationError as error:
        if life.state is not AgentState.TERMINATING:
            raise
        raise AgentInitializationError("it was terminated while it was starting") from error
    finally:
        life.starting = None


async def _called_off(life: Life, starting: asyncio.Task[None]) -> None:
    """Whoever asked has gone. One that became ready in that very moment ends too, for nobody knows of it."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None and life.plan is not None:
        await _undo(life, life.plan, life.cell)


async def _start(house: House, life: Life, by: Actor, beside: Beside) -> None:
    plan = life.plan = plan_of(house, life, house.registry.maker(life.record.definition_id))
    life.pulse = pulse_of(house, life)
    life.tally = Tally()
    cell: Cell | None = None
    try:
        async with _in_turn(house, life) as begun, _in_time(house, life):
            cell = life.cell = await _isolated(house, life, plan)
            begun()
            await _initialized(cell)
        house.fault("spawn.ready.before")
        enforcement = enforced(life)
        said = {"enforcement": enforcement, "reason": "it is initialised"}
        # What was started is written down with the first good news of it, in one commit. One that is cut off before
        # is found again by its instance and attempt, which the intent names.
        known = replace(beside, identity=cell.handle)
        async with life.lock:
            await house.move(life, AgentState.READY, by=by, beside=known, **said)
            life.suspension = life.depth = None
        house.fault("spawn.ready.after")
    except BaseException:
        await asyncio.shield(house.run(_undo(life, plan, cell), "ostler-undo-start"))
        raise


async def _isolated(house: House, life: Life, plan: StartPlan) -> Cell:
    house.fault("spawn.start.before")
    try:
        await life.isolation.prepare(plan)
        cell = await life.isolation.start(plan, Ear(house, life))
    except AgentExecutionError as error:
        raise AgentInitializationError(f"it could not be made: {error}") from error
    except OstlerError:
        raise
    except Exception as error:
        raise AgentInitializationError(f"it could not be started: {type(error).__name__}: {error}") from error
    house.fault("spawn.start.after")
    return cell


@asynccontextmanager
async def _in_turn(house: House, life: Life) -> AsyncIterator[Callable[[], object]]:
    """Where many processes are to be started, the urgent ones come first. Its wait is not part of its time.

    What the agent does then takes no turn from others, nor does a module that takes long to import.
    """
    if not life.isolation.capabilities.kills:  # inside this program there is nothing to wait for
        yield bool
        return
    async with house.starting.turn(life.options.priority, _LONGEST_TURN_SECONDS) as begun:
        yield begun


@asynccontextmanager
async def _in_time(house: House, life: Life) -> AsyncIterator[None]:
    """All of a start has one limit: what makes the agent object may hang as well as what initialises it."""
    limit = life.options.initialization_timeout
    try:
        async with Deadline(house.clock, limit):
            yield
    except TimeoutError as error:
        raise InitializationTimeoutError(
            f"it was not ready within {limit.total_seconds():g} s; raise initialization_timeout if it needs longer"
        ) from error


async def _initialized(cell: Cell) -> None:
    try:
        await cell.call(Verb.INITIALIZE)
    except AgentExecutionError as error:
        raise AgentInitializationError(f"its initialisation failed: {error}") from error
    except AgentGoneError as error:
        when = "it ended while it was initialising"
        if cell.ended is not None:
            raise cell.ended.before_ready(when) from error
        raise AgentInitializationError(f"{when}: {error}") from error


async def _undo(life: Life, plan: StartPlan, cell: Cell | None) -> None:
    """Leave no process, socket or directory of this start, and touch no other."""
    if cell is not None:
        await hush(life, cell, NO_GRACE)
        await cell.destroy()
        if life.cell is cell:
            life.cell = None
    await life.isolation.discard(plan)
    if plan.attempt == 1 and plan.workspace is not None:
        shutil.rmtree(plan.workspace, ignore_errors=True)  # it was never asked for anything, so nothing in it is work


def plan_of(house: House, life: Life, maker: AgentMaker) -> StartPlan:
    record = life.record
    return StartPlan(
        instance_id=record.instance_id,
        attempt=record.attempt,
        name=record.name or str(record.instance_id),
        manifest=life.manifest,
        maker=maker,
        limits=life.limits,
        context=record.context or {},
        workspace=house.workroom / str(record.instance_id) if house.workroom else None,
        priority=life.options.priority,
    )


def pulse_of(house: House, life: Life) -> Pulse:
    now = house.clock.mono()
    interval = life.check.interval.total_seconds()
    # Spread over the interval, so that agents started together are not all looked at together.
    first = now + interval * house.chance.random()
    return Pulse(started=now, heartbeat=now, output=now, cpu_change=now, sampled=now, next_probe=first)


def enforced(life: Life) -> Mapping[str, Enforcement]:
    """How well each limit of this life is held, as it is recorded."""
    if life.cell is not None and life.cell.enforcement is not None:
        return {**dict.fromkeys(LIMITS, Enforcement.ADVISORY), **life.cell.enforcement}
    capabilities = life.isolation.capabilities
    return {name: capabilities.holds(name) for name in LIMITS}
