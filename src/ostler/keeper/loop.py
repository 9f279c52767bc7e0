"""The keeper's one loop: descriptors, timers and signals, nothing of it ever waits.

What must be quick (a manager, a template, a child's end) comes before what may be much (output) in every turn.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Timer:
    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class _Watch:
    __slots__ = ("call", "events", "urgent")

    def __init__(self, call: Callable[[], None], events: int, *, urgent: bool) -> None:
        self.call = call
        self.events = events
        self.urgent = urgent


class Loop:
    """`failed` is told of what a callback raised; `turn_end` is called once after all callbacks of a turn."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._epoll = select.epoll()
        self._watches: dict[int, _Watch] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._signals: dict[int, Callable[[], None]] = {}
        self._wake: tuple[int, int] | None = None
        self._goes_on = True
        self.turn_end: Callable[[], None] = lambda: None

    # --- what is watched ---------------------------------------------------------------------------

    def watch(self, fd: int, call: Callable[[], None], events: int = READ, *, urgent: bool = True) -> None:
        known = self._watches.get(fd)
        self._watches[fd] = _Watch(call, events, urgent=urgent)
        if known is None:
            self._epoll.register(fd, events)
        elif known.events != events:
            self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Before the descriptor is closed; harmless for one that is not watched."""
        if self._watches.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + seconds, call)
        heapq.heappush(self._timers, (timer.when, next(self._numbers), timer))
        return timer

    def on_signal(self, number: int, call: Callable[[], None]) -> None:
        if self._wake is None:
            self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
            self.watch(self._wake[0], self._signalled)
        self._signals[number] = call
        signal.signal(number, _unheeded)

    def _signalled(self) -> None:
        assert self._wake is not None  # noqa: S101 - it is what called this
        seen: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._wake[0], 4096):
                seen.update(chunk)
        for number in seen & self._signals.keys():
            self._guarded(self._signals[number])

    # --- the turn ----------------------------------------------------------------------------------

    def run(self) -> None:
        while self._goes_on:
            self.turn()

    def end(self) -> None:
        self._goes_on = False

    def turn(self) -> None:
        try:
            ready = self._epoll.poll(self._patience(), 512)
        except InterruptedError:
            ready = []
        found = [(fd, self._watches[fd]) for fd, _ in ready if fd in self._watches]
        found.sort(key=lambda one: not one[1].urgent)
        for fd, watch in found:
            # One before it in this turn may have closed it, and another may have its number now.
            if self._watches.get(fd) is watch:
                self._guarded(watch.call)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                self._guarded(timer.call)
        self._guarded(self.turn_end)

    def _patience(self) -> float:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1
        return max(0.0, self._timers[0][0] - time.monotonic())

    def _guarded(self, call: Callable[[], None]) -> None:
        """Whatever one conversation does to it, the keeper goes on for the others."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - said in the log, and the others live on
            self._failed(error)

    def close(self) -> None:
        self._epoll.close()
        if self._wake is not None:
            signal.set_wakeup_fd(-1)
            for one in self._wake:
                os.close(one)
            self._wake = None


def _unheeded(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has told the loop."""
    del number, frame
