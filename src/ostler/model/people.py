"""Who asks, in which workspace, and how much they may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from ostler.model.bounds import Interval
from ostler.model.context import json_faults
from ostler.model.moments import Moment
from ostler.model.record import MAX_COUNT, Record, settle
from ostler.model.states import Tier
from ostler.model.text import name_faults, plain_text_faults
from ostler.model.validation import Fault

#: The workspace of a home of one's own; every store has it from the start.
HOME_WORKSPACE_ID = UUID("00000000-0000-7000-8000-000000000001")


MAX_SOURCE = 4096


class Permission(StrEnum):
    AGENTS_READ = "agents.read"
    AGENTS_SPAWN = "agents.spawn"
    AGENTS_PROCESS = "agents.process"
    AGENTS_SUSPEND = "agents.suspend"
    AGENTS_TERMINATE = "agents.terminate"
    TASKS_READ = "tasks.read"
    TASKS_WRITE = "tasks.write"
    TASKS_REVIEW = "tasks.review"
    AUDIT_READ = "audit.read"
    WORKSPACE_ADMIN = "workspace.admin"
    WORKSPACES_CROSS = "workspaces.cross"  #: look into other workspaces; enterprise only


class Role(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"
    REVIEWER = "reviewer"
    ADMIN = "admin"
    AGENT = "agent"  #: what an agent itself may do through its own token


@dataclass(frozen=True, kw_only=True)
class Principal(Record):
    principal_id: UUID
    name: str
    workspace_id: UUID
    roles: tuple[Role, ...] = ()
    #: Granted beyond the roles.
    permissions: tuple[Permission, ...] = ()
    created_at: Moment
    disabled_at: Moment | None = None

    def __post_init__(self) -> None:
        settle(self, "roles", "permissions")

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)


@dataclass(frozen=True, kw_only=True)
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
        yield from name_faults("token_hash", self.token_hash)


@dataclass(frozen=True, kw_only=True)
class Workspace(Record):
    """A tenant: its plan, and room for its records."""

    workspace_id: UUID
    name: str
    tier: Tier
    created_at: Moment

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)


@dataclass(frozen=True, kw_only=True)
class Definition(Record):
    """What an agent is: a name, where it comes from, and its manifest."""

    definition_id: UUID
    name: str
    kind: str
    manifest: Mapping[str, Any]
    source: str | None = None
    created_at: Moment
    updated_at: Moment
    version: Annotated[int, Interval(ge=1, le=MAX_COUNT)] = 1

    def __post_init__(self) -> None:
        settle(self, "manifest")

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from name_faults("kind", self.kind)
        yield from plain_text_faults("source", self.source, MAX_SOURCE)
        yield from json_faults("manifest", self.manifest)
