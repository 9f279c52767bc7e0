"""Who may do what: workspaces, principals, roles, permissions and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from ostler.model.record import Record, record
from ostler.model.states import Tier
from ostler.model.text import name_faults
from ostler.model.types import Interval, Moment, from_micros
from ostler.model.validation import Fault

#: The workspace of a home of one's own; every store has it from the start.
HOME_WORKSPACE_ID = UUID("00000000-0000-7000-8000-000000000001")


class Permission(StrEnum):
    AGENTS_LIFECYCLE = "agents.lifecycle"  #: every permission that begins with agents.
    AGENTS_READ = "agents.read"
    AGENTS_READ_ALL = "agents.read_all"  #: list by another owner
    AGENTS_SPAWN = "agents.spawn"
    AGENTS_PROCESS = "agents.process"
    AGENTS_SUSPEND = "agents.suspend"
    AGENTS_TERMINATE = "agents.terminate"
    TASKS_READ = "tasks.read"
    TASKS_WRITE = "tasks.write"
    TASKS_REVIEW = "tasks.review"
    AUDIT_READ = "audit.read"
    WORKSPACE_ADMIN = "workspace.admin"
    WORKSPACES_CROSS = "workspaces.cross"  #: read in other workspaces; enterprise only


class Role(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"
    REVIEWER = "reviewer"
    ADMIN = "admin"
    AGENT = "agent"  #: what an agent may do through its own token


@record
class Principal(Record):
    principal_id: UUID
    name: str
    workspace_id: UUID
    roles: tuple[Role, ...] = ()
    #: Granted beyond the roles.
    permissions: tuple[Permission, ...] = ()
    created_at: Moment
    disabled_at: Moment | None = None

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)


#: The principal of a home of one's own.
OWNER = Principal(
    principal_id=UUID("00000000-0000-7000-8000-000000000002"),
    name="owner",
    workspace_id=HOME_WORKSPACE_ID,
    roles=(Role.ADMIN,),
    created_at=from_micros(0),
)


@record
class Actor(Record):
    """The name that the audit gives to the author of a command, and the trace that it belongs to."""

    name: str
    principal_id: UUID | None = None
    correlation_id: str | None = None

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("correlation_id", self.correlation_id)


#: Ostler itself: restarts by policy, timers, recovery.
SYSTEM = Actor(name="system")


@record
class Token(Record):
    """A key that speaks for a principal. Only its SHA-256 is kept."""

    token_id: UUID
    principal_id: UUID
    token_hash: str
    name: str
    created_at: Moment
    expires_at: Moment | None = None
    revoked_at: Moment | None = None

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)


@record
class Workspace(Record):
    """A tenant: its plan, its feature flags, its share of tokens."""

    workspace_id: UUID
    name: str
    tier: Tier
    created_at: Moment
    #: Flags that are off, such as "agents.lifecycle.spawn".
    disabled_features: tuple[str, ...] = ()
    #: For agents without a token limit of their own; 0 means unlimited.
    max_tokens_per_minute: Annotated[int, Interval(ge=0)] = 0

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
