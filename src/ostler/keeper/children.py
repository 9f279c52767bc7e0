"""Who has ended. Every process whose parent dies in here becomes a child of the keeper, so it reaps strangers too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ostler.keeper.tree import start_time, stat


class Ended:
    """How one process ended: its exit code, or the signal that ended it."""

    __slots__ = ("at", "code", "pid", "signal", "start_time", "uptime")

    def __init__(self, pid: int, status: int, begun: int | None) -> None:
        self.pid = pid
        self.start_time = begun
        self.code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        self.at = time.time()
        self.uptime = time.clock_gettime(time.CLOCK_BOOTTIME)


class Children:
    """A pid in here is certain: its process is not reaped yet, so the number is nobody else's."""

    def __init__(self) -> None:
        #: By pid: who is told of its end, and whose it is.
        self._known: dict[int, tuple[Callable[[Ended], None], object]] = {}
        #: Ended before anybody said whose they are, while a template was forking.
        self._early: dict[int, Ended] = {}
        self._expected = 0

    def expect(self) -> None:
        """A child is being born elsewhere and its pid is not known yet; `born` or `unborn` follows."""
        self._expected += 1

    def unborn(self) -> None:
        self._expected -= 1
        if not self._expected:
            self._early.clear()

    def is_newborn(self, pid: int) -> bool:
        """Whether it is a child of ours that nobody has claimed. A template runs foreign code, and may lie."""
        return pid in self._early or self.is_unclaimed(pid)

    def is_unclaimed(self, pid: int) -> bool:
        """The same for one that is not reaped yet."""
        seen = stat(pid) if pid not in self._known else None
        return seen is not None and seen.parent == os.getpid()

    def born(self, pid: int, ended: Callable[[Ended], None], owner: object) -> Ended | None:
        """Answers how it ended if that came first; then `ended` is not called."""
        early = self._early.pop(pid, None)
        if early is not None and start_time(pid) is not None:
            early = None  # of one before it, who had the same number
        if early is None:
            self._known[pid] = (ended, owner)
        self.unborn()
        return early

    def put_back(self, ended: Ended) -> None:
        """It was known as one thing and may turn out to be another, which is being born."""
        if self._expected:
            self._early[ended.pid] = ended

    def add(self, pid: int, ended: Callable[[Ended], None], owner: object) -> None:
        self._known[pid] = (ended, owner)

    def is_known(self, pid: int) -> bool:
        return pid in self._known

    def is_of(self, pid: int, owner: object) -> bool:
        """Whether the process is not reaped yet and still that of `owner`: another may have had its number since."""
        return pid in self._known and self._known[pid][1] is owner

    def kill(self, pid: int, number: int, owner: object, *, group: bool = False) -> None:
        """Only that of its owner. Its group is looked for first: right after its birth it has none of its own."""
        if not self.is_of(pid, owner):
            return
        if group:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                pass
            except PermissionError:  # one of them belongs to somebody else by now; the others have it
                return
            else:
                return
        try:
            os.kill(pid, number)
        except OSError:
            return

    def reap(self) -> bool:
        """Whether there may be more: a process that forks and exits for ever must not hold the loop."""
        for _ in range(1024):
            try:
                seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if seen is None:
                return False
            self._reap_one(seen.si_pid)
        return True

    def _reap_one(self, pid: int) -> None:
        begun = start_time(pid) if self._expected else None
        _, status = os.waitpid(pid, 0)
        known = self._known.pop(pid, None)
        ended = Ended(pid, status, begun)
        if known is not None:
            known[0](ended)
        elif self._expected:
            self._early[pid] = ended
