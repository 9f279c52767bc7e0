"""One that was found again may be of a definition that this program has not registered yet. Later it may."""

from __future__ import annotations

from dataclasses import replace

from ostler.errors import AgentGoneError
from ostler.isolation.base import Cell, Exit, StartPlan
from ostler.lifecycle.ear import Ear
from ostler.lifecycle.house import House
from ostler.lifecycle.life import Life
from ostler.lifecycle.settle import settle
from ostler.lifecycle.working import rejoin


async def introduce(house: House, life: Life) -> None:
    """Take over what the definition says. `AgentNotFoundError` while it is still not registered."""
    if not life.stranger:
        return
    manifest = await house.registry.get_manifest(life.record.definition_id)
    async with life.lock:
        if not life.stranger:
            return
        if life.is_riddle and life.cell is not None and life.plan is not None:
            await _reach_again(house, life, life.cell, replace(life.plan, manifest=manifest))
        life.manifest, life.stranger = manifest, False
        rejoin(house, life)
    await settle(house, life)


async def _reach_again(house: House, life: Life, cell: Cell, plan: StartPlan) -> None:
    """What a run of a command means comes from its definition, so only now can it be listened to. Hold the lock."""
    found = await life.isolation.recover(cell.handle, plan, Ear(house, life))
    if isinstance(found, Exit):
        raise AgentGoneError(f"the agent has ended ({found.detail or found.outcome})")
    life.cell, life.plan = found, plan
    cell.let_go()
