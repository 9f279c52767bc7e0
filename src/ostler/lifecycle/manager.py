"""`AgentLifecycleManager`: every verb of one life, on behalf of somebody. Thin: each verb has a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.agents import AgentRegistry
from ostler.errors import AgentNotFoundError
from ostler.lifecycle.doors import Asker, asker_for, enter, reach, refusals, require_kind, subject
from ostler.lifecycle.fanout import Fanout
from ostler.lifecycle.house import House
from ostler.lifecycle.observe import Observation
from ostler.lifecycle.process import process
from ostler.lifecycle.restart import restart
from ostler.lifecycle.resume import resume
from ostler.lifecycle.spawn import spawn
from ostler.lifecycle.suspend import suspend
from ostler.lifecycle.terminate import terminate
from ostler.lifecycle.waits import answer_wait
from ostler.lifecycle.why import why
from ostler.model import (
    AgentInstance,
    GetInstancesFilter,
    LifecycleStatistics,
    ObservationOptions,
    Permission,
    Principal,
    SpawnRequest,
    SuspendDepth,
    TerminationOptions,
    TerminationResult,
    Wait,
    Why,
)
from ostler.store import Store


class AgentLifecycleManager:
    """Made by `ostler.open`. Every method belongs to the event loop that opened it."""

    def __init__(self, house: House, fanout: Fanout, asker: Asker | None = None) -> None:
        self._house = house
        self._fanout = fanout
        self._asker = asker or Asker()

    @property
    def registry(self) -> AgentRegistry:
        """The definitions that can be spawned."""
        return self._house.registry

    @property
    def store(self) -> Store:
        """The record behind it, for reading."""
        return self._house.store

    @property
    def principal(self) -> Principal:
        """On whose behalf this one acts."""
        return self._asker.principal

    def require_open(self) -> None:
        """Raise when it is closed, or has found that somebody else owns the store now."""
        self._house.require_open()

    def acting_as(self, principal: Principal, *, correlation_id: str | None = None) -> AgentLifecycleManager:
        """The same manager on behalf of somebody else: their permissions, their workspace, their name in the audit."""
        return AgentLifecycleManager(self._house, self._fanout, asker_for(principal, correlation_id))

    # --- a life ---------------------------------------------------------------------------------

    async def spawn(self, request: SpawnRequest, *, idempotency_key: str | None = None) -> AgentInstance:
        """Start a new instance and answer when it is ready. The same key asks for the same instance again."""
        about = subject("definition", getattr(request, "agent_definition_id", None))
        async with refusals(self._house, self._asker, "spawn", about):
            return await spawn(self._house, self._asker, request, idempotency_key=idempotency_key)

    async def process(
        self, instance_id: UUID, request: Any, *, wait: bool = True, request_id: UUID | None = None
    ) -> Any:
        """Give the agent a request and answer its result. `wait=False`: refuse rather than queue.

        A request with an id of its own is done once. Asked for again under that id, `request` is not looked at: the
        caller joins the work that is under way, or gets what came of it, result or error; the last 100 answers of
        each instance are kept for that. So it is also after this program has died in mid-work, where the agent
        outlives it: open a manager, and ask again. One that was called off by all who asked for it is forgotten.
        """
        async with refusals(self._house, self._asker, "process", subject("instance", instance_id)):
            return await process(self._house, self._asker, instance_id, request, wait=wait, request_id=request_id)

    async def suspend(
        self, instance_id: UUID, depth: SuspendDepth | None = None, *, resume_after: timedelta | None = None
    ) -> AgentInstance:
        """Pause it. Without a depth: hold, and only when it is ready or waiting."""
        async with refusals(self._house, self._asker, "suspend", subject("instance", instance_id)):
            return await suspend(self._house, self._asker, instance_id, depth, resume_after)

    async def resume(self, instance_id: UUID) -> AgentInstance:
        """End its pause: it goes on, or starts fresh where it was parked."""
        async with refusals(self._house, self._asker, "resume", subject("instance", instance_id)):
            return await resume(self._house, self._asker, instance_id)

    async def restart(self, instance_id: UUID, *, reason: str | None = None) -> AgentInstance:
        """Stop it in order and start it again, or bring a failed one back now."""
        async with refusals(self._house, self._asker, "restart", subject("instance", instance_id)):
            return await restart(self._house, self._asker, instance_id, reason)

    async def terminate(self, instance_id: UUID, options: TerminationOptions | None = None) -> TerminationResult:
        """End it: asked first, then forced."""
        async with refusals(self._house, self._asker, "terminate", subject("instance", instance_id)):
            return await terminate(self._house, self._asker, instance_id, options)

    async def answer(self, wait_id: UUID, outcome: str = "done", answer: Mapping[str, Any] | None = None) -> Wait:
        """End what an agent waits for."""
        async with refusals(self._house, self._asker, "answer", subject("wait", wait_id)):
            return await answer_wait(self._house, self._asker, wait_id, outcome, answer)

    # --- looking --------------------------------------------------------------------------------

    async def get_instance(self, instance_id: UUID) -> AgentInstance | None:
        """The record, in whatever state; None where there is none that you may see."""
        try:
            return await reach(self._house, self._asker, instance_id, Permission.AGENTS_READ)
        except AgentNotFoundError:
            return None

    async def get_active_instances(self, wanted: GetInstancesFilter | None = None) -> list[AgentInstance]:
        """Those of your workspace that match, newest first; finished ones when the filter asks for them."""
        if wanted is not None:
            require_kind("wanted", wanted, GetInstancesFilter)
        await enter(self._house, self._asker, Permission.AGENTS_READ, "instances")
        return await self._house.store.list_instances(wanted, self._asker.workspace_id)

    async def get_waits(self, instance_id: UUID) -> list[Wait]:
        """Why it does not run, or what it waits for."""
        await reach(self._house, self._asker, instance_id, Permission.AGENTS_READ)
        return await self._house.store.open_waits(instance_id=instance_id)

    def observe(
        self,
        instance_id: UUID | None = None,
        options: ObservationOptions | None = None,
        *,
        after: int | None = None,
    ) -> Observation:
        """Events as they happen, or from a cursor on. Without an instance: all of your workspace."""
        return Observation(self._house, self._fanout, self._asker, instance_id, options, after)

    async def why(self, instance_id: UUID) -> Why:
        """Why it is as it is: a verdict, the evidence, and what would change it."""
        return await why(self._house, self._asker, instance_id)

    async def get_statistics(self) -> LifecycleStatistics:
        await enter(self._house, self._asker, Permission.AGENTS_READ, "statistics")
        return await self._house.store.statistics(self._asker.workspace_id)

    def metrics(self) -> str:
        """All counters and gauges, as Prometheus reads them."""
        return self._house.metrics.expose()
