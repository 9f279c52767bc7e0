"""Which home a command looks at, and looking at it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from uuid import UUID

import click

from ostler.errors import WorkspaceNotFoundError
from ostler.model import HOME_WORKSPACE_ID
from ostler.store import Store, view_store

R = TypeVar("R")
Decorated = Callable[..., Any]

DEFAULT_HOME = "~/.ostler"


def home_option(command: Decorated) -> Decorated:
    return click.option(
        "--home",
        metavar="DIR|URL",
        default=lambda: os.environ.get("OSTLER_HOME") or DEFAULT_HOME,
        help="A home directory or a postgresql:// address; else OSTLER_HOME, else ~/.ostler.",
    )(command)


def workspace_option(default: UUID | None = HOME_WORKSPACE_ID) -> Callable[[Decorated], Decorated]:
    what = "the home workspace" if default else "every workspace"
    return click.option("--workspace", type=click.UUID, default=default, help=f"Only this one; else {what}.")


def look(home: str, read: Callable[[Store], Awaitable[R]]) -> R:
    """Open the home, read, close. Looking creates and changes nothing."""

    async def within() -> R:
        async with view_store(home) as store:
            return await read(store)

    return asyncio.run(within())


async def require_workspace(store: Store, workspace_id: UUID) -> None:
    if await store.get_workspace(workspace_id) is None:
        raise WorkspaceNotFoundError(f"there is no workspace {workspace_id} in this home; check the id")
