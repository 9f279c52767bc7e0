"""Tokens: opaque keys for the TCP listener. Each is shown once; only its hash is kept."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta
from typing import Annotated, Any
from uuid import uuid4

from fastapi import Body
from pydantic import Field

from ostler.api.context import Handlers, ManagerOf
from ostler.errors import NotFoundError
from ostler.model.access import Actor, Permission, Principal, Role, Token
from ostler.model.validation import fault
from ostler.store import workspaces
from ostler.store.transaction import Transaction

PREFIX = "ostler_"
_BYTES = 32
_LOOKING = frozenset({Role.VIEWER, Role.REVIEWER})
#: In seconds, up to ten years.
Lifetime = Annotated[float, Field(gt=0, le=10 * 366 * 86400, allow_inf_nan=False)]


async def create(
    manager: ManagerOf,
    name: Annotated[str, Body()],
    role: Annotated[str, Body()] = Role.OPERATOR,
    expires_in: Annotated[Lifetime | None, Body()] = None,
    permissions: Annotated[tuple[Permission, ...] | None, Body()] = None,
) -> dict[str, Any]:
    """The token itself is in this answer and nowhere else."""
    if role not in {*Role}:
        raise fault("role", f"must be one of {', '.join(Role)}", role)
    if permissions is None:  # a token that only looks owns no agents, so it would see none in lists
        permissions = (Permission.AGENTS_READ_ALL,) if role in _LOOKING else ()
    for permission in permissions:
        await manager.require(permission)
    now = manager.now()
    secret = PREFIX + secrets.token_urlsafe(_BYTES)
    principal = Principal(
        principal_id=uuid4(),
        name=name,
        workspace_id=manager.principal.workspace_id,
        roles=(Role(role),),
        permissions=permissions,
        created_at=now,
    ).checked()
    token = Token(
        token_id=uuid4(),
        principal_id=principal.principal_id,
        token_hash=hashlib.sha256(secret.encode()).hexdigest(),
        name=name,
        created_at=now,
        expires_at=None if expires_in is None else now + timedelta(seconds=expires_in),
    ).checked()
    await manager.store.run(_add, principal, token, _by(manager))
    return {"token_id": str(token.token_id), "name": name, "role": role, "token": secret}


def _add(tx: Transaction, principal: Principal, token: Token, by: Actor) -> None:
    workspaces.add_principal(tx, principal, by=by)
    workspaces.add_token(tx, token, principal.workspace_id, by=by)


def _by(manager: ManagerOf) -> Actor:
    return Actor(name=manager.principal.name, principal_id=manager.principal.principal_id)


async def list_tokens(manager: ManagerOf) -> list[dict[str, Any]]:
    tokens = await manager.store.read(workspaces.list_tokens)
    return [{name: value for name, value in token.to_dict().items() if name != "token_hash"} for token in tokens]


async def revoke(token_id: str, manager: ManagerOf) -> dict[str, Any]:
    """By its id or its name."""
    tokens = await manager.store.read(workspaces.list_tokens)
    chosen = [token for token in tokens if token_id in {str(token.token_id), token.name} and token.revoked_at is None]
    if not chosen:
        raise NotFoundError(f"there is no valid token {token_id}; list them with `ostler token list`")
    for token in chosen:
        await manager.store.run(
            workspaces.revoke_token, token.token_id, manager.principal.workspace_id, by=_by(manager)
        )
    return {"revoked": [token.name for token in chosen]}


HANDLERS: Handlers = {
    "create_token": create,
    "tokens": list_tokens,
    "revoke_token": revoke,
}
