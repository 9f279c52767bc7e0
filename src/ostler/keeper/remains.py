"""Those who outlived every blow: an uninterruptible sleep, a group that somebody else has frozen.

The record of an end names them, so that whoever asks later, of whichever keeper, is not told that all is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from ostler.keeper import tree
from ostler.keeper.records import Record
from ostler.keeper.tree import Process


def named(pids: Iterable[int]) -> list[list[int]]:
    """Each by its pid and when it began: a pid alone may be another's by tomorrow."""
    found = (process for pid in pids if (process := tree.living(pid)) is not None)
    return [[process.pid, process.start_time] for process in found]


def remains(records: Iterable[Record | None], boot_id: str) -> set[Process]:
    """Of those whom these records name, who lives still."""
    found = (one for one in records if one is not None and one.get("boot_id") == boot_id)
    who = (Process(*each) for one in found for each in one.get("survivors", ()))
    return {process for process in who if tree.living(process.pid) == process}


def strike(found: Iterable[Process]) -> None:
    for process in found:
        tree.signal_pid(process.pid, process.start_time, signal.SIGKILL)
