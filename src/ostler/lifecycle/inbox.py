"""What needs a person, in one list: a function for each kind of row, and the list of these functions."""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

from ostler.definitions.project import settings_fault
from ostler.home import DAEMON_LOG, SETTINGS_FILE
from ostler.lifecycle.instance import Runtime
from ostler.model.loop import PullRequest
from ostler.model.query import InboxKind, InboxRow
from ostler.model.task import TaskState
from ostler.model.text import clipped
from ostler.model.wait import WORKDIR_GONE, Wait
from ostler.store import loops, moves, queries, tasks
from ostler.store.transaction import Reader

_MAX_SENTENCE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewer:
    """On whose behalf the inbox is read, and what of it."""

    runtime: Runtime
    workspace_id: UUID
    #: The only owner whose agents are shown; None shows those of every owner.
    owner_id: UUID | None
    may_read_tasks: bool
    #: Open waits for a person that the viewer may see.
    waits: tuple[Wait, ...]


async def read_inbox(viewer: Viewer) -> list[InboxRow]:
    """The oldest first."""
    rows = [row for read_kind in KINDS for row in await read_kind(viewer)]
    return sorted(rows, key=lambda row: (row.since, row.key))


# --- questions and parked tasks: waits for a person --------------------------------------------------


async def questions(viewer: Viewer) -> Iterable[InboxRow]:
    """Agents and tasks that asked something. One that asked twice is answered by the ids of its waits."""
    asked = [wait for wait in viewer.waits if _cause(wait) is None]
    keys = await _keys_of(viewer, asked)
    times = Counter(keys.values())
    return [
        InboxRow(
            kind=InboxKind.QUESTION,
            key=keys[wait.wait_id],
            since=wait.created_at,
            sentence=f"asks: {_first_line(wait.reason or 'it did not say what')}",
            next=f"ostler answer {keys[wait.wait_id] if times[keys[wait.wait_id]] == 1 else wait.wait_id} yes",
        )
        for wait in asked
        if wait.wait_id in keys
    ]


async def parked(viewer: Viewer) -> Iterable[InboxRow]:
    """Queued tasks whose attempts or limits are used up."""
    waits = [wait for wait in viewer.waits if _cause(wait) not in {None, WORKDIR_GONE}]
    keys = await _keys_of(viewer, waits)
    return [
        InboxRow(
            kind=InboxKind.PARKED,
            key=keys[wait.wait_id],
            since=wait.created_at,
            sentence=_without_advice(wait.reason or "it waits for you"),
            next=f"ostler task requeue {keys[wait.wait_id]}",
        )
        for wait in waits
        if wait.wait_id in keys
    ]


def _cause(wait: Wait) -> str | None:
    """Why Ostler itself asks for a person; None where an agent does."""
    return (wait.detail or {}).get("cause") if wait.task_id is not None else None


async def _keys_of(viewer: Viewer, waits: Iterable[Wait]) -> dict[UUID, str]:
    """What each wait belongs to, by its id: the name of an agent, or the key of a task that is not reviewed yet."""

    def read(reader: Reader) -> dict[UUID, str]:
        keys = {}
        for wait in waits:
            if wait.task_id is not None:
                task = tasks.get_task(reader, wait.task_id)
                if task is not None and task.state is not TaskState.COMPLETED:
                    keys[wait.wait_id] = task.key
            elif wait.instance_id is not None:
                instance = moves.get_instance(reader, wait.instance_id)
                keys[wait.wait_id] = (instance.name if instance is not None else None) or str(wait.instance_id)
        return keys

    return await viewer.runtime.store.read(read)


def _without_advice(reason: str) -> str:
    """The reason of a parked task also names a command, which has a place of its own here."""
    for advice in ("; go on: ostler", ". Answer to let it go on: ostler"):
        reason = reason.partition(advice)[0]
    return _first_line(reason)


# --- work that is done -------------------------------------------------------------------------------


async def reviews(viewer: Viewer) -> Iterable[InboxRow]:
    """Completed tasks and pull requests. While CI is asked about a pull request, nobody need look at it."""
    if not viewer.may_read_tasks:
        return []

    def read(reader: Reader) -> tuple[list[tasks.Reviewable], list[PullRequest]]:
        completed = tasks.completed_tasks(reader, viewer.workspace_id)
        return completed, loops.list_pull_requests(reader, viewer.workspace_id)

    completed, open_pulls = await viewer.runtime.store.read(read)
    pulls = {pull.task_id: pull for pull in open_pulls}
    troubles = {wait.task_id: wait.reason for wait in viewer.waits if wait.task_id is not None}
    rows = [_review(task, pulls.get(task.task_id), troubles.get(task.task_id)) for task in completed]
    return [row for row in rows if row is not None]


def _review(task: tasks.Reviewable, pull: PullRequest | None, trouble: str | None) -> InboxRow | None:
    if pull is not None and pull.ci == "pending":
        return None
    sentence, step = f"is done: {task.title}", f"ostler diff {task.key}"
    if pull is not None:
        sentence, step = (
            f"pull request #{pull.number} waits for its merge: {pull.title}",
            f"ostler pr merge {pull.number}",
        )
    return InboxRow(
        kind=InboxKind.REVIEW,
        key=task.key,
        since=task.completed_at,
        sentence=_first_line(trouble or sentence),
        next=step,
    )


# --- what failed -------------------------------------------------------------------------------------


async def failures(viewer: Viewer) -> Iterable[InboxRow]:
    """Agents that nothing will restart, and tasks whose workdir was removed under them."""
    store, space = viewer.runtime.store, viewer.workspace_id
    rows = [
        InboxRow(
            kind=InboxKind.FAILED,
            key=name,
            since=ended,
            sentence=_first_line(error) or "it failed",
            next=f"ostler why {name}",
        )
        for name, error, ended in await store.read(queries.lasting_failures, space, viewer.owner_id)
    ]
    gone = [wait for wait in viewer.waits if _cause(wait) == WORKDIR_GONE]
    keys = await _keys_of(viewer, gone)
    rows += [
        InboxRow(
            kind=InboxKind.FAILED,
            key=keys[wait.wait_id],
            since=wait.created_at,
            sentence=_first_line(wait.reason or ""),
            next=f"ostler answer {keys[wait.wait_id]} seen",
        )
        for wait in gone
        if wait.wait_id in keys
    ]
    return rows


# --- settings ----------------------------------------------------------------------------------------


async def broken_settings(viewer: Viewer) -> Iterable[InboxRow]:
    """Of every project that is served."""
    if viewer.runtime.home is None:
        return []
    roots = viewer.runtime.definitions.projects.roots()
    return [row for root in roots if (row := await asyncio.to_thread(_broken_settings, root, roots[0])) is not None]


def _broken_settings(root: Path, own: Path) -> InboxRow | None:
    """`own` is the project of the home."""
    fault = settings_fault(root)
    if fault is None:
        return None
    path, error = fault
    try:
        changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError:  # removed since
        return None
    return InboxRow(
        kind=InboxKind.SETTINGS,
        key=path.name if root == own else str(path),
        since=changed,
        sentence=_first_line(str(error)),
        next="ostler agents validate" if root == own else f"cd {shlex.quote(str(root))} && ostler agents validate",
    )


# --- the disk ----------------------------------------------------------------------------------------


async def full_disk(viewer: Viewer) -> Iterable[InboxRow]:
    """By the last measurement; nothing waits for one here."""
    meter = viewer.runtime.disk
    if meter.last is None or meter.high_since is None:
        return []
    usage = meter.last.usage
    effect = "no new task begins" if usage.is_full else "at 100 % no new task begins"
    return [
        InboxRow(
            kind=InboxKind.DISK,
            key="disk",
            since=meter.high_since,
            sentence=f"{usage.sentence}; {effect}",
            next="ostler df",
        )
    ]


# --- hooks -------------------------------------------------------------------------------------------


async def failed_hooks(viewer: Viewer) -> Iterable[InboxRow]:
    """Commands of the settings whose last run failed. Another daemon begins with none."""
    home = viewer.runtime.home
    if home is None:
        return []
    return [
        InboxRow(
            kind=InboxKind.HOOK,
            key=name,
            since=since,
            sentence=_first_line(f"{name} {failure}; mend it in {SETTINGS_FILE}, then `ostler restart-daemon`"),
            next=f"tail {shlex.quote(str(home / DAEMON_LOG))}",
        )
        for name, (since, failure) in viewer.runtime.hook_failures.items()
    ]


def _first_line(text: str) -> str:
    line = (text.strip().splitlines() or [""])[0]
    return clipped(line.removesuffix("; its last lines:").removesuffix(":"), _MAX_SENTENCE)


#: A kind that is added is a function here; the command line, the API and the client need nothing of it.
KINDS: tuple[Callable[[Viewer], Awaitable[Iterable[InboxRow]]], ...] = (
    questions,
    reviews,
    failures,
    parked,
    broken_settings,
    full_disk,
    failed_hooks,
)
