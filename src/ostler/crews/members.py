"""The members of crews: each goes from one generation to the next, and what follows from its end is decided here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from ostler.crews.crew import Crew, Member, Work
from ostler.crews.rules import CrewRules, CrewShared, Generation, MemberLoopRules, MemberRules, run_generation
from ostler.crews.scope import Scope
from ostler.errors import InvalidOperationError, StoreError
from ostler.lifecycle.manager import AgentHandle
from ostler.loop.collaborators import LoopCollaborators
from ostler.model.crew import MemberState
from ostler.model.task import Task, TaskState
from ostler.policy.crew import CrewDecision, Ends, MemberEnd, decide_end, replaced_with
from ostler.tasks.attempt import MEMBER_REPLACED
from ostler.tasks.orchestrator import TaskOrchestrator

_log = logging.getLogger("ostler.crews")
#: Before an attempt goes on whose end could not be written.
_STORE_SECONDS = 5.0
#: Before one goes on whose task was changed by another.
_CHANGED_SECONDS = 0.05


class Members:
    """The part of the supervisor that runs members. Each is an asyncio task in one group."""

    def __init__(self, orchestrator: TaskOrchestrator, parts: LoopCollaborators) -> None:
        #: Handles of the live generations, by agent id.
        self.agents: dict[str, AgentHandle] = {}
        #: The crew of each member, by agent id; kept from one generation to the next.
        self.agent_types: dict[str, str] = {}
        #: What can be cancelled, by agent id: the present generation of each member.
        self.agent_contexts: dict[str, Scope] = {}
        #: No new work.
        self.draining = False
        self._orchestrator = orchestrator
        self._tasks = orchestrator.tasks
        self._shared = CrewShared(orchestrator.tasks)
        self._parts = parts
        self._scope = Scope()
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    async def _stop(self, crew: Crew, *, reason: str | None = None) -> None:
        """Stop one crew in order."""
        raise NotImplementedError

    async def _shut_down(self, reason: str) -> None:
        """Stop everything in order."""
        raise NotImplementedError

    def _begin(self, crew: Crew, number: int, generation: int, work: Work | None = None) -> None:
        now, agent_id = self._orchestrator.manager.now(), crew.id_of(number)
        member = Member(agent_id, number, Scope(self._scope), now, generation=generation, work=work)
        crew.members[agent_id] = member
        self.agent_types[agent_id] = crew.name
        self.agent_contexts[agent_id] = member.scope
        member.runner = self._spawn(self._live_safely(crew, member), agent_id)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        if self._group is None:
            raise InvalidOperationError("the supervisor is not open; use it with `async with`")
        return self._group.create_task(work, name=f"ostler-crew-{name}")

    async def _live_safely(self, crew: Crew, member: Member) -> None:
        """A fault of ours ends one generation of one member, not all crews; the member begins afresh."""
        try:
            await self._live(crew, member)
        except Exception as error:  # noqa: BLE001 - as the docstring says
            _log.exception("%s failed by a fault of Ostler; it begins afresh", member.agent_id)
            when = self._orchestrator.manager.now().astimezone().isoformat(sep=" ", timespec="seconds")
            self._tasks.failed_background[member.agent_id] = f"failed at {when} and began afresh: {error!r}"
            await asyncio.sleep(_STORE_SECONDS)
            if not self.draining and crew.has_place_for(member) and member.agent_id not in crew.members:
                self._begin(crew, member.number, member.generation)

    async def _live(self, crew: Crew, member: Member) -> None:
        """One generation after the other, until the crew has no place for the member."""
        try:
            while (work := await self._next_work(crew, member)) is not None:
                end = await self._generation(crew, member, work)
                if end is not None and not await self._go_on(crew, member, end):
                    break
        finally:
            self.agent_contexts.pop(member.agent_id, None)
            if member.is_live:
                crew.members.pop(member.agent_id, None)
                self.agent_types.pop(member.agent_id, None)
        # Where it got its place back while it was leaving, nothing may be stranded.
        if member.is_live and not self.draining and crew.has_place_for(member):
            self._begin(crew, member.number, member.generation)

    async def _next_work(self, crew: Crew, member: Member) -> Work | None:
        if member.work is not None:  # of an earlier program
            return member.work
        if self.draining or not crew.has_place_for(member):
            return None
        member.scope = self.agent_contexts[member.agent_id] = Scope(self._scope)
        member.offer = asyncio.get_running_loop().create_future()
        member.become(MemberState.IDLE, self._orchestrator.manager.now())
        self._wake.set()
        member.work = await member.offer
        if member.scope.is_cancelled and not self._scope.is_cancelled and crew.has_place_for(member):
            member.scope = self.agent_contexts[member.agent_id] = Scope(self._scope)  # it had nothing to lose yet
        return member.work

    async def _generation(self, crew: Crew, member: Member, work: Work) -> MemberEnd | None:
        """A fresh instance at one task. None where it neither was done nor erred: it waits, or was stopped."""
        task, member.generation = work.claim.task, work.claim.generation
        member.become(MemberState.WORKING, self._orchestrator.manager.now())

        def began(handle: AgentHandle) -> None:
            self.agents[member.agent_id] = handle

        generation = Generation(work.plan, member.generation, member.scope, began)
        rules: MemberRules = CrewRules(self._shared, generation)
        if task.loop is not None:
            rules = MemberLoopRules(self._parts, generation)
        try:
            after = await self._attempt(member, task, rules)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end every member
            _log.exception("%s at %s failed by a fault of Ostler", member.agent_id, task.key)
            return MemberEnd(member=member.agent_id, task=task.key, error=f"internal error: {error!r}")
        finally:
            self.agents.pop(member.agent_id, None)
            member.work = None
        spent = (after.cost_usd or 0.0) - (task.cost_usd or 0.0)
        if after.cost_usd is not None:
            member.cost_usd = (member.cost_usd or 0.0) + spent
        _log.info("%s of crew %s: %s is %s", member.agent_id, crew.name, after.key, after.state)
        if rules.error is None and after.state is not TaskState.COMPLETED:
            return None
        return MemberEnd(member=member.agent_id, task=task.key, error=rules.error)

    async def _attempt(self, member: Member, task: Task, rules: MemberRules) -> Task:
        """Taken up again from its record where the store could not write, or another wrote to the task meanwhile."""
        number = task.attempt
        while task.state is TaskState.RUNNING and task.attempt == number:
            try:
                after = await run_generation(self._orchestrator, task, rules, member.scope)
                if after is None or after.state is not TaskState.RUNNING or self.draining:
                    return after or await self._tasks.reload(task)
                _log.info("%s goes on with %s, which was changed meanwhile", member.agent_id, task.key)
                await asyncio.sleep(_CHANGED_SECONDS)
            except StoreError as error:
                if self.draining:
                    raise
                _log.warning("%s at %s: %s", member.agent_id, task.key, error)
                await asyncio.sleep(_STORE_SECONDS)
            task = await self._tasks.reload(task)
        return task

    # --- what follows ----------------------------------------------------------------------------

    async def _go_on(self, crew: Crew, member: Member, end: MemberEnd) -> bool:
        """Whether another generation follows."""
        now = self._orchestrator.manager.now()
        member.error = end.error
        if end.error is None:
            member.errors_in_a_row = 0
        else:
            member.errors_in_a_row += 1
            crew.note_error(now)
        decision = decide_end(crew.settings, end, tuple(crew.errors), member.errors_in_a_row, now)
        if not crew.is_up:
            return True  # it is stopping already, and has no place for this member
        if end.error is not None and decision.ends in {Ends.NOTHING, Ends.MEMBER}:
            self._replace_others(crew, member)
        return await self._apply(crew, member, decision)

    def _replace_others(self, crew: Crew, erred: Member) -> None:
        numbers = tuple(member.number for member in crew.members.values())
        replaced = replaced_with(crew.settings.strategy, erred.number, numbers)
        for member in crew.members.values():
            if member.number in replaced and member.work is not None:
                member.scope.cancel(MEMBER_REPLACED)

    async def _apply(self, crew: Crew, member: Member, decision: CrewDecision) -> bool:
        now = self._orchestrator.manager.now()
        if decision.ends is not Ends.NOTHING:
            member.become(MemberState.STOPPED, now)
            if decision.ends is Ends.EVERYTHING:
                self._spawn(self._shut_down(str(decision.reason)), "shut-down")
            elif decision.ends is Ends.CREW:
                _log.error("crew %s stops: %s", crew.name, decision.reason)
                self._spawn(self._stop(crew, reason=decision.reason), crew.name)
            return False
        if decision.delay:
            member.become(MemberState.BACKOFF, now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(decision.delay.total_seconds()):
                    await member.scope.cancelled.wait()
        return True
