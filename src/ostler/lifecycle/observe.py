"""Look at an agent as it lives: from now on, or from a place in its history."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self
from uuid import UUID

from ostler.errors import ValidationError
from ostler.lifecycle.doors import Asker, enter, reach, require_kind
from ostler.lifecycle.fanout import Buffer, Fanout, Wanted
from ostler.lifecycle.house import House
from ostler.model import (
    INACTIVE_STATES,
    AgentErrorEvent,
    AgentEvent,
    AgentHealthChangedEvent,
    AgentMetricsUpdatedEvent,
    AgentProgressEvent,
    AgentRestartingEvent,
    AgentSignalEvent,
    AgentState,
    Event,
    EventsMissed,
    Fault,
    ObservationOptions,
    Permission,
    WaitKind,
    shown,
)
from ostler.model.validation import whole_number

Seen = AgentEvent | EventsMissed


class Observation(AsyncIterator[Seen]):
    """A stream of events of one instance, or of all in the workspace. Ends when the instance does.

    It listens from the moment it is made. Use it with `async for`; leave early with `aclose` or `async with`.
    """

    def __init__(
        self,
        house: House,
        fanout: Fanout,
        asker: Asker,
        instance_id: UUID | None,
        options: ObservationOptions | None = None,
        after: int | None = None,
    ) -> None:
        house.require_loop()
        self._house = house
        self._fanout = fanout
        self._asker = asker
        self._instance_id = instance_id
        self._options = ObservationOptions.default() if options is None else options
        require_kind("options", self._options, ObservationOptions)
        if instance_id is not None:
            require_kind("instance_id", instance_id, UUID)
        self._options.validate().require()
        start = None if after is None else whole_number(after)
        if after is not None and (start is None or start < 0):
            bound = "must be 0 or the number of an event"
            raise ValidationError([Fault(field="after", bound=bound, value=shown(after))])
        # What is committed is past, also what the fan-out has not come to yet.
        self._seen = max(fanout.cursor, house.store.newest) if start is None else start
        self._wanted = wanted_by(self._options)
        self._buffer = Buffer(instance_id, self._options.buffer_capacity)
        self._live = start is None
        self._admitted = False
        #: Looked at once, when it begins to listen; later its end is heard.
        self._may_be_over = True
        self._page: list[Event] = []
        self._closed = False
        if self._live:
            self._attach()

    def _attach(self) -> None:
        self._buffer.after = self._seen
        self._fanout.attach(self._buffer, self._asker.workspace_id, self._wanted)

    async def __anext__(self) -> Seen:
        if self._closed:
            raise StopAsyncIteration
        try:
            if not self._admitted:
                await self._admit()
            found = await self._next()
        except Exception:
            self._leave()
            raise  # a step that was only cancelled can be taken again
        if found is None:
            self._leave()
            raise StopAsyncIteration
        return found

    async def _admit(self) -> None:
        """Asked on the first step, for asking takes time and listening had to begin at once."""
        if self._instance_id is None:
            await enter(self._house, self._asker, Permission.AGENTS_READ, "events")
        else:
            await reach(self._house, self._asker, self._instance_id, Permission.AGENTS_READ)
        self._admitted = True  # not before: a step that is cancelled here is taken again, and asks again

    async def _end_if_over(self, instance_id: UUID) -> None:
        """Where it had ended before, nothing will come. Where it ended since, its end is on the way."""
        if await self._is_over(instance_id):
            since = await self._house.store.read_page(self._seen, instance_id=instance_id, limit=1)
            if not since.events:
                self._buffer.close()

    async def _is_over(self, instance_id: UUID) -> bool:
        """A return that was decided on stands in the store since the very commit that says failed."""
        store = self._house.store
        record = await store.get_instance(instance_id)
        if record is None or record.state is not AgentState.FAILED:
            return record is None or record.state in INACTIVE_STATES
        waits = await store.open_waits(instance_id=instance_id)
        if any(wait.kind is WaitKind.BACKOFF for wait in waits):
            return False
        now = await store.get_instance(instance_id)  # it may have come back between the two questions
        return now is None or now.version == record.version

    async def _next(self) -> Seen | None:
        while not self._live:
            while self._page:
                event = self._page.pop(0)
                if isinstance(event, AgentEvent) and self._wanted(event):
                    return event
            await self._read_on()
        if self._may_be_over and self._instance_id is not None:
            await self._end_if_over(self._instance_id)
            self._may_be_over = False
        while True:
            found = await self._buffer.get()
            if found is None or isinstance(found, EventsMissed | AgentEvent):
                return found

    async def _read_on(self) -> None:
        """History page by page, until it has caught up with the present; then listen."""
        space = self._asker.workspace_id if self._instance_id is None else None
        page = await self._house.store.read_page(self._seen, workspace_id=space, instance_id=self._instance_id)
        self._seen = page.cursor
        self._page = list(page.events)
        if self._page or self._seen < self._fanout.cursor:
            return
        self._live = True
        self._attach()

    def _leave(self) -> None:
        self._closed = True
        self._fanout.detach(self._buffer)

    async def aclose(self) -> None:
        self._leave()
        self._buffer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def wanted_by(options: ObservationOptions) -> Wanted:
    """Which events these options ask for. Knows the options only, so that an observer can be let go of."""

    def wanted(event: Event) -> bool:
        match event:
            case AgentMetricsUpdatedEvent():
                return options.include_metrics
            case AgentHealthChangedEvent():
                return options.include_health_checks
            case AgentErrorEvent():
                return options.include_errors
            case AgentRestartingEvent():
                return options.include_restarts
            case AgentProgressEvent() | AgentSignalEvent():
                return options.include_reports
            case AgentEvent():
                return options.include_state_changes
            case _:
                return False

    return wanted
