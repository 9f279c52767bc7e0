"""The loop and the threads of an agent that has its own: in a thread of the manager, or in a process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from ostler.agents.failures import error_text

#: A worker that has had nothing to do for so many seconds ends, so that an idle agent has one thread.
LINGER_SECONDS = 1.0

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Work = tuple[Future[Any], Callable[[], Any]]

_set_async = ctypes.pythonapi.PyThreadState_SetAsyncExc
_log = logging.getLogger("ostler.isolation")


class Cutoff(BaseException):
    """Raised by force inside the code of an agent that does not end. Not an error of Ostler: do not catch it."""


class Census:
    """The living threads of one cell, and the only way to interrupt them.

    A thread's number is used again after its end, and asking for the time of an ended one may crash the program.
    So each leaves by itself, and a user of the numbers holds the lock meanwhile. A cut-off may be raised between
    any two steps of a thread; so only foreign code is exposed to it, never our own book-keeping.
    """

    def __init__(self, emptied: Callable[[], None]) -> None:
        self._emptied = emptied
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        #: Numbers of the threads that run foreign code now.
        self._exposed: set[int] = set()
        #: Seconds of the processor, by threads that have ended.
        self._spent = 0.0

    def start(self, name: str, life: Callable[[], None]) -> threading.Thread:
        """A counted thread, for as long as `life` takes. When the last has left, `emptied` is called in it."""
        thread = threading.Thread(target=self._live, args=(life,), name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._threads.remove(thread)
            raise
        return thread

    def exposed(self, action: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
        """Run foreign code, which may be cut off: what it answered, or what it raised."""
        number = threading.get_ident()
        answer: _T | None = None
        error: BaseException | None = None
        # Cut-offs come one by one with pauses between. One that hits just outside of the inner block is caught by
        # the outer; one that was sent and has not hit yet is taken back.
        try:
            try:
                with self._lock:
                    self._exposed.add(number)
                answer = action()
            except BaseException as raised:  # noqa: BLE001 - told to the caller
                error = raised
            self._cover(number)
        except Cutoff as cutoff:
            self._cover(number)
            error = error or cutoff
        try:
            return answer, error
        finally:
            # The frame would hold the error, and the error the frame.
            del error

    def interrupt(self) -> None:
        """Raise `Cutoff` in all foreign code, as soon as it runs Python again."""
        with self._lock:
            for number in self._exposed:
                _set_async(ctypes.c_ulong(number), ctypes.py_object(Cutoff))

    def cpu_seconds(self) -> float:
        with self._lock:
            numbers = [thread.ident for thread in self._threads if thread.ident is not None]
            return self._spent + sum(time.clock_gettime(time.pthread_getcpuclockid(number)) for number in numbers)

    def __len__(self) -> int:
        return len(self._threads)

    def _live(self, life: Callable[[], None]) -> None:
        try:
            life()
        except BaseException as error:  # noqa: BLE001 - logged; whatever it was, the thread has to be counted out
            _log.error("a thread of an agent ended by an error: %s", error_text(error))
        with self._lock:
            self._spent += time.thread_time()
            self._threads.remove(threading.current_thread())
            is_empty = not self._threads
        if is_empty:
            self._emptied()

    def _cover(self, number: int) -> None:
        with self._lock:
            self._exposed.discard(number)
            _set_async(ctypes.c_ulong(number), None)


class Workers(Executor):
    """A few threads that come when there is work and go when there is none.

    The pool of the standard library joins its threads when the program ends, so one stuck agent would keep the
    whole program from ending. These are daemons, and they are abandoned where they do not come back.
    """

    def __init__(self, most: int, name: str, census: Census) -> None:
        #: Of threads; may be changed as long as there is no work.
        self.most = most
        self._name = name
        self._census = census
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads = 0
        #: Idle threads, less the work that waits for one.
        self._free = 0
        self._closed = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the agent is ending and starts no more work")
            if self._free <= 0 and self._threads < self.most:
                self._hire()
            self._queue.put((future, lambda: fn(*args, **kwargs)))
            self._free -= 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - never waits
        """What runs may finish, what waits does not begin, nothing new is taken. Returns at once."""
        with self._lock:
            self._closed = True
            while not self._queue.empty():
                if work := self._queue.get_nowait():
                    work[0].cancel()
            for _ in range(self._threads):
                self._queue.put(None)

    def _hire(self) -> None:
        try:
            self._census.start(f"{self._name}-worker", self._serve)
        except RuntimeError:
            # No more threads on this machine. Those at work will get to it; without any, say so.
            if self._threads == 0:
                raise
            return
        self._threads += 1
        self._free += 1

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            self._run(*work)
            del work  # nothing of it is held while the thread waits for the next

    def _run(self, future: Future[Any], action: Callable[[], Any]) -> None:
        is_wanted = future.set_running_or_notify_cancel()
        answer, error = self._census.exposed(action) if is_wanted else (None, None)
        with self._lock:
            self._free += 1  # before the answer is out, so that the next call finds this thread
        if error is not None:
            future.set_exception(error)
        elif is_wanted:
            future.set_result(answer)

    def _next(self) -> _Work | None:
        while True:
            try:
                return self._queue.get(timeout=LINGER_SECONDS)
            except queue.Empty:
                with self._lock:
                    if not self._queue.empty():
                        continue
                    self._threads -= 1
                    self._free -= 1
                    return None


class AgentLoop(asyncio.SelectorEventLoop):
    """Whatever the agent hands to the loop's own executor goes to the workers of its cell, and so is bounded."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        super().__init__()
        self.set_exception_handler(_note)

    def run_in_executor(  # type: ignore[override]  # typeshed ties the arguments to those of func
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        return super().run_in_executor(executor or self.workers, func, *args)

    def _check_signal(self, sig: int) -> None:
        """Asyncio asks this by making a set of all signals, most of the work of a loop that wants to hear of one."""
        if not isinstance(sig, int):
            raise TypeError(f"sig must be an int, not {sig!r}")
        if not 1 <= sig < signal.NSIG:
            raise ValueError(f"invalid signal number {sig}")

    def end_tasks(self) -> None:
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            # One that wants to end the program instead is done with that; the others have their turn again.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.run_until_complete(self.shutdown_asyncgens())

    def leave(self) -> None:
        """It may have been cut off so hard that it still thinks it runs."""
        self._thread_id = None
        asyncio._set_running_loop(None)  # noqa: SLF001 - meant for authors of loops


def _note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What goes wrong beside the calls, on one line and written without a trace: see `agents.failures` for why."""
    error = context.get("exception")
    if not isinstance(error, Cutoff):  # which is our doing
        _log.error("%s%s", context.get("message", "an error"), f" ({error_text(error)})" if error else "")
