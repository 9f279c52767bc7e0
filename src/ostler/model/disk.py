"""What a home takes on the disk, by kind and by task, and how much of its limit that is."""

from __future__ import annotations

from ostler.durations import size_text
from ostler.model.record import Record, record
from ostler.model.types import Moment

_MEGABYTE = 1024 * 1024
#: From this share of the limit on a person is told.
WARN_SHARE = 0.8


@record
class TaskDisk(Record):
    """Bytes of one task."""

    key: str
    #: Its state, or `purged` where only the vault knows it any more.
    state: str
    workdir: int = 0
    vault: int = 0
    #: The output of its agents and their private homes.
    logs: int = 0

    @property
    def total(self) -> int:
        return self.workdir + self.vault + self.logs


@record
class DiskUsage(Record):
    """Bytes that the files of a home occupy; a file with several names counts once."""

    measured_at: Moment
    workdirs: int = 0
    vault: int = 0
    #: The output of agents, and the log of the daemon.
    logs: int = 0
    #: The database.
    store: int = 0
    #: Objects that worktrees borrow.
    repositories: int = 0
    #: The private homes of agents.
    homes: int = 0
    other: int = 0
    #: Free on the disk of the home.
    free: int = 0
    #: The most that the home may take (`disk` of the retention); None for no limit.
    limit: int | None = None
    #: The largest first.
    tasks: tuple[TaskDisk, ...] = ()

    @property
    def total(self) -> int:
        return self.workdirs + self.vault + self.logs + self.store + self.repositories + self.homes + self.other

    @property
    def share(self) -> float | None:
        """Of the limit; None without one."""
        return None if self.limit is None else self.total / self.limit

    @property
    def is_high(self) -> bool:
        return self.share is not None and self.share >= WARN_SHARE

    @property
    def is_full(self) -> bool:
        return self.share is not None and self.share >= 1

    @property
    def sentence(self) -> str:
        """How much of its limit the home takes."""
        if self.limit is None:
            return f"the home takes {size_text(self.total)}"
        return f"the home takes {size_text(self.total)} of {size_text(self.limit)} ({100 * self.total // self.limit} %)"


def limit_bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes * _MEGABYTE
