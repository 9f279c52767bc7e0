"""An agent that says more than its manager can write: what it answers counts, however much lies before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from defect_ground import do, plan_for
from isolation.ground import RecordingListener, until
from process_ground import Begin, beginning, isolation, listener, site

from ostler.isolation import Verb
from ostler.isolation.held import channel
from ostler.isolation.held.python_cell import PythonCell
from ostler.isolation.process.level import ProcessIsolation

__all__ = ["isolation", "listener", "site"]

pytestmark = pytest.mark.anyio

ENOUGH = 100


class Weary(RecordingListener):
    """Has enough after a while, and never again has room until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.room: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_message(self, attempt: int, message: Any) -> asyncio.Future[None] | None:  # type: ignore[override]  # the ground's own listener never has enough
        super().on_message(attempt, message)
        self.count += 1
        return self.room if self.count >= ENOUGH and not self.room.done() else None


@pytest.fixture
async def weary() -> AsyncIterator[Weary]:
    found = Weary()
    yield found
    if not found.room.done():
        found.room.set_result(None)


@pytest.fixture
def begin(isolation: ProcessIsolation, weary: Weary, monkeypatch: pytest.MonkeyPatch) -> Begin:
    monkeypatch.setattr(PythonCell, "GIVE_UP", timedelta(seconds=1))
    return beginning(isolation, weary, plan_for)


async def held(begin: Begin, count: int) -> tuple[PythonCell, asyncio.Task[Any]]:
    cell = await begin()
    assert isinstance(cell, PythonCell)
    asking = asyncio.ensure_future(cell.call(Verb.PROCESS, do("chatter", count=count)))
    await until(lambda: cell._calls.held() is not None)  # noqa: SLF001 - nobody else sees that it is not read
    return cell, asking


async def test_who_calls_off_a_request_hears_the_answer_behind_the_backlog(
    begin: Begin, weary: Weary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PythonCell, "GIVE_UP", timedelta(seconds=60))  # the backlog is long on a busy machine
    cell, asking = await held(begin, 5000)
    asking.cancel()
    await asyncio.wait((asking,), timeout=60)
    assert asking.cancelled()
    assert not cell.is_stuck
    assert weary.count >= 5000
    assert await cell.call(Verb.CLEANUP) == []
    await cell.destroy()


async def test_a_farewell_is_answered_while_nobody_writes(begin: Begin) -> None:
    cell, asking = await held(begin, 5000)
    assert await asyncio.wait_for(cell.call(Verb.CLEANUP), 60) == []
    await asyncio.wait_for(cell.call(Verb.SHUTDOWN), 60)
    assert (await cell.stop(timedelta(seconds=60))).graceful
    await asyncio.wait((asking,))
    await cell.destroy()


async def test_one_that_goes_on_and_on_has_to_wait_again(
    begin: Begin, weary: Weary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_BACKLOG", 1000)
    cell, asking = await held(begin, 20_000)
    asking.cancel()
    await until(lambda: weary.count >= ENOUGH + 1000)
    await asyncio.sleep(2)  # longer than its patience
    assert weary.count < 10_000
    assert not cell.is_stuck
    assert not asking.done()
    weary.room.set_result(None)
    await asyncio.wait((asking,), timeout=60)
    assert asking.cancelled()
    await cell.destroy()
