"""Terminals: a stream of what a program draws, its input, the size of the window. Bytes are sent as base64."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Body, Header, Request
from fastapi.responses import StreamingResponse

from ostler.api.context import Context, ContextOf, Handlers, ManagerOf, Number
from ostler.api.routes.events import STREAM, Validity, last_words, validity_of, with_heartbeat
from ostler.isolation.base import Input
from ostler.lifecycle.terminal import ScreenPart
from ostler.model.spawn import TerminalSize
from ostler.model.validation import fault

_MAX_WRITER = 64


async def follow(
    instance: str,
    request: Request,
    context: ContextOf,
    manager: ManagerOf,
    after: str | None = None,
    follow: bool = True,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """The screen as it is and then all that the program writes, until the instance has ended. Always a stream."""
    del follow
    await manager.require_terminal(instance)  # refused before the stream has begun
    parts = manager.terminal(instance, after=last_event_id or after)
    return StreamingResponse(_stream(context, validity_of(request), parts), media_type=STREAM)


async def _stream(context: Context, valid: Validity, parts: AsyncIterator[ScreenPart]) -> AsyncIterator[str]:
    async for part in with_heartbeat(context, valid, parts):
        if part is None:
            yield ": heartbeat\n\n"
        else:
            data = json.dumps({"data": base64.b64encode(part.data).decode()})
            yield f"id: {part.cursor}\nevent: output\ndata: {data}\n\n"
    yield await last_words(context, valid)


async def write_input(
    instance: str,
    manager: ManagerOf,
    data: Annotated[str, Body()] = "",
    writer: Annotated[str | None, Body()] = None,
    at: Annotated[Number, Body()] = 0,
    close: Annotated[bool, Body()] = False,
    size: Annotated[dict[str, Any] | None, Body()] = None,
) -> dict[str, Any]:
    """How many bytes were taken; the rest, perhaps all, is to be sent again. `writer` (a random text) and `at` (how
    many bytes it sent before) make sending again harmless after a lost connection.
    """
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise fault("data", "must be base64") from None
    if writer is not None and not 1 <= len(writer) <= _MAX_WRITER:
        raise fault("writer", f"must have 1 to {_MAX_WRITER} characters", writer)
    window = None if size is None else TerminalSize.from_dict(size)
    pair = None if window is None else (window.rows, window.columns)
    taken, is_closed = await manager.write_input(
        instance, Input(data=raw, writer=writer, at=at, close=close, size=pair)
    )
    return {"taken": taken, "closed": is_closed}


async def resize(
    instance: str,
    manager: ManagerOf,
    rows: Annotated[Number | None, Body()] = None,
    columns: Annotated[Number | None, Body()] = None,
    redraw: Annotated[bool, Body()] = False,
) -> dict[str, Any]:
    """Without rows and columns the size stays."""
    size = None
    if rows is not None or columns is not None:
        size = TerminalSize.from_dict({"rows": rows, "columns": columns})
    await manager.resize_terminal(instance, size, redraw=redraw)
    return {}


HANDLERS: Handlers = {
    "terminal": follow,
    "write_input": write_input,
    "resize": resize,
}
