"""Workspaces with their plans, principals with their tokens, and the definitions of a workspace."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from ostler.errors import ConflictError, WorkspaceNotFoundError
from ostler.model.access import SYSTEM, Actor, Principal, Token, Workspace
from ostler.model.spawn import Definition
from ostler.store.record_table import RecordTable
from ostler.store.transaction import Reader, Transaction

WORKSPACES = RecordTable(Workspace, "workspaces", renamed={"workspace_id": "id"})
PRINCIPALS = RecordTable(Principal, "principals", renamed={"principal_id": "id"})
TOKENS = RecordTable(Token, "tokens", renamed={"token_id": "id"})
DEFINITIONS = RecordTable(Definition, "definitions", renamed={"definition_id": "id"})


def get_workspace(reader: Reader, workspace_id: UUID) -> Workspace | None:
    return WORKSPACES.read_one(reader.fetch_one(f"{WORKSPACES.select} WHERE id = :id", id=workspace_id))


def require_workspace(reader: Reader, workspace_id: UUID) -> Workspace:
    workspace = get_workspace(reader, workspace_id)
    if workspace is None:
        raise WorkspaceNotFoundError
    return workspace


def list_workspaces(reader: Reader) -> list[Workspace]:
    return WORKSPACES.read(reader.fetch(f"{WORKSPACES.select} ORDER BY id"))


def put_workspace(tx: Transaction, workspace: Workspace, *, by: Actor = SYSTEM) -> Workspace:
    """Create it, or change its name, plan, flags and token share."""
    values = WORKSPACES.encode(workspace)
    changed = tx.execute(
        """UPDATE workspaces SET name = :name, tier = :tier, disabled_features_json = :disabled_features_json,
           max_tokens_per_minute = :max_tokens_per_minute WHERE id = :id""",
        **{name: value for name, value in values.items() if name != "created_at"},
    )
    if not changed:
        WORKSPACES.insert(tx, workspace)
    detail = f"tier {workspace.tier}" + "".join(f", {name} off" for name in workspace.disabled_features)
    tx.audit(workspace.workspace_id, by, "workspace.put", f"workspace:{workspace.workspace_id}", detail=detail)
    return workspace


def add_principal(tx: Transaction, principal: Principal, *, by: Actor = SYSTEM) -> Principal:
    require_workspace(tx, principal.workspace_id)
    if get_principal(tx, principal.principal_id) is not None:
        raise ConflictError(f"principal {principal.principal_id} exists already")
    PRINCIPALS.insert(tx, principal)
    tx.audit(principal.workspace_id, by, "principal.add", f"principal:{principal.principal_id}", detail=principal.name)
    return principal


def get_principal(reader: Reader, principal_id: UUID) -> Principal | None:
    return PRINCIPALS.read_one(reader.fetch_one(f"{PRINCIPALS.select} WHERE id = :id", id=principal_id))


def add_token(tx: Transaction, token: Token, workspace_id: UUID, *, by: Actor = SYSTEM) -> Token:
    TOKENS.insert(tx, token)
    tx.audit(workspace_id, by, "token.add", f"token:{token.token_id}", detail=token.name)
    return token


def revoke_token(tx: Transaction, token_id: UUID, workspace_id: UUID, *, by: Actor = SYSTEM) -> bool:
    """False where it is unknown or revoked already."""
    changed = tx.execute(
        "UPDATE tokens SET revoked_at = :now WHERE id = :id AND revoked_at IS NULL", id=token_id, now=tx.now
    )
    if changed:
        tx.audit(workspace_id, by, "token.revoke", f"token:{token_id}")
    return bool(changed)


def list_tokens(reader: Reader) -> list[Token]:
    return TOKENS.read(reader.fetch(f"{TOKENS.select} ORDER BY id"))


def find_token(reader: Reader, token_hash: str, now: datetime) -> Token | None:
    """One that is valid now."""
    row = reader.fetch_one(
        f"""{TOKENS.select} WHERE token_hash = :hash AND revoked_at IS NULL
            AND (expires_at IS NULL OR expires_at > :now)""",
        hash=token_hash,
        now=now,
    )
    return TOKENS.read_one(row)


def put_definition(tx: Transaction, definition: Definition) -> None:
    """Keep the manifest, so that a later manager can start its instances again. Unchanged ones are left alone."""
    stored = get_definition(tx, definition.definition_id)
    if stored is None:
        DEFINITIONS.insert(tx, definition)
        return
    same = stored.evolve(created_at=definition.created_at, updated_at=definition.updated_at, version=definition.version)
    if same != definition:
        values = DEFINITIONS.encode(definition.evolve(created_at=stored.created_at, version=stored.version + 1))
        tx.execute(
            """UPDATE definitions SET name = :name, kind = :kind, manifest_json = :manifest_json, source = :source,
               updated_at = :updated_at, version = :version WHERE id = :id""",
            **{name: value for name, value in values.items() if name not in {"created_at", "workspace_id"}},
        )


def get_definition(reader: Reader, definition_id: UUID) -> Definition | None:
    return DEFINITIONS.read_one(reader.fetch_one(f"{DEFINITIONS.select} WHERE id = :id", id=definition_id))


def find_definition(reader: Reader, workspace_id: UUID, name: str) -> Definition | None:
    row = reader.fetch_one(
        f"{DEFINITIONS.select} WHERE workspace_id = :workspace_id AND name = :name ORDER BY updated_at DESC LIMIT 1",
        workspace_id=workspace_id,
        name=name,
    )
    return DEFINITIONS.read_one(row)


def list_definitions(reader: Reader, workspace_id: UUID) -> list[Definition]:
    rows = reader.fetch(
        f"{DEFINITIONS.select} WHERE workspace_id = :workspace_id ORDER BY name", workspace_id=workspace_id
    )
    return DEFINITIONS.read(rows)
