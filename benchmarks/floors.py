"""What a life costs without us: a bare task, a bare thread with its own loop, and the bare commits of a spawn."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID, uuid4

import ostler
from ostler.model import AgentState, SpawnRequest
from ostler.store import EngineStore, open_store
from ostler.store.commands import MoveInstance, ReserveInstance
from recording import BareSqlite, Commits, recording_sqlite


class Echo(ostler.Agent):
    async def process(self, request: Any) -> Any:
        return request


class Asked(Protocol):
    """What is left of a life when it is up: it can be asked, and ended."""

    async def process(self, request: Any) -> Any: ...

    async def terminate(self) -> None: ...


class BareTask:
    """A task that answers. Nothing of it is remembered."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def spawn(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready))
        await ready

    async def _live(self, ready: asyncio.Future[None]) -> None:
        agent = Echo()
        ready.set_result(None)
        while True:
            request, answer = await self._asked.get()
            answer.set_result(await agent.process(request))

    async def process(self, request: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((request, answer))
        return await answer

    async def terminate(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])


class BareThread:
    """A thread with a loop that answers. Nothing of it is remembered."""

    def __init__(self) -> None:
        self._home = asyncio.get_running_loop()
        self._place = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._agent: Echo | None = None

    async def spawn(self) -> None:
        ready = self._home.create_future()
        self._place.call_soon(self._make, ready)
        self._thread.start()
        await ready

    def _live(self) -> None:
        asyncio.set_event_loop(self._place)
        self._place.run_forever()
        self._place.close()
        asyncio.set_event_loop(None)
        self._home.call_soon_threadsafe(self._gone.set_result, None)

    def _make(self, ready: asyncio.Future[None]) -> None:
        self._agent = Echo()
        self._home.call_soon_threadsafe(ready.set_result, None)

    async def process(self, request: Any) -> Any:
        assert self._agent is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._agent.process(request), self._place))

    async def terminate(self) -> None:
        self._gone = self._home.create_future()
        self._place.call_soon_threadsafe(self._place.stop)
        await self._gone
        self._thread.join()


class TwoCommits:
    """The commits of a life without the life: each act is two, as a manager makes them."""

    def __init__(self, store: ostler.Store) -> None:
        self._store = store
        self._ids: list[UUID] = []

    async def act(self, name: str) -> None:
        match name:
            case "spawn":
                record = await self._store.commit(ReserveInstance(request=SpawnRequest(agent_definition_id=uuid4())))
                self._ids.append(record.instance_id)
                await self._move(AgentState.READY)
            case "call":
                await self._move(AgentState.PROCESSING)
                await self._move(AgentState.WAITING)
            case _:
                await self._move(AgentState.TERMINATING)
                await self._move(AgentState.TERMINATED)
                self._ids.pop()

    async def _move(self, to: AgentState) -> None:
        await self._store.commit(MoveInstance(instance_id=self._ids[-1], to=to))


class BareCommits:
    """The same commits, as a bare driver repeats them one after the other."""

    def __init__(self, home: Path, commits: Commits) -> None:
        self._bare = BareSqlite(home / "ostler.db")
        self._left = iter(commits)

    @classmethod
    async def record(cls, folder: Path, acts: Iterable[str]) -> BareCommits:
        home, copy = folder / "recorded", folder / "copy"
        async with open_store(home):
            pass
        shutil.copytree(home, copy)
        commits: Commits = []
        async with EngineStore(recording_sqlite(home / "ostler.db", commits)) as store:
            lives = TwoCommits(store)
            for act in acts:
                await lives.act(act)
        return cls(copy, commits)

    def milliseconds(self) -> float:
        """What one commit takes, by the two of the next act."""
        return 1000 / self._bare.rate([next(self._left), next(self._left)])

    def close(self) -> None:
        self._bare.close()
