"""A crew: agents of one type that a supervisor keeps at work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from ostler.model.record import Record, record
from ostler.model.task import Task
from ostler.model.text import name_faults
from ostler.model.types import Duration, Interval, Moment
from ostler.model.validation import Fault, shown

#: How the reason of a crew begins that stopped by itself and needs a person.
MANUAL = "manual intervention required"
#: A crew names the directories of its members, so nothing else may stand in it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,50}")


class CrewAction(StrEnum):
    RESTART = "restart"  #: a fresh member for the next task
    REQUEUE = "requeue"  #: the task goes back to the queue, then a fresh member
    STOP = "stop"  #: this member ends; the others go on
    SHUTDOWN = "shutdown"  #: everything ends in order: a person has to look


class CrewStrategy(StrEnum):
    """Who else is replaced when a member errs."""

    ONE_FOR_ONE = "one-for-one"
    ONE_FOR_ALL = "one-for-all"
    REST_FOR_ONE = "rest-for-one"  #: those that were started after it


@record
class CrewPolicy(Record):
    #: What follows when a member has done its task: restart, stop or shutdown.
    on_done: CrewAction = CrewAction.RESTART
    #: What follows when it failed: requeue, restart, stop or shutdown.
    on_error: CrewAction = CrewAction.REQUEUE
    #: Who else is replaced then: one-for-one, one-for-all or rest-for-one.
    strategy: CrewStrategy = CrewStrategy.ONE_FOR_ONE
    #: More errors than this within the window stop the crew.
    max_errors: Annotated[int, Interval(ge=1, le=10_000)] = 10
    error_window: Annotated[Duration, Interval(ge=timedelta(seconds=1), le=timedelta(days=7))] = timedelta(minutes=10)
    #: Before the first restart after an error; doubled with each that follows, up to five minutes.
    backoff: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(minutes=5))] = timedelta(seconds=1)

    def rules(self) -> Iterator[Fault]:
        if self.on_done is CrewAction.REQUEUE:
            bound = "must be restart, stop or shutdown: a task that is done does not go back to the queue"
            yield Fault(field=self.spelled("on_done"), bound=bound, value="requeue")

    @classmethod
    def coder(cls) -> CrewPolicy:
        return cls()

    @classmethod
    def architect(cls) -> CrewPolicy:
        return cls(on_error=CrewAction.SHUTDOWN)


@record
class CrewSettings(CrewPolicy):
    """A table `[crew.NAME]` of ostler.toml."""

    #: The definition of its members.
    agent: str
    #: How many members it has.
    count: Annotated[int, Interval(ge=0, le=1000)] = 1
    model: str | None = None
    #: Which tasks it works on: `tag:NAME`, `agent:NAME`, or `*`; without it, those for its agent.
    tasks: str | None = None

    def selects(self, task: Task) -> bool:
        """Whether it works on this task."""
        kind, _, name = (self.tasks or f"agent:{self.agent}").partition(":")
        match kind:
            case "tag":
                return name.lower() in task.tags
            case "agent":
                return task.agent == name
            case _:
                return True

    def rules(self) -> Iterator[Fault]:
        yield from CrewPolicy.rules(self)
        yield from name_faults("agent", self.agent)
        if self.tasks is not None and self.tasks != "*" and not self.tasks.startswith(("tag:", "agent:")):
            yield Fault(field="tasks", bound="must be `tag:NAME`, `agent:NAME` or `*`", value=shown(self.tasks))


@record
class CrewRecord(Record):
    """What is kept of a crew: whether it is up, and how many members a person has asked for."""

    workspace_id: UUID
    #: The directory of the project that declares it; empty for the project of the home.
    project: str = ""
    name: str
    is_up: bool = False
    count: int | None = None
    #: Why it is not up, where it stopped by itself.
    reason: str | None = None
    updated_at: Moment


class MemberState(StrEnum):
    IDLE = "idle"  #: waits for a task
    WORKING = "working"
    BACKOFF = "backoff"  #: erred, and begins afresh soon
    STOPPING = "stopping"  #: its agent was asked to end
    STOPPED = "stopped"  #: by the policy; the next `up` begins it again


@record
class MemberView(Record):
    """One member of a crew, as a list shows it."""

    member: str
    state: MemberState
    generation: int = 0
    #: The key of its task.
    task: str | None = None
    since: Moment
    #: Of the tasks that it has worked on in this program.
    cost_usd: float | None = None
    error: str | None = None


@record
class CrewView(Record):
    """One crew, as a list shows it."""

    name: str
    #: The directory of the project that declares it; None for the project of the home.
    project: str | None = None
    agent: str
    count: int
    is_up: bool
    on_done: CrewAction
    on_error: CrewAction
    strategy: CrewStrategy
    reason: str | None = None
    #: What is wrong with the file of the project; the settings are the last good ones.
    trouble: str | None = None
    members: tuple[MemberView, ...] = ()


def crew_name_faults(field: str, name: str) -> Iterator[Fault]:
    if not _NAME.fullmatch(name):
        bound = "must be 1 to 51 letters, digits, - and _, beginning with a letter or a digit"
        yield Fault(field=field, bound=bound, value=shown(name))
