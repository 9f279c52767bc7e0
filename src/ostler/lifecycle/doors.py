"""Who may do what, asked once at the beginning of every verb. A refusal is written into the audit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from uuid import UUID

from ostler.errors import (
    AgentNotFoundError,
    AuthorizationError,
    InvalidOperationError,
    LicenseError,
    NotFoundError,
    OstlerError,
    ValidationError,
    WorkspaceNotFoundError,
)
from ostler.lifecycle.house import House
from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentInstance,
    Fault,
    Permission,
    Principal,
    Role,
    Workspace,
    from_micros,
    shown,
)
from ostler.model.text import name_faults
from ostler.policy import decide_access
from ostler.store import Actor
from ostler.store.commands import RecordAudit

#: Refusals that are acts worth remembering. A busy agent or a disk that is full is neither.
_TOLD = (AuthorizationError, LicenseError, ValidationError, InvalidOperationError, NotFoundError)
#: Kinds that have a better name in a sentence than in the code.
_KINDS: Mapping[type, str] = MappingProxyType({UUID: "a UUID", str: "text", bool: "True or False"})
#: Who acts in a home of one's own.
OWNER = Principal(
    principal_id=UUID("00000000-0000-7000-8000-000000000002"),
    name="owner",
    workspace_id=HOME_WORKSPACE_ID,
    roles=(Role.ADMIN,),
    created_at=from_micros(0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asker:
    """On whose behalf a verb is done."""

    principal: Principal = OWNER
    correlation_id: str | None = None

    @property
    def workspace_id(self) -> UUID:
        return self.principal.workspace_id

    @property
    def actor(self) -> Actor:
        return Actor(
            name=self.principal.name, principal_id=self.principal.principal_id, correlation_id=self.correlation_id
        )


def asker_for(principal: Principal, correlation_id: str | None) -> Asker:
    """Whoever it is stands in the audit with name and id, so both must be fit to stand there."""
    require_kind("principal", principal, Principal)
    faults = [*principal.validate()]
    if correlation_id is not None:
        require_kind("correlation_id", correlation_id, str)
        faults += name_faults("correlation_id", correlation_id)
    if faults:
        raise ValidationError(faults)
    return Asker(principal=principal, correlation_id=correlation_id)


async def enter(house: House, asker: Asker, permission: Permission, about: str) -> Workspace:
    """Into the asker's own workspace, with this permission."""
    house.require_loop()
    house.require_open()
    workspace = await house.workspace(asker.workspace_id)
    if workspace is None:
        raise WorkspaceNotFoundError
    decision = decide_access(asker.principal, permission, asker.workspace_id, tier=workspace.tier)
    if not decision:
        error = AuthorizationError(decision.reason)
        await note_refusal(house, asker, permission, about, error)
        raise error
    return workspace


async def reach(house: House, asker: Asker, instance_id: UUID, permission: Permission) -> AgentInstance:
    """An instance that the asker may do this to. One that is not the asker's to see is not found, to the letter."""
    house.require_loop()
    house.require_open()
    require_kind("instance_id", instance_id, UUID)
    life = house.lives.get(instance_id)
    if life is not None and life.lock.locked() and permission is not Permission.AGENTS_READ:
        async with life.lock:  # a move is under way, and whoever observes may know of it before we do
            pass
    # A move is durable before we hear of it. Who looks meanwhile is shown the store, or one who began to observe after
    # the commit and looks then would learn of it neither way.
    if life is None or life.lock.locked():
        record = await house.store.get_instance(instance_id)
    else:
        record = life.record
    own = await house.workspace(asker.workspace_id)
    missing = AgentNotFoundError(f"there is no instance {instance_id}; list what exists, or check the id")
    if record is None or own is None:
        raise missing
    space = record.workspace_id or HOME_WORKSPACE_ID
    decision = decide_access(asker.principal, permission, space, tier=own.tier)
    if decision:
        return record
    error: OstlerError = AuthorizationError(decision.reason)
    await note_refusal(house, asker, permission, f"instance:{instance_id}", error)
    missing.noted = True
    raise error if space == asker.workspace_id else missing


def require_kind(field: str, value: object, kind: type) -> None:
    """A slip of the caller's is answered with a sentence, not with a trace from deep inside."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        bound = f"must be {_KINDS.get(kind) or f'{article} {kind.__name__}'}"
        raise ValidationError([Fault(field=field, bound=bound, value=shown(value))])


def subject(what: str, value: object) -> str:
    """What the audit says a verb was about; also where the caller gave something that is no id."""
    return f"{what}:{value if isinstance(value, UUID) else shown(value)}"


async def note_refusal(house: House, asker: Asker, what: str, about: str, error: OstlerError) -> None:
    """A refusal that no command of the store will tell of. It must not hide the error it is about."""
    if isinstance(error, LicenseError):
        house.metrics.count("lifecycle.license.rejections")
    command = RecordAudit(
        by=asker.actor,
        workspace_id=asker.workspace_id,
        what=what,
        about=about,
        outcome=type(error).__name__,
        detail=str(error),
    )
    error.noted = True
    try:
        await house.store.commit(command)
    except OstlerError as failure:
        house.log.emit("audit_failed", error=str(failure))


@asynccontextmanager
async def refusals(house: House, asker: Asker, what: str, about: str) -> AsyncIterator[None]:
    """Around a verb: what it refuses, and no command of the store has told of yet, goes into the audit."""
    house.require_loop()  # before anything: a refusal cannot be noted from elsewhere either
    try:
        yield
    except _TOLD as error:
        if not error.noted and house.shut is None:
            await note_refusal(house, asker, what, about, error)
        raise
