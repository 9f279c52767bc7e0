"""When the disk or one command fails in the middle: each caller is told the truth about its own command."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import OstlerError, StoreFailedError, StoreFullError
from ostler.model import HOME_WORKSPACE_ID, Principal, Task, TaskFilter, Token, from_micros
from ostler.store import Seams, open_store
from ostler.store.commands import CreateTask, PutRecord

pytestmark = pytest.mark.anyio

HASH = "a" * 64


class Gate:
    """A fault that holds the first commit until the test has queued more, and then acts at a later one."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.queued = threading.Event()
        self.armed = False
        self._visits = 0
        self._act = act

    def __call__(self, name: str) -> None:
        if name != "store.commit.before" or not self.armed:
            return
        self._visits += 1
        if self._visits == 1:
            assert self.queued.wait(timeout=30)
        self._act(self._visits)


def failing_at(nth: int, error: Exception) -> Callable[[int], None]:
    def act(visit: int) -> None:
        if visit == nth:
            raise error

    return act


async def started(*wishes: Any) -> list[asyncio.Task[Any]]:
    """Tasks that have handed their commands to the writer."""
    tasks = [asyncio.ensure_future(wish) for wish in wishes]
    await asyncio.sleep(0)
    return tasks


async def test_nothing_that_was_queued_is_written_after_the_disk_failed(tmp_path: Path) -> None:
    gate = Gate(failing_at(1, OSError(5, "a failed sync")))
    async with open_store(tmp_path, Seams(fault=gate)) as store:
        gate.armed = True
        first = await started(store.commit(CreateTask(task="first")))
        later = await started(*(store.commit(CreateTask(task=f"later {number}")) for number in range(3)))
        gate.queued.set()
        answers = await asyncio.gather(*first, *later, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreFailedError] * 4
        assert len({id(answer) for answer in answers}) == 4, "each caller gets an error of its own"
    async with open_store(tmp_path) as again:
        assert await again.list_tasks() == []


async def test_a_refusal_that_is_raised_often_does_not_grow(tmp_path: Path) -> None:
    gate = Gate(failing_at(1, OSError(5, "a failed sync")))
    gate.queued.set()
    async with open_store(tmp_path, Seams(fault=gate)) as store:
        gate.armed = True
        depths = set()
        for _ in range(20):
            with pytest.raises(StoreFailedError) as refused:
                await store.commit(CreateTask(task="x"))
            depths.add(len(refused.traceback))
        assert max(depths) < 10


async def test_what_was_committed_alone_is_not_called_failed_when_the_disk_fills_up(tmp_path: Path) -> None:
    """One command of a batch is bad, so they are tried one by one; then there is no space for the last."""
    gate = Gate(failing_at(3, StoreFullError()))
    async with open_store(tmp_path, Seams(fault=gate)) as store:
        person = Principal(
            principal_id=UUID(int=1), name="p", workspace_id=HOME_WORKSPACE_ID, created_at=from_micros(0)
        )
        await store.commit(PutRecord(record=person))
        token = Token(
            token_id=UUID(int=2), principal_id=UUID(int=1), token_hash=HASH, name="t", created_at=from_micros(0)
        )
        await store.commit(PutRecord(record=token))
        gate.armed = True
        holding = await started(store.commit(CreateTask(task="held")))
        same_hash = PutRecord(record=token.evolve(token_id=UUID(int=3)))
        batch = await started(
            store.commit(CreateTask(task="good")), store.commit(same_hash), store.commit(CreateTask(task="too late"))
        )
        gate.queued.set()
        await asyncio.gather(*holding)
        good, bad, late = await asyncio.gather(*batch, return_exceptions=True)
        assert isinstance(good, Task)
        assert isinstance(bad, OstlerError)
        assert isinstance(late, StoreFullError)
        assert {one.task for one in await store.list_tasks(TaskFilter())} == {"held", "good"}
        await store.commit(CreateTask(task="after there was space again"))
