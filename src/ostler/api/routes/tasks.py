"""Tasks: queued, listed, cancelled, sent back; reviewed: diff, accept, reject, undo; retired and brought back."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from fastapi import Body, Header

from ostler.api.context import ContextOf, LoopsOf, TasksOf
from ostler.api.gate import LARGE_BODY, Route
from ostler.errors import OstlerError
from ostler.model.access import Permission
from ostler.model.record import Record, record
from ostler.model.task import Task, TaskFilter, TaskState
from ostler.tasks.orchestrator import TaskOrchestrator


@record
class TaskBody(Record):
    """The body of a new task; see `TaskOrchestrator.submit`."""

    task: str
    key: str | None = None
    agent: str | None = None
    model: str | None = None
    checks: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()
    priority: str = "normal"
    tags: tuple[str, ...] = ()
    hold: bool = False
    timeout: str | float | None = None
    max_failures: int | None = None
    near: str | None = None
    #: Settings of a loop, which it is then driven by; see `LoopSettings`.
    loop: dict[str, Any] | None = None


async def add(
    context: ContextOf,
    tasks: TasksOf,
    loops: LoopsOf,
    body: Annotated[dict[str, Any], Body()],
    idempotency_key: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    wanted = TaskBody.from_dict(body)
    context.refresh()
    values = {name: getattr(wanted, name) for name in wanted.to_dict()}
    if wanted.loop is not None:
        values["loop"] = loops.new_loop(**wanted.loop)
    return _shown(await tasks.submit(**values, idempotency_key=idempotency_key))


async def list_tasks(
    tasks: TasksOf,
    state: str | None = None,
    agent: str | None = None,
    tag: str | None = None,
    text: str | None = None,
    created_from: datetime | None = None,
    created_until: datetime | None = None,
    include_finished: bool = False,
    limit: int = 100,
    offset: int = 0,
) -> list[dict[str, Any]]:
    given: dict[str, Any] = {
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
    found = await tasks.list_tasks(
        TaskFilter.from_dict({name: value for name, value in given.items() if value is not None})
    )
    return [{**_shown(task), "next": await _next(tasks, task)} for task in found]


async def get(key: str, tasks: TasksOf) -> dict[str, Any]:
    task, waits = await tasks.look(key)
    return {**_shown(task), "next": await _next(tasks, task), "waits": [wait.to_dict() for wait in waits]}


def _shown(task: Task) -> dict[str, Any]:
    return {**task.to_dict(), "title": task.title}


async def _next(tasks: TaskOrchestrator, task: Task) -> str:
    """What it waits for, or what a person can do with it, in a few words."""
    if task.state is TaskState.COMPLETED:
        merged = "" if task.accepted is None else f"{_merged(task.accepted)}; "
        return f"{merged}needs review: ostler diff {task.key}"
    if task.state is not TaskState.QUEUED:
        return ""
    if task.is_held:
        return f"held; release it: ostler task requeue {task.key}"
    if missing := await tasks.unmet(task):
        return f"waits for {', '.join(missing)}"
    waits = await tasks.waits(task.key)
    if waits:
        return waits[0].reason or str(waits[0].kind)
    return "" if task.agent is not None else "names no agent"


def _merged(accepted: Mapping[str, Any]) -> str:
    return f"{accepted['files'] - accepted['left']} of {accepted['files']} files accepted"


async def cancel(key: str, tasks: TasksOf, reason: Annotated[str | None, Body(embed=True)] = None) -> dict[str, Any]:
    return _shown(await tasks.cancel(key, reason=reason))


async def requeue(key: str, tasks: TasksOf) -> dict[str, Any]:
    return _shown(await tasks.requeue(key))


async def hold(key: str, tasks: TasksOf) -> dict[str, Any]:
    return _shown(await tasks.hold(key))


async def send_back(
    key: str, tasks: TasksOf, comment: Annotated[str | None, Body(embed=True)] = None
) -> dict[str, Any]:
    return _shown(await tasks.send_back(key, comment))


async def diff(key: str, tasks: TasksOf, paths: str = "", stat: bool = False) -> dict[str, Any]:
    chosen = tuple(path for path in paths.split("\0") if path)
    text = await tasks.diff(key, paths=chosen, stat=stat)
    task = await tasks.get(key)
    try:
        state = await tasks.merge_state(key) if task.workdir is not None else None
    except OstlerError as error:
        state = {"trouble": str(error)}
    claimed, actual = set(task.claimed_files or ()), set(task.changed_files or ())
    mismatch = [] if task.claimed_files is None else sorted(claimed ^ actual)
    return {"diff": text, "merge": state, "task": _shown(task), "claims_differ": mismatch}


async def accept(
    key: str,
    tasks: TasksOf,
    paths: Annotated[list[str] | None, Body(embed=True)] = None,
    message: Annotated[str | None, Body(embed=True)] = None,
    branch_only: Annotated[bool, Body(embed=True)] = False,
) -> dict[str, Any]:
    return _shown(await tasks.accept(key, paths=paths or (), message=message, branch_only=branch_only))


async def reject(key: str, tasks: TasksOf, reason: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
    return _shown(await tasks.reject(key, reason=reason))


async def undo(key: str, tasks: TasksOf) -> dict[str, Any]:
    task, undone = await tasks.take_back(key)
    return {**_shown(task), "undone": [part.to_dict() for part in undone]}


async def retire(key: str, tasks: TasksOf) -> dict[str, Any]:
    return _shown(await tasks.retire(key))


async def unretire(key: str, tasks: TasksOf) -> dict[str, Any]:
    return _shown(await tasks.unretire(key))


_P = Permission
_ONE = "/v1/tasks/{key}"
ROUTES = (
    Route(
        method="POST",
        path="/v1/tasks",
        handler=add,
        permission=_P.TASKS_WRITE,
        body_limit=LARGE_BODY,
        status=201,
    ),
    Route(method="GET", path="/v1/tasks", handler=list_tasks, permission=_P.TASKS_READ),
    Route(method="GET", path=_ONE, handler=get, permission=_P.TASKS_READ),
    Route(method="POST", path=f"{_ONE}/cancel", handler=cancel, permission=_P.TASKS_WRITE),
    Route(method="POST", path=f"{_ONE}/requeue", handler=requeue, permission=_P.TASKS_WRITE),
    Route(method="POST", path=f"{_ONE}/hold", handler=hold, permission=_P.TASKS_WRITE),
    Route(method="POST", path=f"{_ONE}/send-back", handler=send_back, permission=_P.TASKS_REVIEW),
    Route(method="GET", path=f"{_ONE}/diff", handler=diff, permission=_P.TASKS_READ),
    Route(method="POST", path=f"{_ONE}/accept", handler=accept, permission=_P.TASKS_REVIEW),
    Route(method="POST", path=f"{_ONE}/reject", handler=reject, permission=_P.TASKS_REVIEW),
    Route(method="POST", path=f"{_ONE}/undo", handler=undo, permission=_P.TASKS_REVIEW),
    Route(method="POST", path=f"{_ONE}/retire", handler=retire, permission=_P.TASKS_REVIEW),
    Route(method="POST", path=f"{_ONE}/unretire", handler=unretire, permission=_P.TASKS_REVIEW),
)
