"""What must hold before a spawn reserves anything: all faults at once, each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ostler.agents import AgentManifest
from ostler.errors import LicenseError, ValidationError
from ostler.isolation.base import Capabilities, Isolation
from ostler.lifecycle.doors import Asker, enter, note_refusal
from ostler.lifecycle.house import House
from ostler.lifecycle.introduce import introduce
from ostler.lifecycle.life import Life
from ostler.lifecycle.slots import Slots
from ostler.lifecycle.start import LIMITS
from ostler.model import (
    AgentInstance,
    AgentSpawnOptions,
    Enforcement,
    Fault,
    Permission,
    ResourceLimits,
    SpawnRequest,
    SuspendDepth,
    WaitKind,
    Workspace,
)
from ostler.policy import gate_refusals

_UNLIMITED = {"max_cpu_percent": 0, "max_tokens_per_minute": 0}
_STRENGTH = (Enforcement.ADVISORY, Enforcement.APPROXIMATED, Enforcement.ENFORCED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What a spawn will be made with."""

    workspace: Workspace
    manifest: AgentManifest
    request: SpawnRequest
    isolation: Isolation


async def admit(house: House, asker: Asker, request: SpawnRequest) -> Admission:
    """Authorise, find the definition, validate, look whether plan and level can give what is asked."""
    workspace = await enter(house, asker, Permission.AGENTS_SPAWN, f"definition:{request.agent_definition_id}")
    request.validate().require()
    manifest = await house.registry.get_manifest(request.agent_definition_id)
    options = chosen_options(request.options, manifest)
    refusals = gate_refusals(workspace.tier, options)
    if refusals:
        error = LicenseError("; ".join(one.sentence for one in refusals), tier=workspace.tier)
        await note_refusal(house, asker, "spawn", f"definition:{manifest.id}", error)
        raise error
    isolation = house.levels.get(options.isolation_level)
    faults = list(_faults(options, manifest, isolation.capabilities))
    if faults:
        raise ValidationError(faults)
    wanted = request.evolve(options=options)
    return Admission(workspace=workspace, manifest=manifest, request=wanted, isolation=isolation)


def chosen_options(asked: AgentSpawnOptions | None, manifest: AgentManifest) -> AgentSpawnOptions:
    """What was asked for; what was left open, as the definition has it."""
    defaults = manifest.defaults
    if asked is None:
        return defaults or AgentSpawnOptions()
    if defaults is None:
        return asked
    return asked.evolve(
        resource_limits=asked.resource_limits or defaults.resource_limits,
        restart_policy=asked.restart_policy or defaults.restart_policy,
        health_check=asked.health_check or defaults.health_check,
    )


def _faults(options: AgentSpawnOptions, manifest: AgentManifest, can: Capabilities) -> Iterator[Fault]:
    level = options.isolation_level
    if level.rank < manifest.min_isolation.rank:
        yield Fault(
            field="options.isolation_level",
            bound=f"must be at least {manifest.min_isolation}, which the definition {manifest.name} asks for",
            value=level,
        )
    if manifest.kind not in can.kinds:
        yield Fault(field="options.isolation_level", bound=f"cannot run a {manifest.kind} agent", value=level)
    limits = options.resource_limits or ResourceLimits()
    for name in LIMITS:
        held = can.holds(name)
        unlimited = name in _UNLIMITED and getattr(limits, name) == _UNLIMITED[name]
        if not unlimited and _STRENGTH.index(held) < _STRENGTH.index(options.min_enforcement):
            yield Fault(
                field=f"options.resource_limits.{name}",
                bound=f"would be {held} at the {level} level, and {options.min_enforcement} is demanded; "
                "choose a higher level, or accept less with min_enforcement",
            )


def make_life(house: House, record: AgentInstance, manifest: AgentManifest, isolation: Isolation) -> Life:
    options = record.spawn_options or AgentSpawnOptions()
    limits = options.resource_limits or ResourceLimits()
    slots = Slots(limits.max_concurrent_tasks, limits.max_concurrent_tasks * house.settings.queue_per_slot)
    return Life(record=record, manifest=manifest, options=options, limits=limits, slots=slots, isolation=isolation)


async def revive(house: House, record: AgentInstance) -> Life:
    """The life of a record that has none in this manager: found by recovery, or failed and let go."""
    known = house.lives.get(record.instance_id)
    if known is not None:
        if known.cell is None:  # to bring it back takes its definition
            await introduce(house, known)
        return known
    manifest = await house.registry.get_manifest(record.definition_id)
    options = record.spawn_options or AgentSpawnOptions()
    life = make_life(house, record, manifest, house.levels.get(options.isolation_level))
    for wait in await house.store.open_waits(instance_id=record.instance_id):
        if wait.kind is WaitKind.RESUME:
            life.suspension = wait.wait_id
            life.depth = SuspendDepth((wait.detail or {}).get("depth", SuspendDepth.PARK))
        elif wait.kind is WaitKind.BACKOFF:
            life.backoff = wait.wait_id
    return house.lives.setdefault(record.instance_id, life)
