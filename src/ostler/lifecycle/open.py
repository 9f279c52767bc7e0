"""From a home to a manager and back: lock, store, lease, recovery; and the orderly close."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

from ostler.agents.registry import AgentManifest, AgentRegistry
from ostler.aio import finish
from ostler.definitions import read_lifecycle
from ostler.definitions.projects import Projects
from ostler.drivers import register_built_in
from ostler.errors import (
    InvalidOperationError,
    LeaseHeldError,
    OstlerError,
    StaleWriterError,
    StoreError,
    StoreFullError,
)
from ostler.failpoints import Seams
from ostler.home import LOCK_FILE, SOCKET_FILE, default_home
from ostler.isolation.hardening import harden, is_kept, keep_from_children
from ostler.isolation.registry import IsolationLevels
from ostler.keeper.protocol import MARK
from ostler.keeper.rlimit_tag import TEMPLATE
from ostler.lifecycle.definitions import Definitions
from ostler.lifecycle.disk import DiskMeter
from ostler.lifecycle.identity import settle_home
from ostler.lifecycle.instance import Instance, Runtime
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.messages import Close, Detach, OwnerLost, Registered
from ostler.lifecycle.monitor import Monitor
from ostler.lifecycle.observe import Fanout
from ostler.lifecycle.phases import Starting
from ostler.lifecycle.reach import require_kind
from ostler.lifecycle.recover import recover
from ostler.lifecycle.settings import LifecycleSettings
from ostler.lifecycle.start_gate import StartGate
from ostler.lifecycle.table import TABLE
from ostler.model.validation import fault
from ostler.store import leases, workspaces
from ostler.store.store import Store, home_path, is_address
from ostler.telemetry.log import LifecycleLog
from ostler.telemetry.metrics import LifecycleMetrics

#: Processes that are started at a time, so that the cores are busy and an urgent start does not wait long.
_STARTS_AT_ONCE = 8
#: Beyond twice the grace, for what has none of its own: commits, forced ends.
_CLOSE_SECONDS = 15.0
_CLOSED = "this manager is closed, or about to be; open one again"
_NO_GUARD = (
    "this program opens a manager while a template loads it to find the classes of its agents; "
    'put what starts the program under `if __name__ == "__main__":`'
)


@asynccontextmanager
async def open_manager(
    where: str | os.PathLike[str] | Store | None = None,
    *,
    settings: LifecycleSettings | None = None,
    registry: AgentRegistry | None = None,
    levels: IsolationLevels | None = None,
    seams: Seams | None = None,
) -> AsyncIterator[AgentLifecycleManager]:
    """A manager over a home directory, a `postgresql://` address, `:memory:` or a store.

    Nothing else may manage it meanwhile. What an earlier manager left is recovered first. On leaving, the agents are
    ended in order and those that are suspended are parked; `keep_agents` on the manager leaves them alive instead.
    """
    _require_no_template()
    for name, value, kind in (
        ("settings", settings, LifecycleSettings),
        ("registry", registry, AgentRegistry),
        ("levels", levels, IsolationLevels),
        ("seams", seams, Seams),
    ):
        if value is not None:
            require_kind(name, value, kind)
    place = default_home() if where is None else where
    if not isinstance(place, str | os.PathLike | Store):
        raise fault("where", "must be a directory, an address or a Store", place)
    chosen = (settings or LifecycleSettings()).checked()
    outside = seams or Seams()
    home = None if isinstance(place, Store) or is_address(place) else home_path(place).absolute()
    async with AsyncExitStack() as stack:
        if home is not None:
            if is_kept(home):  # first of all: agents that live on run as the same user
                harden()
            lock = HomeLock(home)
            lock.take()
            stack.callback(lock.release)
        store = place if isinstance(place, Store) else Store(place, outside)
        if not isinstance(place, Store):
            await stack.enter_async_context(store)
        runtime = _build(store, chosen, outside, home, registry, levels)
        stack.push_async_callback(runtime.levels.close)
        lease = LeaseKeeper(store, runtime, chosen)
        runtime.levels.site.epoch = await lease.take(certain=home is not None)
        stack.push_async_callback(lease.release)
        if home is not None:
            runtime.home_notice = await settle_home(store, home, outside.clock.wall())
        session = _Session(runtime)
        try:
            await session.open()
            lease.keep(session.lose_ownership)
            yield session.manager
        finally:
            await finish(session.close())


def _build(
    store: Store,
    settings: LifecycleSettings,
    seams: Seams,
    home: Path | None,
    registry: AgentRegistry | None,
    levels: IsolationLevels | None,
) -> Runtime:
    clock = seams.clock
    chance = seams.chance or random.Random(os.urandom(32))  # noqa: S311 - jitter and spreading, no secrets
    metrics = LifecycleMetrics()
    places = IsolationLevels(clock) if levels is None else levels
    places.site.directory = places.site.directory or home
    places.site.outlive, places.site.environment = settings.outlive, settings.environment
    places.site.output_rate = settings.output_rate * 1024 * 1024
    definitions = AgentRegistry(read_lifecycle=read_lifecycle) if registry is None else registry
    register_built_in(definitions)
    return Runtime(
        store=store,
        definitions=Definitions(Projects(definitions, home), store, clock),
        levels=places,
        clock=clock,
        chance=chance,
        ids=seams.id_source(),
        fault=seams.fault,
        log=LifecycleLog(),
        metrics=metrics,
        settings=settings,
        fanout=Fanout(lambda count: metrics.count("lifecycle.observers.dropped", count)),
        table=TABLE,
        home=home,
        loop=asyncio.get_running_loop(),
        start_gate=StartGate(clock, at_once=_STARTS_AT_ONCE),
        restart_gate=StartGate(clock, at_once=settings.restarts_at_once, per_second=settings.restarts_per_second),
        disk=DiskMeter(home, clock, settings.retention.disk),
    )


class _Session:
    """What goes on for as long as a manager is open."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._monitor = Monitor(runtime)
        self._forget: Callable[[], None] | None = None
        self.manager = AgentLifecycleManager(runtime)

    async def open(self) -> None:
        runtime = self._runtime
        await runtime.fanout.start(runtime.store)
        for workspace in await runtime.store.read(workspaces.list_workspaces):
            runtime.workspaces[workspace.workspace_id] = workspace
        self._forget = runtime.definitions.registry.on_change(self._registered)
        await recover(runtime)
        await self._monitor.refresh()
        self._monitor.start()

    def _registered(self, manifest: AgentManifest) -> None:
        """On whatever thread registers: instances may have waited for this definition."""
        with contextlib.suppress(RuntimeError):
            self._runtime.loop.call_soon_threadsafe(self._tell_registered, manifest)

    def _tell_registered(self, manifest: AgentManifest) -> None:
        for instance in list(self._runtime.instances.values()):
            if instance.record.definition_id == manifest.id:
                instance.manifest = manifest
                instance.post(Registered())

    def lose_ownership(self, error: StaleWriterError) -> None:
        """Another manager owns the store."""
        runtime = self._runtime
        runtime.closing = error
        runtime.log.emit("ownership_lost", error=str(error))
        for instance in list(runtime.instances.values()):
            instance.post(OwnerLost(error=error))

    async def close(self) -> None:
        """Agents end in order; with `keep` those that can go on are left as they are, in mid-work too."""
        runtime = self._runtime
        owned = runtime.closing is None
        runtime.closing = runtime.closing or InvalidOperationError(_CLOSED)
        if self._forget is not None:
            self._forget()
        await self._monitor.close()
        if runtime.recovering is not None:
            runtime.recovering.cancel()
            await asyncio.wait([runtime.recovering])
        runtime.restart_gate.open()
        runtime.start_gate.open()
        grace = runtime.settings.close_grace
        limit = 2 * grace.total_seconds() + _CLOSE_SECONDS
        if owned:
            # By the real clock: however the agents behave, closing ends.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._end_all(grace if grace >= timedelta(seconds=1) else timedelta(0))
        for instance in list(runtime.instances.values()):
            if instance.task is not None:
                runtime.log.emit("left_behind", instance_id=instance.instance_id, what="the manager was closed first")
                instance.task.cancel()
                await asyncio.wait([instance.task])
                if instance.cell is not None:
                    await instance.cell.destroy()
        if runtime.tasks:
            _, pending = await asyncio.wait(set(runtime.tasks), timeout=limit)
            for task in pending:
                task.cancel()
        runtime.fanout.close()

    async def _end_all(self, grace: timedelta) -> None:
        runtime, keep = self._runtime, self.manager.keep_agents
        while runtime.reserving or any(not instance.is_over for instance in runtime.instances.values()):
            if runtime.reserving:
                await asyncio.wait(list(runtime.reserving))
                await asyncio.sleep(0)  # their callers make the instances
            running = [instance for instance in runtime.instances.values() if not instance.is_over]
            await asyncio.gather(*(self._end(instance, grace, keep=keep) for instance in running))

    async def _end(self, instance: Instance, grace: timedelta, *, keep: bool) -> None:
        stays = keep and instance.level.capabilities.outlives_manager
        if stays and isinstance(instance.phase, Starting) and instance.phase.operation is not None:
            task = instance.phase.operation.task
            if task is not None:
                await asyncio.wait([task], timeout=grace.total_seconds())
        with contextlib.suppress(OstlerError):
            await instance.ask(Detach() if stays else Close(grace=grace))
        if instance.task is not None:
            await asyncio.wait([instance.task])


def _require_no_template() -> None:
    """Or the template would open a manager, which starts a template, which opens a manager."""
    if os.environ.get(MARK, "").partition(":")[2].startswith(TEMPLATE):
        raise InvalidOperationError(_NO_GUARD)


# --- one owner ---------------------------------------------------------------------------------------


class HomeLock:
    """Held as long as this process lives. Its holder knows that no other manager runs here."""

    def __init__(self, home: Path) -> None:
        self._path = home / LOCK_FILE
        self._descriptor: int | None = None
        keep_from_children(self)

    def take(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"{self._path.parent} cannot be used as a home ({error.strerror}); choose one that you may write"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 100).decode(errors="replace").strip()
            os.close(descriptor)
            who = f"process {holder}" if holder.isdigit() else "another process"
            if (self._path.parent / SOCKET_FILE).exists():
                raise LeaseHeldError(
                    f"a daemon ({who}) manages the home {self._path.parent}; use `ostler.Client()` or the command "
                    "line to work with it, or stop it with `ostler down`"
                ) from None
            raise LeaseHeldError(
                f"{who} manages the home {self._path.parent}; close it first, or use another home"
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the number in it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                # Not by closing alone: a copy of the descriptor in a child would hold it on.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forked(self) -> None:
        """In a child: without unlocking, for it is still the parent's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class LeaseKeeper:
    """Takes the lease of the store, renews it, and says when it is lost."""

    def __init__(self, store: Store, runtime: Runtime, settings: LifecycleSettings) -> None:
        self._store = store
        self._runtime = runtime
        self._ttl = settings.lease_ttl
        # Two managers of one process are two owners.
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._certain = False
        self._task: asyncio.Task[None] | None = None

    async def take(self, *, certain: bool) -> int:
        """The epoch. `certain`: the lock on the home is held, so an owner that has a lease there is gone."""
        self._certain = certain
        before = await self._store.read(leases.get_lease)
        if before is not None:
            self._runtime.last_owned = before.expires_at - self._ttl
        try:
            return (await self._store.take_lease(self._owner, ttl=self._ttl, steal=certain)).epoch
        except StoreFullError:
            if not certain:
                raise
            # A home on a full disk is opened all the same, so that what lives there can be ended.
            return await self._store.own_without_lease() + 1

    def keep(self, lost: Callable[[StaleWriterError], None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._renew(lost), name="ostler-lease")

    async def _renew(self, lost: Callable[[StaleWriterError], None]) -> None:
        while True:
            await self._runtime.clock.sleep(self._ttl.total_seconds() / 3)
            try:
                if self._store.lease is None:
                    await self._store.take_lease(self._owner, ttl=self._ttl, steal=self._certain)
                else:
                    await self._store.renew_lease(ttl=self._ttl)
            except StaleWriterError as error:
                lost(error)
                return
            except StoreError:
                continue  # a busy or a full disk: another owner cannot write there either

    async def release(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(StoreError, StaleWriterError):  # one that cannot be given back ends by itself
            await self._store.release_lease()
