"""Retirement: the workdir of a task into the vault and back, and the one place of retention."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from ostler.errors import InvalidOperationError, OstlerError, TaskNotFoundError
from ostler.home import HOMES, LOGS
from ostler.model.access import Actor
from ostler.model.task import Task, TaskState
from ostler.store import tasks as task_store
from ostler.store.totals import count_task
from ostler.store.transaction import Transaction
from ostler.tasks.context import BY, TaskContext, exists, workdir_key, workdir_of
from ostler.workdirs.records import VaultEntry, Workdir

_log = logging.getLogger("ostler.tasks")
_GC_INTERVAL = timedelta(minutes=10)


async def retire(tasks: TaskContext, task: Task, *, by: Actor = BY) -> Task:
    """Saved and verified first, then deleted. Called again after a kill, it finishes."""
    workdir = workdir_of(task)
    if workdir is None:
        return task
    if task.crew is not None:  # the directory of a member, which the settings may have moved since
        tasks.workdirs.allow(Path(workdir.path).parent)
    logs = None if task.instance_id is None else tasks.home / LOGS / str(task.instance_id)
    entry = await tasks.workdirs.retire(workdir, record=task.to_dict(), logs=logs)
    tasks.active.pop(task.key, None)
    return await tasks.change(task, {"workdir": None, "vault": entry.to_dict()}, by=by, act="task.retire")


async def unretire(tasks: TaskContext, workspace_id: UUID, key: str, *, by: Actor) -> Task:
    task = await tasks.store.read(task_store.find_task, workspace_id, key)
    workdir = None if task is None else workdir_of(task)
    if task is not None and workdir is not None:
        if exists(workdir) or task.state is TaskState.RUNNING:
            raise InvalidOperationError(f"the workdir of {task.key} is in its place: {workdir.path}")
        task = await retire(tasks, task, by=by)  # finishes one that was cut off
    entry = None if task is None or task.vault is None else VaultEntry.from_dict(task.vault)
    if entry is None:
        names = (key, key.upper()) if task is None else (task.key,)
        kept = [await tasks.workdirs.find(workdir_key(workspace_id, name)) for name in names]
        entry = next((entry for entry in kept if entry is not None), None)
    if entry is None:
        raise TaskNotFoundError(f"there is nothing of {key} in the vault")
    if task is None:
        if "task_id" not in entry.record:
            raise TaskNotFoundError(f"{entry.path} is the workdir of no known task; its archive holds the files")
        task = await tasks.store.run(_restore_record, entry, by=by)
    # One that is there was brought back by a program that was killed before it could say so.
    workdir = entry.workdir if exists(entry.workdir) else await tasks.workdirs.restore(entry)
    tasks.active[task.key] = workdir
    changes = {"workdir": workdir.to_dict(), "vault": None}
    return await tasks.change(task, changes, by=by, act="task.unretire")


def _restore_record(tx: Transaction, entry: VaultEntry, *, by: Actor) -> Task:
    """Of a task that was purged. It stays finished."""
    saved = Task.from_dict(entry.record)
    task = saved.evolve(workdir=None, vault=entry.to_dict(), updated_at=tx.now, ended_at=tx.now)
    task_store.TASKS.insert(tx, task, rank=0)
    count_task(tx, None, task)
    tx.audit(task.workspace_id, by, "task.restore", f"task:{task.key}")
    return task


def retired_workdir(task: Task) -> Workdir | None:
    return None if task.vault is None else VaultEntry.from_dict(task.vault).workdir


async def collect(tasks: TaskContext) -> int:
    """Purge what was accepted or rejected long enough ago; how many. Each task in its own guard."""
    purged = 0
    now = tasks.manager.now()
    for task in await tasks.store.read(task_store.finished_until, now):
        kept_until = now - tasks.settings_of(task.project).retention
        if task.ended_at is None or task.ended_at > kept_until:
            continue
        if await tasks.store.read(task_store.dependents, task):
            continue
        try:
            await purge(tasks, task)
            purged += 1
        except OstlerError as error:
            _log.warning("%s could not be purged: %s", task.key, error)
    await _retire_orphans(tasks)
    return purged


async def purge(tasks: TaskContext, task: Task) -> None:
    """The vault keeps its record, its key and its workdir."""
    if task.workdir is not None:
        task = await retire(tasks, task)
    elif task.vault is None:
        nowhere = await tasks.workdirs.plan(workdir_key(task.workspace_id, task.key), near=None)
        entry = await tasks.workdirs.retire(nowhere, record=task.to_dict())
        task = await tasks.change(task, {"vault": entry.to_dict()}, by=BY)
    await tasks.store.run(task_store.delete_task, task, by=BY)
    await tasks.workdirs.remove(tasks.home / HOMES / str(task.task_id))


async def _retire_orphans(tasks: TaskContext) -> None:
    """Workdirs that no record knows are kept: in the vault."""
    places = await tasks.store.read(task_store.task_places)
    keys = {workdir_key(workspace_id, key) for workspace_id, key, _ in places}
    keys |= {own_key for _, _, own_key in places if own_key is not None}
    for path in await tasks.workdirs.orphans(keys):
        try:
            workdir = await tasks.workdirs.plan(path.name, near=None)
            await tasks.workdirs.retire(workdir, record={"key": workdir.key})
            _log.warning("the workdir %s belongs to no task; it went to the vault", path)
        except OstlerError as error:
            _log.warning("the workdir %s belongs to no task and could not be retired: %s", path, error)


async def collect_for_ever(tasks: TaskContext) -> None:
    while True:
        try:
            await collect(tasks)
        except OstlerError as error:
            _log.warning("retention of tasks: %s", error)
        await tasks.clock.sleep(_GC_INTERVAL.total_seconds())
