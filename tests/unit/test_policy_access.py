from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest

from ostler.errors import AuthorizationError
from ostler.model.access import Permission, Principal, Role
from ostler.model.states import Tier
from ostler.policy.access import CROSS_PERMISSIONS, ROLE_PERMISSIONS, decide_access, granted, require_access

NOW = datetime(2026, 3, 1, tzinfo=UTC)
HERE, ELSEWHERE = UUID(int=1), UUID(int=2)
P = Permission


def somebody(*roles: Role, permissions: tuple[Permission, ...] = (), disabled: bool = False) -> Principal:
    return Principal(
        principal_id=UUID(int=9),
        name="ada",
        workspace_id=HERE,
        roles=roles,
        permissions=permissions,
        created_at=NOW,
        disabled_at=NOW if disabled else None,
    )


LOOK = {P.AGENTS_READ, P.TASKS_READ}
AGENTS = {one for one in P if one.value.startswith("agents.")}
EXPECTED = {
    Role.VIEWER: LOOK,
    Role.OPERATOR: LOOK | AGENTS | {P.TASKS_WRITE},
    Role.REVIEWER: LOOK | {P.TASKS_REVIEW},
    Role.ADMIN: set(P) - {P.WORKSPACES_CROSS},
    Role.AGENT: LOOK,
}


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("permission", P)
@pytest.mark.parametrize("role", Role)
def test_a_role_brings_exactly_its_permissions_in_its_own_workspace(
    role: Role, permission: Permission, tier: Tier
) -> None:
    decision = decide_access(somebody(role), permission, HERE, tier=tier)
    assert decision.allowed == (permission in EXPECTED[role])
    assert "ada" in decision.reason
    assert str(permission) in decision.reason


def test_every_role_has_an_entry() -> None:
    assert set(ROLE_PERMISSIONS) == set(Role)


@pytest.mark.parametrize("permission", P)
def test_without_a_role_or_a_grant_nothing_is_allowed(permission: Permission) -> None:
    assert not decide_access(somebody(), permission, HERE, tier=Tier.ENTERPRISE)


def test_a_permission_can_be_granted_by_name() -> None:
    reader = somebody(permissions=(P.AUDIT_READ,))
    assert decide_access(reader, P.AUDIT_READ, HERE, tier=Tier.CORE)
    assert not decide_access(reader, P.AGENTS_READ, HERE, tier=Tier.CORE)


@pytest.mark.parametrize("permission", P)
def test_the_permission_for_the_lifecycle_stands_for_every_agent_permission(permission: Permission) -> None:
    keeper = somebody(permissions=(P.AGENTS_LIFECYCLE,))
    assert decide_access(keeper, permission, HERE, tier=Tier.CORE).allowed == (permission in AGENTS)


def test_reading_the_agents_of_others_is_a_permission_of_its_own() -> None:
    assert not decide_access(somebody(Role.VIEWER), P.AGENTS_READ_ALL, HERE, tier=Tier.ENTERPRISE)
    assert decide_access(somebody(permissions=(P.AGENTS_READ_ALL,)), P.AGENTS_READ_ALL, HERE, tier=Tier.CORE)
    assert decide_access(somebody(Role.OPERATOR), P.AGENTS_READ_ALL, HERE, tier=Tier.CORE)


def test_two_roles_add_up() -> None:
    assert granted(somebody(Role.OPERATOR, Role.REVIEWER)) == EXPECTED[Role.OPERATOR] | {P.TASKS_REVIEW}


@pytest.mark.parametrize("permission", P)
def test_a_disabled_principal_may_nothing(permission: Permission) -> None:
    decision = decide_access(
        somebody(Role.ADMIN, permissions=tuple(P), disabled=True), permission, HERE, tier=Tier.ENTERPRISE
    )
    assert not decision.allowed
    assert decision.reason == "principal ada is disabled"


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("permission", P)
def test_an_admin_may_nothing_in_another_workspace(permission: Permission, tier: Tier) -> None:
    assert not decide_access(somebody(Role.ADMIN), permission, ELSEWHERE, tier=tier)


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("permission", P)
def test_looking_across_is_for_enterprise_and_only_looking(permission: Permission, tier: Tier) -> None:
    everything = somebody(Role.ADMIN, permissions=tuple(P))
    decision = decide_access(everything, permission, ELSEWHERE, tier=tier)
    may_look = {P.AGENTS_READ, P.AGENTS_READ_ALL, P.TASKS_READ, P.AUDIT_READ}
    assert decision.allowed == (tier is Tier.ENTERPRISE and permission in may_look)
    assert may_look == CROSS_PERMISSIONS


def test_looking_across_still_needs_the_permission_itself() -> None:
    crosser = somebody(Role.VIEWER, permissions=(P.WORKSPACES_CROSS,))
    assert decide_access(crosser, P.TASKS_READ, ELSEWHERE, tier=Tier.ENTERPRISE)
    assert not decide_access(crosser, P.AUDIT_READ, ELSEWHERE, tier=Tier.ENTERPRISE)


def test_who_is_not_known_is_refused() -> None:
    assert not decide_access(None, P.AGENTS_READ, HERE, tier=Tier.ENTERPRISE)
    strange = somebody().evolve(roles=("owner",))
    assert not decide_access(strange, P.AGENTS_READ, HERE, tier=Tier.ENTERPRISE)
    unknown: Permission = "agents.clone"  # type: ignore[assignment]  # wrong on purpose
    assert not decide_access(somebody(Role.ADMIN), unknown, HERE, tier=Tier.ENTERPRISE)


def test_requiring_access_raises_the_reason() -> None:
    require_access(somebody(Role.VIEWER), P.AGENTS_READ, HERE, tier=Tier.CORE)
    with pytest.raises(AuthorizationError, match=r"ada does not have the permission agents\.spawn"):
        require_access(somebody(Role.VIEWER), P.AGENTS_SPAWN, HERE, tier=Tier.CORE)
