"""The verbs of the manager, on behalf of a principal: each checks, finds the task of the instance, and posts to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID

from ostler.agents.registry import AgentRegistry
from ostler.aio import wait_ignoring_cancel
from ostler.durations import to_duration
from ostler.errors import (
    AgentGoneError,
    AgentInitializationError,
    AgentNotFoundError,
    AuthorizationError,
    InvalidOperationError,
    LicenseError,
    NotFoundError,
    OstlerError,
    ValidationError,
    WorkspaceNotFoundError,
)
from ostler.lifecycle.admit import Admission, admit, new_record
from ostler.lifecycle.calls import answer_from, request_digest
from ostler.lifecycle.instance import ActorEndedError, Instance, Runtime
from ostler.lifecycle.logs import LogLine, LogWindow, read_log, render_of
from ostler.lifecycle.messages import Answer, Join, Process, Restart, Resume, Suspend, Terminate
from ostler.lifecycle.observe import Observation
from ostler.lifecycle.operations import begin_start
from ostler.lifecycle.recover import revive
from ostler.lifecycle.start import call_off_reserved, why_not_ready
from ostler.lifecycle.waits import OWN_KINDS, TIMED_OUT
from ostler.lifecycle.why import why
from ostler.model.access import OWNER, Actor, Permission, Principal, Workspace
from ostler.model.attempt import Request, RequestState
from ostler.model.instance import AgentInstance, TerminationResult, Why
from ostler.model.query import GetInstancesFilter, LifecycleStatistics, ObservationOptions
from ostler.model.record import Record
from ostler.model.spawn import SpawnRequest, TerminationOptions
from ostler.model.states import AgentState, SuspendDepth
from ostler.model.task import TaskState
from ostler.model.text import MAX_NAME, MAX_REASON, plain_text_faults
from ostler.model.validation import fault, shown
from ostler.model.wait import Wait
from ostler.policy.access import decide_access
from ostler.store import audit, instances, moves, queries, requests, tasks, waits, workspaces
from ostler.store.idempotency import IdempotencyKey
from ostler.store.store import Store
from ostler.store.transaction import AUDITED_ERRORS, Act

R = TypeVar("R", bound=Record)
T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
InstanceId = UUID | str
#: A verb that met a task in its last moment looks again; no more often than this.
_LOOKS = 5
_MAX_REQUEST_ID = 200


class Verbs:
    """Every method belongs to the event loop that opened the manager.

    An instance is named by its id, by the beginning or the end of it, or by its name.
    """

    def __init__(self, runtime: Runtime, principal: Principal = OWNER, correlation_id: str | None = None) -> None:
        self._runtime = runtime
        self._principal = principal
        #: True: closing leaves agents that can go on without a manager as they are.
        self.keep_agents = False
        actor = Actor(name=principal.name, principal_id=principal.principal_id, correlation_id=correlation_id)
        self._by = actor.checked()

    @property
    def registry(self) -> AgentRegistry:
        """The definitions that can be spawned by name."""
        return self._runtime.definitions.registry

    @property
    def store(self) -> Store:
        """The record behind the manager, for reading."""
        return self._runtime.store

    @property
    def principal(self) -> Principal:
        return self._principal

    # --- spawn -----------------------------------------------------------------------------------

    async def spawn(self, request: SpawnRequest, *, idempotency_key: str | None = None) -> AgentInstance:
        """A ready instance; or an error, and nothing is left of it but its record."""
        runtime = self._runtime
        began = runtime.clock.mono()
        runtime.metrics.count("lifecycle.spawn.count")
        try:
            record = await self._spawn(request, idempotency_key)
        except BaseException as error:
            runtime.metrics.count("lifecycle.spawn.failures")
            if isinstance(error, LicenseError):
                runtime.metrics.count("lifecycle.license.rejections")
                if error.maximum is not None:
                    runtime.log.emit("spawn_rejected", current=error.current, max=error.maximum)
            raise
        runtime.metrics.observe("lifecycle.spawn.duration", runtime.clock.mono() - began)
        return record

    async def _spawn(self, request: SpawnRequest, idempotency_key: str | None) -> AgentInstance:
        runtime = self._runtime
        require_kind("request", request, SpawnRequest)
        definition = request.agent_definition_id
        runtime.log.emit("spawn_requested", definition_id=definition, options=request.options)
        async with _Refusals(self, "spawn", f"definition:{definition}"):
            workspace = await self._enter(Permission.AGENTS_SPAWN)
            admission = await admit(runtime, workspace, request)
            key = None
            if idempotency_key is not None:
                require_kind("idempotency_key", idempotency_key, str)
                key = IdempotencyKey.of(idempotency_key, admission.request.to_json())
            await runtime.definitions.keep(admission.manifest)
            runtime.require_open()
            record = new_record(runtime, admission, self._principal)
            runtime.fault("spawn.intent.before")
            reserving = runtime.store.submit(instances.reserve_instance, record, by=self._by, key=key)
            runtime.reserving[reserving] = None
            try:
                await asyncio.wait([reserving])
            except asyncio.CancelledError:
                await wait_ignoring_cancel(reserving)
                self._give_back(admission, reserving)
                raise
            finally:
                runtime.reserving.pop(reserving)
            reserved, is_new = reserving.result()
            runtime.fault("spawn.intent.after")
        return await self._bring_up(admission, reserved, is_new=is_new)

    async def _bring_up(self, admission: Admission, reserved: AgentInstance, *, is_new: bool) -> AgentInstance:
        runtime = self._runtime
        if not is_new:
            return await self._join(runtime.instances.get(reserved.instance_id), reserved.instance_id)
        instance = Instance(runtime, reserved, admission.manifest, admission.level)
        instance.start(lambda one: begin_start(one, by=self._by))
        ready = await self._join(instance, reserved.instance_id)
        runtime.log.emit(
            "spawned",
            instance_id=ready.instance_id,
            definition_id=ready.definition_id,
            isolation=admission.options.isolation_level,
        )
        return ready

    async def _join(self, instance: Instance | None, instance_id: UUID) -> AgentInstance:
        """Wait for the start that is under way; the record says what became of an earlier one."""
        if instance is not None:
            try:
                joined: AgentInstance = await instance.ask(Join(by=self._by))
            except ActorEndedError:
                self._runtime.require_open()
            else:
                return joined
        record = await self._load(instance_id)
        if record.state is AgentState.INITIALIZING:
            raise AgentInitializationError("its manager let go of it while it was starting; look at why")
        error = await why_not_ready(self._runtime, record)
        if error is not None:
            raise error
        return record

    def _give_back(self, admission: Admission, reserving: asyncio.Future[tuple[AgentInstance, bool]]) -> None:
        """The caller has gone in the middle of the reservation: what it made is failed, and never started."""
        if reserving.cancelled() or reserving.exception() is not None or not reserving.result()[1]:
            return
        instance = Instance(self._runtime, reserving.result()[0], admission.manifest, admission.level)
        instance.start(call_off_reserved)

    # --- looking ---------------------------------------------------------------------------------

    async def get_instance(self, instance_id: InstanceId) -> AgentInstance | None:
        """None where there is none; one of another workspace is not found."""
        await self._enter(Permission.AGENTS_READ)
        try:
            return await self._reach(instance_id, Permission.AGENTS_READ)
        except AgentNotFoundError:
            return None

    async def get_active_instances(self, filter: GetInstancesFilter | None = None) -> list[AgentInstance]:  # noqa: A002 - the seed's name
        """Newest first; of the principal's own workspace unless the filter names another.

        Without the permission `agents.read_all` only the instances that the principal owns.
        """
        wanted = GetInstancesFilter() if filter is None else filter
        require_kind("filter", wanted, GetInstancesFilter)
        wanted = wanted.checked()
        space = wanted.workspace_id or self._principal.workspace_id
        tier = (await self._enter(Permission.AGENTS_READ, space)).tier
        own = self._principal.principal_id
        if wanted.owner_id is None and not decide_access(self._principal, Permission.AGENTS_READ_ALL, space, tier=tier):
            wanted = wanted.evolve(owner_id=own)
        elif wanted.owner_id not in {None, own}:
            await self._enter(Permission.AGENTS_READ_ALL, space)
        return await self._runtime.store.read(queries.list_instances, wanted, space)

    async def get_statistics(self, workspace_id: UUID | None = None) -> LifecycleStatistics:
        space = workspace_id or self._principal.workspace_id
        await self._enter(Permission.AGENTS_READ, space)
        return await self._runtime.store.read(queries.statistics, space, self._runtime.clock.wall())

    def observe(
        self,
        instance_id: InstanceId | None = None,
        options: ObservationOptions | None = None,
        *,
        after: int | None = None,
    ) -> Observation:
        """A stream of events of one instance, or of the workspace; `after` replays the log from that number."""
        self._runtime.require_open()
        chosen = ObservationOptions() if options is None else options
        require_kind("options", chosen, ObservationOptions)
        if after is not None and (type(after) is not int or after < 0):
            raise fault("after", "must be 0 or the number of an event", after)

        async def admitted() -> tuple[UUID, UUID | None]:
            await self._enter(Permission.AGENTS_READ)
            if instance_id is None:
                return self._principal.workspace_id, None
            record = await self._reach(instance_id, Permission.AGENTS_READ)
            return record.workspace_id, record.instance_id

        return Observation(self._runtime.store, self._runtime.fanout, admitted, chosen.checked(), after)

    async def why(self, instance_id: InstanceId) -> Why:
        await self._enter(Permission.AGENTS_READ)
        return await why(self._runtime, await self._reach(instance_id, Permission.AGENTS_READ))

    async def log(  # noqa: PLR0913 - each names some of the lines
        self,
        instance_id: InstanceId,
        *,
        after: str | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        since: datetime | None = None,
        follow: bool = False,
        raw: bool = False,
    ) -> AsyncGenerator[LogLine, None]:
        """What the agent wrote, line by line; with `follow` it goes on until the instance has ended.

        The output of a coding agent is given as a person reads it, with `raw` as it was written.
        """
        await self._enter(Permission.AGENTS_READ)
        record = await self._reach(instance_id, Permission.AGENTS_READ)
        render = None
        with contextlib.suppress(AgentNotFoundError, ValidationError):  # of a definition that is not known any more
            render = None if raw else render_of(await self._runtime.definitions.manifest(record.definition_id))
        wanted = LogWindow(after=after, attempt=attempt, tail=tail, since=since, follow=follow, render=render)
        async for line in read_log(self._runtime, record, wanted):
            yield line

    def metrics(self) -> str:
        """The text of Prometheus."""
        return self._runtime.metrics.expose()

    async def get_requests(self, instance_id: InstanceId, *, state: RequestState | str | None = None) -> list[Request]:
        """Requests with an id, newest first."""
        await self._enter(Permission.AGENTS_READ)
        record = await self._reach(instance_id, Permission.AGENTS_READ)
        wanted = None if state is None else _member(RequestState, "state", state)
        return await self._runtime.store.read(requests.list_requests, record.instance_id, wanted)

    async def open_waits(self, instance_id: InstanceId | None = None) -> list[Wait]:
        """Oldest first; of all instances of the workspace unless one is named."""
        await self._enter(Permission.AGENTS_READ)
        if instance_id is None:
            found = await self._runtime.store.read(waits.open_waits, self._principal.workspace_id)
        else:
            record = await self._reach(instance_id, Permission.AGENTS_READ)
            found = await self._runtime.store.read(waits.open_waits, instance_id=record.instance_id)
        return sorted(found, key=lambda wait: wait.created_at)

    # --- acting ----------------------------------------------------------------------------------

    async def process(
        self,
        instance_id: InstanceId,
        request: Any,
        *,
        request_id: str | UUID | None = None,
        timeout: timedelta | float | str | None = None,  # noqa: ASYNC109 - the agent is cancelled, not the caller
        wait: bool = True,
        retries: int = 0,
    ) -> Any:
        """The answer of the agent. A request id is answered once, over restarts and managers; see the guide.

        `retries` asks again, under the same id, when the agent ends before it has answered.
        """
        name = None if request_id is None else _checked_request_id(str(request_id))
        digest = "" if name is None else request_digest(request)
        if type(wait) is not bool:
            raise fault("wait", "must be true or false", wait)
        if type(retries) is not int or retries < 0:
            raise fault("retries", "must be 0 or more", retries)
        if retries and name is None:
            raise fault("retries", "needs a request_id, so that the request is not answered twice", retries)
        limit = _duration("timeout", timeout)
        due = None if limit is None else self._runtime.clock.mono() + limit.total_seconds()

        def verb() -> Process:
            return Process(
                by=self._by, request=request, request_id=name, digest=digest, timeout=limit, due=due, wait=wait
            )

        while True:
            try:
                return await self._ask(instance_id, Permission.AGENTS_PROCESS, "process", verb)
            except AgentGoneError:
                if retries <= 0:
                    raise
                retries -= 1

    async def suspend(
        self,
        instance_id: InstanceId,
        depth: SuspendDepth | str | None = None,
        *,
        resume_after: timedelta | float | str | None = None,
        timeout: timedelta | float | str | None = None,  # noqa: ASYNC109 - the time for its work to end
        reason: str | None = None,
    ) -> AgentInstance:
        """Hold (the default) finishes its work, freeze stops it where it is, park ends its process."""
        chosen = _depth(depth)
        after, limit = _duration("resume_after", resume_after), _duration("timeout", timeout)
        _require_text("reason", reason)
        found: AgentInstance = await self._ask(
            instance_id,
            Permission.AGENTS_SUSPEND,
            "suspend",
            lambda: Suspend(by=self._by, depth=chosen, resume_after=after, timeout=limit, reason=reason),
        )
        return found

    async def resume(self, instance_id: InstanceId) -> AgentInstance:
        found: AgentInstance = await self._ask(
            instance_id, Permission.AGENTS_SUSPEND, "resume", lambda: Resume(by=self._by)
        )
        return found

    async def restart(self, instance_id: InstanceId, *, reason: str | None = None) -> AgentInstance:
        """By hand: a failed one at once, a living one after an orderly stop. It spends no retry."""
        _require_text("reason", reason)
        why_ = reason or f"restarted by {self._principal.name}"
        await self._require_present_attempt(instance_id)
        found: AgentInstance = await self._ask(
            instance_id, Permission.AGENTS_SPAWN, "restart", lambda: Restart(by=self._by, reason=why_)
        )
        return found

    async def _require_present_attempt(self, instance_id: InstanceId) -> None:
        """Nothing reads what the agent of an earlier attempt at a task answers, and its workdir is in other hands."""
        async with _Refusals(self, "restart", f"instance:{instance_id}"):
            await self._enter(Permission.AGENTS_SPAWN)
            record = await self._reach(instance_id, Permission.AGENTS_SPAWN)
            task = None if record.task_id is None else await self._runtime.store.read(tasks.get_task, record.task_id)
            if task is None or (task.state is TaskState.RUNNING and task.instance_id == record.instance_id):
                return
            cures = {
                TaskState.QUEUED: f"`ostler why {task.key}` says when it is begun again",
                TaskState.RUNNING: f"its present attempt is {task.key}-{task.attempt}",
                TaskState.COMPLETED: f"`ostler task send-back {task.key}` begins another attempt",
            }
            cure = cures.get(task.state, "add it as a new task")
            raise InvalidOperationError(f"{record.name} worked on {task.key}, which is {task.state}; {cure}")

    async def terminate(self, instance_id: InstanceId, options: TerminationOptions | None = None) -> TerminationResult:
        """Callers at the same time share one end; the least patient of them decides its grace."""
        chosen = TerminationOptions() if options is None else options
        require_kind("options", chosen, TerminationOptions)
        chosen = chosen.checked()
        result: TerminationResult = await self._ask(
            instance_id,
            Permission.AGENTS_TERMINATE,
            "terminate",
            lambda: Terminate(by=self._by, options=chosen),
        )
        return result

    async def answer(self, wait_id: UUID | str, outcome: str = "done", answer: Mapping[str, Any] | None = None) -> Wait:
        """End a wait; the agent goes on with the answer. Of two answers one counts."""
        wait_id = wait_id if isinstance(wait_id, UUID) else _uuid("wait_id", wait_id)
        if type(outcome) is not str or not outcome.strip() or outcome == TIMED_OUT:
            raise fault("outcome", f"must be a word such as done or approved, other than {TIMED_OUT}", outcome)
        async with _Refusals(self, "answer", f"wait:{wait_id}"):
            await self._enter(Permission.AGENTS_PROCESS)
            found = await self._runtime.store.read(waits.get_wait, wait_id)
            if found is None or found.workspace_id != self._principal.workspace_id:
                raise NotFoundError(f"there is no wait {wait_id}; list the open ones")
            found.evolve(outcome=outcome, answer=answer).checked()
            if found.kind in OWN_KINDS:
                raise InvalidOperationError(
                    f"the wait {wait_id} is a {found.kind} of Ostler's own; resume or restart the instance instead"
                )
            if found.instance_id is None or found.ended_at is not None:
                return await self._runtime.store.run(
                    waits.end_wait, wait_id, outcome, answer, by=self._by, act="answer"
                )

        def verb() -> Answer:
            return Answer(by=self._by, wait_id=wait_id, outcome=outcome, answer_data=answer)

        ended: Wait = await self._ask(found.instance_id, Permission.AGENTS_PROCESS, "answer", verb)
        return ended

    # --- inside ----------------------------------------------------------------------------------

    async def _ask(self, instance_id: InstanceId, permission: Permission, action: str, verb: Callable[[], Any]) -> Any:
        """Check, find the task of the instance, post, wait. A refusal stands in the audit."""
        async with _Refusals(self, action, f"instance:{instance_id}"):
            workspace = self._runtime.workspaces.get(self._principal.workspace_id)
            if workspace is None:
                await self._enter(permission)
            else:
                self._require(permission, workspace)
            for look in range(_LOOKS):
                try:
                    instance = await self._find(instance_id, permission, verb, again=look > 0)
                    return await instance.ask(verb()) if isinstance(instance, Instance) else instance.value
                except ActorEndedError:
                    # Its task ended in this moment; its record says what is so now.
                    self._runtime.require_open()
            raise InvalidOperationError(f"{instance_id} changes faster than it can be asked; try again")

    async def _find(
        self, instance_id: InstanceId, permission: Permission, verb: Callable[[], Any], *, again: bool
    ) -> Instance | _Answered:
        """Its task; one is made for an instance that has none. `again`: it had one that ended in this moment."""
        runtime = self._runtime
        if isinstance(instance_id, UUID):
            known = runtime.instances.get(instance_id)
            if known is not None and not known.is_over and known.record.workspace_id == self._principal.workspace_id:
                return known
        record = await self._reach(instance_id, permission)
        known = runtime.instances.get(record.instance_id)
        if known is not None and not known.is_over:
            return known
        asked = verb()
        if isinstance(asked, Process) and asked.request_id is not None:
            row = await runtime.store.read(requests.get_request, record.instance_id, asked.request_id)
            if row is not None and row.state is RequestState.DONE:
                answer_from(row, asked)
                return _Answered(asked.reply.result())
        if again and record.state is AgentState.TERMINATED and isinstance(asked, Terminate):
            return _Answered(TerminationResult.successful(record, True, timedelta(0)))  # another caller was faster
        if record.state is AgentState.TERMINATED or (
            isinstance(asked, Process | Suspend | Resume) and not record.is_active
        ):
            raise _refusal(record, asked)
        if record.instance_id in runtime.unrecovered:
            raise InvalidOperationError(runtime.unrecovered[record.instance_id], current=record.state)
        return await revive(runtime, record)

    async def _enter(self, permission: Permission, workspace_id: UUID | None = None) -> Workspace:
        """The principal may do this in the workspace."""
        own = self._runtime.workspaces.get(self._principal.workspace_id)
        if own is None:
            own = await self._runtime.store.read(workspaces.get_workspace, self._principal.workspace_id)
            if own is None:
                raise WorkspaceNotFoundError
            self._runtime.workspaces[own.workspace_id] = own
        self._require(permission, own, workspace_id)
        return own

    def _require(self, permission: Permission, own: Workspace, workspace_id: UUID | None = None) -> None:
        runtime = self._runtime
        _require_loop(runtime)
        runtime.require_open()
        decision = decide_access(
            self._principal, permission, workspace_id or self._principal.workspace_id, tier=own.tier
        )
        if not decision:
            raise AuthorizationError(decision.reason)

    async def _reach(self, instance_id: InstanceId, permission: Permission) -> AgentInstance:
        """The record, where the principal may see it; to the letter "not found" where it may not."""
        runtime = self._runtime
        named = str(instance_id) if isinstance(instance_id, UUID) else shown(instance_id)
        missing = AgentNotFoundError(f"there is no instance {named}; list what exists, or check the id")
        if isinstance(instance_id, UUID):
            found = await runtime.store.read(moves.get_instance, instance_id)
            records = [] if found is None else [found]
        elif not isinstance(instance_id, str):
            raise fault("instance_id", "must be the id or the name of an instance", instance_id)
        elif not instance_id.isprintable() or len(instance_id) > MAX_NAME:
            records = []
        else:
            records = await runtime.store.read(queries.find_instances, instance_id, self._principal.workspace_id)
        if len(records) > 1:
            ids = ", ".join(str(record.instance_id) for record in records[:5])
            raise NotFoundError(f"{named} names {len(records)} instances ({ids}); give more of the id")
        if not records:
            raise missing
        record = records[0]
        own = runtime.workspaces.get(self._principal.workspace_id)
        tier = own.tier if own is not None else (await self._enter(permission)).tier
        if not decide_access(self._principal, permission, record.workspace_id, tier=tier):
            raise missing
        return record

    async def _load(self, instance_id: UUID) -> AgentInstance:
        record = await self._runtime.store.read(moves.get_instance, instance_id)
        if record is None:
            raise AgentNotFoundError
        return record

    async def note_refusal(self, action: str, subject: str, error: OstlerError) -> None:
        """A refusal that no command of the store has told of."""
        if self._runtime.closing is not None:
            return
        act = Act(self._principal.workspace_id, self._by, action, subject, type(error).__name__, str(error))
        error.audited = True
        try:
            await self._runtime.store.run(audit.record_act, act)
        except OstlerError as failure:
            self._runtime.log.emit("audit_failed", error=str(failure))


class _Answered:
    """An answer that needed no task."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Refusals:
    """Around a verb: what it refuses goes into the audit, once."""

    def __init__(self, manager: Verbs, action: str, subject: str) -> None:
        self._manager = manager
        self._action = action
        self._subject = subject[:200] if subject.isprintable() else ascii(subject)[1:-1][:200]

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AUDITED_ERRORS) and not error.audited:
            await self._manager.note_refusal(self._action, self._subject, error)


def _refusal(record: AgentInstance, verb: object) -> InvalidOperationError:
    doing = {Process: "asked", Suspend: "suspended", Resume: "resumed", Restart: "restarted"}.get(
        type(verb), "terminated"
    )
    advice = "spawn another" if record.state is AgentState.TERMINATED else "restart it, or look at why"
    name = record.name or record.instance_id
    return InvalidOperationError(f"{name} is {record.state} and cannot be {doing}; {advice}", current=record.state)


def require_kind(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise fault(field, f"must be of type {kind.__name__}", value)


def _require_text(field: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise fault(field, "must be text", value)
    faults = list(plain_text_faults(field, value, MAX_REASON))
    if faults:
        raise ValidationError(faults)


def _require_loop(runtime: Runtime) -> None:
    if asyncio.get_running_loop() is not runtime.loop:
        raise InvalidOperationError(
            "this manager belongs to the event loop that opened it; hand the call over to that loop with "
            "asyncio.run_coroutine_threadsafe, or open a manager of a home of its own here"
        )


def _depth(depth: SuspendDepth | str | None) -> SuspendDepth:
    return SuspendDepth.HOLD if depth is None else _member(SuspendDepth, "depth", depth)


def _member(kind: type[E], field: str, value: Any) -> E:
    try:
        return kind(value)
    except ValueError:
        raise fault(field, f"must be one of {', '.join(kind)}", value) from None


def _duration(field: str, value: timedelta | float | str | None) -> timedelta | None:
    """A positive duration, as people write it."""
    if value is None:
        return None
    try:
        duration = to_duration(value)
    except (ValueError, OverflowError):
        duration = timedelta(0)
    if duration <= timedelta(0):
        raise fault(field, "must be a duration above zero, such as 30s", value)
    return duration


def _checked_request_id(name: str) -> str:
    if not 1 <= len(name) <= _MAX_REQUEST_ID or not name.isprintable():
        raise fault("request_id", f"must be 1 to {_MAX_REQUEST_ID} printable characters", name)
    return name


def _uuid(field: str, text: object) -> UUID:
    try:
        return UUID(str(text))
    except ValueError:
        raise fault(field, "must be a UUID", text) from None
