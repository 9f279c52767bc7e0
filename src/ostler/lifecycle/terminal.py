"""Terminals and standard input of commands, for people: watched from any place, typed into with the right to ask."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from uuid import UUID

from ostler.errors import AgentGoneError, AgentNotFoundError, InvalidOperationError, ValidationError
from ostler.isolation.base import Console, Input, Screen
from ostler.lifecycle.instance import Runtime
from ostler.lifecycle.observe import LastEvent, is_over
from ostler.lifecycle.reach import InstanceId, Reach
from ostler.model.access import Actor, Permission
from ostler.model.instance import AgentInstance
from ostler.model.record import Record, record
from ostler.model.spawn import AgentSpawnOptions, TerminalSize
from ostler.model.validation import fault
from ostler.store.transaction import Transaction

#: How often a command that has no terminal yet, or none any more, is looked at.
_LOOK_SECONDS = 0.2
#: Input for a command that has not begun waits for so long.
_BEGIN_SECONDS = 10.0


@record
class ScreenPart(Record):
    #: From here a viewer goes on that lost its connection.
    cursor: str
    #: As the program wrote it, control sequences included.
    data: bytes


async def follow(
    reach: Reach, instance_id: InstanceId, screen: Screen | None = None
) -> AsyncGenerator[ScreenPart, None]:
    """Over restarts: each has a terminal of its own."""
    instance = await reach.find(instance_id, Permission.AGENTS_READ)
    await require_terminal(reach, instance)
    runtime = reach.runtime
    console = _console(runtime, instance)
    last_event = LastEvent(runtime.fanout, runtime.clock, instance)
    while True:
        over = await runtime.store.read(is_over, instance.instance_id)
        shown = None
        with contextlib.suppress(AgentGoneError):
            shown = await console.read(screen)
        if shown is not None:
            if shown.data:
                yield ScreenPart(cursor=f"{shown.unit}:{shown.position}", data=shown.data)
            screen = shown
        if shown is None or (shown.has_ended and not shown.data):
            if over:
                return
            await last_event.wait(_LOOK_SECONDS)


async def write_input(reach: Reach, instance_id: InstanceId, data: Input) -> tuple[int, bool]:
    async with reach.audited("write_input", f"instance:{instance_id}"):
        instance = await reach.find(instance_id, Permission.AGENTS_PROCESS)
        on_terminal = await has_terminal(reach, instance)
        if not on_terminal and not _options(instance).stdin:
            ways = "`ostler run -i` (a pipe) or `ostler run -it` (a terminal)"
            raise InvalidOperationError(f"{instance.name} reads no input; start it with {ways}")
        await _note_typist(reach, instance)
    runtime = reach.runtime
    console, until = _console(runtime, instance), runtime.clock.mono() + _BEGIN_SECONDS
    last_event = LastEvent(runtime.fanout, runtime.clock, instance)
    while True:
        over = await runtime.store.read(is_over, instance.instance_id)
        with contextlib.suppress(AgentGoneError):
            taken, is_closed = await console.write(data)
            if taken or not is_closed or over or not on_terminal:  # its next run has a terminal of its own
                return taken, is_closed
        if over or runtime.clock.mono() > until:
            return 0, over
        await last_event.wait(_LOOK_SECONDS)


async def resize(reach: Reach, instance_id: InstanceId, size: TerminalSize | None, *, redraw: bool) -> None:
    async with reach.audited("resize", f"instance:{instance_id}"):
        instance = await reach.find(instance_id, Permission.AGENTS_PROCESS)
        checked = None if size is None else size.checked()
        await require_terminal(reach, instance)
    with contextlib.suppress(AgentGoneError):  # it has not begun, or has ended
        pair = None if checked is None else (checked.rows, checked.columns)
        await _console(reach.runtime, instance).resize(pair, redraw=redraw)


async def require_terminal(reach: Reach, instance: AgentInstance) -> None:
    if not await has_terminal(reach, instance):
        raise InvalidOperationError(
            f"{instance.name} has no terminal: `ostler logs -f {instance.name}` follows what it writes; "
            "a command gets a terminal with `ostler run -it -- CMD`"
        )


async def has_terminal(reach: Reach, instance: AgentInstance) -> bool:
    if _options(instance).terminal is not None:
        return True
    with contextlib.suppress(AgentNotFoundError, ValidationError):  # of a definition that is not known any more
        command = (await reach.runtime.definitions.manifest(instance.definition_id)).command
        return command is not None and command.pty
    return False


def _options(instance: AgentInstance) -> AgentSpawnOptions:
    return instance.spawn_options or AgentSpawnOptions()


def _console(runtime: Runtime, instance: AgentInstance) -> Console:
    return runtime.levels.get(_options(instance).isolation_level).console(instance.instance_id)


def parse_cursor(cursor: str | None) -> Screen | None:
    if cursor is None:
        return None
    unit, _, position = cursor.rpartition(":")
    if not unit or not position.isdecimal() or len(position) > 18:
        raise fault("after", "must be the cursor of a part of the screen", cursor)
    return Screen(unit=unit, position=int(position))


async def _note_typist(reach: Reach, instance: AgentInstance) -> None:
    """The audit names who types into the agent of another: once for each typist and attempt."""
    principal = reach.principal
    key = (instance.instance_id, instance.attempt, principal.principal_id)
    if principal.principal_id != instance.owner_id and key not in reach.runtime.typists:
        reach.runtime.typists.add(key)
        await reach.runtime.store.run(_audit_typist, instance.workspace_id, reach.actor, str(instance.instance_id))


def _audit_typist(tx: Transaction, workspace_id: UUID, by: Actor, instance_id: str) -> None:
    tx.audit(workspace_id, by, "write_input", f"instance:{instance_id}")
