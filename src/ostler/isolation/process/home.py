"""The keeper of one home, as a level sees it: found or started when first needed, and replaced when it dies.

A tenant registers for its unit *before* that is started, so that no end is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ostler.clock import Clock
from ostler.errors import InvalidOperationError, StaleWriterError
from ostler.isolation.base import Site
from ostler.isolation.process import launch
from ostler.isolation.process.link import Answer, KeeperError, Link
from ostler.isolation.process.remains import Remains
from ostler.isolation.process.tenants import Tenant, tell
from ostler.keeper.protocol import REFUSED, VERSION

_log = logging.getLogger("ostler.isolation")
#: How long a keeper may take to end all that it has; it bounds every step of that by itself.
_END_SECONDS = 30.0
#: How long a keeper that is just leaving is asked again, or one that hangs, and how long that is waited in between.
_CONNECT_SECONDS = 20.0
_PAUSE_SECONDS = 0.025
_REFUSED_SECONDS = 1.0
_DYING_LOOKS = 80
#: How long a keeper may work on what it was asked before it is asked whether it lives; that takes 2 s more.
_UNANSWERED_SECONDS = 2.0
#: How long a close waits for what was confirmed to be forgotten.
_LAST_SECONDS = 2.0
#: It hung up, or is about to, or says nothing.
_GOING = frozenset({"lost", "ending", "late"})


class KeeperHome:
    def __init__(self, clock: Clock, site: Site) -> None:
        self._clock = clock
        self._site = site
        self._link: Link | None = None
        self._opening = asyncio.Lock()
        #: To connect, by whether a keeper is started where there is none.
        self._attempts: dict[bool, asyncio.Task[None]] = {}
        self._replacing: asyncio.Task[None] | None = None
        self._own: Path | None = None
        self._tenants: dict[str, Tenant] = {}
        self._work: set[asyncio.Task[Any]] = set()
        self._last_work: set[asyncio.Task[Any]] = set()
        #: By unit, what the keeper held when we came; recovery looks here for what an earlier manager started.
        self.found: dict[str, dict[str, Any]] = {}
        self._by_box: dict[str, set[str]] | None = None
        self.remains = Remains()
        self._has_read = False
        #: What the keeper said of itself: token, boxes, enforcement.
        self.about: Mapping[str, Any] = {}

    @property
    def outlives(self) -> bool:
        return self._site.directory is not None and self._site.outlive.total_seconds() > 0

    @property
    def output_rate(self) -> int:
        return self._site.output_rate

    @property
    def directory(self) -> Path:
        """The home; a private one that goes away again, where the manager has none."""
        if self._site.directory is not None:
            return self._site.directory.absolute()
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="ostler-home-"))
        return self._own

    @property
    def is_linked(self) -> bool:
        return self._link is not None and self._link.is_open

    @property
    def keeper_identity(self) -> str:
        """Of the present keeper process: one that follows it has another."""
        return ":".join(str(self.about.get(name)) for name in ("boot_id", "pid", "start_time"))

    # --- asking --------------------------------------------------------------------------------------

    async def open(self, *, start: bool = True) -> bool:
        """Connect to the living keeper, or start one. Whether there is one now."""
        await self.settled()
        if not self.is_linked:
            attempt = self._attempts.get(start)
            if attempt is None:  # one for all that wait for it: a keeper that hangs is not waited for by turns
                attempt = self._attempts[start] = self.run(self._attempt(start=start))
                attempt.add_done_callback(partial(self._attempted, start))
            await asyncio.wait((attempt,))
            if attempt.cancelled():
                raise InvalidOperationError(f"the manager of {self.directory} is closing")
            attempt.result()
        return self.is_linked

    async def _attempt(self, *, start: bool) -> None:
        async with self._opening:
            if not self.is_linked:
                await self._connect(start=start)

    def _attempted(self, start: bool, attempt: asyncio.Task[None]) -> None:
        del self._attempts[start]
        if not attempt.cancelled():
            attempt.exception()  # its callers may have been cancelled

    async def request(self, op: str, /, **fields: Any) -> dict[str, Any]:
        """Ask the present keeper. Raises `KeeperError`."""
        if self._link is None:
            raise KeeperError("the keeper of this home is gone", "lost")
        return await self._link.request(op, **fields)

    def ask(self, op: str, /, fds: Sequence[int] = (), **fields: Any) -> asyncio.Future[Answer]:
        if self._link is None:
            raise KeeperError("the keeper of this home is gone", "lost")
        return self._link.ask(op, fds, **fields)

    def move_in(self, unit: str, tenant: Tenant) -> Tenant | None:
        """From now on this one is told of the unit. Answers the tenant before it."""
        before = self._tenants.get(unit)
        self._tenants[unit] = tenant
        return before

    def has_tenant(self, unit: str) -> bool:
        return unit in self._tenants

    def move_out(self, unit: str, tenant: Tenant) -> None:
        if self._tenants.get(unit) is tenant:
            del self._tenants[unit]
        self.found.pop(unit, None)

    def run(self, work: Coroutine[Any, Any, Any], *, before_close: bool = False) -> asyncio.Task[Any]:
        """In a task of its own, held until it is done. With `before_close` it has a moment when the home closes."""
        task = asyncio.get_running_loop().create_task(work, name="ostler-keeper-errand")
        held = self._last_work if before_close else self._work
        held.add(task)
        task.add_done_callback(held.discard)
        return task

    def units_in(self, box: str) -> set[str]:
        """The runs of a command that the keeper had when we came, or that have a tenant."""
        if self._by_box is None:
            self._by_box = {}
            for unit, status in self.found.items():
                self._by_box.setdefault(str(status["box"]), set()).add(unit)
        ours = {unit for unit in self._tenants if unit.startswith(f"{box}.")}
        return {unit for unit in self._by_box.get(box, ()) if unit in self.found} | ours

    def boxes_in_use(self) -> set[str]:
        return _boxes(self._tenants)

    async def strike(self, box: str, leaf: str | None = None, grace_seconds: float = 0.0) -> list[str]:
        """End all in it; the keeper proves that nothing is left. Answers what is. Raises `KeeperError`."""
        report = await self.request("stop", box=box, leaf=leaf, unit=None, grace_seconds=grace_seconds)
        left = [str(one) for one in report.get("left", ())]
        if left or leaf is None:
            self.remains.note(box, left)
        return left

    async def is_answered(self, work: asyncio.Task[Any]) -> bool:
        """Wait until the work that asks the keeper is done. False after about 4 s of a keeper that does not answer.

        The work goes on then.
        """
        while True:
            await asyncio.wait((work,), timeout=_UNANSWERED_SECONDS)
            if work.done():
                return True
            link = self._link
            try:
                if link is not None:
                    await link.request("ping")
            except KeeperError as error:
                if error.kind == "late" and not work.done():
                    return False

    async def forget_box(self, box: str) -> None:
        """All of it has ended; the keeper may forget how. One that does not answer is told again when it does."""
        while (link := self._link) is not None:
            try:
                await link.request("forget", box=box)
            except KeeperError as error:
                if error.kind == "late":
                    await link.next_word()
                else:
                    return
            else:
                return
            with contextlib.suppress(KeeperError):  # it has read by now what it was asked before
                await self.strike(box)

    # --- coming and going ----------------------------------------------------------------------------

    async def _connect(self, *, start: bool) -> None:
        directory = self.directory / launch.KEEPER
        loop = asyncio.get_running_loop()
        until = loop.time() + _CONNECT_SECONDS
        why = "neither answers nor makes room for another"
        while loop.time() < until:
            sock = launch.connect(directory)
            if sock is None:
                if not start:
                    return
                if not await launch.start(directory):
                    await asyncio.sleep(_PAUSE_SECONDS)  # another is about to leave; no clock of ours knows when
                continue
            link = Link(sock, self._told, self._lost)
            try:
                await self._greet(link)
            except KeeperError as error:
                link.close()
                if error.kind == REFUSED:  # perhaps only for a moment, in which a process above ours was ending
                    until, why = min(until, loop.time() + _REFUSED_SECONDS), f"refuses: {error}"
                else:
                    _require_going(error, directory)
                await asyncio.sleep(_PAUSE_SECONDS)
            except BaseException:
                link.close()
                raise
            else:
                self._link = link
                return
        raise InvalidOperationError(f"the keeper of {directory} {why}")

    async def _greet(self, link: Link) -> None:
        lease = self._site.outlive.total_seconds() if self.outlives else 0
        hello = {"version": VERSION, "epoch": self._site.epoch, "lease_seconds": lease, "pid": os.getpid()}
        about = await link.request("hello", **hello)
        if await launch.renew(link, about, self.directory / launch.KEEPER):
            about = await link.request("hello", **hello)
        self.found, self._by_box = {one["unit"]: one for one in about.get("units", ())}, None
        for status in self.found.values():
            self.remains.read(status)
        self.about = about
        _log.info("the keeper of %s holds limits by %s", self.directory, about.get("boxes"))

    async def sweep_dead(self) -> None:
        """A keeper that ended in order took its socket along; one that was killed may have left processes."""
        if self._site.directory is not None:
            directory = self._site.directory / launch.KEEPER
            with launch.vacant(directory) as is_vacant:
                if is_vacant:
                    await launch.sweep(launch.token_of_dead(directory))

    async def read_last_will(self) -> Mapping[str, Mapping[str, Any]]:
        """Of a keeper that is gone: how its units ended, by unit, as far as it wrote that down. What it left is ended.

        Raises `InvalidOperationError` when a keeper holds the place and does not answer.
        """
        return {} if self._site.directory is None else await self._read_when_vacant(self._site.directory, sweep=True)

    def was_killed(self) -> bool:
        """Whether the last keeper did not end in order, and no other has followed it."""
        directory = self._site.directory
        return directory is not None and not self.is_linked and bool(launch.token_of_dead(directory / launch.KEEPER))

    async def read_remains(self) -> None:
        """Of a keeper that is gone; one that lives says them when it is greeted. Raises as `read_last_will`."""
        if self._site.directory is not None and not self._has_read and not self.is_linked:
            await self._read_when_vacant(self._site.directory, sweep=False)

    async def _read_when_vacant(self, home: Path, *, sweep: bool) -> Mapping[str, Mapping[str, Any]]:
        directory = home / launch.KEEPER
        for _ in range(_DYING_LOOKS):
            with launch.vacant(directory) as is_vacant:
                if is_vacant:
                    if sweep:
                        await launch.sweep(launch.token_of_dead(directory))
                    return self._read_exits(directory)
            await asyncio.sleep(_PAUSE_SECONDS)  # it is on its way out; no clock of ours knows when
        raise InvalidOperationError(f"the keeper of {directory} neither answers nor ends; kill it, and open again")

    def _read_exits(self, directory: Path) -> Mapping[str, Mapping[str, Any]]:
        exits = launch.exits_of_dead(directory)
        self._has_read = True
        for record in exits.values():
            self.remains.read({"box": record["box"], "exit": record})
        return exits

    async def settled(self) -> None:
        """Until a keeper that was lost is replaced, if one was."""
        while self._replacing is not None and self._replacing is not asyncio.current_task():
            await asyncio.wait((self._replacing,))

    async def close(self) -> None:
        """Leave the agents that go on without this manager, or end the keeper with all that it has."""
        if self._replacing is not None:
            _, pending = await asyncio.wait((self._replacing,), timeout=_END_SECONDS)
            for replacing in pending:
                replacing.cancel()
                await asyncio.wait((replacing,))
        for attempt in tuple(self._attempts.values()):
            attempt.cancel()
            await asyncio.wait((attempt,))
        if self._last_work:
            await asyncio.wait(self._last_work, timeout=_LAST_SECONDS)
        link, self._link = self._link, None
        if link is not None and link.is_open:
            link.depart()
            try:
                await link.request("bye", leave=self.outlives)
                if not self.outlives:
                    await asyncio.wait((link.over,), timeout=_END_SECONDS)
            except KeeperError as error:
                if error.kind != "lost":  # else it is gone already, and with it all that it had
                    _log.warning("%s; it ends what it has when it can", error)
            link.close()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None

    # --- being told ----------------------------------------------------------------------------------

    def _told(self, message: Mapping[str, Any]) -> None:
        if message.get("event") != "exit":
            return
        unit, record = str(message.get("unit")), message.get("exit") or {}
        if unit in self.found:
            self.found[unit]["exit"] = record
        self.remains.read({"box": record.get("box"), "exit": record})
        tenant = self._tenants.get(unit)
        if tenant is not None:
            tell(tenant, {"exit": record})

    def _lost(self) -> None:
        """Between one message and the next: the keeper was killed, or has crashed."""
        if self._link is None:
            return  # it never became ours
        self._link = None
        _log.error("the keeper of %s is gone; if it was killed, its agents die with it", self.directory)
        self._replacing = asyncio.get_running_loop().create_task(self._replace(), name="ostler-keeper-replacing")

    async def _replace(self) -> None:
        """A new keeper sweeps before it does anything else, and knows what the old one wrote down last."""
        tenants, token = dict(self._tenants), str(self.about.get("token", ""))
        self.found, taken = {}, True
        try:
            if tenants:
                await self._again(token)
            taken = False
        except StaleWriterError:
            _log.warning("the agents of %s are left to the keeper or manager that has them now", self.directory)
        finally:  # whatever happened, every tenant is told
            for unit, tenant in tenants.items():
                tell(tenant, self.found.get(unit), taken=taken)
            self._replacing = None

    async def _again(self, token: str) -> None:
        """Never sweeps while a keeper lives: then another manager looks after this home."""
        try:
            async with self._opening:
                await self._patiently()
        except StaleWriterError:
            raise
        except Exception:  # noqa: BLE001 - then it is swept without one
            _log.exception("no new keeper could be started for %s", self.directory)
            for _ in range(_DYING_LOOKS):  # one that was killed holds its lock until it is quite dead
                with launch.vacant(self.directory / launch.KEEPER) as is_vacant:
                    if is_vacant:
                        await launch.sweep(token)
                        return
                await asyncio.sleep(_PAUSE_SECONDS)
            raise StaleWriterError from None

    async def _patiently(self) -> None:
        """A program that has no descriptors left may have some again in a moment."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _CONNECT_SECONDS
        while True:
            try:
                return await self._connect(start=True)
            except InvalidOperationError as error:
                if not launch.is_short(error) or loop.time() > until:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)


def _require_going(error: KeeperError, directory: Path) -> None:
    """Raises for a keeper that stays and refuses us; any other is asked again."""
    if error.kind == "stale":
        raise StaleWriterError(f"a newer manager has the keeper of {directory}") from error
    if error.kind not in _GOING:
        raise InvalidOperationError(f"the keeper of {directory} refuses: {error}") from error


def _boxes(units: Mapping[str, Any]) -> set[str]:
    return {".".join(unit.split(".")[:2]) for unit in units}
