"""The limit on what a home takes on the disk: what goes when it is reached, and what never does.

The oldest goes first. Output that no record belongs to; then the workdirs of reviewed tasks, into the vault; then what
the vault holds of reviewed tasks. Work that nobody has reviewed stays, whatever the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import datetime
from pathlib import Path
from uuid import UUID

from ostler.durations import size_text
from ostler.errors import OstlerError
from ostler.home import LOGS
from ostler.lifecycle.logs import remove_logs
from ostler.model.disk import DiskUsage
from ostler.model.task import FINISHED_STATES, Task, TaskState
from ostler.store import tasks as task_store
from ostler.store.moves import get_instance
from ostler.tasks.context import BY, TaskContext, workdir_key
from ostler.tasks.retire import retire
from ostler.workdirs.records import VaultEntry

_log = logging.getLogger("ostler.tasks")
#: How often a home with a limit is measured; a slow measurement is made less often.
_INTERVAL_SECONDS = 60.0
_MOST_SHARE_OF_TIME = 0.05


async def watch_disk(tasks: TaskContext) -> None:
    """For ever: measure, and make room where the limit is reached."""
    while True:
        began = tasks.clock.mono()
        try:
            await make_room(tasks)
        except (OstlerError, OSError) as error:
            _log.warning("making room on the disk: %s", error)
        spent = tasks.clock.mono() - began
        await tasks.clock.sleep(max(_INTERVAL_SECONDS, spent / _MOST_SHARE_OF_TIME))


async def make_room(tasks: TaskContext) -> DiskUsage:
    """Until the home is below its limit, or nothing is left that may go. What it takes then."""
    before = tasks.manager.disk_now
    usage = await tasks.manager.disk(max_age=0)
    was_full = usage.is_full or (before is not None and before.is_full)
    for step in (_remove_stray_logs, _retire_reviewed, _empty_vault):
        if not usage.is_full:
            break
        usage = await step(tasks, usage)
    if usage.is_full:
        _log.warning("%s; no new task begins", usage.sentence)
    for wake in tasks.on_room if was_full and not usage.is_full else ():
        wake()
    return usage


async def _remove_stray_logs(tasks: TaskContext, usage: DiskUsage) -> DiskUsage:
    """Of instances whose record is gone: no command shows them any more."""
    owned = {task.instance_id for task in await tasks.store.read(task_store.tasks_in, frozenset(TaskState))}
    freed = 0
    for instance_id in await asyncio.to_thread(_logged_instances, tasks.home / LOGS):
        if instance_id in owned or await tasks.store.read(get_instance, instance_id) is not None:
            continue
        freed += await asyncio.to_thread(remove_logs, tasks.home, instance_id)
        _log.warning("removed the output of the instance %s, which has no record", instance_id)
        if usage.limit is not None and usage.total - freed < usage.limit:
            break
    return await tasks.manager.disk(max_age=0)


def _logged_instances(logs: Path) -> list[UUID]:
    """The oldest first."""
    times: dict[UUID, float] = {}
    for folder in logs.glob("*"):
        with contextlib.suppress(ValueError, OSError):
            times[UUID(folder.name)] = folder.stat().st_mtime
    return sorted(times, key=lambda instance_id: times[instance_id])


async def _retire_reviewed(tasks: TaskContext, usage: DiskUsage) -> DiskUsage:
    finished = await tasks.store.read(task_store.tasks_in, FINISHED_STATES)
    for task in sorted((task for task in finished if task.workdir is not None), key=_ended):
        try:
            await retire(tasks, task)
        except OstlerError as error:
            _log.warning("%s could not be retired to make room: %s", task.key, error)
            continue
        _log.warning("%s is in the vault: the home had reached its limit", task.key)
        usage = await tasks.manager.disk(max_age=0)
        if not usage.is_full:
            break
    return usage


def _ended(task: Task) -> datetime:
    return task.ended_at or task.updated_at


async def _empty_vault(tasks: TaskContext, usage: DiskUsage) -> DiskUsage:
    rows = await tasks.store.read(task_store.tasks_in, frozenset(TaskState))
    owners = {workdir_key(task.workspace_id, task.key): task for task in rows}
    freed = 0
    for entry in sorted(await tasks.workdirs.list_entries(), key=lambda entry: entry.saved_at):
        owner = owners.get(entry.key)
        if not _is_reviewed(entry, owner):
            continue
        if owner is not None and owner.vault is not None and owner.vault.get("path") == entry.path:
            owners[entry.key] = await tasks.change(owner, {"vault": None}, by=BY, act="task.discard")
        freed += await tasks.workdirs.discard(entry)
        _log.warning("%s was removed from the vault: the home had reached its limit", entry.path)
        if usage.limit is not None and usage.total - freed < usage.limit:
            break
    return await tasks.manager.disk(max_age=0)


def _is_reviewed(entry: VaultEntry, owner: Task | None) -> bool:
    """By the task as it is now; of one that was purged, by its state then. A workdir of no known task is unreviewed."""
    state = entry.record.get("state") if owner is None else owner.state
    return state in FINISHED_STATES


# --- in sentences ------------------------------------------------------------------------------------


def brake(usage: DiskUsage | None) -> str | None:
    """Why no new task begins; None while there is room."""
    if usage is None or not usage.is_full or usage.limit is None:
        return None
    return (
        f"the home takes {size_text(usage.total)}, and `disk` below [retention] allows {size_text(usage.limit)}; "
        "no new task begins"
    )
