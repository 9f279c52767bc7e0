"""Waits: what agents wait for, and the answers to it."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any
from uuid import UUID

from fastapi import Body

from ostler.api.context import Handlers, ManagerOf, TasksOf
from ostler.store.tasks import get_task
from ostler.store.waits import get_wait


async def list_waits(manager: ManagerOf, instance: str | None = None) -> list[dict[str, Any]]:
    shown = []
    for wait in await manager.open_waits(instance):
        instance_record = None if wait.instance_id is None else await manager.get_instance(wait.instance_id)
        task = None if wait.task_id is None else await manager.store.read(get_task, wait.task_id)
        name = None if instance_record is None else instance_record.name
        shown.append({**wait.to_dict(), "instance_name": name, "task_key": None if task is None else task.key})
    return shown


async def answer_wait(
    wait: str,
    manager: ManagerOf,
    tasks: TasksOf,
    outcome: Annotated[str, Body()] = "done",
    answer: Annotated[dict[str, Any] | None, Body()] = None,
) -> dict[str, Any]:
    with contextlib.suppress(ValueError):  # a part of an id is looked for by the manager
        record = await manager.store.read(get_wait, UUID(wait))
        if record is not None and record.instance_id is None:
            return (await tasks.answer(record.wait_id, outcome, answer)).to_dict()
    return (await manager.answer(wait, outcome, answer)).to_dict()


HANDLERS: Handlers = {
    "waits": list_waits,
    "answer": answer_wait,
}
