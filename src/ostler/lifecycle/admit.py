"""What must hold before a spawn reserves anything: every fault at once, each with what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ostler.agents.registry import AgentKind, AgentManifest
from ostler.drivers import options_of
from ostler.errors import AuthorizationError, LicenseError, ValidationError
from ostler.isolation.base import Capabilities, Isolation
from ostler.lifecycle.instance import Runtime
from ostler.lifecycle.operations import LIMITS
from ostler.model.access import Principal, Workspace
from ostler.model.instance import AgentInstance
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits, SpawnRequest
from ostler.model.states import AgentState, Enforcement, IsolationLevel
from ostler.model.text import fold_tags
from ostler.model.validation import Fault, shown
from ostler.policy.quota import gate_refusals

#: The feature flag of a workspace that spawns need.
SPAWN_FLAG = "agents.lifecycle.spawn"
_MIB = 1024 * 1024
_UNLIMITED = {"max_cpu_percent": 0, "max_tokens_per_minute": 0}
_STRENGTH = (Enforcement.ADVISORY, Enforcement.APPROXIMATED, Enforcement.ENFORCED)
_SHORT_ID = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What a spawn is made with."""

    manifest: AgentManifest
    request: SpawnRequest
    options: AgentSpawnOptions
    level: Isolation


async def admit(runtime: Runtime, workspace: Workspace, request: SpawnRequest) -> Admission:
    """Find the definition, lay the options over its own, check the plan, the level and the machine."""
    if SPAWN_FLAG in workspace.disabled_features:
        raise AuthorizationError(
            f"spawning is switched off in the workspace {workspace.name} (flag {SPAWN_FLAG}); "
            "ask an administrator to switch it on"
        )
    checked = request.checked()
    manifest = await runtime.definitions.find(checked.agent_definition_id, checked.project)
    defaults = options_of(manifest)
    given_options = checked.options
    options = defaults if given_options is None else given_options.over(defaults)
    refusals = gate_refusals(workspace.tier, options)
    if refusals:
        raise LicenseError("; ".join(refusal.sentence for refusal in refusals), tier=workspace.tier)
    level = runtime.levels.get(options.isolation_level)
    faults = list(_faults(options, manifest, level.capabilities))
    if faults:
        raise ValidationError(faults)
    return Admission(manifest=manifest, request=checked, options=options, level=level)


def _faults(options: AgentSpawnOptions, manifest: AgentManifest, can: Capabilities) -> Iterator[Fault]:
    level = options.isolation_level
    if level.rank < manifest.min_isolation.rank:
        bound = f"must be at least {manifest.min_isolation}, which the definition {manifest.name} asks for"
        yield Fault(field="options.isolation_level", bound=bound, value=level)
    if manifest.kind not in can.kinds:
        bound = f"cannot run a {manifest.kind} agent; use {IsolationLevel.PROCESS} or a stronger level"
        yield Fault(field="options.isolation_level", bound=bound, value=level)
    for name in ("terminal", "stdin"):
        if getattr(options, name) and not (manifest.kind is AgentKind.COMMAND and can.has_terminals):
            bound = f"is for commands at level {IsolationLevel.PROCESS}, not for a {manifest.kind} agent at {level}"
            yield Fault(field=f"options.{name}", bound=bound)
    limits = options.resource_limits or ResourceLimits()
    yield from _machine_faults(limits)
    for name in LIMITS:
        held = can.holds(name)
        unlimited = name in _UNLIMITED and getattr(limits, name) == _UNLIMITED[name]
        if not unlimited and _STRENGTH.index(held) < _STRENGTH.index(options.min_enforcement):
            yield Fault(
                field=f"options.resource_limits.{name}",
                bound=f"would be {held} at level {level}, and {options.min_enforcement} is demanded; "
                "choose a higher level, or accept less with min_enforcement",
            )


def _machine_faults(limits: ResourceLimits) -> Iterator[Fault]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB
    cores = os.cpu_count() or 1
    for name, value, most, what in (
        ("max_memory_mb", limits.max_memory_mb, max(memory, 512), "the memory of this machine"),
        ("max_cpu_percent", limits.max_cpu_percent, 100 * cores, f"its {cores} cores"),
    ):
        if value > most:
            bound = f"must be at most {most}, {what}"
            yield Fault(field=f"options.resource_limits.{name}", bound=bound, value=shown(value))


def new_record(runtime: Runtime, admission: Admission, principal: Principal) -> AgentInstance:
    """The record as it is reserved."""
    options, request = admission.options, admission.request
    instance_id = runtime.ids.new()
    now = runtime.clock.wall()
    return AgentInstance(
        instance_id=instance_id,
        definition_id=admission.manifest.id,
        state=AgentState.INITIALIZING,
        created_at=now,
        updated_at=now,
        spawn_options=options,
        tags=fold_tags(options.tags),
        name=options.name or f"{admission.manifest.name[:190]}-{instance_id.hex[-_SHORT_ID:]}",
        owner_id=principal.principal_id,
        workspace_id=principal.workspace_id,
        project=request.project,
        task_id=request.task_id,
        crew=request.crew,
        agent_id=request.agent_id,
        generation=request.generation,
        context=request.context,
        job=request.job,
    )
