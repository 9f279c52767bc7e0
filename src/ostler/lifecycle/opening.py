"""From a directory or a database address to a manager, and back to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ostler.agents import AgentManifest, AgentRegistry
from ostler.agents.files import read_lifecycle
from ostler.errors import InvalidOperationError, OstlerError, StaleWriterError, StoreError, ValidationError
from ostler.isolation import IsolationLevels
from ostler.isolation.walls import harden, is_kept
from ostler.keeper.protocol import MARK
from ostler.keeper.tag import TEMPLATE
from ostler.lifecycle.doors import require_kind
from ostler.lifecycle.fanout import Fanout
from ostler.lifecycle.house import House
from ostler.lifecycle.introduce import introduce
from ostler.lifecycle.leaving import cancel_calls, let_go, put_out, turn_away
from ostler.lifecycle.life import Life
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.ownership import HomeLock, Ownership
from ostler.lifecycle.recover import recover
from ostler.lifecycle.restart import restart_due
from ostler.lifecycle.resume import resume_due
from ostler.lifecycle.settings import LifecycleSettings
from ostler.lifecycle.suspend import park
from ostler.lifecycle.terminate import end
from ostler.lifecycle.timers import Timers
from ostler.lifecycle.waits import time_out
from ostler.lifecycle.watch import Watch
from ostler.model import AgentState, Fault, TerminationOptions, Wait, WaitKind, shown
from ostler.seams import Uuid7Source
from ostler.store import Seams, Store, open_store
from ostler.store.opening import home_path, is_address
from ostler.telemetry import LifecycleLog, LifecycleMetrics

WORKROOM = "work"
_NO_GUARD = (
    "this program opens a manager while a template loads it to find the classes of its agents; "
    'put what starts the program under `if __name__ == "__main__":`'
)
#: As many are ended together as the store takes in without complaint.
_AT_ONCE = 2000
_ROUNDS = 2
#: Beyond twice the grace, for what has no grace of its own: commits, forced ends.
_PATIENCE_SECONDS = 15.0
_SETTLED = frozenset({AgentState.READY, AgentState.PROCESSING, AgentState.WAITING, AgentState.SUSPENDED})
_CLOSING = "this manager is closed, or about to be; open one again"


@asynccontextmanager
async def open_manager(
    where: str | os.PathLike[str] | Store,
    *,
    settings: LifecycleSettings | None = None,
    registry: AgentRegistry | None = None,
    levels: IsolationLevels | None = None,
    seams: Seams | None = None,
    workroom: Path | None = None,
) -> AsyncIterator[AgentLifecycleManager]:
    """A manager over a home directory, a `postgresql://` address or a store.

    Nothing else may manage it meanwhile. Whatever an earlier manager left is recovered first; on leaving, the
    agents end in order, and those that are suspended stay so. With `LifecycleSettings.outlive`, those that can go on
    without a manager are left as they are, in mid-work too, until the next one finds them. `workroom` is where the
    private directories of instances are made; a home has its own.
    """
    _require_a_program_of_its_own()
    _require_kinds(where, settings, registry, levels, seams)
    chosen = LifecycleSettings() if settings is None else settings
    chosen.validate().require()
    outside = Seams() if seams is None else seams
    async with AsyncExitStack() as stack:
        home = None if isinstance(where, Store) or is_address(where) else _home(where)
        if home is not None:
            if is_kept(home):  # first of all: agents that lived on run already, and as the same user
                harden()
            lock = HomeLock(home)
            lock.take()  # at once: it does not wait, and a cancelled opening must not keep it
            stack.callback(lock.release)
        store = await stack.enter_async_context(where if isinstance(where, Store) else open_store(where, outside))
        room = workroom or (home / WORKROOM if home is not None else None)
        house = _build(store, chosen, outside, room, (registry, levels))
        stack.push_async_callback(house.levels.close)
        ownership = Ownership(store, house.clock, chosen)
        site = house.levels.site
        site.directory = site.directory or (home.absolute() if home is not None else None)
        site.outlive, site.environment = chosen.outlive, chosen.environment
        site.epoch = await ownership.take(certain=home is not None)
        stack.push_async_callback(ownership.release)
        keeping = Keeping(house, ownership)
        try:
            await keeping.open()
            yield AgentLifecycleManager(house, keeping.fanout)
        finally:
            await _uninterrupted(keeping.close())


def _require_kinds(where: object, *given: object) -> None:
    """Whatever is not left out must be what it says, also where it is empty and so would pass for left out."""
    if not isinstance(where, str | os.PathLike | Store):
        bound = "must be a directory, an address or a Store"
        raise ValidationError([Fault(field="where", bound=bound, value=shown(where))])
    kinds = {"settings": LifecycleSettings, "registry": AgentRegistry, "levels": IsolationLevels, "seams": Seams}
    for (name, kind), value in zip(kinds.items(), given, strict=True):
        if value is not None:
            require_kind(name, value, kind)


def _home(where: str | os.PathLike[str]) -> Path:
    home = home_path(where)
    try:
        str(home.absolute()).encode()
    except UnicodeEncodeError as error:  # agents are told of it, and records name it: all of that is text
        raise StoreError(f"the path {str(home)!a} is no UTF-8; choose a directory whose path is") from error
    return home


def _build(
    store: Store,
    settings: LifecycleSettings,
    seams: Seams,
    workroom: Path | None,
    parts: tuple[AgentRegistry | None, IsolationLevels | None],
) -> House:
    registry, levels = parts
    chance = seams.chance or random.Random(os.urandom(32))  # noqa: S311 - jitter and spreading, no secrets
    clock = seams.clock
    return House(
        store=store,
        registry=AgentRegistry(read_lifecycle=read_lifecycle) if registry is None else registry,
        levels=IsolationLevels(clock) if levels is None else levels,
        clock=clock,
        chance=chance,
        ids=seams.ids or Uuid7Source(clock, chance),
        fault=seams.fault,
        log=LifecycleLog(),
        metrics=LifecycleMetrics(),
        settings=settings,
        timers=Timers(clock),
        workroom=workroom.absolute() if workroom is not None else None,
    )


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Closing is finished even when whoever closes is cancelled meanwhile; the cancellation comes after."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                break
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


class Keeping:
    """What goes on for as long as a manager is open."""

    def __init__(self, house: House, ownership: Ownership) -> None:
        self._house = house
        self._ownership = ownership
        self._watch = Watch(house)
        self._forget: Callable[[], None] | None = None
        self.fanout = Fanout(
            house.store, house.clock, lambda count: house.metrics.count("lifecycle.observers.dropped", count)
        )

    async def open(self) -> None:
        house = self._house
        await self.fanout.start()
        await recover(house)
        house.timers.start(self._due)
        loop = asyncio.get_running_loop()

        def registered(manifest: AgentManifest) -> None:  # on whatever thread registers
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._registered, manifest)

        self._forget = house.registry.on_change(registered)
        self._watch.start()
        self._ownership.keep(self._lost)

    def _due(self, wait: Wait) -> None:
        house = self._house
        match wait.kind:
            case WaitKind.BACKOFF:
                house.run(restart_due(house, wait), "ostler-restart")
            case WaitKind.RESUME:
                house.run(resume_due(house, wait), "ostler-resume")
            case _:
                house.run(time_out(house, wait), "ostler-wait")

    def _registered(self, manifest: AgentManifest) -> None:
        """Some may have waited for just this definition."""
        if self._house.shut is not None:
            return
        for wait in self._house.strangers.pop(manifest.id, {}).values():
            self._due(wait)
        for life in self._house.living():
            if life.stranger and life.record.definition_id == manifest.id:
                self._house.run(introduce(self._house, life), "ostler-introduce")

    def _lost(self, error: StaleWriterError) -> None:
        """Somebody else owns the store now, and takes agents inside our program for lost; they must not live on."""
        house = self._house
        house.shut = error
        house.log.emit("ownership_lost", error=str(error))
        for life in house.living():
            if life.isolation.capabilities.outlives_manager:
                let_go(life)  # the new owner finds it again
                continue
            cancel_calls(life)
            turn_away(life, str(error))
            house.run(put_out(life), "ostler-disowned")

    async def close(self) -> None:
        house = self._house
        owned = house.shut is None
        limit = 2 * house.settings.close_grace.total_seconds() + _PATIENCE_SECONDS
        house.shut = house.shut or InvalidOperationError(_CLOSING)
        if self._forget is not None:
            self._forget()
        await self._watch.close()
        house.timers.close()
        house.restarting.open()
        house.starting.open()
        for _ in range(_ROUNDS):  # a spawn that was under way when the door was shut comes to light only later
            if owned:
                await asyncio.wait([house.run(self._retire_all(), "ostler-retire")], timeout=limit)
            for life in house.living():  # what could not be ended in order must not outlive us either
                if life.left:
                    continue
                if life.starting is not None:
                    life.starting.cancel()
                cancel_calls(life)
            await house.settle_down(limit)
        for life in house.living():
            if not life.left:
                with contextlib.suppress(OstlerError):
                    await put_out(life)
        await self.fanout.close()

    async def _retire_all(self) -> None:
        """Agents that live in this program end with it; a pause is kept, without a process.

        What can go on by itself, and is to, is left as it is; also what is about to be ready.
        """
        house = self._house
        if house.settings.outlive:
            staying = [life for life in house.living() if life.isolation.capabilities.outlives_manager]
            starts = [life.starting for life in staying if life.starting is not None and life.ending is None]
            if starts:
                await asyncio.wait(starts, timeout=house.settings.close_grace.total_seconds())
            for life in staying:
                if _stays(life):
                    let_go(life)
        options = TerminationOptions(
            graceful_timeout=_grace(house.settings.close_grace), reason="the manager was closed"
        )
        lives = list(house.living())
        for first in range(0, len(lives), _AT_ONCE):
            ends = []
            for life in lives[first : first + _AT_ONCE]:
                if life.left:
                    continue
                if life.state is AgentState.SUSPENDED and life.starting is None:
                    ends.append(house.run(park(house, life), "ostler-park"))
                elif life.record.is_active:
                    ends.append(end(house, life, options))
            await asyncio.gather(*ends, return_exceptions=True)


def _stays(life: Life) -> bool:
    """It lives, and is not on its way anywhere else."""
    under_way = life.starting or life.ending or life.parking
    return life.state in _SETTLED and life.cell is not None and not under_way and life.mourned < life.attempt


def _grace(wanted: timedelta) -> timedelta:
    """Less than a second is no grace by the rules of a termination, so it is none."""
    return wanted if wanted >= timedelta(seconds=1) else timedelta(0)


def _require_a_program_of_its_own() -> None:
    """Or the template would open a manager, which starts a template, which opens a manager."""
    if os.environ.get(MARK, "").partition(":")[2].startswith(TEMPLATE):
        raise InvalidOperationError(_NO_GUARD)
