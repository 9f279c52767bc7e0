"""Many callers: several threads with their own loops, cancelled ones, and the end of a store."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ostler.errors import StoreClosedError, StoreError
from ostler.model import AgentInstance, AgentState, GetInstancesFilter
from ostler.store import Seams, Store
from ostler.testing.store_suite.ground import (
    OpenStore,
    StoreGround,
    brought_to,
    moved,
    reservation,
    reserved,
    whole_log,
)


class SharingContract(StoreGround):
    async def test_threads_with_loops_of_their_own_may_all_commit(self, store: Store) -> None:
        async def some() -> None:
            await asyncio.gather(*(brought_to(store, AgentState.WAITING) for _ in range(5)))

        with ThreadPoolExecutor(6) as threads:
            running = [asyncio.get_running_loop().run_in_executor(threads, asyncio.run, some()) for _ in range(6)]
            await asyncio.gather(*running)
        statistics = await store.statistics()
        assert statistics.by_state[AgentState.WAITING] == 30
        assert (await store.head()).sequence == 30 * 4

    async def test_two_stores_over_the_same_content_see_each_other(
        self, store: Store, open_store: OpenStore, seams: Seams
    ) -> None:
        async with open_store(seams) as other:
            mine, theirs = await asyncio.gather(reserved(store, "mine"), reserved(other, "theirs"))
            await moved(other, mine, AgentState.READY, expected_version=1)
            await moved(store, theirs, AgentState.READY, expected_version=1)
            await moved(store, mine, AgentState.PROCESSING, expected_version=2)
            await moved(other, theirs, AgentState.FAILED, expected_version=2)
            assert await store.list_instances() == await other.list_instances()
            lives = (brought_to(one, AgentState.TERMINATED) for one in (store, other) * 10)
            await asyncio.gather(*lives)
            assert await whole_log(store) == await whole_log(other)

    async def test_cancelling_a_caller_neither_undoes_nor_hangs(self, store: Store) -> None:
        callers = [asyncio.ensure_future(store.commit(reservation(f"n{number}"))) for number in range(10)]
        await asyncio.sleep(0)  # each has handed its command over
        for caller in callers:
            caller.cancel()
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*callers, return_exceptions=True)
        )
        await reserved(store, "last")
        names = {one.name for one in await store.list_instances()}
        assert names == {"last", *(f"n{number}" for number in range(10))}

    async def test_a_caller_whose_loop_is_gone_does_not_stop_the_others(self, store: Store) -> None:
        class Leaving(asyncio.SelectorEventLoop):
            """Closes in the very moment in which the answer arrives."""

            def call_soon_threadsafe(self, *args: object, **named: object) -> asyncio.Handle:
                self.close()
                return super().call_soon_threadsafe(*args, **named)  # type: ignore[arg-type]  # passed on as they came

        def leave() -> None:
            loop = Leaving()
            caller = loop.create_task(store.commit(reservation("gone")))
            loop.call_soon(loop.stop)
            loop.run_forever()
            caller._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - it is left on purpose
            caller.get_coro().close()

        await asyncio.to_thread(leave)
        assert (await reserved(store, "stays")).name == "stays"
        assert {one.name for one in await store.list_instances()} == {"gone", "stays"}

    async def test_closing_finishes_what_was_accepted(self, open_store: OpenStore, seams: Seams, store: Store) -> None:
        closing = open_store(seams)
        await closing.open()
        callers = [asyncio.ensure_future(closing.commit(reservation())) for _ in range(100)]
        readers = [asyncio.ensure_future(closing.list_instances()) for _ in range(100)]
        await asyncio.sleep(0)
        await closing.close()
        assert all(isinstance(one, AgentInstance) for one in await asyncio.gather(*callers))
        assert all(isinstance(one, list) for one in await asyncio.gather(*readers))
        assert (await store.statistics()).total_spawned == 100

    async def test_a_store_is_opened_once_at_a_time(self, store: Store, open_store: OpenStore, seams: Seams) -> None:
        with pytest.raises(StoreError, match="open already"):
            await store.open()
        await reserved(store)
        both = open_store(seams)
        answers = await asyncio.gather(both.open(), both.open(), return_exceptions=True)
        assert sum(isinstance(one, StoreError) for one in answers) == 1
        await both.close()

    async def test_opening_and_closing_may_be_cancelled_and_leave_no_thread(
        self, open_store: OpenStore, seams: Seams
    ) -> None:
        before = set(threading.enumerate())
        for steps in range(6):
            one = open_store(seams)
            opening = asyncio.ensure_future(one.open())
            for _ in range(steps):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            closing = asyncio.ensure_future(one.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
        for _ in range(500):
            left = [one for one in set(threading.enumerate()) - before if "ostler" in one.name]
            if not left:
                break
            await asyncio.sleep(0.01)
        assert left == []

    async def test_a_closed_store_says_so_and_closing_twice_is_harmless(
        self, open_store: OpenStore, seams: Seams
    ) -> None:
        closed = open_store(seams)
        with pytest.raises(StoreClosedError):
            await closed.head()
        await closed.open()
        await closed.close()
        await closed.close()
        with pytest.raises(StoreClosedError):
            await reserved(closed)
        with pytest.raises(StoreClosedError):
            await closed.list_instances(GetInstancesFilter())
        async with closed:
            await reserved(closed)
        with pytest.raises(StoreClosedError):
            await closed.sweep()
