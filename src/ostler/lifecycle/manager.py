"""`AgentLifecycleManager`: the verbs, and the short way in."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.clock import Clock
from ostler.errors import InvalidOperationError
from ostler.failpoints import Seams
from ostler.lifecycle.admit import SPAWN_FLAG
from ostler.lifecycle.handle import AgentHandle, Start
from ostler.lifecycle.logs import last_line, remove_logs, render_of
from ostler.lifecycle.operations import WORKDIRS
from ostler.lifecycle.verbs import InstanceId, Verbs, require_kind
from ostler.lifecycle.why import doing
from ostler.model.access import Actor, Permission, Principal, Workspace
from ostler.model.attempt import Attempt
from ostler.model.events import Event
from ostler.model.instance import AgentInstance
from ostler.model.states import Tier
from ostler.model.validation import fault
from ostler.store import attempts, retention, workspaces
from ostler.store import events as log
from ostler.store.transaction import PAGE

#: Fields of a workspace that an administrator changes.
_CHANGEABLE = frozenset({"name", "tier", "disabled_features", "max_tokens_per_minute"})


class AgentLifecycleManager(Verbs):
    """Made by `ostler.open`."""

    def acting_as(self, principal: Principal, *, correlation_id: str | None = None) -> AgentLifecycleManager:
        """The same manager on behalf of another principal."""
        require_kind("principal", principal, Principal)
        return AgentLifecycleManager(self._runtime, principal.checked(), correlation_id)

    def start(  # noqa: PLR0913 - the short way in: every option is a word of its own
        self,
        agent: Any,
        *,
        name: str | None = None,
        isolation: str | None = None,
        memory: str | int | None = None,
        cpu: float | None = None,
        timeout: str | float | timedelta | None = None,
        tasks: int | None = None,
        restart: Any = None,
        health: Any = None,
        tags: tuple[str, ...] = (),
        context: Mapping[str, Any] | None = None,
        key: str | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
    ) -> Start:
        """Spawn in one line: `await` it for a handle, or use `async with`, which stops the agent at the end.

        `agent` is a class, a function `f(request, context)`, a `CommandSpec` or a list of words, the name of a
        definition, or the path of a definition file. `cpu` counts cores, `timeout` bounds one request.
        """
        options = {
            "name": name,
            "isolation_level": isolation,
            "restart_policy": restart,
            "health_check": health,
            "tags": tuple(tags) or None,
            "env": env,
            "workdir": workdir,
        }
        limits = {
            "max_memory_mb": memory,
            "max_cpu_percent": None if cpu is None else round(100 * cpu),
            "execution_timeout": timeout,
            "max_concurrent_tasks": tasks,
        }
        return Start(self, agent, options=options, limits=limits, context=context, key=key)

    def handle(self, instance_id: InstanceId) -> AgentHandle:
        return AgentHandle(self, instance_id)

    # --- for lists and for the daemon ------------------------------------------------------------

    def now(self) -> datetime:
        return self._runtime.clock.wall()

    @property
    def clock(self) -> Clock:
        return self._runtime.clock

    def new_id(self) -> UUID:
        return self._runtime.ids.new()

    @property
    def seams(self) -> Seams:
        """Its clock, chance, ids and fault points, for what works beside it."""
        runtime = self._runtime
        return Seams(clock=runtime.clock, chance=runtime.chance, ids=runtime.ids, fault=runtime.fault)

    @property
    def actor(self) -> Actor:
        """The principal, as the audit names it."""
        return self._by

    async def require(self, permission: Permission) -> None:
        """Raises `AuthorizationError` where the principal may not."""
        await self._enter(permission)

    def require_home(self) -> Path:
        """The directory of this manager; a store without one keeps no files."""
        if self._runtime.home is None:
            raise InvalidOperationError("this needs a home directory; open one with ostler.open(DIRECTORY)")
        return self._runtime.home

    async def get_workspace(self) -> Workspace:
        """The principal's own."""
        return await self._enter(Permission.AGENTS_READ)

    async def change_workspace(self, changes: Mapping[str, Any]) -> Workspace:
        """Its name, plan (`tier`), feature flags and token share. A smaller plan ends nothing that is active."""
        own = await self._enter(Permission.WORKSPACE_ADMIN)
        for name in changes.keys() - _CHANGEABLE:
            raise fault(name, f"cannot be changed; name one of {', '.join(sorted(_CHANGEABLE))}")
        workspace = Workspace.from_dict({**own.to_dict(), **changes}).checked()
        for flag in workspace.disabled_features:
            if flag != SPAWN_FLAG:
                raise fault("disabled_features", f"must be of {SPAWN_FLAG}, the one feature that can be off", flag)
        self._runtime.workspaces[own.workspace_id] = await self._runtime.store.run(
            workspaces.put_workspace, workspace, by=self._by
        )
        return workspace

    def tier_of(self, workspace_id: UUID) -> Tier:
        found = self._runtime.workspaces.get(workspace_id)
        return Tier.CORE if found is None else found.tier

    def unrecovered(self) -> dict[str, str]:
        """What recovery could not do, by instance."""
        return {str(instance_id): why for instance_id, why in self._runtime.unrecovered.items()}

    def live_units(self) -> dict[str, tuple[UUID, int]]:
        """Instance and attempt of each live agent, by the names under which the keeper runs its processes."""
        units: dict[str, tuple[UUID, int]] = {}
        for instance in self._runtime.instances.values():
            box, attempt = f"{instance.instance_id.hex}.{instance.attempt}", (instance.instance_id, instance.attempt)
            units |= {box: attempt, **{f"{box}.{call_id.hex}": attempt for call_id in instance.calls}}
        return units

    async def require_instance(self, instance_id: InstanceId) -> AgentInstance:
        """Raises `AgentNotFoundError` where there is none."""
        await self._enter(Permission.AGENTS_READ)
        return await self._reach(instance_id, Permission.AGENTS_READ)

    async def get_attempts(self, instance_id: UUID) -> list[Attempt]:
        await self.require_instance(instance_id)
        return await self._runtime.store.read(attempts.list_attempts, instance_id)

    async def list_events(
        self, instance_id: InstanceId | None = None, *, after: int | None = None, limit: int = 100
    ) -> list[Event]:
        """The newest events, oldest first; with `after` those that follow that number."""
        await self._enter(Permission.AGENTS_READ)
        found = None if instance_id is None else (await self.require_instance(instance_id)).instance_id
        space, count = self._principal.workspace_id, max(1, min(limit, PAGE))
        store = self._runtime.store
        if after is None:
            return await store.read(log.last_events, count, workspace_id=space, instance_id=found)
        page = await store.read(log.read_events, after, workspace_id=space, instance_id=found, limit=count)
        return list(page.events)

    async def details(self, instance: AgentInstance) -> dict[str, Any]:
        """What a list shows beside the record: the name of the definition, what it does now, what it uses now."""
        runtime = self._runtime
        live = runtime.instances.get(instance.instance_id)
        shown: dict[str, Any] = {
            "definition": await runtime.definitions.name(instance.definition_id),
            "doing": None,
            "metrics_now": None,
            "exit_code": None,
        }
        if live is not None:
            metrics = live.metrics_now()
            # A coding agent tells what it does; its last line is not for people.
            silent = live.waits or runtime.home is None or render_of(live.manifest) is not None
            said = None if silent or runtime.home is None else last_line(runtime.home, instance)
            shown["doing"] = doing(live, said)
            shown["metrics_now"] = None if metrics is None else metrics.to_dict()
        elif not instance.is_active:
            last = await runtime.store.read(attempts.get_attempt, instance.instance_id, instance.attempt)
            if last is not None:
                shown["exit_code"] = last.exit_code if last.exit_signal is None else 128 + last.exit_signal
        return shown

    async def remove(self, instance_id: InstanceId) -> dict[str, Any]:
        """Remove the record and the output of an instance that has ended. Events and audit stay."""
        await self._enter(Permission.AGENTS_TERMINATE)
        record = await self._reach(instance_id, Permission.AGENTS_TERMINATE)
        if record.is_active:
            raise InvalidOperationError(
                f"{record.name} is {record.state} and cannot be removed; stop it first", current=record.state
            )
        home = self._runtime.home
        workdir = None if home is None else home / WORKDIRS / str(record.instance_id)
        if workdir is not None and workdir.is_dir() and any(workdir.iterdir()):
            raise InvalidOperationError(f"the workdir of {record.name} holds files ({workdir}); move them away first")
        await self._runtime.store.run(retention.remove_instance, record, by=self._by)
        freed = 0 if home is None else remove_logs(home, record.instance_id)
        return {"instance_id": str(record.instance_id), "name": record.name, "freed_bytes": freed}
