"""Streams: the numbered log as server-sent events, and the output of an instance. Both go on from a cursor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any

from fastapi import Header, Request
from fastapi.responses import StreamingResponse

from ostler.api.context import Context, ContextOf, Handlers, ManagerOf, Number
from ostler.model.events import EVENT_CLASSES, Event, EventsMissed
from ostler.model.log import LogLine, Stream
from ostler.model.query import ObservationOptions
from ostler.model.record import adapter
from ostler.model.validation import fault

#: A comment is sent when nothing happens for so long, so that both ends notice a lost connection.
HEARTBEAT_SECONDS = 15.0
#: How often an open stream looks whether its token is still valid.
CHECK_SECONDS = 2.0
STREAM = "text/event-stream"
#: Events whose text is kept for the next observer.
_KEPT_TEXTS = 1000
#: Lines of a log that are written as one piece of an answer.
_LINES_AT_ONCE = 200
#: Lines of a log, each of up to 64 KiB, that wait to be sent to one who follows it.
_LINES_IN_BURST = 50
#: Whether the caller of a stream may still be served.
Validity = Callable[[], Awaitable[bool]]


async def list_events(
    request: Request,
    context: ContextOf,
    manager: ManagerOf,
    instance: str | None = None,
    after: Number | None = None,
    types: str | None = None,
    follow: bool = False,
    limit: Number = 100,
    metrics: bool = False,
    last_event_id: Annotated[Number | None, Header()] = None,
) -> Any:
    """A page of the log; with `follow` a stream. `Last-Event-ID` continues where a lost connection ended."""
    event_types = None if types is None else _known_types(types)
    cursor = last_event_id if last_event_id is not None else after
    if not follow:
        events = await manager.list_events(instance, after=cursor, limit=limit, types=event_types or ())
        return [_document(event) for event in events]
    if cursor is not None:
        await manager.list_events(instance, after=cursor, limit=1)  # 410 before the stream has begun
    options = ObservationOptions(include_metrics=metrics, buffer_capacity=10_000)
    stream = manager.observe(instance, options, after=cursor)
    return StreamingResponse(_events(context, validity_of(request), stream, event_types), media_type=STREAM)


def _known_types(types: str) -> frozenset[str]:
    names = frozenset(types.split(","))
    for name in sorted(names - EVENT_CLASSES.keys()):
        raise fault("types", f"must be one of {', '.join(EVENT_CLASSES)}", name)
    return names


async def _events(
    context: Context, valid: Validity, stream: Any, event_types: frozenset[str] | None
) -> AsyncIterator[str]:
    async with stream:
        async for event in with_heartbeat(context, valid, stream):
            if event is None:
                yield ": heartbeat\n\n"
                continue
            burst = (event, *stream.take_ready())
            texts = [_text(context, seen) for seen in burst if _is_chosen(seen, event_types)]
            if texts:
                yield "".join(texts)


def _is_chosen(event: Event | EventsMissed, event_types: frozenset[str] | None) -> bool:
    return event_types is None or isinstance(event, EventsMissed) or event.event_type in event_types


def _text(context: Context, event: Event | EventsMissed) -> str:
    """One event as it is sent. All observers of a daemon get the same text, made once."""
    if isinstance(event, EventsMissed):
        return f"event: missed\ndata: {event.to_json()}\n\n"
    text = context.event_texts.get(event.sequence)
    if text is None:
        number = f"id: {event.sequence}\n" if event.sequence else ""
        text = f"{number}event: {event.event_type}\ndata: {json.dumps(_document(event))}\n\n"
        if event.sequence:  # a live event has no number
            if len(context.event_texts) >= _KEPT_TEXTS:
                context.event_texts.clear()
            context.event_texts[event.sequence] = text
    return text


def _document(event: Event) -> dict[str, Any]:
    return {"event_type": event.event_type, **event.to_dict()}


async def with_heartbeat(context: Context, valid: Validity, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The items of a stream, and None when there was none for a while. It ends with the daemon, and with the token."""
    loop = asyncio.get_running_loop()
    following: asyncio.Future[Any] | None = None
    stopping = asyncio.ensure_future(context.stopping.wait())
    sent_at = checked_at = loop.time()
    try:
        while True:
            following = following or asyncio.ensure_future(anext(stream))
            await asyncio.wait({following, stopping}, timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if loop.time() - checked_at >= CHECK_SECONDS:
                checked_at = loop.time()
                if not await valid():
                    return
            if stopping.done():
                return
            if not following.done():
                if loop.time() - sent_at >= HEARTBEAT_SECONDS:
                    sent_at = loop.time()
                    yield None
                continue
            item, following, sent_at = following, None, loop.time()
            try:
                yield item.result()
            except StopAsyncIteration:
                return
    finally:
        stopping.cancel()
        if following is not None:
            following.cancel()


def validity_of(request: Request) -> Validity:
    valid: Validity = request.scope.get("still_valid", _always)
    return valid


async def _always() -> bool:
    return True


async def logs(
    instance: str,
    request: Request,
    context: ContextOf,
    manager: ManagerOf,
    after: str | None = None,
    attempt: Number | None = None,
    tail: Number | None = None,
    since: datetime | None = None,
    stream: Stream | None = None,
    follow: bool = False,
    raw: bool = False,
    exact: bool = False,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Any:
    """Lines of output with their cursors; with `follow` a stream until the instance has ended."""
    cursor = last_event_id or after
    last = tail if cursor is None else None  # a caller that goes on from a line gets every line after it
    lines = manager.log(
        instance,
        after=cursor,
        attempt=attempt,
        tail=last,
        since=since,
        stream=stream,
        follow=follow,
        raw=raw,
        exact=exact,
    )
    if not follow:
        pieces = _log_array(lines)
        first = await anext(pieces)  # what is refused is refused before the answer has begun
        return StreamingResponse(_chained(first, pieces), media_type="application/json")
    await manager.require_instance(instance)  # refused before the stream has begun
    return StreamingResponse(_log_lines(context, validity_of(request), lines), media_type=STREAM)


async def _log_array(lines: AsyncIterator[LogLine]) -> AsyncIterator[bytes]:
    """A JSON array in pieces: a whole log may be larger than what the daemon should hold at once."""
    dump = adapter(list[LogLine]).dump_json
    batch: list[LogLine] = []
    separator = b"["
    async for line in lines:
        batch.append(line)
        if len(batch) >= _LINES_AT_ONCE:
            yield separator + dump(batch)[1:-1]
            batch, separator = [], b","
    yield (separator + dump(batch)[1:-1] if batch else separator.replace(b",", b"")) + b"]"


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def _log_lines(context: Context, valid: Validity, lines: AsyncIterator[LogLine]) -> AsyncIterator[str]:
    async for burst in with_heartbeat(context, valid, _bursts(lines)):
        yield ": heartbeat\n\n" if burst is None else "".join(map(_log_line, burst))
    yield await last_words(context, valid)


async def _bursts(lines: AsyncIterator[LogLine]) -> AsyncIterator[list[LogLine]]:
    """All lines that are there already, together: one at a time would cost more than to read them."""
    ready: asyncio.Queue[LogLine | None] = asyncio.Queue(_LINES_IN_BURST)

    async def read() -> None:
        try:
            async for line in lines:
                await ready.put(line)
        except Exception:
            await ready.put(None)
            raise
        await ready.put(None)

    reading = asyncio.create_task(read())
    try:
        while (line := await ready.get()) is not None:
            burst = [line]
            while not ready.empty() and (line := ready.get_nowait()) is not None:
                burst.append(line)
            yield burst
            if line is None:
                break
        await reading  # raises what ended it
    finally:
        reading.cancel()


async def last_words(context: Context, valid: Validity) -> str:
    """Where the daemon ends first, the client goes on with the next daemon."""
    is_cut_off = context.stopping.is_set() or not await valid()
    return f"event: {'bye' if is_cut_off else 'end'}\ndata: {{}}\n\n"


def _log_line(line: LogLine) -> str:
    return f"id: {line.cursor}\nevent: line\ndata: {line.to_json()}\n\n"


HANDLERS: Handlers = {
    "events": list_events,
    "logs": logs,
}
