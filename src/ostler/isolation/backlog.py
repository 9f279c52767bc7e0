"""What an agent has said and the manager has not heard yet: bounded, in order, and nothing that counts is dropped."""

from __future__ import annotations

from collections import deque

from ostler.agents import Message, MetricReported, Progress
from ostler.errors import AgentBusyError

#: So many may wait for the manager; beyond it the oldest news of no consequence make room.
MAX_WAITING = 1000
#: So much that counts may wait. It is never dropped, so an agent that says still more is refused.
MAX_WEIGHTY = 100_000
TOO_MUCH = "the agent says more than its manager can hear; say less, or wait in between"


class Backlog:
    """What was said and is not heard yet, in order. News can make room without a search, however much else waits."""

    __slots__ = ("_count", "_news", "_weighty")

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
            raise AgentBusyError(TOO_MUCH)
        if len(self) > MAX_WAITING and self._news:
            self._news.popleft()
            return 1
        return 0

    def take(self, most: int) -> list[Message]:
        return [self._next().popleft()[1] for _ in range(min(most, len(self)))]

    def _next(self) -> deque[tuple[int, Message]]:
        if self._news and self._weighty:
            return min(self._news, self._weighty, key=lambda one: one[0][0])
        return self._news or self._weighty
