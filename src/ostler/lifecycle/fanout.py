"""From the log to everybody who looks. Each event is read and decoded once, however many watch.

The log is the truth, and a commit only wakes this up. An observer that does not keep up loses the oldest of its
own buffer and is told so; nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from uuid import UUID

from ostler.errors import CursorGoneError, OstlerError
from ostler.model import AgentEvent, AgentState, AgentStateChangedEvent, Event, EventsMissed
from ostler.seams import Clock
from ostler.store import Store
from ostler.store.base import PAGE, EventPage

Wanted = Callable[[Event], bool]

_RETRY_SECONDS = 1.0
#: Events that are handed out without letting those who watch read them; less than a usual buffer has room for.
_AT_ONCE = 50


class Buffer:
    """What one observer has not read yet; never more than its capacity."""

    __slots__ = (
        "__weakref__",
        "_capacity",
        "_events",
        "_missed",
        "_missed_from",
        "_over",
        "_ready",
        "after",
        "instance_id",
    )

    def __init__(self, instance_id: UUID | None, capacity: int) -> None:
        self.instance_id = instance_id
        #: What is no later than this is known already.
        self.after = 0
        self._capacity = capacity
        self._events: deque[Event] = deque()
        self._missed = 0
        self._missed_from = 0
        self._over = False
        self._ready: asyncio.Future[None] | None = None

    @property
    def missed(self) -> int:
        return self._missed

    def put(self, event: Event) -> bool:
        """Whether all is kept; False when the oldest had to go."""
        dropped = len(self._events) >= self._capacity
        if dropped:
            oldest = self._events.popleft()
            self._missed_from = self._missed_from or oldest.sequence
            self._missed += 1
        self._events.append(event)
        self._wake()
        return not dropped

    def close(self) -> None:
        """Nothing more will come."""
        self._over = True
        self._wake()

    async def get(self) -> Event | EventsMissed | None:
        """The next, or what was missed before it; None at the end."""
        while not self._events:
            if self._over:
                return None
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready
        if self._missed:
            gap = EventsMissed(instance_id=self.instance_id, count=self._missed, first_sequence=self._missed_from)
            self._missed = self._missed_from = 0
            return gap
        return self._events.popleft()

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)


class Fanout:
    def __init__(self, store: Store, clock: Clock, note_drops: Callable[[int], None]) -> None:
        self._store = store
        self._clock = clock
        self._note_drops = note_drops
        #: Events that slow observers lost and nobody has counted yet.
        self._dropped = 0
        #: Up to here everything has been delivered.
        self.cursor = 0
        #: By instance; None holds those who look at a whole workspace. An observer that is let go leaves by itself.
        self._watchers: dict[UUID | None, dict[int, tuple[weakref.ref[Buffer], UUID, Wanted]]] = {}
        self._woken = asyncio.Event()
        self._told = False
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._over = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            self._told = False
            self._woken.set()

        def committed(_sequence: int) -> None:  # on the writer's thread
            if not self._told:
                self._told = True
                with contextlib.suppress(RuntimeError):  # the loop has closed; nobody is left to be told
                    loop.call_soon_threadsafe(wake)

        self._unsubscribe = self._store.subscribe(committed)
        self.cursor = (await self._store.head()).sequence
        self._task = loop.create_task(self._follow(), name="ostler-fanout")

    async def close(self) -> None:
        """Deliver what is committed, then end every stream."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._over = True
        if self._task is not None:
            self._woken.set()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for group in list(self._watchers.values()):
            for ref, _, _ in list(group.values()):
                if (buffer := ref()) is not None:
                    buffer.close()
        self._watchers.clear()

    def attach(self, buffer: Buffer, workspace_id: UUID, wanted: Wanted) -> None:
        """From the present cursor on."""
        if self._over:
            buffer.close()
            return
        group = self._watchers.setdefault(buffer.instance_id, {})
        key = id(buffer)
        instance_id = buffer.instance_id
        ref = weakref.ref(buffer, lambda _: self._leave(instance_id, key))
        group[key] = (ref, workspace_id, wanted)

    def detach(self, buffer: Buffer) -> None:
        self._leave(buffer.instance_id, id(buffer))

    def _leave(self, instance_id: UUID | None, key: int) -> None:
        group = self._watchers.get(instance_id)
        if group is not None:
            group.pop(key, None)
            if not group:
                del self._watchers[instance_id]

    @property
    def watching(self) -> int:
        return sum(len(group) for group in list(self._watchers.values()))

    async def _follow(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                await self._drain()
            except CursorGoneError as error:
                self.cursor = error.horizon
                self._woken.set()
            except OstlerError:  # a store that cannot be read now; no commit need come to wake us again
                if self._over:
                    return
                self._clock.call_later(_RETRY_SECONDS, self._woken.set)
            if self._over and not self._woken.is_set():
                return

    async def _drain(self) -> None:
        while True:
            if not self._watchers:
                self.cursor = max(self.cursor, self._store.newest)  # delivered to nobody, so nobody need read it
                return
            page = await self._store.read_page(self.cursor)
            await self._hand_out(page)
            if self._dropped:
                self._note_drops(self._dropped)  # once for all of them: who never reads must cost others little
                self._dropped = 0
            if len(page.events) < PAGE:
                return  # a commit since then has woken us again
            await asyncio.sleep(0)

    async def _hand_out(self, page: EventPage) -> None:
        """A few at a time: what came in one commit must not be more than one who reads as it comes can keep."""
        for first in range(0, len(page.events), _AT_ONCE):
            if first:
                await asyncio.sleep(0)
            few = page.events[first : first + _AT_ONCE]
            # Cursor and delivery move together, without a pause between them: whoever attaches now gets what follows.
            self.cursor = few[-1].sequence
            for event in few:
                self._deliver(event)
        self.cursor = page.cursor

    def _deliver(self, event: Event) -> None:
        if not isinstance(event, AgentEvent):
            return
        for key in (event.instance_id, None):
            group = self._watchers.get(key)
            if not group:
                self._watchers.pop(key, None)  # all who looked were let go
                continue
            over = key is not None and is_last(event)
            for ref, workspace_id, wanted in list(group.values()):
                buffer = ref()
                if buffer is None or (key is None and event.workspace_id != workspace_id):
                    continue  # whoever looks at one instance was asked for its permission to that
                if event.sequence > buffer.after and wanted(event) and not buffer.put(event):
                    self._dropped += 1
                if over:
                    buffer.close()
            if over:
                self._watchers.pop(key, None)


def is_last(event: Event) -> bool:
    """Whether the stream of its instance ends here. A terminated one says one thing more after its last move."""
    if event.event_type == "agent_terminated":
        return True
    return isinstance(event, AgentStateChangedEvent) and event.is_final and event.new_state is not AgentState.TERMINATED
