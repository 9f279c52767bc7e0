"""Those who outlived every blow: an uninterruptible sleep, a group that somebody else has frozen.

The record of an end names them, so that whoever asks later, of whichever keeper, is not told that all is gone.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from typing import Any

from ostler.keeper import cgroupfs, tree
from ostler.keeper.emptying import described
from ostler.keeper.records import Record
from ostler.keeper.tree import Process


def named(pids: Iterable[int]) -> list[list[int]]:
    """Each by its pid and when it began: a pid alone may be another's by tomorrow."""
    found = (process for pid in pids if (process := tree.living(pid)) is not None)
    return [[process.pid, process.start_time] for process in found]


def remains(records: Iterable[Record], boot_id: str) -> set[Process]:
    """Of those whom these records name, who lives still."""
    found = (one for one in records if one.get("boot_id") == boot_id)
    who = (Process(*each) for one in found for each in one.get("survivors", ()))
    return {process for process in who if tree.living(process.pid) == process}


def strike(found: Iterable[Process]) -> None:
    for process in found:
        tree.signal_pid(process.pid, process.start_time, signal.SIGKILL)


def records_of_swept(killed: Iterable[int], token: str) -> Iterator[dict[str, Any]]:
    """Of those whom a killed keeper left, and who live though they were struck: the ends that nobody saw."""
    by_unit: dict[str, set[int]] = {}
    for pid in killed:
        unit = _unit_of(pid, token) if tree.living(pid) is not None else ""
        if unit:
            by_unit.setdefault(unit, set()).add(pid)
    for unit, pids in by_unit.items():
        yield {
            "unit": unit,
            "box": ".".join(unit.split(".")[:2]),
            "boot_id": tree.boot_id(),
            "by": "lost",
            "left": [described(pid) for pid in sorted(pids)],
            "survivors": named(sorted(pids)),
        }


def _unit_of(pid: int, token: str) -> str:
    """By its mark; the forks of a template keep that of the template, and are known by their groups."""
    grouped = ""
    with contextlib.suppress(OSError):
        for line in cgroupfs.read(f"/proc/{pid}/cgroup").splitlines():
            found = ".".join(line.partition(f"/ostler-{token}/")[2].split("/")[:2])
            grouped = max(grouped, found, key=len)  # not every hierarchy has the rooms of a box
    home, _, unit = (tree.mark_of(pid) or "").partition(":")
    if home == token and (not grouped or f"{unit}.".startswith(f"{grouped}.")):
        return unit
    return grouped
