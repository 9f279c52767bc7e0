"""`ostler events`: the numbered log."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import click

from ostler.cli.homes import home_option, look, require_workspace, workspace_option
from ostler.cli.output import as_json, as_json_line, note, table
from ostler.errors import CursorGoneError, StoreError
from ostler.model import Event, duration_text
from ostler.store import Store

#: The largest number that a store can hold.
_LAST = 2**63 - 1
_HEAD = ("NUMBER", "TIME (UTC)", "EVENT", "ABOUT", "WHAT")
#: What has a column of its own, or says nothing to a person.
_ELSEWHERE = frozenset(
    {"attempt", "correlation_id", "event_id", "instance_id", "occurred_at", "options", "sequence", "stack_trace"}
    | {"task_id", "version", "workspace_id"}
)


@click.command()
@click.option("--after", type=click.IntRange(min=0, max=_LAST), help="Those after this number; without it, the newest.")
@click.option("-n", "count", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json", "jsonl"]), default="table", help="How to print them."
)
@workspace_option(default=None)
@home_option
def events(after: int | None, count: int, output: str, workspace: UUID | None, home: str) -> None:
    """Show the numbered log, oldest first. The number of the last one is the cursor to go on from."""

    async def read(store: Store) -> tuple[int | None, int]:
        if workspace is not None:
            await require_workspace(store, workspace)
        head = await store.head()
        start = max(head.horizon, head.sequence - count) if after is None else after
        try:
            return await _show(_first(store.replay(start, workspace_id=workspace), count), output), head.sequence
        except CursorGoneError as error:
            raise StoreError(
                f"events up to {error.horizon} are no longer kept; go on with --after {error.horizon}"
            ) from error

    last, newest = look(home, read)
    if last is not None and last < newest and after is not None:
        note(f"there are more; go on with --after {last}")


async def _show(found: AsyncIterator[Event], output: str) -> int | None:
    """Print them, and return the number of the last. Lines are printed as they come: a log has no end."""
    last: int | None = None
    kept: list[Event] = []
    async for event in found:
        last = event.sequence
        if output == "jsonl":
            as_json_line(_whole(event))
        else:
            kept.append(event)
    if output == "json":
        as_json([_whole(event) for event in kept])
    elif output == "table":
        table(_HEAD, (_row(event) for event in kept))
    return last


async def _first(source: AsyncIterator[Event], count: int) -> AsyncIterator[Event]:
    async for event in source:
        yield event
        count -= 1
        if not count:
            return


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
