"""Which principal may do what in which workspace. What is not granted here is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from uuid import UUID

from ostler.errors import AuthorizationError
from ostler.model.access import Permission, Principal, Role
from ostler.model.states import Tier

_P = Permission
_LOOK = frozenset({_P.AGENTS_READ, _P.TASKS_READ})

ROLE_PERMISSIONS: Mapping[Role, frozenset[Permission]] = MappingProxyType(
    {
        Role.VIEWER: _LOOK,
        Role.OPERATOR: _LOOK | {_P.AGENTS_LIFECYCLE, _P.TASKS_WRITE},
        Role.REVIEWER: _LOOK | {_P.TASKS_REVIEW},
        # Reading in other workspaces is granted by name only.
        Role.ADMIN: frozenset(_P) - {_P.WORKSPACES_CROSS},
        Role.AGENT: _LOOK,
    }
)
#: The most that a principal of another workspace can have.
CROSS_PERMISSIONS = frozenset({_P.AGENTS_READ, _P.AGENTS_READ_ALL, _P.TASKS_READ, _P.AUDIT_READ})
_AGENT_PERMISSIONS = frozenset(permission for permission in _P if permission.startswith("agents."))


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessDecision:
    """True when allowed, so that it cannot be taken for a yes by mistake."""

    allowed: bool
    reason: str

    def __bool__(self) -> bool:
        return self.allowed


def granted(principal: Principal) -> frozenset[Permission]:
    """The permissions of its roles and those given by name; `agents.lifecycle` stands for every agent permission."""
    by_role = (ROLE_PERMISSIONS.get(role, frozenset()) for role in principal.roles)
    held = frozenset(principal.permissions).union(*by_role)
    return held | _AGENT_PERMISSIONS if Permission.AGENTS_LIFECYCLE in held else held


def decide_access(
    principal: Principal | None, permission: Permission, workspace_id: UUID, *, tier: Tier
) -> AccessDecision:
    """Whether this principal may do this in this workspace; `tier` is the plan of the principal's own."""
    if principal is None:
        return _no("no principal is named")
    who = f"principal {principal.name}"
    if principal.disabled_at is not None:
        return _no(f"{who} is disabled")
    held = granted(principal)
    if permission not in held:
        return _no(f"{who} does not have the permission {permission}")
    if permission is Permission.WORKSPACES_CROSS and tier is not Tier.ENTERPRISE:
        return _no(f"{permission} needs the enterprise plan, this one is {tier}")
    if principal.workspace_id == workspace_id:
        return AccessDecision(allowed=True, reason=f"{who} has the permission {permission}")
    return _decide_across(who, held, permission, tier)


def require_access(principal: Principal | None, permission: Permission, workspace_id: UUID, *, tier: Tier) -> None:
    """Raise `AuthorizationError` with the reason unless it is allowed."""
    decision = decide_access(principal, permission, workspace_id, tier=tier)
    if not decision.allowed:
        raise AuthorizationError(decision.reason)


def _decide_across(who: str, held: frozenset[Permission], permission: Permission, tier: Tier) -> AccessDecision:
    if Permission.WORKSPACES_CROSS not in held:
        return _no(f"{who} belongs to another workspace")
    if tier is not Tier.ENTERPRISE:
        return _no(f"{who} belongs to another workspace; looking across needs the enterprise plan, not {tier}")
    if permission not in CROSS_PERMISSIONS:
        return _no(f"{who} belongs to another workspace and may only look here, not {permission}")
    return AccessDecision(allowed=True, reason=f"{who} may look across workspaces")


def _no(reason: str) -> AccessDecision:
    return AccessDecision(allowed=False, reason=reason)
