"""`Supervisor`: keeps the members of crews at work, replaces them by their policies, and stops them in order.

Each member is an asyncio task in the supervisor's task group, and it alone sees the end of its agent: one death is one
restart. One more task hands work out; members that wait for it cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

from ostler.crews.crew import Crew, Member, Work
from ostler.crews.factory import GetConfig, MemberFactory, MemberPlan
from ostler.crews.members import Members
from ostler.crews.rules import cut_off
from ostler.definitions.project import ConfigFile
from ostler.errors import InvalidOperationError, OstlerError
from ostler.home import project_of
from ostler.loop.service import Loops
from ostler.model.access import Actor
from ostler.model.crew import CrewPolicy, CrewSettings, CrewView
from ostler.model.events import Event, TaskEvent
from ostler.model.task import Task, TaskState
from ostler.model.validation import fault
from ostler.store import crews as crew_store
from ostler.store import tasks as task_store
from ostler.tasks.attempt import CREW_STOPPED
from ostler.tasks.context import Taker
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.queue import LOOK_SECONDS, end_due_waits

_log = logging.getLogger("ostler.crews")
#: Who acts where no person does.
BY = Actor(name="crews")
#: How long attempts get to end in order before they are forced.
DRAIN_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
#: How long a retried task waits for another member than the one that failed it.
_PATIENCE = timedelta(minutes=1)
_MAX_COUNT = 1000
_SETTINGS_SECONDS = 1.0


class Supervisor(Members):
    """Use it with `async with`, which brings up the crews that it is given and stops them at the end.

    A program that decides itself what is up, such as the daemon, calls `open`, `up`, `stop` and `close`.
    """

    def __init__(
        self,
        orchestrator: TaskOrchestrator,
        crews: Mapping[str, CrewSettings] | None = None,
        *,
        get_config: GetConfig | None = None,
        refresh: Callable[[], object] | None = None,
        loops: Loops | None = None,
        project: str | None = None,
    ) -> None:
        """Without `crews` those of the settings are meant. `refresh` reads definition files before a member begins.
        `loops` are those that a task queue drives as well, which then ends their waits. `project` is the directory of
        the project whose crews these are, where that is not the project of the home; they work on its tasks only.
        """
        manager = orchestrator.manager
        home = manager.require_home()
        self._config = get_config or ConfigFile(project_of(home))
        self.factory = MemberFactory(
            manager.registry, self._config, home, crews=crews, refresh=refresh, project=project
        )
        self._own_loops = Loops(orchestrator) if loops is None else None
        super().__init__(orchestrator, (loops or Loops(orchestrator)).parts)
        self._space = manager.principal.workspace_id
        self.project = project
        self._place = crew_store.Place(self._space, project or "")
        self._crews: dict[str, Crew] = {}
        self._runner: asyncio.Task[None] | None = None
        #: Why everything was stopped by a policy.
        self.shutdown_reason: str | None = None
        #: Set when everything was.
        self.is_shut_down = asyncio.Event()
        #: Called when the settings declare other crews than before: which tasks belong to one may have changed.
        self.on_settings: Callable[[], None] = lambda: None

    @property
    def policy(self) -> Mapping[str, CrewPolicy]:
        """Of each declared crew, by name."""
        return self.factory.declared()

    # --- opening and closing ---------------------------------------------------------------------

    async def open(self, recovered: Sequence[Task] | None = None) -> None:
        """Bring up again what was up, and let each member go on with what it was at.

        `recovered` are attempts of an earlier program, where the caller has looked for them already.
        """
        self._tasks.takers.append(self._taker)
        self._tasks.on_room.append(self._wake.set)
        ready = asyncio.Event()
        self._runner = asyncio.get_running_loop().create_task(self._run(ready), name="ostler-crews")
        await ready.wait()
        under_way = await self._orchestrator.recover_agents() if recovered is None else recovered
        records = {row.name: row for row in await self._tasks.store.read(crew_store.list_crews, self._place)}
        for name in (name for name, row in records.items() if row.is_up):
            try:
                crew = self._crew(name, count=records[name].count)
            except OstlerError as error:
                _log.warning("crew %s does not come up again: %s", name, error)
                await self._write(name, {"is_up": False, "reason": str(error)}, act="crew.stop")
                await self._tasks.store.run(crew_store.tell_stopped, self._place, name)
                continue
            generations = await self._tasks.store.read(crew_store.generations, self._place, name)
            crew.is_up = True
            self._fill(crew, generations)
            for task in under_way:
                if task.crew == name and self._is_ours(task) and crew.number_of(str(task.member)):
                    self._take_up(crew, task, generations.get(str(task.member), 1))
        for task in under_way:
            if task.crew is not None and self._is_ours(task) and not self._is_taken_up(task):
                await cut_off(self._orchestrator, task, CREW_STOPPED)  # of a stop that was not finished
                await self._tasks.store.run(crew_store.tell_stopped, self._place, task.crew)
        self._wake.set()

    def _is_taken_up(self, task: Task) -> bool:
        crew = self._crews.get(str(task.crew))
        member = None if crew is None else crew.members.get(str(task.member))
        return member is not None and member.work is not None and member.work.claim.task.task_id == task.task_id

    def drain(self, reason: str) -> None:
        """No new work, and every agent is asked to end; what is up stays up for the next program."""
        self.draining = True
        self._scope.cancel(reason)

    async def close(self) -> None:
        """No new work. Members whose agents have ended write that; others are left to the next program."""
        self.draining = True
        with contextlib.suppress(ValueError):  # it was never opened
            self._tasks.takers.remove(self._taker)
            self._tasks.on_room.remove(self._wake.set)
        members = [member for crew in self._crews.values() for member in crew.members.values()]
        for member in members:
            member.give(None)
        runners = {member.runner for member in members if member.runner is not None and not member.runner.done()}
        if runners:
            await asyncio.wait(runners, timeout=0.0 if self._orchestrator.manager.keep_agents else _CLOSE_SECONDS)
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner

    async def __aenter__(self) -> Self:
        await self.open()
        try:
            await self.up()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop()
        finally:
            await self.close()

    async def _run(self, ready: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            background = {
                "the crews": self._hand_out,
                "the events of the crews": self._listen,
                "the settings of the crews": self._watch_settings,
            }
            for name, work in background.items():
                group.create_task(self._tasks.keep_running(name, work), name=f"ostler-{name}")
            ready.set()
            await asyncio.Event().wait()  # until it is cancelled, and all of the group with it

    # --- the verbs -------------------------------------------------------------------------------

    async def up(self, *names: str, by: Actor = BY) -> list[CrewView]:
        """Bring up these crews, or all that are declared, with as many members as the settings say."""
        if self.draining:
            raise InvalidOperationError("no crew comes up while everything is stopping; wait for the end of it")
        chosen = list(dict.fromkeys(names)) or list(self.factory.declared()) or [""]
        self.shutdown_reason = None
        self.is_shut_down.clear()
        for name in chosen:
            self.factory.plan(f"{name}-1", name)  # all of them are good before one of them is touched
        for name in chosen:
            crew = self._crew(name)
            await self._ended(crew)
            crew.is_up, crew.reason, crew.errors = True, None, []
            self._forget_stopped(crew)
            await self._write(name, {"is_up": True, "count": None, "reason": None}, act="crew.up", by=by)
            self._fill(crew, await self._tasks.store.read(crew_store.generations, self._place, name))
        self._wake.set()
        return [view for view in await self.list_crews() if view.name in chosen]

    async def stop(self, *names: str, force: bool = False, by: Actor = BY) -> list[CrewView]:
        """Stop these crews, or all, in order: no new work, ask, wait, force. `force` does not wait.

        Their tasks go back to the queue and have spent nothing.
        """
        for name in names:
            if name not in self._crews:
                self.factory.settings(name)
        named = [crew for name, crew in self._crews.items() if not names or name in names]
        chosen = [crew for crew in named if crew.is_up or crew.members]
        await asyncio.gather(*(self._stop(crew, force=force, by=by) for crew in chosen))
        return [crew.view(None, self.project) for crew in chosen]

    async def scale(self, name: str, count: int, *, by: Actor = BY) -> CrewView:
        """As many members as that, until the crew is brought up anew. Those that leave finish their task first."""
        if not 0 <= count <= _MAX_COUNT:
            raise fault("count", f"must be 0 to {_MAX_COUNT}", count)
        self.factory.settings(name)
        crew = self._crews.get(name)
        if crew is None or not crew.is_up:
            raise InvalidOperationError(f"crew {name} is not up; bring it up with `ostler crew up {name}`")
        await self._write(name, {"count": count}, act="crew.scale", by=by)
        crew.count = count
        self._fill(crew, await self._tasks.store.read(crew_store.generations, self._place, name))
        self._wake.set()
        return crew.view(None, self.project)

    async def reload(self) -> list[CrewView]:
        """Follow the settings now. Live members keep theirs; every new one reads them fresh."""
        await self._follow_settings()
        self._wake.set()
        return await self.list_crews()

    async def list_crews(self) -> list[CrewView]:
        """All that are declared or up."""
        records = {row.name: row for row in await self._tasks.store.read(crew_store.list_crews, self._place)}
        crews = {}
        for name, settings in self._declared().items():
            row = records.get(name)
            crews[name] = Crew(name, settings, settings.count, reason=None if row is None else row.reason)
        crews |= {name: crew for name, crew in self._crews.items() if crew.is_up or crew.members}
        return [crew.view(self.trouble, self.project) for crew in crews.values()]

    @property
    def trouble(self) -> str | None:
        """What is wrong with the file of the settings, with its line."""
        broken = self._config.trouble if isinstance(self._config, ConfigFile) else None
        return None if broken is None else str(broken)

    def _is_ours(self, task: Task) -> bool:
        return self._orchestrator.manager.projects.at(task.project).scope == self.project

    def owns(self, task: Task) -> bool:
        """Whether a crew works on it, so that the plain queue leaves it alone."""
        if not self._is_ours(task):
            return False
        if task.state is TaskState.RUNNING:
            return task.crew is not None and task.member is not None and task.crew in self._declared()
        if task.loop is not None:  # a person waits for it: without members the queue drives it
            return any(crew.is_up and crew.settings.selects(task) for crew in self._crews.values())
        return any(settings.selects(task) for settings in self._declared().values())

    def _taker(self, task: Task) -> Taker | None:
        """Of the crews that select a task, the one that is nearest to taking it."""
        names = [name for name, settings in self._declared().items() if settings.selects(task)]
        if not names or not self.owns(task):
            return None
        up = [name for name in names if name in self._crews and self._crews[name].is_up]
        name = (up or names)[0]
        crew = self._crews.get(name)
        members = [] if crew is None else list(crew.members.values())
        is_up = bool(up) and not self.draining
        return Taker(
            name=f"crew {name}",
            is_up=is_up,
            places=0 if crew is None else crew.count,
            at_work=tuple(member.work.claim.task.key for member in members if member.work is not None),
            trouble=None if crew is None else crew.trouble or (None if is_up else crew.reason),
            cure=f"`ostler crew {f'scale {name} 1` gives it a member' if is_up else f'up {name}` brings it up'}",
        )

    # --- crews -----------------------------------------------------------------------------------

    def _declared(self) -> Mapping[str, CrewSettings]:
        try:
            return self.factory.declared()
        except OstlerError:  # never good; `trouble` says what is wrong
            return {}

    def _crew(self, name: str, *, count: int | None = None) -> Crew:
        settings = self.factory.settings(name)
        crew = self._crews.setdefault(name, Crew(name, settings, settings.count))
        crew.settings = settings
        crew.count = settings.count if count is None else count
        return crew

    async def _write(self, name: str, changes: dict[str, Any], *, act: str, by: Actor = BY) -> None:
        await self._tasks.store.run(crew_store.put_crew, self._place, name, changes, act=act, by=by)

    async def _follow_settings(self) -> None:
        """What the file says now, for crews that are up."""
        declared = self._declared()
        for crew in [crew for crew in self._crews.values() if crew.is_up]:
            settings = declared.get(crew.name)
            if settings is None:
                if self.trouble is None:
                    self._spawn(self._stop(crew, reason="it is no longer declared in the settings"), crew.name)
                continue
            if settings != crew.settings:
                row = await self._tasks.store.read(crew_store.get_crew, self._place, crew.name)
                crew.settings = settings
                crew.count = settings.count if row is None or row.count is None else row.count
                self._fill(crew, await self._tasks.store.read(crew_store.generations, self._place, crew.name))

    def _fill(self, crew: Crew, generations: Mapping[str, int]) -> None:
        """Members for every place; those without one leave when they have no task."""
        for number in range(1, crew.count + 1):
            if crew.id_of(number) not in crew.members:
                self._begin(crew, number, generations.get(crew.id_of(number), 0))
        for member in crew.members.values():
            if member.is_waiting and not crew.has_place_for(member):
                member.give(None)

    def _take_up(self, crew: Crew, task: Task, generation: int) -> None:
        """An attempt of an earlier program goes on with the member that began it."""
        agent_id = str(task.member)
        number = crew.number_of(agent_id)
        work = Work(crew_store.Claim(task, generation), self.factory.plan(agent_id, crew.name, check=False))
        member = crew.members.get(agent_id)
        if member is None:
            self._begin(crew, number, generation, work)
        else:
            member.work = work

    async def _stop(self, crew: Crew, *, reason: str | None = None, force: bool = False, by: Actor = BY) -> None:
        """Its end is committed first, so that a killed program does not bring it up again."""
        was_up, crew.is_up = crew.is_up, False
        for member in crew.members.values():
            member.scope.cancel(force=force)
            if member.is_waiting:
                member.give(None)
        if was_up:
            crew.reason = reason
            await self._write(crew.name, {"is_up": False, "reason": reason}, act="crew.stop", by=by)
        if not await self._ended(crew, DRAIN_SECONDS):
            for member in crew.members.values():
                member.scope.cancel(force=True)
            await self._ended(crew)
        self._forget_stopped(crew)
        if was_up:
            await self._tasks.store.run(crew_store.tell_stopped, self._place, crew.name)

    def _forget_stopped(self, crew: Crew) -> None:
        for member in [member for member in crew.members.values() if not member.is_live]:
            del crew.members[member.agent_id]
            self.agent_types.pop(member.agent_id, None)

    async def _ended(self, crew: Crew, seconds: float | None = None) -> bool:
        """Wait until no member of a crew that is not up is at work."""
        if crew.is_up:
            return True
        current = asyncio.current_task()
        runners = {
            member.runner
            for member in crew.members.values()
            if member.runner is not None and member.runner is not current
        }
        pending = {runner for runner in runners if not runner.done()}
        if pending:
            _, pending = await asyncio.wait(pending, timeout=seconds)
        return not pending

    async def _shut_down(self, reason: str) -> None:
        """Everything stops in order, and says why."""
        _log.error("%s", reason)
        self.shutdown_reason = reason
        await asyncio.gather(*(self._stop(crew, reason=reason) for crew in self._crews.values()))
        self.is_shut_down.set()

    # --- handing out -----------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for event in self._orchestrator.manager.observe():
            if isinstance(event, TaskEvent) or not isinstance(event, Event):
                self._wake.set()

    async def _watch_settings(self) -> None:
        """A look at the file costs one stat; a change is followed without waiting for a task to move."""
        before = self._declared()
        while True:
            await self._tasks.clock.sleep(_SETTINGS_SECONDS)
            declared = self._declared()
            if declared != before:
                before = declared
                self._wake.set()
                self.on_settings()

    async def _hand_out(self) -> None:
        while True:
            self._wake.clear()
            wait = LOOK_SECONDS
            try:
                if self._own_loops is not None:
                    await self._own_loops.settle()
                wait = min(wait, await end_due_waits(self._orchestrator))
                if not self.draining:
                    await self._follow_settings()
                    await self._give_tasks()
            except OstlerError as error:
                _log.warning("crews: %s", error)
            except Exception:  # noqa: BLE001 - a fault of ours must not end every member
                _log.exception("crews: handing out failed; it is tried again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()

    async def _give_tasks(self) -> None:
        able = [crew for crew in self._crews.values() if crew.waiting()]
        if not able or not await self._tasks.manager.has_room():
            return

        def selects(task: Task) -> bool:
            return self._is_ours(task) and any(crew.settings.selects(task) for crew in able)

        for task in await self._tasks.store.read(task_store.claimable_tasks, self._space, 1000, selects=selects):
            can_wait = self._orchestrator.manager.now() - task.updated_at < _PATIENCE
            for crew in able:
                member = crew.choose(task, can_wait=can_wait) if crew.settings.selects(task) else None
                if member is not None:
                    await self._give(crew, member, task)
                    break

    async def _give(self, crew: Crew, member: Member, task: Task) -> None:
        member.is_chosen = True
        try:
            plan = self._plan(crew, member)
            if plan is None:
                return
            claim = await self._tasks.store.run(
                crew_store.claim_for_member,
                task,
                project=self._place.project,
                crew=crew.name,
                member=member.agent_id,
                agent=plan.settings.agent,
                by=BY,
            )
            if claim is not None:
                member.give(Work(claim, plan))
        finally:
            member.is_chosen = False
            if not crew.has_place_for(member):
                member.give(None)

    def _plan(self, crew: Crew, member: Member) -> MemberPlan | None:
        """Where no member can be begun, the tasks wait and a person is told."""
        try:
            plan = self.factory.plan(member.agent_id, crew.name)
        except OstlerError as error:
            if crew.trouble != str(error):
                crew.trouble = str(error)
                _log.warning("crew %s cannot begin a member: %s", crew.name, error)
            return None
        crew.trouble = None
        return plan
