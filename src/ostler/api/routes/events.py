"""Streams: the numbered log as server-sent events, and the output of an instance. Both go on from a cursor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import Header
from fastapi.responses import StreamingResponse

from ostler.api.context import ContextOf, Handlers, ManagerOf
from ostler.lifecycle.logs import LogLine
from ostler.model.events import Event, EventsMissed
from ostler.model.query import ObservationOptions

#: A comment is sent when nothing happens for so long, so that both ends notice a lost connection.
HEARTBEAT_SECONDS = 15.0
_STREAM = "text/event-stream"


async def list_events(
    context: ContextOf,
    manager: ManagerOf,
    instance: str | None = None,
    after: int | None = None,
    types: str | None = None,
    follow: bool = False,
    limit: int = 100,
    metrics: bool = False,
    last_event_id: Annotated[int | None, Header()] = None,
) -> Any:
    """A page of the log; with `follow` a stream. `Last-Event-ID` continues where a lost connection ended."""
    event_types = None if types is None else frozenset(types.split(","))
    cursor = last_event_id if last_event_id is not None else after
    if not follow:
        events = await manager.list_events(instance, after=cursor, limit=limit)
        return [_document(event) for event in events if event_types is None or event.event_type in event_types]
    if cursor is not None:
        await manager.list_events(instance, after=cursor, limit=1)  # 410 before the stream has begun
    options = ObservationOptions(include_metrics=metrics, buffer_capacity=10_000)
    stream = manager.observe(instance, options, after=cursor)
    return StreamingResponse(_events(context, stream, event_types), media_type=_STREAM)


async def _events(context: ContextOf, stream: Any, event_types: frozenset[str] | None) -> AsyncIterator[str]:
    async with stream:
        async for event in _with_heartbeat(context, stream):
            if event is None:
                yield ": heartbeat\n\n"
            elif isinstance(event, EventsMissed):
                yield f"event: missed\ndata: {event.to_json()}\n\n"
            elif event_types is None or event.event_type in event_types:
                number = f"id: {event.sequence}\n" if event.sequence else ""
                yield f"{number}event: {event.event_type}\ndata: {json.dumps(_document(event))}\n\n"


def _document(event: Event) -> dict[str, Any]:
    return {"event_type": event.event_type, **event.to_dict()}


async def _with_heartbeat(context: ContextOf, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The items of a stream, and None when there was none for a while. It ends with the daemon."""
    following: asyncio.Future[Any] | None = None
    stopping = asyncio.ensure_future(context.stopping.wait())
    try:
        while True:
            following = following or asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait(
                {following, stopping}, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if stopping in done:
                return
            if not done:
                yield None
                continue
            item, following = following, None
            try:
                yield item.result()
            except StopAsyncIteration:
                return
    finally:
        stopping.cancel()
        if following is not None:
            following.cancel()


async def logs(
    instance: str,
    context: ContextOf,
    manager: ManagerOf,
    after: str | None = None,
    attempt: int | None = None,
    tail: int | None = None,
    since: datetime | None = None,
    follow: bool = False,
    raw: bool = False,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Any:
    """Lines of output with their cursors; with `follow` a stream until the instance has ended."""
    cursor = last_event_id or after
    last = tail if cursor is None else None  # a caller that goes on from a line gets every line after it
    lines = manager.log(instance, after=cursor, attempt=attempt, tail=last, since=since, follow=follow, raw=raw)
    if not follow:
        return [line.to_dict() async for line in lines]
    await manager.require_instance(instance)  # refused before the stream has begun
    return StreamingResponse(_log_lines(context, lines), media_type=_STREAM)


async def _log_lines(context: ContextOf, lines: AsyncIterator[LogLine]) -> AsyncIterator[str]:
    async for line in _with_heartbeat(context, lines):
        yield ": heartbeat\n\n" if line is None else _log_line(line)
    # Where the daemon ends first, the client goes on with the next daemon.
    yield f"event: {'bye' if context.stopping.is_set() else 'end'}\ndata: {{}}\n\n"


def _log_line(line: LogLine) -> str:
    return f"id: {line.cursor}\nevent: line\ndata: {line.to_json()}\n\n"


HANDLERS: Handlers = {
    "events": list_events,
    "logs": logs,
}
