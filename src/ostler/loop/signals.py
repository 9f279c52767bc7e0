"""Breakpoints: three ways by which an agent says that it stops, and one message.

`AgentContext.signal` and `ostler signal` put it into the event log of the instance. What an agent writes into
communications.json is put there too, so that from then on there is one place to look at, and it survives us.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostler.errors import ValidationError
from ostler.model.access import Actor
from ostler.model.events import AgentSignalEvent
from ostler.model.instance import AgentInstance
from ostler.model.loop import Breakpoint, BreakpointType
from ostler.model.task import Task
from ostler.store import loops as loop_store
from ostler.store.reports import add_signal
from ostler.store.transaction import Transaction
from ostler.tasks.context import BY, TaskContext
from ostler.workdirs.files import opened, read_small, write_durably
from ostler.workdirs.records import SIGNAL_FILE, Workdir

_log = logging.getLogger("ostler.loop")
_MAX_BYTES = 1024 * 1024
#: A change is told when nothing more came for one step, at the latest after the second time.
_STEP_MS, _DEBOUNCE_MS = 20, 200
_T = BreakpointType
#: Names of signals that are breakpoints.
BREAKPOINTS: Mapping[str, BreakpointType] = {
    "complete": _T.TASK_COMPLETE,
    "blocked": _T.BLOCKED,
    "pr": _T.PR_CREATED,
    **{kind.value: kind for kind in _T},
}
_STATES: Mapping[str, BreakpointType | None] = {
    "working": None,
    "complete": _T.TASK_COMPLETE,
    "blocked": _T.BLOCKED,
    "waiting_pr": _T.PR_CREATED,
}


def breakpoint_of(event: AgentSignalEvent) -> Breakpoint | None:
    kind = BREAKPOINTS.get(event.name)
    try:
        return None if kind is None else Breakpoint.read(kind, event.payload or {})
    except (ValidationError, TypeError) as error:
        _log.warning("a signal of %s cannot be read: %s", event.instance_id, error)
        return None


async def last_breakpoint(tasks: TaskContext, instance: AgentInstance) -> Breakpoint | None:
    """Of this instance, and of no other: a later one corrects an earlier one."""
    signals = [breakpoint_of(event) for event in await tasks.store.read(loop_store.signals_of, instance.instance_id)]
    return next((signal for signal in reversed(signals) if signal is not None), None)


# --- communications.json -----------------------------------------------------------------------------


@dataclass
class SignalFile:
    """One file, and the one entry in it that is ours."""

    tasks: TaskContext
    task: Task
    path: Path
    #: Whether other agents write there too.
    is_shared: bool
    #: What cannot be used in it; the next agent is told.
    fault: str | None = None
    #: The entry that an earlier attempt left: another program that shares the file may write it back.
    _stale: Any = None
    _taken: Any = None
    _told: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, tasks: TaskContext, task: Task, workdir: Workdir) -> SignalFile:
        shared = None if task.loop is None else task.loop.comm_file
        return cls(tasks, task, Path(shared) if shared else Path(workdir.path) / SIGNAL_FILE, shared is not None)

    @property
    def name(self) -> str:
        return f"agent-{self.task.key}"

    def read(self) -> dict[str, Any]:
        """Without a file there is nothing in it. Raises `ValueError` for one that is no JSON, such as half of it."""
        try:
            with opened(self.path.parent) as folder:
                data = read_small(folder, os.fsencode(self.path.name), _MAX_BYTES)
            values = {} if data is None else json.loads(data)
        except OSError:
            return {}
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(values, dict):
            raise ValueError("it is no object")  # noqa: TRY004 - as all that is wrong with the text
        return values

    def clear(self) -> None:
        """Before an attempt begins: what an earlier one said is not said by this one."""
        with contextlib.suppress(OSError, ValueError):
            if not self.is_shared:
                self.path.unlink()
                return
            values = self.read()
            if self.name in values:
                self._stale = values.pop(self.name)
                write_durably(self.path, json.dumps(values, indent=2).encode())

    async def take(self, instance: AgentInstance, *, has_ended: bool = False) -> bool:
        """Put what it says into the event log, once. Whether there was a breakpoint.

        While the agent works, the entry of its predecessor does not count.
        """
        try:
            values = await asyncio.to_thread(self.read)
        except ValueError as error:
            self.fault = f"{SIGNAL_FILE} cannot be read: {error}"
            return False
        self.fault = None
        if not self.is_shared:
            for other in sorted(values.keys() - {self.name}):
                await self._refuse(instance, f"an entry {other!a} in {SIGNAL_FILE}; {self.name} was expected")
        entry = values.get(self.name)
        is_old = entry == self._taken or (entry == self._stale and not has_ended)
        if not isinstance(entry, Mapping) or is_old:
            return False
        signal = await self._breakpoint(instance, entry)
        if signal is None:
            return False
        payload = {**signal.to_dict(), "origin": SIGNAL_FILE}
        await self.tasks.store.run(add_signal, instance, signal.type.value, payload)
        self._taken = entry
        return True

    async def _breakpoint(self, instance: AgentInstance, entry: Mapping[str, Any]) -> Breakpoint | None:
        values = entry.get("breakpoint")
        values = dict(values) if isinstance(values, Mapping) else {}
        kind = self._kind(entry.get("lifecycle_state"), values.get("type"))
        if kind is None:
            return None
        if values.get("task_id") not in (None, self.task.key):
            await self._refuse(instance, f"a breakpoint of the task {values['task_id']!a} in the workdir of another")
            return None
        if values.get("attempt") not in (None, self.task.attempt):
            await self._refuse(instance, f"a breakpoint of attempt {values['attempt']!a}; this is {self.task.attempt}")
            return None
        try:
            return Breakpoint.read(kind, values)
        except (ValidationError, TypeError) as error:
            self._warn(f"{SIGNAL_FILE} cannot be used: {error}")
            return None

    def _kind(self, state: Any, name: Any) -> BreakpointType | None:
        """The type decides; a state that says something else is a warning."""
        by_state = _STATES.get(str(state))
        if name is None:
            if state is not None and str(state) not in _STATES:
                self._warn(f"lifecycle_state {state!a} is not known; known are {', '.join(_STATES)}")
            return by_state
        kind = BREAKPOINTS.get(str(name))
        if kind is None:
            self._warn(f"a breakpoint has the unknown type {name!a}; known are {', '.join(_T)}")
        elif by_state is not kind:
            _log.warning("%s: lifecycle_state is %a, the breakpoint says %s; that counts", self.task.key, state, kind)
        return kind

    def _warn(self, fault: str) -> None:
        self.fault = fault
        if fault not in self._told:
            self._told.add(fault)
            _log.warning("%s: %s", self.task.key, fault)

    async def _refuse(self, instance: AgentInstance, what: str) -> None:
        self.fault = f"{SIGNAL_FILE} has {what}, which is refused"
        if what in self._told:
            return
        self._told.add(what)
        await self.tasks.store.run(note_refusal, self.task, BY, f"{what} (instance {instance.instance_id})")

    async def watch(self, interval: float) -> AsyncIterator[None]:
        """Once now, and after each change. Where the file cannot be watched it is looked at every so often."""
        yield
        from watchfiles import awatch  # noqa: PLC0415 - only a loop needs it

        try:
            async for changes in awatch(
                self.path.parent,
                recursive=False,
                step=_STEP_MS,
                debounce=_DEBOUNCE_MS,
                rust_timeout=round(interval * 1000),
                yield_on_timeout=True,
            ):
                if not changes or any(Path(path).name == self.path.name for _, path in changes):
                    yield
        except (OSError, RuntimeError, FileNotFoundError) as error:
            _log.info("%s cannot be watched (%s), so it is read every %s s", self.path, error, interval)
            while True:
                await self.tasks.manager.clock.sleep(interval)
                yield


def note_refusal(tx: Transaction, task: Task, by: Actor, what: str) -> None:
    tx.audit(task.workspace_id, by, "task.signal", f"task:{task.key}", outcome="denied", detail=what)
