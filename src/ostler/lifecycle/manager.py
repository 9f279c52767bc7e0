"""`AgentLifecycleManager`: the verbs, and the short way in."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ostler.lifecycle.handle import AgentHandle, Start
from ostler.lifecycle.verbs import InstanceId, Verbs, require_kind
from ostler.model.people import Principal


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
