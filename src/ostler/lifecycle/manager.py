"""The manager with its verbs, each on behalf of a principal; the handle of one instance; the short way to start one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from ostler.agents.command import remove_without_work
from ostler.agents.registry import AgentManifest, AgentRegistry
from ostler.clock import Clock
from ostler.definitions.projects import Projects
from ostler.errors import AgentGoneError, AgentNotFoundError, InvalidOperationError, NotFoundError, ValidationError
from ostler.failpoints import Seams
from ostler.isolation.base import Input
from ostler.lifecycle import terminal
from ostler.lifecycle.admit import SPAWN_FLAG
from ostler.lifecycle.calls import request_digest
from ostler.lifecycle.disk import DISK_AGE, usage_by_task
from ostler.lifecycle.inbox import Viewer, read_inbox
from ostler.lifecycle.instance import Runtime
from ostler.lifecycle.logs import LogWindow, logs_of, read_log, remove_logs, render_of
from ostler.lifecycle.messages import Answer, Process, Restart, Resume, Suspend, Terminate
from ostler.lifecycle.observe import Observation
from ostler.lifecycle.operations import WORKDIRS
from ostler.lifecycle.reach import InstanceId, Reach, member_of, positive_duration, require_kind, require_reason
from ostler.lifecycle.report import read_report
from ostler.lifecycle.spawn import request_of, spawn
from ostler.lifecycle.terminal import ScreenPart
from ostler.lifecycle.waits import OWN_KINDS, TIMED_OUT
from ostler.lifecycle.why import doing, why
from ostler.model.access import OWNER, Actor, Permission, Principal, Workspace
from ostler.model.attempt import Attempt, Request, RequestState
from ostler.model.disk import DiskUsage, limit_bytes
from ostler.model.events import Event
from ostler.model.instance import AgentInstance, InstanceDetails, TerminationResult, Why
from ostler.model.log import LogLine, Stream
from ostler.model.query import GetInstancesFilter, InboxRow, LifecycleStatistics, ObservationOptions, Report
from ostler.model.spawn import SpawnRequest, TerminalSize, TerminationOptions
from ostler.model.states import SuspendDepth, Tier
from ostler.model.task import TaskState
from ostler.model.text import visible_text
from ostler.model.validation import fault
from ostler.model.wait import Wait, WaitKind
from ostler.policy.access import decide_access
from ostler.store import attempts, queries, requests, retention, tasks, waits, workspaces
from ostler.store import events as event_log
from ostler.store.store import Store

_MAX_REQUEST_ID = 200
_ALL = GetInstancesFilter(include_restarting=True, limit=1000)
_ENDED = GetInstancesFilter(include_terminated=True, limit=1000)
#: Fields of a workspace that an administrator changes.
_CHANGEABLE = frozenset({"name", "tier", "disabled_features", "max_tokens_per_minute"})


class AgentLifecycleManager:
    """Made by `ostler.open`; every method belongs to the event loop that opened it.

    An instance is named by its id, by the beginning or the end of it, or by its name.
    """

    def __init__(self, runtime: Runtime, principal: Principal = OWNER, correlation_id: str | None = None) -> None:
        self._runtime = runtime
        self._reach = Reach(runtime, principal, correlation_id)
        #: True: closing leaves agents that can go on without a manager as they are.
        self.keep_agents = False

    def acting_as(self, principal: Principal, *, correlation_id: str | None = None) -> AgentLifecycleManager:
        """The same manager on behalf of another principal."""
        require_kind("principal", principal, Principal)
        return AgentLifecycleManager(self._runtime, principal.checked(), correlation_id)

    @property
    def registry(self) -> AgentRegistry:
        """The definitions that can be spawned by name."""
        return self._runtime.definitions.registry

    @property
    def projects(self) -> Projects:
        """The projects that this home serves, with their definitions and settings."""
        return self._runtime.definitions.projects

    async def definition(self, definition_id: UUID) -> AgentManifest:
        """By its id; also one that only the store has, because its file is gone."""
        return await self._runtime.definitions.manifest(definition_id)

    @property
    def store(self) -> Store:
        """The record behind the manager, for reading."""
        return self._runtime.store

    @property
    def principal(self) -> Principal:
        return self._reach.principal

    # --- spawn -----------------------------------------------------------------------------------

    async def spawn(self, request: SpawnRequest, *, idempotency_key: str | None = None) -> AgentInstance:
        """A ready instance; or an error, and nothing is left of it but its record."""
        return await spawn(self._reach, request, idempotency_key)

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

        async def spawn_handle() -> AgentHandle:
            request = request_of(self.registry, agent, options, limits, context)
            return self.handle((await self.spawn(request, idempotency_key=key)).instance_id)

        return Start(spawn_handle)

    def handle(self, instance_id: InstanceId) -> AgentHandle:
        return AgentHandle(self, instance_id)

    # --- looking ---------------------------------------------------------------------------------

    async def get_instance(self, instance_id: InstanceId) -> AgentInstance | None:
        """None where there is none; one of another workspace is not found."""
        try:
            return await self.require_instance(instance_id)
        except AgentNotFoundError:
            return None

    async def get_active_instances(self, filter: GetInstancesFilter | None = None) -> list[AgentInstance]:  # noqa: A002 - the seed's name
        """Newest first; of the principal's own workspace unless the filter names another.

        Without the permission `agents.read_all` only the instances that the principal owns.
        """
        chosen = GetInstancesFilter() if filter is None else filter
        require_kind("filter", chosen, GetInstancesFilter)
        chosen = chosen.checked()
        space = chosen.workspace_id or self.principal.workspace_id
        reads_all = await self._may_read_all(space)
        if chosen.owner_id is None and not reads_all:
            chosen = chosen.evolve(owner_id=self.principal.principal_id)
        elif chosen.owner_id not in {None, self.principal.principal_id}:
            await self._reach.enter(Permission.AGENTS_READ_ALL, space)
        return await self.store.read(queries.list_instances, chosen, space)

    async def _may_read_all(self, workspace_id: UUID) -> bool:
        """Whether lists show the instances of every owner."""
        tier = (await self._reach.enter(Permission.AGENTS_READ, workspace_id)).tier
        return bool(decide_access(self.principal, Permission.AGENTS_READ_ALL, workspace_id, tier=tier))

    async def get_statistics(self, workspace_id: UUID | None = None) -> LifecycleStatistics:
        space = workspace_id or self.principal.workspace_id
        await self._reach.enter(Permission.AGENTS_READ, space)
        return await self.store.read(queries.statistics, space, self._runtime.clock.wall())

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
            if instance_id is None:
                await self.require(Permission.AGENTS_READ)
                return self.principal.workspace_id, None
            record = await self.require_instance(instance_id)
            return record.workspace_id, record.instance_id

        return Observation(self.store, self._runtime.fanout, admitted, chosen.checked(), after)

    async def why(self, instance_id: InstanceId) -> Why:
        return await why(self._runtime, await self.require_instance(instance_id))

    async def log(  # noqa: PLR0913 - each names some of the lines
        self,
        instance_id: InstanceId,
        *,
        after: str | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        since: datetime | None = None,
        stream: Stream | None = None,
        follow: bool = False,
        raw: bool = False,
        exact: bool = False,
    ) -> AsyncGenerator[LogLine, None]:
        """What the agent wrote, line by line; with `follow` it goes on until the instance has ended.

        The output of a coding agent is given as a person reads it, with `raw` as it was written. With
        `exact` no byte is lost: `text.encode("latin-1")` is what was written, with the end of the line.
        """
        record = await self.require_instance(instance_id)
        render = None
        with contextlib.suppress(AgentNotFoundError, ValidationError):  # of a definition that is not known any more
            manifest = await self._runtime.definitions.manifest(record.definition_id)
            render = None if raw or exact else render_of(manifest)
        if render is None and not (raw or exact) and await terminal.has_terminal(self._reach, record):
            render = visible_text
        window = LogWindow(
            after=after,
            attempt=attempt,
            tail=tail,
            since=since,
            stream=stream,
            follow=follow,
            render=render,
            exact=exact,
        )
        async for line in read_log(self._runtime, record, window):
            yield line

    async def dropped_output(self, instance_id: InstanceId) -> int:
        """Bytes that the agent wrote faster than `output_rate` allows, and that are in no log."""
        record = await self.require_instance(instance_id)
        return await asyncio.to_thread(logs_of(self._runtime, record).dropped)

    def metrics(self) -> str:
        """The text of Prometheus."""
        return self._runtime.metrics.expose()

    async def disk(self, *, max_age: float = DISK_AGE) -> DiskUsage:
        """What the home takes on the disk, by kind and by task; measured in a thread where the last measurement is
        older than so many seconds.
        """
        await self.require(Permission.AGENTS_READ)
        await self.require(Permission.TASKS_READ)
        home = self.require_home()
        measured = await self._runtime.disk.measure(max_age)
        rows = await self.store.read(tasks.tasks_in, frozenset(TaskState))
        own = [task for task in rows if task.workspace_id == self.principal.workspace_id]
        task_of = await self.store.read(queries.tasks_of_instances, self.principal.workspace_id)
        return measured.usage.evolve(tasks=usage_by_task(measured, home, own, task_of))

    async def has_room(self) -> bool:
        """Whether the home is below its limit. While it is not, what is freed is noticed soon."""
        meter = self._runtime.disk
        if not meter.has_limit:
            return True
        is_full = meter.last is not None and meter.last.usage.is_full
        measured = await meter.measure(max(DISK_AGE, 20 * meter.seconds) if is_full else float("inf"))
        return not measured.usage.is_full

    @property
    def disk_limit(self) -> int | None:
        """In bytes; None for no limit."""
        return limit_bytes(self._runtime.settings.retention.disk)

    @property
    def disk_now(self) -> DiskUsage | None:
        """The last measurement, without its tasks; None before the first, and where there is no limit."""
        meter = self._runtime.disk
        return meter.last.usage if meter.has_limit and meter.last is not None else None

    def note_hook(self, name: str, failure: str | None) -> None:
        """How the last run of a command of the settings ended. One that failed is in the inbox until it succeeds."""
        failures = self._runtime.hook_failures
        if failure is None:
            failures.pop(name, None)
        else:
            failures[name] = (failures.get(name, (self.now(), ""))[0], failure)

    async def get_requests(self, instance_id: InstanceId, *, state: RequestState | str | None = None) -> list[Request]:
        """Requests with an id, newest first."""
        record = await self.require_instance(instance_id)
        chosen = None if state is None else member_of(RequestState, "state", state)
        return await self.store.read(requests.list_requests, record.instance_id, chosen)

    async def open_waits(self, instance_id: InstanceId | None = None) -> list[Wait]:
        """Oldest first; of tasks and of the instances that a list shows, unless one instance is named."""
        if instance_id is None:
            reads_all = await self._may_read_all(self.principal.workspace_id)
            open_waits = await self.store.read(waits.open_waits, self.principal.workspace_id)
            if not reads_all:
                own = {record.instance_id for record in await self.get_active_instances(_ALL)}
                open_waits = [wait for wait in open_waits if wait.instance_id is None or wait.instance_id in own]
        else:
            record = await self.require_instance(instance_id)
            open_waits = await self.store.read(waits.open_waits, instance_id=record.instance_id)
        return sorted(open_waits, key=lambda wait: wait.created_at)

    async def inbox(self) -> list[InboxRow]:
        """What needs a person, the oldest first. A row is there as long as its cause."""
        space = self.principal.workspace_id
        reads_all = await self._may_read_all(space)
        viewer = Viewer(
            runtime=self._runtime,
            workspace_id=space,
            owner_id=None if reads_all else self.principal.principal_id,
            may_read_tasks=bool(decide_access(self.principal, Permission.TASKS_READ, space, tier=self.tier_of(space))),
            waits=tuple(wait for wait in await self.open_waits() if wait.kind is WaitKind.HUMAN),
        )
        return await read_inbox(viewer)

    async def report(self, since: datetime | timedelta | float | str = "10h") -> Report:
        """What happened since a moment, or in the last so long. A moment without a time zone is local."""
        moment = since
        if isinstance(since, str):
            with contextlib.suppress(ValueError):
                moment = datetime.fromisoformat(since)
        if not isinstance(moment, datetime):
            moment = self.now() - (positive_duration("since", moment) or timedelta(0))
        await self._reach.enter(Permission.TASKS_READ)
        await self._reach.enter(Permission.AGENTS_READ)
        return await read_report(self._runtime, self.principal.workspace_id, moment.astimezone(UTC))

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
        name = None if request_id is None else str(request_id)
        if name is not None and not (1 <= len(name) <= _MAX_REQUEST_ID and name.isprintable()):
            raise fault("request_id", f"must be 1 to {_MAX_REQUEST_ID} printable characters", name)
        digest = "" if name is None else request_digest(request)
        if type(wait) is not bool:
            raise fault("wait", "must be true or false", wait)
        if type(retries) is not int or retries < 0:
            raise fault("retries", "must be 0 or more", retries)
        if retries and name is None:
            raise fault("retries", "needs a request_id, so that the request is not answered twice", retries)
        limit = positive_duration("timeout", timeout)
        due = None if limit is None else self._runtime.clock.mono() + limit.total_seconds()

        def verb() -> Process:
            return Process(
                by=self.actor, request=request, request_id=name, digest=digest, timeout=limit, due=due, wait=wait
            )

        while True:
            try:
                return await self._reach.ask(instance_id, Permission.AGENTS_PROCESS, "process", verb)
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
        chosen = SuspendDepth.HOLD if depth is None else member_of(SuspendDepth, "depth", depth)
        after, limit = positive_duration("resume_after", resume_after), positive_duration("timeout", timeout)
        require_reason(reason)
        instance: AgentInstance = await self._reach.ask(
            instance_id,
            Permission.AGENTS_SUSPEND,
            "suspend",
            lambda: Suspend(by=self.actor, depth=chosen, resume_after=after, timeout=limit, reason=reason),
        )
        return instance

    async def resume(self, instance_id: InstanceId) -> AgentInstance:
        instance: AgentInstance = await self._reach.ask(
            instance_id, Permission.AGENTS_SUSPEND, "resume", lambda: Resume(by=self.actor)
        )
        return instance

    async def restart(self, instance_id: InstanceId, *, reason: str | None = None) -> AgentInstance:
        """By hand: a failed one at once, a living one after an orderly stop. It spends no retry."""
        require_reason(reason)
        cause = reason or f"restarted by {self.principal.name}"
        await self._require_present_attempt(instance_id)
        instance: AgentInstance = await self._reach.ask(
            instance_id, Permission.AGENTS_SPAWN, "restart", lambda: Restart(by=self.actor, reason=cause)
        )
        return instance

    async def _require_present_attempt(self, instance_id: InstanceId) -> None:
        """Nothing reads what the agent of an earlier attempt at a task answers, and its workdir is in other hands."""
        async with self._reach.audited("restart", f"instance:{instance_id}"):
            record = await self._reach.find(instance_id, Permission.AGENTS_SPAWN)
            task = None if record.task_id is None else await self.store.read(tasks.get_task, record.task_id)
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
        result: TerminationResult = await self._reach.ask(
            instance_id,
            Permission.AGENTS_TERMINATE,
            "terminate",
            lambda: Terminate(by=self.actor, options=chosen),
        )
        return result

    def terminal(self, instance_id: InstanceId, *, after: str | None = None) -> AsyncGenerator[ScreenPart, None]:
        """What the terminal of a command shows: first the screen as it is, then all that comes, until the instance has
        ended. With the cursor of a part it goes on behind that.
        """
        return terminal.follow(self._reach, instance_id, terminal.parse_cursor(after))

    async def require_terminal(self, instance_id: InstanceId) -> None:
        """Raises `InvalidOperationError`, with what to do instead, where it has none."""
        await terminal.require_terminal(self._reach, await self.require_instance(instance_id))

    async def write_input(self, instance_id: InstanceId, data: bytes | Input) -> tuple[int, bool]:
        """Type into the terminal of a command, or write to its open standard input: how many bytes were taken, and
        whether it reads no more. Where the program does not read, none are taken; then send them again.
        """
        chosen = data if isinstance(data, Input) else Input(data=data)
        return await terminal.write_input(self._reach, instance_id, chosen)

    async def resize_terminal(
        self, instance_id: InstanceId, size: TerminalSize | None, *, redraw: bool = False
    ) -> None:
        """None: the size it has. `redraw`: a program that sees the size it had is made to draw its screen again."""
        await terminal.resize(self._reach, instance_id, size, redraw=redraw)

    async def answer(self, wait_id: UUID | str, outcome: str = "done", answer: Mapping[str, Any] | None = None) -> Wait:
        """End a wait; the agent goes on with the answer. Of two answers one counts."""
        try:
            wait_id = wait_id if isinstance(wait_id, UUID) else UUID(str(wait_id))
        except ValueError:
            raise fault("wait_id", "must be a UUID", wait_id) from None
        if type(outcome) is not str or not outcome.strip() or outcome == TIMED_OUT:
            raise fault("outcome", f"must be a word such as done or approved, other than {TIMED_OUT}", outcome)
        async with self._reach.audited("answer", f"wait:{wait_id}"):
            await self._reach.enter(Permission.AGENTS_PROCESS)
            wait = await self.store.read(waits.get_wait, wait_id)
            if wait is None or wait.workspace_id != self.principal.workspace_id:
                raise NotFoundError(f"there is no wait {wait_id}; list the open ones")
            wait.evolve(outcome=outcome, answer=answer).checked()
            if wait.kind in OWN_KINDS:
                raise InvalidOperationError(
                    f"the wait {wait_id} is a {wait.kind} of Ostler's own; resume or restart the instance instead"
                )
            if wait.instance_id is None or wait.ended_at is not None:
                return await self.store.run(waits.end_wait, wait_id, outcome, answer, by=self.actor, act="answer")

        def verb() -> Answer:
            return Answer(by=self.actor, wait_id=wait_id, outcome=outcome, answer_data=answer)

        ended: Wait = await self._reach.ask(wait.instance_id, Permission.AGENTS_PROCESS, "answer", verb)
        return ended

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
        return self._reach.actor

    async def require(self, permission: Permission) -> None:
        """Raises `AuthorizationError` where the principal may not."""
        await self._reach.enter(permission)

    def require_home(self) -> Path:
        """The directory of this manager; a store without one keeps no files."""
        if self._runtime.home is None:
            raise InvalidOperationError("this needs a home directory; open one with ostler.open(DIRECTORY)")
        return self._runtime.home

    async def get_workspace(self) -> Workspace:
        """The principal's own."""
        return await self._reach.enter(Permission.AGENTS_READ)

    async def change_workspace(self, changes: Mapping[str, Any]) -> Workspace:
        """Its name, plan (`tier`), feature flags and token share. A smaller plan ends nothing that is active."""
        own = await self._reach.enter(Permission.WORKSPACE_ADMIN)
        for name in changes.keys() - _CHANGEABLE:
            raise fault(name, f"cannot be changed; name one of {', '.join(sorted(_CHANGEABLE))}")
        workspace = Workspace.from_dict({**own.to_dict(), **changes}).checked()
        for flag in workspace.disabled_features:
            if flag != SPAWN_FLAG:
                raise fault("disabled_features", f"must be of {SPAWN_FLAG}, the one feature that can be off", flag)
        self._runtime.workspaces[own.workspace_id] = await self._runtime.store.run(
            workspaces.put_workspace, workspace, by=self.actor
        )
        return workspace

    @property
    def home_notice(self) -> str | None:
        """That the home was moved or copied since it was last opened, and what was done about it."""
        return self._runtime.home_notice

    def tier_of(self, workspace_id: UUID) -> Tier:
        workspace = self._runtime.workspaces.get(workspace_id)
        return Tier.CORE if workspace is None else workspace.tier

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
        return await self._reach.find(instance_id, Permission.AGENTS_READ)

    async def get_attempts(self, instance_id: UUID) -> list[Attempt]:
        await self.require_instance(instance_id)
        return await self.store.read(attempts.list_attempts, instance_id)

    async def list_events(
        self,
        instance_id: InstanceId | None = None,
        *,
        after: int | None = None,
        limit: int = 100,
        types: Collection[str] = (),
    ) -> list[Event]:
        """The newest events, or those of these types, oldest first; with `after` those that follow that number."""
        await self.require(Permission.AGENTS_READ)
        only = None if instance_id is None else (await self.require_instance(instance_id)).instance_id
        space = self.principal.workspace_id
        if after is None:
            return await self.store.read(
                event_log.last_events, limit, workspace_id=space, instance_id=only, types=types
            )
        page = await self.store.read(
            event_log.read_events, after, workspace_id=space, instance_id=only, limit=limit, types=types
        )
        return list(page.events)

    async def details(self, instance: AgentInstance) -> dict[str, Any]:
        """What a list shows beside the record."""
        return (await self.details_of([instance]))[0].to_dict()

    async def details_of(self, instances: Sequence[AgentInstance]) -> list[InstanceDetails]:
        """What a list shows beside each of them."""
        ended = [(record.instance_id, record.attempt) for record in instances if not record.is_active]
        exit_codes = await self.store.read(attempts.exit_codes, ended) if ended else {}
        return [
            self._details(
                record, await self._runtime.definitions.name(record.definition_id), exit_codes.get(record.instance_id)
            )
            for record in instances
        ]

    def _details(self, record: AgentInstance, definition: str, exit_code: int | None) -> InstanceDetails:
        live = self._runtime.instances.get(record.instance_id)
        if live is None:
            problem = self._runtime.unrecovered.get(record.instance_id)
            return InstanceDetails(definition=definition, doing=problem, exit_code=exit_code)
        # A coding agent tells what it does; its last line is not for people.
        words = doing(live, shows_output=render_of(live.manifest) is None)
        return InstanceDetails(definition=definition, doing=words, metrics_now=live.metrics_now())

    async def remove(self, instance_id: InstanceId) -> dict[str, Any]:
        """Remove the record and the output of an instance that has ended. Events and audit stay."""
        record = await self._reach.find(instance_id, Permission.AGENTS_TERMINATE)
        if record.is_active:
            raise InvalidOperationError(
                f"{record.name} is {record.state} and cannot be removed; stop it first", current=record.state
            )
        home = self._runtime.home
        workdir = None if home is None else home / WORKDIRS / str(record.instance_id)
        if workdir is not None and not await asyncio.to_thread(remove_without_work, workdir):
            raise InvalidOperationError(f"the workdir of {record.name} holds files ({workdir}); move them away first")
        await self.store.run(retention.remove_instance, record, by=self.actor)
        freed = 0 if home is None else remove_logs(home, record.instance_id)
        return {"instance_id": str(record.instance_id), "name": record.name, "freed_bytes": freed}

    async def prune(
        self, *, older_than: timedelta | float | str | None = None, dry_run: bool = False
    ) -> list[dict[str, Any]]:
        """Remove all instances that have ended, or did so longer ago than that; what was removed, newest first.

        One that waits for its restart stays, as do those of a task that is not finished: their output is its evidence.
        One whose workdir holds files stays too, with the reason under `kept`. With `dry_run` nothing is removed.
        """
        age = positive_duration("older_than", older_than)
        await self.require(Permission.AGENTS_TERMINATE)
        before = None if age is None else self.now() - age
        waiting = {wait.instance_id for wait in await self.open_waits()}
        unfinished = await self.store.read(tasks.unfinished_task_ids)
        removed: list[dict[str, Any]] = []
        page = _ENDED
        while records := await self.get_active_instances(page):
            page = page.evolve(before=records[-1].instance_id)
            for record in records:
                is_due = before is None or (record.terminated_at is not None and record.terminated_at <= before)
                if record.is_active or record.instance_id in waiting or record.task_id in unfinished or not is_due:
                    continue
                removed.append(await self._prune(record, dry_run=dry_run))
        return removed

    async def _prune(self, record: AgentInstance, *, dry_run: bool) -> dict[str, Any]:
        report = {"instance_id": str(record.instance_id), "name": record.name, "freed_bytes": 0, "kept": None}
        if dry_run:
            return report
        try:
            return {**report, **await self.remove(record.instance_id)}
        except (InvalidOperationError, AgentNotFoundError) as error:
            return {**report, "kept": str(error)}


class AgentHandle:
    """One instance, without its id in every call."""

    def __init__(self, manager: AgentLifecycleManager, instance_id: UUID | str) -> None:
        self._manager = manager
        self.instance_id = instance_id

    async def record(self) -> AgentInstance:
        record = await self._manager.get_instance(self.instance_id)
        if record is None:
            raise InvalidOperationError(f"instance {self.instance_id} is gone")
        return record

    async def ask(
        self,
        request: Any,
        *,
        id: str | UUID | None = None,  # noqa: A002 - short for the caller
        timeout: timedelta | float | str | None = None,  # noqa: ASYNC109 - the agent is cancelled, not the caller
        wait: bool = True,
        retries: int = 0,
    ) -> Any:
        """Its answer; see `AgentLifecycleManager.process`."""
        return await self._manager.process(
            self.instance_id, request, request_id=id, timeout=timeout, wait=wait, retries=retries
        )

    async def pause(
        self, depth: SuspendDepth | str | None = None, *, resume_after: timedelta | float | str | None = None
    ) -> AgentInstance:
        return await self._manager.suspend(self.instance_id, depth, resume_after=resume_after)

    async def resume(self) -> AgentInstance:
        return await self._manager.resume(self.instance_id)

    async def restart(self, *, reason: str | None = None) -> AgentInstance:
        return await self._manager.restart(self.instance_id, reason=reason)

    def events(self, *, after: int | None = None, options: ObservationOptions | None = None) -> Observation:
        return self._manager.observe(self.instance_id, options, after=after)

    def log(self, *, attempt: int | None = None, follow: bool = False, raw: bool = False) -> AsyncIterator[LogLine]:
        return self._manager.log(self.instance_id, attempt=attempt, follow=follow, raw=raw)

    async def why(self) -> Why:
        return await self._manager.why(self.instance_id)

    async def waits(self) -> list[Wait]:
        return await self._manager.open_waits(self.instance_id)

    async def requests(self) -> list[Request]:
        return await self._manager.get_requests(self.instance_id)

    async def stop(
        self, *, reason: str | None = None, grace: timedelta | float | str | None = None, keep_state: bool = False
    ) -> TerminationResult:
        options: dict[str, Any] = {"reason": reason, "persist_final_state": keep_state}
        if grace is not None:
            options["graceful_timeout"] = grace
        return await self._manager.terminate(self.instance_id, TerminationOptions(**options))

    async def ended(self) -> AgentInstance:
        """Wait until it is terminated, or failed with no restart to come."""
        async with self.events(options=ObservationOptions(include_reports=False)) as events:
            async for _ in events:
                pass  # the stream ends with the instance
        return await self.record()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop it, unless it has ended already."""
        if (await self.record()).is_active:
            await self.stop(reason="its block has ended" if error is None else f"its block raised {error!r}"[:200])


class Start:
    """A spawn that is about to happen: `await` it, or `async with` it."""

    def __init__(self, spawn: Callable[[], Coroutine[Any, Any, AgentHandle]]) -> None:
        self._spawn = spawn
        self._handle: AgentHandle | None = None

    def __await__(self) -> Generator[Any, None, AgentHandle]:
        return self._spawn().__await__()

    async def __aenter__(self) -> AgentHandle:
        self._handle = await self._spawn()
        return self._handle

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._handle is not None:
            await self._handle.__aexit__(kind, error, trace)
