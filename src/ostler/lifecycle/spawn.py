"""A spawn: admitted, reserved in one commit, started; or nothing is left of it but its record."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.agents.commandspec import CommandSpec
from ostler.agents.registry import AgentManifest, AgentRegistry
from ostler.aio import wait_ignoring_cancel
from ostler.definitions import register_file
from ostler.errors import AgentInitializationError, AgentNotFoundError, LicenseError
from ostler.lifecycle.admit import Admission, admit, new_record
from ostler.lifecycle.instance import ActorEndedError, Instance
from ostler.lifecycle.messages import Join
from ostler.lifecycle.operations import begin_start
from ostler.lifecycle.reach import Reach, require_kind
from ostler.lifecycle.start import call_off_reserved, why_not_ready
from ostler.model.access import Permission
from ostler.model.instance import AgentInstance
from ostler.model.spawn import AgentSpawnOptions, SpawnRequest
from ostler.model.states import AgentState
from ostler.store import instances, moves
from ostler.store.idempotency import IdempotencyKey

_DEFINITION_FILES = (".md", ".toml")


async def spawn(reach: Reach, request: SpawnRequest, idempotency_key: str | None) -> AgentInstance:
    runtime = reach.runtime
    began = runtime.clock.mono()
    runtime.metrics.count("lifecycle.spawn.count")
    try:
        record = await _spawn(reach, request, idempotency_key)
    except BaseException as error:
        runtime.metrics.count("lifecycle.spawn.failures")
        if isinstance(error, LicenseError):
            runtime.metrics.count("lifecycle.license.rejections")
            if error.maximum is not None:
                runtime.log.emit("spawn_rejected", current=error.current, max=error.maximum)
        raise
    runtime.metrics.observe("lifecycle.spawn.duration", runtime.clock.mono() - began)
    return record


async def _spawn(reach: Reach, request: SpawnRequest, idempotency_key: str | None) -> AgentInstance:
    runtime = reach.runtime
    require_kind("request", request, SpawnRequest)
    definition = request.agent_definition_id
    runtime.log.emit("spawn_requested", definition_id=definition, options=request.options)
    async with reach.audited("spawn", f"definition:{definition}"):
        workspace = await reach.enter(Permission.AGENTS_SPAWN)
        admission = await admit(runtime, workspace, request)
        key = None
        if idempotency_key is not None:
            require_kind("idempotency_key", idempotency_key, str)
            key = IdempotencyKey.of(idempotency_key, admission.request.to_json())
        await runtime.definitions.keep(admission.manifest)
        runtime.require_open()
        reserved, is_new = await _reserve(reach, admission, key)
    instance = runtime.instances.get(reserved.instance_id)
    if is_new:
        instance = Instance(runtime, reserved, admission.manifest, admission.level)
        instance.start(lambda new_instance: begin_start(new_instance, by=reach.actor))
    ready = await _join(reach, instance, reserved)
    if is_new:
        runtime.log.emit(
            "spawned",
            instance_id=ready.instance_id,
            definition_id=ready.definition_id,
            isolation=admission.options.isolation_level,
        )
    return ready


async def _reserve(reach: Reach, admission: Admission, key: IdempotencyKey | None) -> tuple[AgentInstance, bool]:
    """The record, and whether it is new. What the reservation of a caller that has gone made is failed, not started."""
    runtime = reach.runtime
    record = new_record(runtime, admission, reach.principal)
    runtime.fault("spawn.intent.before")
    reserving = runtime.store.submit(instances.reserve_instance, record, by=reach.actor, key=key)
    runtime.reserving[reserving] = None
    try:
        await asyncio.wait([reserving])
    except asyncio.CancelledError:
        await wait_ignoring_cancel(reserving)
        if not reserving.cancelled() and reserving.exception() is None:
            reserved, is_new = reserving.result()
            if is_new:
                Instance(runtime, reserved, admission.manifest, admission.level).start(call_off_reserved)
        raise
    finally:
        runtime.reserving.pop(reserving)
    reserved, is_new = reserving.result()
    runtime.fault("spawn.intent.after")
    return reserved, is_new


async def _join(reach: Reach, instance: Instance | None, reserved: AgentInstance) -> AgentInstance:
    """Wait for the start that is under way; the record says what became of an earlier one."""
    runtime = reach.runtime
    if instance is not None:
        try:
            ready: AgentInstance = await instance.ask(Join(by=reach.actor))
        except ActorEndedError:
            runtime.require_open()
        else:
            return ready
    record = await runtime.store.read(moves.get_instance, reserved.instance_id)
    if record is None:
        raise AgentNotFoundError
    if record.state is AgentState.INITIALIZING:
        raise AgentInitializationError("its manager let go of it while it was starting; look at why")
    error = await why_not_ready(runtime, record)
    if error is not None:
        raise error
    return record


# --- the short way in ---------------------------------------------------------------------------------


def request_of(
    registry: AgentRegistry,
    agent: Any,
    options: Mapping[str, Any],
    limits: Mapping[str, Any],
    context: Mapping[str, Any] | None,
) -> SpawnRequest:
    """Of `manager.start`; what is None in the options and limits was not given."""
    manifest = _registered(registry, agent)
    values = {name: value for name, value in options.items() if value is not None}
    if any(value is not None for value in limits.values()):
        values["resource_limits"] = {name: value for name, value in limits.items() if value is not None}
    definition = agent if manifest is None else manifest.id
    return SpawnRequest(agent_definition_id=definition, options=AgentSpawnOptions.from_dict(values), context=context)


def _registered(registry: AgentRegistry, agent: Any) -> AgentManifest | None:
    """Register what is given as an object or a file; a name or an id is looked up by the spawn itself."""
    if isinstance(agent, AgentManifest):
        return agent
    if isinstance(agent, str | Path) and str(agent).endswith(_DEFINITION_FILES):
        return register_file(registry, agent)
    if isinstance(agent, str):
        try:
            return registry.find(agent)
        except Exception:  # noqa: BLE001 - the spawn says what is wrong with it, and audits it
            return None
    if isinstance(agent, UUID):
        return None
    if isinstance(agent, list | tuple):
        agent = CommandSpec(argv=tuple(agent))
    if isinstance(agent, CommandSpec):
        return registry.register(agent, name=_command_name(agent), replace=True)
    if getattr(agent, "__name__", "") == "<lambda>":  # it has no name of its own
        name = f"{agent.__module__}.lambda-{agent.__code__.co_firstlineno}"
        return registry.register(agent, name=name, replace=True)
    return registry.register(agent, replace=True)


def _command_name(spec: CommandSpec) -> str:
    return Path(spec.argv[0]).name if spec.argv and spec.argv[0] else "command"
