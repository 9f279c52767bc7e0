"""The daemon itself: health, status, metrics, statistics, its end."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastapi import Body, Request
from fastapi.responses import HTMLResponse, PlainTextResponse

from ostler.api.context import ContextOf, Handlers, ManagerOf, ProjectOf, TasksOf
from ostler.model.wait import WaitKind
from ostler.version import __version__


async def healthz() -> dict[str, str]:
    return {"status": "ok"}


async def metrics(manager: ManagerOf) -> PlainTextResponse:
    return PlainTextResponse(manager.metrics(), media_type="text/plain; version=0.0.4")


async def openapi(request: Request) -> dict[str, Any]:
    """The API, for programs."""
    return await _document(request.app)


async def docs(request: Request) -> HTMLResponse:
    """The API, for people. The page loads nothing and runs no script."""
    from ostler.api.document import PAGE_HEADERS, page  # noqa: PLC0415 - as in `_document`

    return HTMLResponse(page(await _document(request.app)), headers=PAGE_HEADERS)


async def _document(app: Any) -> dict[str, Any]:
    """Made at the first request, in a thread: it takes a tenth of a second."""
    from ostler.api.document import openapi  # noqa: PLC0415 - few ask for it, and each start would pay

    if getattr(app.state, "openapi", None) is None:
        app.state.openapi = await asyncio.to_thread(openapi, app)
    document: dict[str, Any] = app.state.openapi
    return document


async def status(context: ContextOf, project: ProjectOf, manager: ManagerOf, tasks: TasksOf) -> dict[str, Any]:
    statistics = await manager.get_statistics()
    return {
        "version": __version__,
        "pid": os.getpid(),
        "home": str(context.home),
        "started_at": context.started_at.isoformat(),
        "listens": context.listens,
        "home_notice": manager.home_notice,
        "statistics": statistics.to_dict(),
        "tasks": (await tasks.statistics()).to_dict(),
        "inbox": len(await manager.inbox()),
        "waits": sum(wait.kind is WaitKind.HUMAN for wait in await manager.open_waits()),
        "unrecovered": manager.unrecovered(),
        "settings_fault": context.settings_fault() or project.fault(),
        "background": dict(context.orchestrator.tasks.failed_background),
    }


async def statistics(manager: ManagerOf, tasks: TasksOf) -> dict[str, Any]:
    return {**(await manager.get_statistics()).to_dict(), "tasks": (await tasks.statistics()).to_dict()}


async def disk(manager: ManagerOf) -> dict[str, Any]:
    usage = await manager.disk()
    return {
        **usage.to_dict(),
        "total": usage.total,
        "share": usage.share,
        "tasks": [{**task.to_dict(), "total": task.total} for task in usage.tasks],
    }


async def inbox(manager: ManagerOf) -> list[dict[str, Any]]:
    return [row.to_dict() for row in await manager.inbox()]


async def report(manager: ManagerOf, since: str = "10h") -> dict[str, Any]:
    return (await manager.report(since)).to_dict()


async def stop(context: ContextOf, keep: bool = Body(default=False, embed=True)) -> dict[str, Any]:
    """Answered when the agents have ended, or at once where they are kept; then the daemon ends."""
    ended = [] if keep else await context.end_agents()
    context.stop(keep)
    return {"pid": os.getpid(), "kept": keep, "ended": ended}


HANDLERS: Handlers = {
    "health": healthz,
    "metrics": metrics,
    "openapi": openapi,
    "docs": docs,
    "status": status,
    "statistics": statistics,
    "disk": disk,
    "inbox": inbox,
    "report": report,
    "stop_daemon": stop,
}
