"""What the handlers of one daemon share, and on whose behalf each of them acts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Depends, Request
from pydantic import Field

from ostler.api.speaker import Speaker
from ostler.api.table import DIRECTORY_HEADER
from ostler.crews.projects import ProjectCrews
from ostler.definitions.projects import Project
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.loop.service import Loops
from ostler.model.access import Permission, Principal
from ostler.policy.access import decide_access
from ostler.tasks.orchestrator import TaskOrchestrator


@dataclass(kw_only=True, eq=False)
class Context:
    """One daemon, as its routes see it."""

    manager: AgentLifecycleManager
    orchestrator: TaskOrchestrator
    loops: Loops
    crews: ProjectCrews
    home: Path
    started_at: datetime
    #: Where it listens, for people.
    listens: list[str] = field(default_factory=list)
    #: Ends the daemon; True leaves its agents alive.
    stop: Callable[[bool], None]
    #: Ends the agents in order, and says how each ended.
    end_agents: Callable[[], Awaitable[list[dict[str, Any]]]]
    #: What is wrong with the settings or the port, and what is in force instead.
    settings_fault: Callable[[], str | None] = lambda: None
    #: Streams end when it is.
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    #: By number, the last events as observers get them.
    event_texts: dict[int, str] = field(default_factory=dict)
    #: Requests that go on without their caller.
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def run(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its outcome is in the record of the request


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def manager_of(request: Request) -> AgentLifecycleManager:
    """The manager on behalf of the caller; its trace id is the caller's."""
    principal: Principal = request.scope["principal"]
    correlation = request.headers.get("x-correlation-id")
    return context_of(request).manager.acting_as(principal, correlation_id=correlation)


def tasks_of(request: Request) -> TaskOrchestrator:
    return context_of(request).orchestrator.acting_as(manager_of(request))


def loops_of(request: Request) -> Loops:
    """With the settings of the caller's project, where that has a file of its own."""
    project = project_of(request)
    settings = None if project.scope is None else project.settings().loop
    return context_of(request).loops.acting_as(tasks_of(request), settings)


def project_of(request: Request) -> Project:
    """The project that the caller stands in; of an agent, the one that it was spawned in."""
    context, speaker = context_of(request), speaker_of(request)
    projects = context.manager.projects
    if speaker is not None:
        return projects.at(None if speaker.instance is None else speaker.instance.project)
    directory = unquote(request.headers.get(DIRECTORY_HEADER, ""), errors="surrogateescape")
    principal: Principal = request.scope["principal"]
    tier = context.manager.tier_of(principal.workspace_id)
    # What files say is shown to who may run them, not to who may only look at what runs.
    may = decide_access(principal, Permission.AGENTS_SPAWN, principal.workspace_id, tier=tier).allowed
    if not may or not directory.startswith("/"):
        return projects.home
    return projects.near(context.orchestrator.checkout_of(directory))


def speaker_of(request: Request) -> Speaker | None:
    """The agent that calls; None for a person or a program of a person."""
    speaker: Speaker | None = request.scope.get("speaker")
    return speaker


def provided(function: Callable[[Request], Any]) -> Any:
    """What the handlers get from the function. FastAPI would run one that is not async in a thread."""

    async def provide(request: Request) -> Any:
        return function(request)

    return Depends(provide)


#: A number that every store can hold; a larger one is a fault of the caller.
Number = Annotated[int, Field(ge=-(2**53), le=2**53)]
#: The handlers of one resource, by the names of their routes.
Handlers = dict[str, Callable[..., Any]]
SpeakerOf = Annotated[Speaker | None, provided(speaker_of)]
ContextOf = Annotated[Context, provided(context_of)]
ProjectOf = Annotated[Project, provided(project_of)]
ManagerOf = Annotated[AgentLifecycleManager, provided(manager_of)]
TasksOf = Annotated[TaskOrchestrator, provided(tasks_of)]
LoopsOf = Annotated[Loops, provided(loops_of)]
