"""One that has outlived its manager: looked for, and taken up where it stands. Nothing is done to it twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from ostler.agents import AgentKind, AgentManifest, CommandSpec
from ostler.errors import AgentNotFoundError, OstlerError
from ostler.isolation.base import Cell, Exit, Isolation
from ostler.lifecycle.admit import make_life
from ostler.lifecycle.ear import Ear
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life, Tally
from ostler.lifecycle.settle import settle
from ostler.lifecycle.start import plan_of, pulse_of
from ostler.lifecycle.waits import expect
from ostler.lifecycle.working import rejoin
from ostler.model import AgentInstance, AgentSpawnOptions, AgentState, Attempt, SuspendDepth, Wait


def level_of(house: House, record: AgentInstance) -> Isolation | None:
    """Where it lived; None where that level is not installed any more."""
    try:
        return house.levels.get((record.spawn_options or AgentSpawnOptions()).isolation_level)
    except OstlerError:
        return None


async def look_for(house: House, record: AgentInstance, attempt: Attempt, level: Isolation) -> tuple[Life, Cell | Exit]:
    """The life that it would have here, and what was found: the agent itself, or how it ended."""
    life = await life_of(house, record, level)

    def maker() -> Any:  # it exists, so this is for its next start, if ever
        return house.registry.maker(record.definition_id)()

    life.plan = plan_of(house, life, maker)
    return life, await level.recover(attempt.identity, life.plan, Ear(house, life))


async def life_of(house: House, record: AgentInstance, level: Isolation) -> Life:
    """The life that it would have here."""
    try:
        manifest, stranger = await house.registry.get_manifest(record.definition_id), False
    except AgentNotFoundError:
        manifest, stranger = await _remembered(house, record), True
    life = make_life(house, record, manifest, level)
    life.stranger, life.adopted = stranger, asyncio.Event()
    return life


async def _remembered(house: House, record: AgentInstance) -> AgentManifest:
    """What the store knows of a definition that is not registered here: enough to find its agents, not to start any."""
    known = await house.store.get_definition(record.definition_id)
    return AgentManifest(
        id=record.definition_id,
        name=known.name if known else str(record.definition_id),
        kind=AgentKind(known.kind) if known else AgentKind.PYTHON,
        source=known.source if known else None,
        command=CommandSpec(argv=(known.name,)) if known and known.kind == AgentKind.COMMAND else None,
    )


async def adopt(house: House, life: Life, cell: Cell, pause: Wait | None, asks: Sequence[Wait]) -> None:
    """It lives on here as it is. The record is moved only where it says what is not so."""
    record = life.record
    life.cell = cell
    life.pulse = pulse_of(house, life)
    life.pulse.health, life.pulse.cpu_seconds = record.health, None
    if (last := record.metrics) is not None:
        life.tally = Tally(
            completed=last.completed_tasks,
            failed=last.failed_tasks,
            tokens=last.tokens_used + life.tally.tokens,
            last_metrics=last,
        )
    if pause is not None:
        life.suspension, life.depth = pause.wait_id, depth_of(pause)
    house.lives[life.instance_id] = life
    frozen = record.state is AgentState.SUSPENDED and life.depth is SuspendDepth.FREEZE
    if life.isolation.capabilities.freezes and not frozen:
        with contextlib.suppress(OstlerError):  # if it has ended just now, that will be told
            await cell.thaw()  # its manager may have died between the freezing and the word of it
    cell.when_found(partial(_found_late, house, life, cell))
    rejoin(house, life)
    expect(house, life, asks)
    if life.adopted is not None:
        life.adopted.set()
    await settle(house, life)
    house.log.emit("recovered", instance_id=life.instance_id, outcome="adopted")


def _found_late(house: House, life: Life, cell: Cell) -> None:
    """It was busy with something that never awaits, and tells only now what it works on."""
    house.run(_take_up(house, life, cell), "ostler-found-late")


async def _take_up(house: House, life: Life, cell: Cell) -> None:
    async with life.lock:  # not in the midst of a pause, or of its end
        if life.cell is not cell or life.left or not life.record.is_active:
            return
        rejoin(house, life)
    await settle(house, life)


def depth_of(pause: Wait) -> SuspendDepth:
    return SuspendDepth((pause.detail or {}).get("depth", SuspendDepth.PARK))
