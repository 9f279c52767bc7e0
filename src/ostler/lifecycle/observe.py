"""Observers: every event reaches each of them once, in order; one that is too slow is told what it missed."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self
from uuid import UUID

from ostler.aio import first_of
from ostler.clock import Clock
from ostler.model.events import (
    AgentErrorEvent,
    AgentEvent,
    AgentHealthChangedEvent,
    AgentMetricsUpdatedEvent,
    AgentProgressEvent,
    AgentRestartingEvent,
    AgentSignalEvent,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    AgentWaitEndedEvent,
    AgentWaitOpenedEvent,
    CrewEvent,
    Event,
    EventsMissed,
    TaskEvent,
)
from ostler.model.instance import AgentInstance
from ostler.model.query import ObservationOptions
from ostler.model.states import INACTIVE_STATES, AgentState
from ostler.model.wait import WaitKind
from ostler.store import events as log
from ostler.store import moves, waits
from ostler.store.events import EventPage
from ostler.store.store import Store
from ostler.store.transaction import Reader

EventFilter = Callable[[Event], bool]
Seen = AgentEvent | TaskEvent | CrewEvent | EventsMissed
#: Events handed out before those who read them get a turn; less than a usual buffer holds.
_AT_ONCE = 50


class Buffer:
    """What one observer has not read yet; never more than its capacity."""

    __slots__ = ("__weakref__", "_capacity", "_events", "_missed", "_missed_from", "_over", "_ready", "after", "key")

    def __init__(self, key: UUID | None, capacity: int) -> None:
        #: The instance; None for a whole workspace.
        self.key = key
        #: Events up to this number are known already.
        self.after = 0
        self._capacity = capacity
        self._events: deque[Event] = deque()
        self._missed = 0
        self._missed_from = 0
        self._over = False
        self._ready: asyncio.Future[None] | None = None

    def put(self, event: Event) -> bool:
        """False when the oldest event had to go."""
        dropped = len(self._events) >= self._capacity
        if dropped:
            oldest = self._events.popleft()
            if oldest.sequence:  # a live event without a number cannot be read again, so it is no loss to report
                self._missed_from = self._missed_from or oldest.sequence
                self._missed += 1
        self._events.append(event)
        self._wake()
        return not dropped

    def close(self) -> None:
        self._over = True
        self._wake()

    async def get(self) -> Event | EventsMissed | None:
        """The next event, or what was missed before it; None at the end."""
        while (item := self.get_ready()) is None and not self._over:
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready
        return item

    def get_ready(self) -> Event | EventsMissed | None:
        """As `get`, without waiting; None where nothing has come."""
        if not self._events:
            return None
        if self._missed:
            gap = EventsMissed(instance_id=self.key, count=self._missed, first_sequence=self._missed_from)
            self._missed = self._missed_from = 0
            return gap
        return self._events.popleft()

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)


class Fanout:
    """Hands the events of each commit to the observers, on the loop of the manager."""

    def __init__(self, note_drops: Callable[[int], None]) -> None:
        self._note_drops = note_drops
        #: Everything up to this number has been delivered.
        self.cursor = 0
        #: By instance, and under None those of whole workspaces. An observer that is dropped leaves by itself.
        self._observers: dict[UUID | None, dict[int, tuple[weakref.ref[Buffer], UUID, EventFilter]]] = {}
        self._unsubscribe: Callable[[], None] | None = None
        self._pending: deque[Event] = deque()
        self._delivering = False
        self._over = False

    async def start(self, store: Store) -> None:
        loop = asyncio.get_running_loop()

        def committed(events: Sequence[Event]) -> None:  # on the writer's thread
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(self.publish, events)

        self._unsubscribe = store.subscribe(committed)
        self.cursor = await store.read(log.newest_sequence)

    def close(self) -> None:
        """Deliver what is pending, then end every stream."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        while self._pending:
            self._deliver(self._pending.popleft())
        self._over = True
        for group in list(self._observers.values()):
            for ref, _, _ in list(group.values()):
                if (buffer := ref()) is not None:
                    buffer.close()
        self._observers.clear()

    def attach(self, buffer: Buffer, workspace_id: UUID, matches: EventFilter) -> None:
        """From the present cursor on."""
        if self._over:
            buffer.close()
            return
        key, number = buffer.key, id(buffer)
        ref = weakref.ref(buffer, lambda _: self._leave(key, number))
        self._observers.setdefault(key, {})[number] = (ref, workspace_id, matches)

    def detach(self, buffer: Buffer) -> None:
        self._leave(buffer.key, id(buffer))

    def _leave(self, key: UUID | None, number: int) -> None:
        group = self._observers.get(key)
        if group is not None:
            group.pop(number, None)
            if not group:
                self._observers.pop(key, None)

    def __len__(self) -> int:
        return sum(len(group) for group in self._observers.values())

    def publish(self, events: Iterable[Event]) -> None:
        """On the loop, in commit order. Events without a number are live only."""
        self._pending.extend(events)
        if not self._delivering:
            self._deliver_some()

    def _deliver_some(self) -> None:
        """A few at a time, so that one large commit does not overflow an observer that reads as it comes."""
        self._delivering = False
        for _ in range(min(_AT_ONCE, len(self._pending))):
            self._deliver(self._pending.popleft())
        if self._pending:
            self._delivering = True
            asyncio.get_running_loop().call_soon(self._deliver_some)

    def _deliver(self, event: Event) -> None:
        self.cursor = max(self.cursor, event.sequence)
        dropped = 0
        for key in (event.instance_id, None) if isinstance(event, AgentEvent) else (None,):
            over = key is not None and is_last(event)
            for ref, workspace_id, matches in list(self._observers.get(key, {}).values()):
                buffer = ref()
                if buffer is None or (key is None and event.workspace_id != workspace_id):
                    continue
                if (event.sequence > buffer.after or not event.sequence) and matches(event):
                    dropped += not buffer.put(event)
                if over:
                    buffer.close()
            if over:
                self._observers.pop(key, None)
        if dropped:
            self._note_drops(dropped)


def is_last(event: Event) -> bool:
    """Whether the stream of its instance ends here. A terminated one has an event after its last move."""
    if isinstance(event, AgentTerminatedEvent):
        return True
    return isinstance(event, AgentStateChangedEvent) and event.is_final and event.new_state is AgentState.FAILED


class LastEvent:
    """Wakes who looks at an instance again and again as soon as it has ended. It listens from the moment it is made."""

    def __init__(self, fanout: Fanout, clock: Clock, instance: AgentInstance) -> None:
        self._clock = clock
        self._has_come = False
        self._buffer = Buffer(instance.instance_id, 2)
        fanout.attach(self._buffer, instance.workspace_id, is_last)

    async def wait(self, seconds: float) -> None:
        """At most so long; after the last event always."""
        if self._has_come:
            await self._clock.sleep(seconds)
        else:
            await first_of(self._come(), self._clock.sleep(seconds))

    async def _come(self) -> None:
        await self._buffer.get()
        self._has_come = True


class Observation(AsyncIterator[Seen]):
    """A stream of events of one instance, or of a workspace. It ends when the instance does.

    It listens from the moment it is made. With `after` it first replays the log from there, then goes live without a
    gap. Leave early with `aclose` or `async with`.
    """

    def __init__(
        self,
        store: Store,
        fanout: Fanout,
        admit: Callable[[], Awaitable[tuple[UUID, UUID | None]]],
        options: ObservationOptions,
        after: int | None,
    ) -> None:
        """`admit` checks the permission at the first step, and gives the workspace and the instance."""
        self._store = store
        self._fanout = fanout
        self._admit = admit
        self._matches = filter_of(options)
        self._capacity = options.buffer_capacity
        # What is committed is past, also what the fan-out has not delivered yet.
        self._seen = max(fanout.cursor, store.newest) if after is None else after
        self._buffer: Buffer | None = None
        self._space: UUID | None = None
        self._instance_id: UUID | None = None
        self._may_be_over = True
        self._page: deque[Event] = deque()
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Seen:
        if self._closed:
            raise StopAsyncIteration
        try:
            event = await self._next()
        except Exception:
            self._leave()
            raise
        if event is None:
            self._leave()
            raise StopAsyncIteration
        return event

    async def _next(self) -> Seen | None:
        if self._space is None:
            self._space, self._instance_id = await self._admit()
        while self._buffer is None:
            while self._page:
                event = self._page.popleft()
                if isinstance(event, AgentEvent | TaskEvent | CrewEvent) and self._matches(event):
                    return event
            await self._read_on(self._space)
        if self._may_be_over and self._instance_id is not None:
            await self._close_if_over(self._instance_id, self._buffer)
            self._may_be_over = False
        while True:
            item = await self._buffer.get()
            if item is None or isinstance(item, AgentEvent | TaskEvent | CrewEvent | EventsMissed):
                return item

    def take_ready(self) -> list[Seen]:
        """What has come beside the last event and would be given without waiting; for a reader of whole bursts."""
        items: list[Seen] = []
        if self._buffer is not None and not self._closed:
            while (item := self._buffer.get_ready()) is not None:
                if isinstance(item, AgentEvent | TaskEvent | CrewEvent | EventsMissed):
                    items.append(item)
        return items

    async def _read_on(self, space: UUID) -> None:
        """History page by page until it has caught up with what was delivered; then listen at once."""
        page: EventPage = await self._store.read(
            log.read_events, self._seen, workspace_id=space, instance_id=self._instance_id
        )
        self._seen = max(page.cursor, self._seen)
        self._page.extend(page.events)
        if not page.events and self._seen >= self._fanout.cursor:
            self._buffer = Buffer(self._instance_id, self._capacity)
            self._buffer.after = self._seen
            self._fanout.attach(self._buffer, space, self._matches)

    async def _close_if_over(self, instance_id: UUID, buffer: Buffer) -> None:
        """Where the instance had ended before, nothing will come. Where it ends now, its last event is on the way."""
        if await self._store.read(is_over, instance_id):
            since = await self._store.read(log.read_events, self._seen, instance_id=instance_id, limit=1)
            if not since.events:
                buffer.close()

    def _leave(self) -> None:
        self._closed = True
        if self._buffer is not None:
            self._fanout.detach(self._buffer)

    async def aclose(self) -> None:
        self._leave()
        if self._buffer is not None:
            self._buffer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def is_over(reader: Reader, instance_id: UUID) -> bool:
    """Ended without a restart to come: one that was decided on is a wait in the very commit that says failed."""
    record: AgentInstance | None = moves.get_instance(reader, instance_id)
    if record is None or record.state not in INACTIVE_STATES:
        return record is None
    return all(wait.kind is not WaitKind.BACKOFF for wait in waits.open_waits(reader, instance_id=instance_id))


def filter_of(options: ObservationOptions) -> EventFilter:
    """Which events the options ask for."""

    def matches(event: Event) -> bool:
        match event:
            case AgentMetricsUpdatedEvent():
                return options.include_metrics
            case AgentHealthChangedEvent():
                return options.include_health_checks
            case AgentErrorEvent():
                return options.include_errors
            case AgentRestartingEvent():
                return options.include_restarts
            case AgentProgressEvent() | AgentSignalEvent() | AgentWaitOpenedEvent() | AgentWaitEndedEvent():
                return options.include_reports
            case AgentEvent() | TaskEvent() | CrewEvent():
                return options.include_state_changes
            case _:
                return False

    return matches
