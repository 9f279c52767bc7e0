"""A store without threads: what happens depends on nothing but the order of the calls."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from ostler.errors import StoreBusyError, StoreClosedError, StoreFailedError, StoreFullError
from ostler.model import AgentInstance, AgentState, Event
from ostler.seams import InjectedCrash
from ostler.store import Seams
from ostler.store.commands import Command, MoveInstance
from ostler.testing.clock import ManualClock, MemoryTables, inline_store, invariant_faults
from ostler.testing.store_suite.ground import brought_to, moved, reservation, reserved, whole_log

pytestmark = pytest.mark.anyio


async def test_no_thread_is_ever_made() -> None:
    before = threading.enumerate()
    async with inline_store() as store:
        one = await brought_to(store, AgentState.READY)
        assert await store.get_instance(one.instance_id) == one
        assert threading.enumerate() == before
    assert threading.enumerate() == before


async def test_a_commit_yields_once_before_it_is_applied_and_once_after() -> None:
    tables = MemoryTables()
    async with inline_store(tables) as store:
        steps: list[tuple[int, bool]] = []
        making = asyncio.ensure_future(reserved(store))
        for _ in range(4):
            await asyncio.sleep(0)
            steps.append((tables.head.sequence, making.done()))
        # Asked; applied; answered.
        assert steps[:3] == [(0, False), (1, False), (1, True)]


async def test_those_who_ask_at_once_are_served_in_the_order_of_asking() -> None:
    async with inline_store() as store:
        made = await asyncio.gather(*(reserved(store, f"n{number}") for number in range(20)))
        assert [getattr(event, "name", None) for event in await whole_log(store)] == [one.name for one in made]


async def test_two_runs_with_the_same_chance_are_the_same() -> None:
    async def run() -> list[Event]:
        seams = Seams(clock=ManualClock(), chance=random.Random(5))
        async with inline_store(seams=seams) as store:
            await asyncio.gather(*(brought_to(store, state) for state in AgentState))
            assert await invariant_faults(store, seams.clock.wall()) == []
            return await whole_log(store)

    assert await run() == await run()


async def test_the_same_tables_open_the_same_content_again() -> None:
    tables, clock = MemoryTables(), ManualClock()
    async with inline_store(tables, Seams(clock=clock)) as store:
        one = await reserved(store)
    async with inline_store(tables, Seams(clock=clock)) as again:
        assert await again.get_instance(one.instance_id) == one


class Trouble:
    """Refuses moves while it has something to refuse them with."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    def __call__(self, command: Command[Any]) -> None:
        if isinstance(command, MoveInstance) and self.errors:
            raise self.errors.pop(0)


async def test_trouble_meets_one_command_and_passes() -> None:
    trouble = Trouble(StoreBusyError(), StoreFullError())
    async with inline_store(before_commit=trouble) as store:
        one = await reserved(store)
        before = await store.head()
        wishes = (moved(store, one, AgentState.READY), moved(store, one, AgentState.READY), reserved(store))
        busy, full, made = await asyncio.gather(*wishes, return_exceptions=True)
        assert isinstance(busy, StoreBusyError)
        assert isinstance(full, StoreFullError)
        assert isinstance(made, AgentInstance)
        assert (await store.head()).sequence == before.sequence + 1
        assert (await moved(store, one, AgentState.READY)).state is AgentState.READY


@pytest.mark.parametrize("error", [StoreFailedError(), OSError(5, "the disk"), InjectedCrash()])
async def test_what_breaks_for_good_stays_broken_and_can_be_read(error: BaseException) -> None:
    async with inline_store(before_commit=Trouble(error)) as store:
        one = await reserved(store)
        wishes = (moved(store, one, AgentState.READY), reserved(store))
        first, queued = await asyncio.gather(*wishes, return_exceptions=True)
        assert isinstance(first, Exception)
        assert isinstance(queued, StoreFailedError)
        with pytest.raises(StoreFailedError):
            await reserved(store)
        assert await store.list_instances() == [one]


async def test_closing_finishes_what_was_accepted_and_then_refuses() -> None:
    store = inline_store()
    await store.open()
    made = asyncio.ensure_future(store.commit(reservation()))
    await asyncio.sleep(0)
    await store.close()
    assert (await made).state is AgentState.INITIALIZING
    with pytest.raises(StoreClosedError):
        await reserved(store)


async def test_a_store_that_is_closed_while_it_opens_does_not_come_up() -> None:
    store = inline_store()
    opening = asyncio.ensure_future(store.open())
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(StoreClosedError):
        await opening
    async with store:
        await reserved(store)
