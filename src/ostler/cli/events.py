"""`ostler events`: the numbered log."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import click

from ostler.cli.homes import home_option, look, require_workspace, workspace_option
from ostler.cli.output import as_json, as_json_line, note, plain, table
from ostler.errors import AgentNotFoundError, CursorGoneError, StoreError
from ostler.model.events import Event
from ostler.model.faults import duration_text
from ostler.store import Store

#: The largest number that a store can hold.
_LAST = 2**63 - 1
#: So often those who follow look for more.
_PAUSE_SECONDS = 0.5
_NUMBER_WIDTH = 8
_HEAD = ("NUMBER", "TIME (UTC)", "EVENT", "ABOUT", "WHAT")
#: What has a column of its own, or says nothing to a person.
_ELSEWHERE = frozenset(
    {"attempt", "correlation_id", "event_id", "instance_id", "occurred_at", "options", "sequence", "stack_trace"}
    | {"task_id", "version", "workspace_id"}
)


@click.command()
@click.option("--after", type=click.IntRange(min=0, max=_LAST), help="Those after this number; without it, the newest.")
@click.option("-n", "count", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many.")
@click.option("--instance", type=click.UUID, help="Only those of this agent.")
@click.option("-f", "--follow", is_flag=True, help="Go on with those that come, until Ctrl-C.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json", "jsonl"]), default="table", help="How to print them."
)
@workspace_option(default=None)
@home_option
def events(count: int, follow: bool, output: str, home: str, **which: Any) -> None:
    """Show the numbered log, oldest first. The number of the last one is the cursor to go on from."""
    wanted = _Wanted(count=count, **which)
    if follow:
        if output == "json":
            raise click.UsageError("-f has no end, so there is no whole JSON; use -o jsonl")
        look(home, lambda store: _follow(store, wanted, output))
        return
    last = look(home, lambda store: _once(store, wanted, output))
    if last is not None:
        note(f"there are more; go on with --after {last}")


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    after: int | None
    count: int
    workspace: UUID | None
    instance: UUID | None


async def _once(store: Store, wanted: _Wanted, output: str) -> int | None:
    """The number of the last that was shown, if one asked from a cursor and there are more of these."""
    if wanted.after is None:
        await _show(_some(store, wanted), output)
        return None
    found = _AtMost(_some(store, dataclasses.replace(wanted, count=wanted.count + 1)), wanted.count)
    last = await _show(found, output)
    return last if found.more else None


class _AtMost:
    """So many of them, and whether there was another: that others have later ones tells nothing."""

    def __init__(self, found: AsyncIterator[Event], most: int) -> None:
        self._found = found
        self._most = most
        self.more = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        left = self._most
        async for event in self._found:
            if not left:
                self.more = True
                return
            yield event
            left -= 1


async def _some(store: Store, wanted: _Wanted) -> AsyncIterator[Event]:
    """At most so many: the first after the cursor, or the newest."""
    if wanted.workspace is not None:
        await require_workspace(store, wanted.workspace)
    head = await store.head()
    if wanted.after is None and wanted.instance is not None:
        # One agent has few, and they may lie far apart: the last are known when all were seen.
        newest = deque([event async for event in _from(store, head.horizon, wanted)], maxlen=wanted.count)
        if not newest and await store.get_instance(wanted.instance) is None:
            raise AgentNotFoundError(f"there is no agent {wanted.instance} in this home; check the id")
        for event in newest:
            yield event
        return
    start = max(head.horizon, head.sequence - wanted.count) if wanted.after is None else wanted.after
    left = wanted.count
    async for event in _from(store, start, wanted):
        yield event
        left -= 1
        if not left:
            return


async def _from(store: Store, start: int, wanted: _Wanted) -> AsyncIterator[Event]:
    with _in_options():
        async for event in store.replay(start, workspace_id=wanted.workspace, instance_id=wanted.instance):
            yield event


@contextmanager
def _in_options() -> Iterator[None]:
    """A cursor that is too old, in the words of a shell."""
    try:
        yield
    except CursorGoneError as error:
        raise StoreError(
            f"events up to {error.horizon} are no longer kept; go on with --after {error.horizon}"
        ) from error


async def _follow(store: Store, wanted: _Wanted, output: str) -> None:
    """First what was asked for, then whatever comes; without a table's head, for nobody knows how wide it will be."""
    cursor = wanted.after
    if cursor is None:
        cursor = (await store.head()).sequence
        async for event in _some(store, wanted):
            cursor = max(cursor, event.sequence)
            _print(event, output)
    elif wanted.workspace is not None:
        await require_workspace(store, wanted.workspace)
    while True:
        with _in_options():
            page = await store.read_page(cursor, workspace_id=wanted.workspace, instance_id=wanted.instance)
        for event in page.events:
            _print(event, output)
        if cursor == page.cursor:
            await asyncio.sleep(_PAUSE_SECONDS)
        cursor = page.cursor


def _print(event: Event, output: str) -> None:
    if output == "jsonl":
        as_json_line(_whole(event))
    else:
        number, *rest = _row(event)
        click.echo(plain(f"{number:>{_NUMBER_WIDTH}}  " + "  ".join(rest)))


async def _show(found: AsyncIterable[Event], output: str) -> int | None:
    """Print them, and return the number of the last. Lines are printed as they come: a log has no end."""
    last: int | None = None
    kept: list[Event] = []
    async for event in found:
        last = event.sequence
        if output == "jsonl":
            _print(event, output)
        else:
            kept.append(event)
    if output == "json":
        as_json([_whole(event) for event in kept])
    elif output == "table":
        table(_HEAD, (_row(event) for event in kept))
    return last


def _whole(event: Event) -> dict[str, Any]:
    return {"event_type": event.event_type, **json.loads(event.to_json())}


def _row(event: Event) -> tuple[str, ...]:
    about = getattr(event, "instance_id", None) or getattr(event, "task_id", None)
    return (
        str(event.sequence),
        f"{event.occurred_at:%Y-%m-%d %H:%M:%S}",
        event.event_type,
        str(about or "-"),
        ", ".join(_details(event)) or "-",
    )


def _details(event: Event) -> Iterator[str]:
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name in _ELSEWHERE or value is None:
            continue
        text = duration_text(value) if isinstance(value, timedelta) else str(value)
        yield f"{field.name}={text}"
