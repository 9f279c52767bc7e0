"""The brains of one run that live as instances of a manager: spawned when they join, ended when they leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid5

from ostler.agents.failures import MAX_MESSAGE
from ostler.errors import (
    AgentExecutionError,
    AgentGoneError,
    InvalidOperationError,
    OstlerError,
    StaleWriterError,
    StoreError,
)
from ostler.lifecycle import AgentLifecycleManager
from ostler.model import AgentInstance, IsolationLevel, SpawnRequest, clipped
from ostler.seams import Clock, Deadline, SystemClock
from ostler.simulation.answers import Failed, failure, overdue
from ostler.simulation.brains import Managed
from ostler.simulation.housing import (
    answered,
    definition_of,
    each,
    ended,
    fits,
    instances_of,
    is_usable,
    mourned,
    number_of,
    request_for,
    spawned,
)
from ostler.simulation.members import Member
from ostler.simulation.telling import SimulationLog
from ostler.simulation.view import AgentView

#: One that was called off has so long to heed that before the turn goes on without it.
_HEED = timedelta(milliseconds=100)
#: How long closing waits for those that did not.
_CLOSE_SECONDS = 1.0
_IN_PROGRAM = frozenset({IsolationLevel.NONE, IsolationLevel.THREAD})


@dataclass(eq=False, slots=True)
class _Box:
    """The place of one agent; who stands in it may change."""

    name: str
    managed: Managed
    instance_id: UUID | None = None
    #: The start of it that was seen last, and whether a caller has found that one dead.
    attempt: int = 0
    gone: bool = False
    generation: int = 1
    #: Why nobody stands in it.
    failure: Failed | None = None
    turn: int = -1
    tries: int = 0
    #: A call that was called off and goes on all the same.
    leaving: asyncio.Task[Any] | None = None

    def take_in(self, record: AgentInstance) -> None:
        self.instance_id, self.attempt, self.gone, self.failure = record.instance_id, record.attempt, False, None


class Stable:
    """Knows its agents by their numbers. What fails is told in the answer and logged; it does not end the run."""

    def __init__(
        self,
        manager: AgentLifecycleManager,
        run_id: UUID,
        log: SimulationLog | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._manager = manager
        self._run_id = run_id
        self._log = log or SimulationLog()
        self._clock = clock or SystemClock()
        self._boxes: dict[int, _Box] = {}
        #: Those of this run that lived before it was taken up here; None while nobody has looked.
        self._found: dict[int, list[AgentInstance]] | None = None
        self._strays: set[asyncio.Task[Any]] = set()
        self._closed = False

    def instances(self) -> dict[int, UUID]:
        return {number: box.instance_id for number, box in self._boxes.items() if box.instance_id is not None}

    # --- coming ---------------------------------------------------------------------------------

    async def house(self, members: Iterable[Member]) -> dict[int, Failed]:
        """See to it that every managed brain among them has a living instance; who has none, and why.

        Those that a run before a crash has left alive are used again. One that has died for good is replaced.
        """
        if self._closed:
            raise InvalidOperationError("the managed brains of this run are let go of; take the run up again")
        members = list(members)
        wanted = [member for member in members if isinstance(member.agent, Managed)]
        await self.retire(self._exchanged(members))
        if not wanted:
            return {}
        if self._found is None:
            self._found = await self._look()
        failures: dict[int, Failed] = {}

        async def one(member: Member) -> None:
            box = self._boxes.setdefault(member.number, _Box(member.name, member.agent))
            try:
                if not await self._is_housed(box):
                    await self._spawn(member, box)
            except Exception as error:  # noqa: BLE001 - one that cannot live must not keep the others from it
                failures[member.number] = box.failure = _failed(error)

        await each(one, [member for member in wanted if not await self._is_well(member)])
        return failures

    def _exchanged(self, members: Iterable[Member]) -> list[int]:
        """Those who were given another brain."""
        boxes = self._boxes
        return [one.number for one in members if one.number in boxes and boxes[one.number].managed != one.agent]

    async def _look(self) -> dict[int, list[AgentInstance]]:
        found: dict[int, list[AgentInstance]] = {}
        async for record in instances_of(self._manager, self._run_id):
            found.setdefault(number_of(record), []).append(record)
        return found

    async def _is_well(self, member: Member) -> bool:
        """As it was last turn; for nearly all, and at little cost."""
        box = self._boxes.get(member.number)
        return box is not None and not box.gone and await self._is_housed(box)

    async def _is_housed(self, box: _Box) -> bool:
        record = None
        if box.instance_id is not None and box.gone:
            record = await mourned(self._manager, self._clock, box.instance_id, box.attempt)
        elif box.instance_id is not None:
            record = await self._manager.get_instance(box.instance_id)
        if record is None or not await is_usable(self._manager, record):
            box.instance_id = None
            return False
        box.take_in(record)
        return True

    async def _spawn(self, member: Member, box: _Box) -> None:
        definition_id = definition_of(self._manager.registry, box.managed.definition)
        request = request_for(member, box.managed, self._run_id, definition_id)
        if await self._took_up(box, request, member.number):
            return
        made, box.generation = await spawned(self._manager, request, self._run_id, member.number, box.generation)
        if made is None:
            raise InvalidOperationError(
                f"{box.generation - 1} earlier instances of {member.name} have ended and no new one was started yet; "
                "the next turn goes on from there"
            )
        box.take_in(made)

    async def _took_up(self, box: _Box, request: SpawnRequest, number: int) -> bool:
        """Use the newest that lives from before and is what is wanted; the others are in the way and end."""
        taken = False
        for record in (self._found or {}).pop(number, ()):
            if not await is_usable(self._manager, record):
                continue
            if taken or not fits(record, request):
                await self._end((record.instance_id, box.name))
            else:
                box.take_in(record)
                taken = True
        return taken

    # --- asking ---------------------------------------------------------------------------------

    async def ask(self, member: Member, view: AgentView, limit: timedelta) -> Any | Failed:
        """Its decision, or why there is none. Asked again for the same turn after a crash, it is not done twice."""
        box = self._boxes.get(member.number)
        if box is None or box.instance_id is None:
            unknown = f"{member.name} has no instance to ask; house it first"
            return (box.failure if box else None) or Failed(False, "AgentNotFoundError", unknown)
        task = asyncio.create_task(self._ask(box, box.instance_id, view), name="ostler-managed-brain")
        try:
            async with Deadline(self._clock, limit):
                await asyncio.wait([task])
        except TimeoutError:
            if not task.done():
                view.closed = True
                await self._call_off(box, task)
                return overdue(limit.total_seconds())
        except asyncio.CancelledError:
            view.closed = True
            self._let_go(box, task)
            raise
        return _outcome(task, box, view)

    async def require_owner(self) -> None:
        """Raise where no agent can be to blame: its manager is closed, or was replaced and may not know it yet."""
        self._manager.require_open()
        store = self._manager.store
        with contextlib.suppress(StoreError):  # nobody can tell now; the failures stand as they are
            head = await store.head()
            if head.epoch != store.epoch:
                raise StaleWriterError(
                    f"another owner has taken over this store (epoch {head.epoch}, this manager has {store.epoch}), so "
                    "its agents cannot be asked; take the run up there, or open the manager again"
                )

    async def _ask(self, box: _Box, instance_id: UUID, view: AgentView) -> Any:
        box.turn, box.tries = view.turn, (box.tries + 1 if box.turn == view.turn else 1)
        name = uuid5(self._run_id, f"{view.turn}/{view.number}/{box.tries}")
        request = view.as_request()
        shared = box.managed.isolation in _IN_PROGRAM
        if shared:
            request = json.loads(json.dumps(request, allow_nan=False))  # a copy: the state is not its to change
        if box.leaving is not None:
            await asyncio.wait([box.leaving])  # it thinks of one turn at a time
            box.leaving = None
        answer = await answered(self._manager, instance_id, request, name)
        return _as_json(answer) if shared else answer

    async def _call_off(self, box: _Box, task: asyncio.Task[Any]) -> None:
        """The time of others is not its to waste: what does not end now ends by itself, or by its manager's force."""
        self._let_go(box, task)
        with contextlib.suppress(TimeoutError):
            async with Deadline(self._clock, _HEED):
                await asyncio.wait([task])

    def _let_go(self, box: _Box, task: asyncio.Task[Any]) -> None:
        if box.leaving is None or box.leaving.done():
            box.leaving = task
        self._strays.add(task)
        task.add_done_callback(self._came_in)
        task.cancel()

    def _came_in(self, task: asyncio.Task[Any]) -> None:
        self._strays.discard(task)
        if not task.cancelled():
            task.exception()  # looked at; nobody waits for it

    # --- going ----------------------------------------------------------------------------------

    async def retire(self, numbers: Iterable[int]) -> None:
        """End the instances of agents that have left. What does not go is logged."""
        going = [box for number in numbers if (box := self._boxes.pop(number, None)) is not None]
        await each(self._end, [(box.instance_id, box.name) for box in going if box.instance_id is not None])

    async def sweep(self, members: Iterable[Member]) -> int:
        """After a crash: end what belongs to this run, but to none of these. How many that were."""
        kept = {member.number for member in members if isinstance(member.agent, Managed)}
        orphans = []
        async for record in instances_of(self._manager, self._run_id):
            number = number_of(record)
            box = self._boxes.get(number)
            current = box.instance_id if box else None
            if number not in kept or current not in (None, record.instance_id):
                orphans.append((record.instance_id, record.name or str(number)))
        await each(self._end, orphans)
        return len(orphans)

    async def close(self, *, keep: bool = False) -> None:
        """End all of them, or leave them for whoever takes up the run."""
        if self._closed:
            return
        self._closed = True
        if not keep:
            await self.retire(list(self._boxes))
            if self._found is not None:
                await self._sweep_up()
        self._boxes.clear()
        if self._strays:
            await asyncio.wait(list(self._strays), timeout=_CLOSE_SECONDS)

    async def _sweep_up(self) -> None:
        """Also one whose start was called off so late that nobody has heard of it."""
        try:
            await self.sweep(())
        except OstlerError as error:
            self._log.warning("managed_brain_left", agent_name="", reason=str(error))

    async def _end(self, who: tuple[UUID, str]) -> None:
        instance_id, name = who
        reason = await ended(self._manager, instance_id)
        if reason is not None:
            self._log.warning("managed_brain_left", agent_name=name, reason=reason)


def _outcome(task: asyncio.Task[Any], box: _Box, view: AgentView) -> Any | Failed:
    if task.cancelled():
        return Failed(False, "CancelledError", "the request was called off by somebody else")
    error = task.exception()
    if error is None:
        return task.result()
    box.gone = box.gone or isinstance(error, AgentGoneError)
    view.closed = view.closed or isinstance(error, TimeoutError)
    return _failed(error)


def _failed(error: BaseException) -> Failed:
    if isinstance(error, TimeoutError):
        return Failed(True, "TimeoutError", clipped(str(error), MAX_MESSAGE))
    if isinstance(error, AgentExecutionError):
        kind = error.exception_type or type(error).__name__
        return Failed(False, kind.rpartition(".")[2], clipped(str(error), MAX_MESSAGE))
    return failure(error)


def _as_json(answer: Any) -> Any:
    """What an agent in this very program answers, as it would come from another."""
    try:
        return json.loads(json.dumps(answer, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise AgentExecutionError(f"its decision must be JSON values: {error}", exception_type="TypeError") from error
