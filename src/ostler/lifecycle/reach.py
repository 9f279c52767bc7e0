"""A principal before the instances: what it may do, which instance it means, and how a verb gets to its task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID

from ostler.durations import to_duration
from ostler.errors import (
    AgentNotFoundError,
    AuthorizationError,
    InvalidOperationError,
    NotFoundError,
    OstlerError,
    ValidationError,
    WorkspaceNotFoundError,
)
from ostler.lifecycle.calls import answer_from
from ostler.lifecycle.instance import ActorEndedError, Instance, Runtime
from ostler.lifecycle.messages import Process, Restart, Resume, Suspend, Terminate, Verb
from ostler.lifecycle.recover import revive
from ostler.model.access import Actor, Permission, Principal, Workspace
from ostler.model.attempt import RequestState
from ostler.model.instance import AgentInstance, TerminationResult
from ostler.model.states import AgentState
from ostler.model.text import MAX_NAME, MAX_REASON, plain_text_faults
from ostler.model.validation import fault, shown
from ostler.policy.access import decide_access
from ostler.store import audit, moves, queries, requests, workspaces
from ostler.store.transaction import AUDITED_ERRORS, Act

E = TypeVar("E", bound=StrEnum)
InstanceId = UUID | str
#: A verb that met a task in its last moment looks again; no more often than this.
_LOOKS = 5
_DOING = {Process: "asked", Suspend: "suspended", Resume: "resumed", Restart: "restarted"}


class Reach:
    """What one principal reaches of one runtime."""

    def __init__(self, runtime: Runtime, principal: Principal, correlation_id: str | None) -> None:
        self.runtime = runtime
        self.principal = principal
        actor = Actor(name=principal.name, principal_id=principal.principal_id, correlation_id=correlation_id)
        self.actor = actor.checked()

    async def enter(self, permission: Permission, workspace_id: UUID | None = None) -> Workspace:
        """Its own workspace, where it may do this in the workspace; without an await once that is known."""
        runtime, principal = self.runtime, self.principal
        own = runtime.workspaces.get(principal.workspace_id)
        if own is None:
            own = await runtime.store.read(workspaces.get_workspace, principal.workspace_id)
            if own is None:
                raise WorkspaceNotFoundError
            runtime.workspaces[own.workspace_id] = own
        _require_loop(runtime)
        runtime.require_open()
        decision = decide_access(principal, permission, workspace_id or principal.workspace_id, tier=own.tier)
        if not decision:
            raise AuthorizationError(decision.reason)
        return own

    async def find(self, instance_id: InstanceId, permission: Permission) -> AgentInstance:
        """The record. What the principal may not see is "not found", as what does not exist is."""
        own = await self.enter(permission)
        store = self.runtime.store
        text = str(instance_id) if isinstance(instance_id, UUID) else shown(instance_id)
        if isinstance(instance_id, UUID):
            record = await store.read(moves.get_instance, instance_id)
            records = [] if record is None else [record]
        elif not isinstance(instance_id, str):
            raise fault("instance_id", "must be the id or the name of an instance", instance_id)
        elif not instance_id.isprintable() or len(instance_id) > MAX_NAME:
            records = []
        else:
            records = await store.read(queries.find_instances, instance_id, self.principal.workspace_id)
        if len(records) > 1:
            ids = ", ".join(str(record.instance_id) for record in records[:5])
            raise NotFoundError(f"{text} names {len(records)} instances ({ids}); give more of the id")
        if not records or not decide_access(self.principal, permission, records[0].workspace_id, tier=own.tier):
            raise AgentNotFoundError(f"there is no instance {text}; list what exists, or check the id")
        return records[0]

    async def ask(self, instance_id: InstanceId, permission: Permission, action: str, verb: Callable[[], Verb]) -> Any:
        """Check, find the task of the instance, post, wait. A refusal stands in the audit."""
        async with self.audited(action, f"instance:{instance_id}"):
            await self.enter(permission)
            for look in range(_LOOKS):
                message = verb()
                try:
                    instance = self._live(instance_id) or await self._revived(
                        instance_id, permission, message, again=look > 0
                    )
                    return message.reply.result() if instance is None else await instance.ask(message)
                except ActorEndedError:
                    # Its task ended in this moment; its record says what is so now.
                    self.runtime.require_open()
            raise InvalidOperationError(f"{instance_id} changes faster than it can be asked; try again")

    def _live(self, instance_id: InstanceId) -> Instance | None:
        """Without an await, so that the verbs of one caller keep their order."""
        instance = self.runtime.instances.get(instance_id) if isinstance(instance_id, UUID) else None
        if instance is None or instance.is_over or instance.record.workspace_id != self.principal.workspace_id:
            return None
        return instance

    async def _revived(
        self, instance_id: InstanceId, permission: Permission, message: Verb, *, again: bool
    ) -> Instance | None:
        """The task of the instance, made where it has none; None where the record alone has answered the message.

        `again`: it had a task that ended in this moment.
        """
        runtime = self.runtime
        record = await self.find(instance_id, permission)
        instance = runtime.instances.get(record.instance_id)
        if instance is not None and not instance.is_over:
            return instance
        if isinstance(message, Process) and message.request_id is not None:
            row = await runtime.store.read(requests.get_request, record.instance_id, message.request_id)
            if row is not None and row.state is RequestState.DONE:
                answer_from(row, message)
                return None
        if again and record.state is AgentState.TERMINATED and isinstance(message, Terminate):
            message.answer(TerminationResult.successful(record, True, timedelta(0)))  # another caller was faster
            return None
        needs_life = isinstance(message, Process | Suspend | Resume)
        if record.state is AgentState.TERMINATED or (needs_life and not record.is_active):
            doing = _DOING.get(type(message), "terminated")
            advice = "spawn another" if record.state is AgentState.TERMINATED else "restart it, or look at why"
            name = record.name or record.instance_id
            raise InvalidOperationError(
                f"{name} is {record.state} and cannot be {doing}; {advice}", current=record.state
            )
        if record.instance_id in runtime.unrecovered:
            raise InvalidOperationError(runtime.unrecovered[record.instance_id], current=record.state)
        return await revive(runtime, record)

    @asynccontextmanager
    async def audited(self, action: str, subject: str) -> AsyncIterator[None]:
        """Around a verb: what it refuses goes into the audit, once."""
        try:
            yield
        except AUDITED_ERRORS as error:
            if not error.audited and self.runtime.closing is None:
                await self._audit(action, subject, error)
            raise

    async def _audit(self, action: str, subject: str, error: OstlerError) -> None:
        error.audited = True
        plain = subject[:200] if subject.isprintable() else ascii(subject)[1:-1][:200]
        act = Act(self.principal.workspace_id, self.actor, action, plain, type(error).__name__, str(error))
        try:
            await self.runtime.store.run(audit.record_act, act)
        except OstlerError as failure:
            self.runtime.log.emit("audit_failed", error=str(failure))


def _require_loop(runtime: Runtime) -> None:
    if asyncio.get_running_loop() is not runtime.loop:
        raise InvalidOperationError(
            "this manager belongs to the event loop that opened it; hand the call over to that loop with "
            "asyncio.run_coroutine_threadsafe, or open a manager of a home of its own here"
        )


# --- arguments of verbs ------------------------------------------------------------------------------


def require_kind(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise fault(field, f"must be of type {kind.__name__}", value)


def require_reason(value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise fault("reason", "must be text", value)
    if faults := list(plain_text_faults("reason", value, MAX_REASON)):
        raise ValidationError(faults)


def member_of(kind: type[E], field: str, value: Any) -> E:
    try:
        return kind(value)
    except ValueError:
        raise fault(field, f"must be one of {', '.join(kind)}", value) from None


def positive_duration(field: str, value: timedelta | float | str | None) -> timedelta | None:
    """As people write it."""
    if value is None:
        return None
    try:
        duration = to_duration(value)
    except (ValueError, OverflowError):
        duration = timedelta(0)
    if duration <= timedelta(0):
        raise fault(field, "must be a duration above zero, such as 30s", value)
    return duration
