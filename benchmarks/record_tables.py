"""What a person types all day, over a record that has grown: it must not grow with it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ostler.clock import SystemClock
from ostler.ids import Uuid7Source
from ostler.model.access import HOME_WORKSPACE_ID, SYSTEM
from ostler.model.attempt import AttemptOutcome
from ostler.model.task import Task, TaskState
from ostler.store import instances, tasks
from ostler.store.attempts import AttemptEnd
from ostler.store.store import Store
from ostler.store.transaction import Transaction
from program import serving
from store_tables import new_record
from table import Table, middle, percentile

_IDS = Uuid7Source(SystemClock())
_BATCH = 500
_OPEN_TASKS = 20
_SIZES = (1_000, 20_000)


def records(*, quick: bool) -> Table:
    heads = ("what", *(f"{size:,} ended p50" for size in _SIZES), f"p95 at {_SIZES[1]:,}", "ratio", "goal")
    table = Table("Over instances and tasks that have ended, by HTTP, milliseconds", *heads)
    with contextlib.ExitStack() as stack:
        connections = []
        for size in _SIZES:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            asyncio.run(_fill(home, size))
            connections.append(stack.enter_context(serving(home)).connection())
        for what, path in (("status", "/v1/status"), ("statistics", "/v1/statistics"), ("task list", "/v1/tasks")):
            times: list[list[float]] = [[], []]
            for _ in range(30 if quick else 150):
                for connection, taken in zip(connections, times, strict=True):
                    taken.append(connection.milliseconds(path))
            short, long = map(middle, times)
            tail = percentile(times[1], 0.95)
            table.add(what, f"{short:.2f}", f"{long:.2f}", f"{tail:.2f}", f"{long / short:.2f}", "1.5")
    return table


async def _fill(home: Path, size: int) -> None:
    async with Store(home) as store:
        await store.take_lease("bench", ttl=timedelta(minutes=10), steal=True)
        for _ in range(0, size, _BATCH):
            await store.run(_end_some, _BATCH)
        for _ in range(_OPEN_TASKS):
            await store.run(tasks.add_task, _new_task(), by=SYSTEM)
        await store.release_lease()


def _end_some(tx: Transaction, count: int) -> None:
    for _ in range(count):
        record, _ = instances.reserve_instance(tx, new_record(), by=SYSTEM)
        end = AttemptEnd(outcome=AttemptOutcome.CLEAN)
        instances.finish_instance(tx, record, instances.Finish(end=end, was_graceful=True), catch_up=True)
        task = tasks.add_task(tx, _new_task(), by=SYSTEM)
        tasks.change_task(tx, task, to=TaskState.REJECTED)


def _new_task() -> Task:
    now = datetime.now(UTC)
    return Task(
        task_id=_IDS.new(),
        workspace_id=HOME_WORKSPACE_ID,
        key="",
        state=TaskState.QUEUED,
        task="do something that takes a sentence to say",
        agent="nobody",
        is_held=True,
        created_by="",
        created_at=now,
        updated_at=now,
    )
