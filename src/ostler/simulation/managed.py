"""Managed brains: instances of the lifecycle manager that decide for the agents of one run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from pydantic_core import from_json

from ostler.errors import AgentExecutionError, OstlerError, StaleWriterError, StoreError
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.attempt import RequestState
from ostler.model.instance import AgentInstance
from ostler.model.query import MAX_PAGE, GetInstancesFilter
from ostler.model.spawn import TerminationOptions
from ostler.model.states import AgentState
from ostler.simulation.ask import Failed, run_all
from ostler.simulation.brains import Managed
from ostler.simulation.membership import log_event
from ostler.simulation.schema import write_json
from ostler.simulation.state import Member
from ostler.simulation.view import AgentView

TAG = "simulation"
#: In the context of an instance: the run and the agent for which it decides.
RUN, NUMBER = "simulation_run", "simulation_number"
_IDLE = frozenset({AgentState.READY, AgentState.WAITING})
#: Instances that are started at a time.
_STARTS = 16
_LONGEST_REQUEST = timedelta(days=7)


class ManagedBrains:
    """Knows the instance of each agent by the agent's number."""

    def __init__(self, manager: AgentLifecycleManager, limit: timedelta) -> None:
        self.manager = manager
        self._limit = limit
        self._starts = asyncio.Semaphore(_STARTS)
        self._instances: dict[int, tuple[Managed, UUID]] = {}
        #: Why an agent has no instance.
        self._failures: dict[int, Failed] = {}
        self._looked = False
        self._ending: set[UUID] = set()
        self._background: set[asyncio.Future[Any]] = set()

    async def prepare(self, run_id: UUID, members: Sequence[Member]) -> None:
        """See that each of these agents has an idle instance. Its start has its own limit, `initialization_timeout`.

        An instance of this run that is not idle, or belongs to no agent, is ended: a killed program may have left it.
        """
        if self._looked and not members and not self._instances:
            return
        self._looked = True
        by_number = {member.number: member for member in members}
        idle: dict[int, UUID] = {}
        async for record in self._living(_tag(run_id)):
            number = int((record.context or {}).get(NUMBER, 0))
            held = self._instances.get(number)
            if number not in by_number:
                if held is not None and held[1] == record.instance_id:
                    continue  # its agent is paused
            elif number not in idle and held in (None, (by_number[number].agent, record.instance_id)):
                idle[number] = record.instance_id
                if await self._is_idle(record):
                    continue
                del idle[number]
            self._end(record.instance_id, TerminationOptions.immediate())
        self._failures = {}
        self._instances |= {number: (by_number[number].agent, instance_id) for number, instance_id in idle.items()}
        await run_all(self._start(run_id, member) for number, member in by_number.items() if number not in idle)
        if self._failures:
            await self.require_owner()

    async def _living(self, tag: str) -> AsyncIterator[AgentInstance]:
        query = GetInstancesFilter(tag=tag, limit=MAX_PAGE)
        while page := await self.manager.get_active_instances(query):
            for record in page:
                yield record
            query = query.evolve(before=page[-1].instance_id)

    async def _is_idle(self, record: AgentInstance) -> bool:
        if record.state not in _IDLE:
            return False
        return not await self.manager.get_requests(record.instance_id, state=RequestState.RUNNING)

    async def _start(self, run_id: UUID, member: Member) -> None:
        managed: Managed = member.agent
        context = {**managed.context, RUN: str(run_id), NUMBER: member.number}
        # A request has more time than the agent, which is timed out by the turn.
        timeout = min(max(self._limit * 2, timedelta(minutes=5)), _LONGEST_REQUEST)
        options: dict[str, Any] = {"timeout": timeout, "isolation": managed.isolation, **managed.options}
        options["tags"] = (TAG, _tag(run_id), *options.get("tags", ()))
        try:
            async with self._starts:
                start = self.manager.start(managed.definition, name=member.name, context=context, **options)
                self._instances[member.number] = (managed, UUID(str((await start).instance_id)))
        except OstlerError as error:
            self._instances.pop(member.number, None)
            self._failures[member.number] = Failed.of(error)

    async def ask(self, member: Member, view: AgentView) -> Any:
        """Its decision, or `Failed`. What it answered for this turn before a crash counts again.

        Cancelled when its time is over, it is replaced: the next turn begins with a new one, as after a resume.
        """
        if member.number in self._failures:
            return self._failures[member.number]
        text = write_json(view.as_request())
        request_id = f"{view.turn}/{hashlib.sha256(text).hexdigest()[:16]}"
        instance_id = self._instances[member.number][1]
        task = asyncio.ensure_future(self.manager.process(instance_id, from_json(text), request_id=request_id))
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            self._in_background(task)
            task.cancel()
            self._replace(member.number)
            raise
        error = task.exception()
        if error is None:
            # As it would come from another process, also where the agent runs in this one.
            return view.take_answer(json.loads(json.dumps(task.result(), allow_nan=False)))
        if isinstance(error, AgentExecutionError):
            kind = error.exception_type or type(error).__name__
            return Failed(False, kind.rpartition(".")[2], str(error))
        self._replace(member.number)
        return Failed(True, "TimeoutError", str(error)) if isinstance(error, TimeoutError) else Failed.of(error)

    async def require_owner(self) -> None:
        """Raise where agents are not to blame: the manager is closed, or another one owns the store."""
        try:
            await self.manager.get_statistics()
        except (StaleWriterError, StoreError):
            raise
        except OstlerError as error:
            raise StaleWriterError(f"the manager of this run cannot ask its agents: {error}") from error

    # --- leaving ---------------------------------------------------------------------------------

    def _replace(self, number: int) -> None:
        held = self._instances.pop(number, None)
        if held is not None:
            self._end(held[1], TerminationOptions.immediate())

    def retire(self, present: set[int]) -> None:
        """End the instances of agents that have left."""
        for number in [number for number in self._instances if number not in present]:
            self._end(self._instances.pop(number)[1], TerminationOptions(reason="its agent has left the simulation"))

    async def close(self) -> None:
        """End all instances of the run, and wait until they have ended."""
        for _, instance_id in self._instances.values():
            self._end(instance_id, TerminationOptions(reason="the simulation was closed"))
        self._instances.clear()
        while self._background:
            await asyncio.wait(set(self._background))

    def _end(self, instance_id: UUID, options: TerminationOptions) -> None:
        """In the background: a process that is hard to end does not hold up the turn."""
        if instance_id in self._ending:
            return
        self._ending.add(instance_id)
        self._in_background(asyncio.ensure_future(self._terminate(instance_id, options)))

    async def _terminate(self, instance_id: UUID, options: TerminationOptions) -> None:
        try:
            result = await self.manager.terminate(instance_id, options)
            reason = None if result.success else result.error_message
        except OstlerError as error:
            record = None
            with contextlib.suppress(OstlerError):
                record = await self.manager.get_instance(instance_id)
            reason = None if record is None or not record.is_active else str(error)
        if reason is not None:
            log_event(logging.WARNING, "managed_brain_left", instance_id=instance_id, reason=reason)

    def _in_background(self, task: asyncio.Future[Any]) -> None:
        self._background.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # no caller waits for it


def _tag(run_id: UUID) -> str:
    return f"run-{run_id.hex}"
