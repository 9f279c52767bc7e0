"""A crew: agents of one type that a supervisor keeps at work."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from ostler.model.faults import Fault
from ostler.model.record import Record, record
from ostler.model.text import name_faults
from ostler.model.types import Duration, Interval, Moment


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
    on_done: CrewAction = CrewAction.RESTART
    on_error: CrewAction = CrewAction.REQUEUE
    strategy: CrewStrategy = CrewStrategy.ONE_FOR_ONE
    #: More errors than this within the window stop the crew.
    max_errors: Annotated[int, Interval(ge=1, le=10_000)] = 10
    error_window: Annotated[Duration, Interval(ge=timedelta(seconds=1), le=timedelta(days=7))] = timedelta(minutes=10)
    #: Before the first restart after an error; doubled with each that follows, up to five minutes.
    backoff: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(minutes=5))] = timedelta(seconds=1)

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
    count: Annotated[int, Interval(ge=0, le=1000)] = 1
    model: str | None = None
    #: Which tasks it works on: `tag:NAME`, `agent:NAME`, or `*`; without it, those for its agent.
    tasks: str | None = None

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("agent", self.agent)
        if self.tasks is not None and self.tasks != "*" and not self.tasks.startswith(("tag:", "agent:")):
            yield Fault(field="tasks", bound="must be `tag:NAME`, `agent:NAME` or `*`", value=self.tasks)


@record
class CrewRecord(Record):
    """What is kept of a crew: whether it is up, and how many members were asked for by hand."""

    workspace_id: UUID
    name: str
    is_up: bool = False
    count: int | None = None
    #: Why it is not up, where it stopped by itself.
    reason: str | None = None
    updated_at: Moment
