"""The way from an agent to its manager, inside one program: any thread may speak, one loop hears."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

from ostler.agents import AgentContext, Message, MetricReported, Progress, WaitAnswer, WaitAsked
from ostler.agents.context import CURRENT_CALL
from ostler.agents.messages import Voice
from ostler.clock import Clock
from ostler.errors import AgentBusyError, AgentGoneError
from ostler.isolation.base import Exit, Listener, StartPlan
from ostler.model.context import ContextData

#: So many may wait for the manager; beyond it the oldest news of no consequence make room.
MAX_WAITING = 1000
#: So much that counts may wait. It is never dropped, so an agent that says still more is refused.
MAX_WEIGHTY = 100_000
#: So many are delivered in one turn, so that one talkative agent does not keep the manager's loop from others; of
#: a longer backlog a quarter, so that it shrinks.
_PER_TURN = 250
_TOO_MUCH = "the agent says more than its manager can hear; say less, or wait in between"
_CLOSED = "the manager has detached from this agent and hears nothing more from it"

_log = logging.getLogger("ostler.isolation")


class Backlog:
    """What was said and is not heard yet, in order. News can make room without a search, however much else waits."""

    def __init__(self) -> None:
        self._count = 0
        self._news: deque[tuple[int, Message]] = deque()
        self._weighty: deque[tuple[int, Message]] = deque()

    def __len__(self) -> int:
        return len(self._news) + len(self._weighty)

    def add(self, message: Message) -> int:
        """How many had to make room for it."""
        self._count += 1
        if isinstance(message, Progress | MetricReported):
            self._news.append((self._count, message))
        elif len(self._weighty) < MAX_WEIGHTY:
            self._weighty.append((self._count, message))
        else:
            raise AgentBusyError(_TOO_MUCH)
        if len(self) > MAX_WAITING and self._news:
            self._news.popleft()
            return 1
        return 0

    def take(self) -> Message:
        """The oldest."""
        queues = [queue for queue in (self._news, self._weighty) if queue]
        return min(queues, key=lambda queue: queue[0][0]).popleft()[1]


def context_of(
    plan: StartPlan, clock: Clock, voice: Voice, write_log: Callable[[str], object] | None = None
) -> AgentContext:
    return AgentContext(
        instance_id=plan.instance_id,
        attempt=plan.attempt,
        definition_id=plan.manifest.id,
        name=plan.name,
        data=ContextData(plan.context),
        limits=plan.limits,
        clock=clock,
        voice=voice,
        directory=plan.workdir,
        owns_directory=plan.owns_workdir,
        env=plan.env,
        write_log=write_log,
    )


class Mailbox:
    """A `Voice` for one start. It belongs to one attempt; once closed it delivers nothing any more."""

    def __init__(self, home: asyncio.AbstractEventLoop, listener: Listener, attempt: int) -> None:
        self.attempt = attempt
        #: How many messages had to make room.
        self.dropped = 0
        self._next_said = 1
        self._home = home
        self._listener = listener
        self._lock = threading.Lock()
        self._closed = False
        #: The listener has enough until then; what is said meanwhile waits here.
        self._held: asyncio.Future[None] | None = None
        # Both are made when first needed: most agents are silent most of the time, and there are many of them.
        self._waiting: Backlog | None = None
        self._asking: set[asyncio.Task[Any] | None] | None = None

    def say(self, message: Message) -> None:
        with self._lock:
            if self._closed:
                return
            idle = self._waiting is None
            if self._waiting is None:
                self._waiting = Backlog()
            self.dropped += self._waiting.add(message)
        if idle:
            # The manager's loop may have closed: then there is no listener, and that is no fault of the agent.
            with contextlib.suppress(RuntimeError):
                self._home.call_soon_threadsafe(self._turn)

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        if self._closed or self._home.is_closed():
            raise AgentGoneError(_CLOSED)
        call = CURRENT_CALL.get()
        call_id = call.call_id if call is not None and isinstance(call.call_id, UUID) else None
        question = self._put(replace(wait, ask_id=uuid4(), call_id=call_id))
        if asyncio.get_running_loop() is self._home:
            return await question
        try:
            answer = asyncio.run_coroutine_threadsafe(question, self._home)
        except RuntimeError:  # it closed in this very moment
            question.close()
            raise AgentGoneError(_CLOSED) from None
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                raise
            # Cancelled from the other side: the manager let go while the agent waited.
            raise AgentGoneError(_CLOSED) from None

    def catch_up(self) -> None:
        """On the manager's loop: deliver what was said until now, as far as the listener can bear it."""
        self._deliver(len(self._waiting or ()))

    def flush(self) -> None:
        """On the manager's loop: deliver all that was said until now, for there will be nothing more."""
        self._deliver(len(self._waiting or ()), last=True)

    def close(self) -> None:
        """On the manager's loop: from here on nothing is delivered. An agent that waits for an answer is told."""
        with self._lock:
            self._closed = True
            self._waiting = None
        for task in tuple(self._asking or ()):
            if task is not None:
                task.cancel()

    def tell_exit(self, how: Exit) -> None:
        """On the manager's loop: what it said before, then how it ended, then silence."""
        self.flush()
        self.close()
        try:
            self._listener.on_exit(self.attempt, how)
        except Exception:  # noqa: BLE001 - logged; the agent has ended all the same
            _log.exception("the manager failed to take note that an agent ended")

    async def _put(self, wait: WaitAsked) -> WaitAnswer:
        """On the manager's loop: what was said before the question is heard before it."""
        self.catch_up()
        if self._closed:
            raise AgentGoneError(_CLOSED)
        task = asyncio.current_task()
        asking = self._asking = self._asking or set()
        asking.add(task)
        try:
            return await self._listener.on_question(self.attempt, wait)
        finally:
            asking.discard(task)

    def _turn(self) -> None:
        self._deliver(max(_PER_TURN, len(self._waiting or ()) // 4))
        if self._waiting is not None and self._held is None:
            self._home.call_soon(self._turn)

    def _deliver(self, most: int, *, last: bool = False) -> None:
        for _ in range(most):
            if self._held is not None and not last:
                break
            if (message := self._take()) is None:
                break
            self._hear(message)
        if self.dropped >= self._next_said:
            _log.warning("an agent says more than can be heard: %d messages were dropped so far", self.dropped)
            self._next_said = self.dropped * 10

    def _hear(self, message: Message) -> None:
        try:
            enough = self._listener.on_message(self.attempt, message)
        except Exception:  # noqa: BLE001 - logged; the next message may fare better
            _log.exception("the manager failed to hear a message of an agent")
            return
        if enough is not None and self._held is None and not self._closed:
            self._held = enough
            enough.add_done_callback(self._go_on)

    def _go_on(self, _: object) -> None:
        self._held = None
        self._home.call_soon(self._turn)

    def _take(self) -> Message | None:
        with self._lock:
            if self._waiting is None:
                return None
            message = self._waiting.take()
            if not self._waiting:
                self._waiting = None
            return message
