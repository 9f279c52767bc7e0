"""Tasks: queued, listed, cancelled, sent back; reviewed: diff, accept, reject, undo; retired and brought back."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import Body, Header

from ostler.api.context import ContextOf, Handlers, LoopsOf, Number, ProjectOf, SpeakerOf, TasksOf
from ostler.api.speaker import task_of_agent
from ostler.errors import OstlerError, ValidationError
from ostler.model.record import Record, record
from ostler.model.task import Task, TaskFilter
from ostler.model.validation import Fault


@record
class TaskBody(Record):
    """The body of a new task; see `TaskOrchestrator.submit`."""

    task: str
    key: str | None = None
    agent: str | None = None
    model: str | None = None
    checks: tuple[str, ...] = ()
    setup: str | None = None
    depends_on: tuple[str, ...] = ()
    priority: str = "normal"
    tags: tuple[str, ...] = ()
    hold: bool = False
    timeout: str | float | None = None
    max_failures: int | None = None
    backoff: str | float | None = None
    near: str | None = None
    #: The key of the task that it is a part of.
    parent: str | None = None
    #: Settings of a loop, which it is then driven by; see `LoopSettings`.
    loop: dict[str, Any] | None = None


async def add(
    context: ContextOf,
    project: ProjectOf,
    tasks: TasksOf,
    loops: LoopsOf,
    speaker: SpeakerOf,
    body: Annotated[dict[str, Any], Body()],
    idempotency_key: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    new_task = TaskBody.from_dict(body)
    project.refresh()
    await context.crews.of(project.scope)  # so that its crews take the task, where they select it
    values = {name: getattr(new_task, name) for name in new_task.to_dict()}
    values["project"] = project.key
    if speaker is not None:
        values = task_of_agent(speaker, values)
    if new_task.loop is not None:
        values["loop"] = loops.new_loop(**new_task.loop)
    task = await tasks.submit(**values, idempotency_key=idempotency_key)
    return {**_shown(task), "warning": tasks.untaken(task)}


async def add_all(
    context: ContextOf,
    project: ProjectOf,
    tasks: TasksOf,
    entries: Annotated[list[dict[str, Any]], Body()],
    near: Annotated[str | None, Body()] = None,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> list[dict[str, Any]]:
    """All of them or none."""
    project.refresh()
    await context.crews.of(project.scope)
    faults: list[Fault] = []
    for number, entry in enumerate(entries):
        try:
            TaskBody.from_dict(entry)
        except ValidationError as error:
            faults += [fault.under(f"tasks.{number}") for fault in error.faults if isinstance(fault, Fault)]
    if faults:
        raise ValidationError(faults)
    added = await tasks.submit_all(entries, near=near, project=project.key, idempotency_key=idempotency_key)
    return [{**_shown(task), "warning": tasks.untaken(task)} for task in added]


async def list_tasks(
    tasks: TasksOf,
    state: str | None = None,
    agent: str | None = None,
    tag: str | None = None,
    text: str | None = None,
    created_from: datetime | None = None,
    created_until: datetime | None = None,
    include_finished: bool = False,
    limit: Number = 100,
    offset: Number = 0,
) -> list[dict[str, Any]]:
    criteria: dict[str, Any] = {
        "state": state,
        "agent": agent,
        "tag": tag,
        "text": text,
        "created_from": created_from,
        "created_until": created_until,
        "include_finished": include_finished,
        "limit": limit,
        "offset": offset,
    }
    query = TaskFilter.from_dict({name: value for name, value in criteria.items() if value is not None})
    return [{**_shown(task), "next": await tasks.next_step(task)} for task in await tasks.list_tasks(query)]


async def get(task: str, tasks: TasksOf) -> dict[str, Any]:
    record, waits = await tasks.look(task)
    return {**_shown(record), "next": await tasks.next_step(record), "waits": [wait.to_dict() for wait in waits]}


def _shown(task: Task) -> dict[str, Any]:
    return {**task.to_dict(), "title": task.title, "slug": task.slug}


async def why(task: str, tasks: TasksOf) -> dict[str, Any]:
    return (await tasks.why(task)).to_dict()


async def cancel(task: str, tasks: TasksOf, reason: Annotated[str | None, Body(embed=True)] = None) -> dict[str, Any]:
    return _shown(await tasks.cancel(task, reason=reason))


async def requeue(task: str, tasks: TasksOf) -> dict[str, Any]:
    return _shown(await tasks.requeue(task))


async def hold(task: str, tasks: TasksOf) -> dict[str, Any]:
    return _shown(await tasks.hold(task))


async def take_over(task: str, tasks: TasksOf) -> dict[str, Any]:
    session = await tasks.take_over(task)
    opened = {"session": session.session, "path": session.path, "argv": session.argv}
    return {"task": _shown(session.task), **opened, "environment": dict(session.environment)}


async def give_back(task: str, tasks: TasksOf, to_agent: Annotated[bool, Body(embed=True)] = False) -> dict[str, Any]:
    return _shown(await tasks.give_back(task, to_agent=to_agent))


async def hand_in(task: str, tasks: TasksOf) -> dict[str, Any]:
    return _shown(await tasks.hand_in(task))


async def send_back(
    task: str, tasks: TasksOf, comment: Annotated[str | None, Body(embed=True)] = None
) -> dict[str, Any]:
    return _shown(await tasks.send_back(task, comment))


async def diff(task: str, tasks: TasksOf, paths: str = "", stat: bool = False) -> dict[str, Any]:
    chosen = tuple(path for path in paths.split("\0") if path)
    text = await tasks.diff(task, paths=chosen, stat=stat)
    record = await tasks.get(task)
    try:
        state = await tasks.merge_state(task) if record.workdir is not None else None
    except OstlerError as error:
        state = {"trouble": str(error)}
    claimed, actual = set(record.claimed_files or ()), set(record.changed_files or ())
    mismatch = [] if record.claimed_files is None else sorted(claimed ^ actual)
    return {"diff": text, "merge": state, "task": _shown(record), "claims_differ": mismatch}


async def accept(
    task: str,
    tasks: TasksOf,
    paths: Annotated[list[str] | None, Body(embed=True)] = None,
    message: Annotated[str | None, Body(embed=True)] = None,
    branch_only: Annotated[bool, Body(embed=True)] = False,
) -> dict[str, Any]:
    return _shown(await tasks.accept(task, paths=paths or (), message=message, branch_only=branch_only))


async def reject(task: str, tasks: TasksOf, reason: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
    return _shown(await tasks.reject(task, reason=reason))


async def undo(task: str, tasks: TasksOf) -> dict[str, Any]:
    record, undone = await tasks.take_back(task)
    return {**_shown(record), "undone": [part.to_dict() for part in undone]}


async def retire(task: str, tasks: TasksOf) -> dict[str, Any]:
    return _shown(await tasks.retire(task))


async def unretire(task: str, tasks: TasksOf) -> dict[str, Any]:
    return _shown(await tasks.unretire(task))


HANDLERS: Handlers = {
    "add_task": add,
    "add_tasks": add_all,
    "tasks": list_tasks,
    "task": get,
    "why_task": why,
    "cancel_task": cancel,
    "requeue_task": requeue,
    "hold_task": hold,
    "take_over": take_over,
    "give_back": give_back,
    "hand_in": hand_in,
    "send_back": send_back,
    "diff": diff,
    "accept": accept,
    "reject": reject,
    "undo": undo,
    "retire": retire,
    "unretire": unretire,
}
