"""What is held by looking, where the kernel does not hold it; and what is known of the kernel's own memory kills."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ostler.keeper import tree
from ostler.keeper.boxes import BoxLimits, BoxUsage
from ostler.keeper.cgroupfs import number
from ostler.keeper.tree import Stat


class Watch:
    """Says when a tree has more than it may. The word "memory" or "pids" in the sentence says which."""

    def __init__(self, limits: BoxLimits, kinds: Collection[str]) -> None:
        self._memory = limits.memory_bytes if "memory" in kinds else None
        self._pids = limits.pids if "pids" in kinds else None
        #: How often it was over its memory.
        self.memory_kills = 0

    @property
    def is_needed(self) -> bool:
        return self._memory is not None or self._pids is not None

    def look(self, stats: Collection[Stat]) -> str | None:
        if self._pids is not None:
            threads = sum(one.threads for one in stats)
            if threads > self._pids:
                return f"it has {threads} pids, counting threads, where {self._pids} are allowed"
        if self._memory is not None:
            used = _memory(stats, self._memory)
            if used > self._memory:
                self.memory_kills += 1
                return f"it uses {used} bytes of memory where {self._memory} are allowed"
        return None


def _memory(stats: Iterable[Stat], limit: int) -> int:
    """Counted fast, shared pages with each who shares them; only when that is too much, counted fairly."""
    resident = {one.process.pid: one.rss_bytes for one in stats}
    if sum(resident.values()) <= limit:
        return sum(resident.values())
    return sum(rss if (fair := tree.pss_bytes(pid)) is None else fair for pid, rss in resident.items())


class MemoryKills:
    """The kernel's count of memory kills on the whole machine: while it stands still, nobody was killed for memory."""

    def __init__(self) -> None:
        self.last_seen: int | None = None
        self._look()

    def none_since(self, count: int | None) -> bool:
        """Whether it stands where it stood; also false when that cannot be said."""
        self._look()
        return count is not None and count == self.last_seen

    def _look(self) -> None:
        self.last_seen = number("/proc/vmstat", "oom_kill")


def stats_of(pids: Iterable[int]) -> list[Stat]:
    seen = map(tree.stat, pids)
    return [one for one in seen if one is not None and not one.is_dead]


def usage_of(stats: Collection[Stat]) -> BoxUsage:
    """Counted process by process."""
    return BoxUsage(
        cpu_seconds=sum(one.cpu_seconds for one in stats),
        memory_bytes=sum(one.rss_bytes for one in stats),
        threads=sum(one.threads for one in stats),
    )


class Duty:
    """Whether a tree must rest, so that on the average it uses no more of a core than it may."""

    #: What was used too much is forgotten beyond this, so that nobody rests for longer than so many seconds.
    _MOST_DEBT = 2.0
    #: And what was not used beyond this.
    _MOST_CREDIT = 0.1

    def __init__(self, percent: int | None) -> None:
        self.is_needed = percent is not None
        self._share = (percent or 0) / 100
        self._credit = 0.0
        self._used = 0.0
        self._at: float | None = None

    def must_rest(self, stats: Iterable[Stat], now: float) -> bool:
        used = sum(one.cpu_seconds for one in stats)
        if self._at is not None:
            # When one of them ends its count may go with it; time does not run backwards for that.
            self._credit += (now - self._at) * self._share - max(0.0, used - self._used)
            most = self._MOST_CREDIT * self._share
            self._credit = max(-self._MOST_DEBT * self._share, min(most, self._credit))
        self._at, self._used = now, used
        return self._credit < 0
