"""Which home a command looks at, and looking at it."""

from __future__ import annotations

import asyncio
import os
import shlex
import stat
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

import click
from click.core import ParameterSource

from ostler.errors import ValidationError, WorkspaceNotFoundError
from ostler.model.people import HOME_WORKSPACE_ID
from ostler.store import Store, view_store
from ostler.store.opening import home_path

R = TypeVar("R")
Decorated = Callable[..., Any]

DEFAULT_HOME = "~/.ostler"


def home_option(command: Decorated) -> Decorated:
    return click.option(
        "--home",
        metavar="DIR|URL",
        default=lambda: os.environ.get("OSTLER_HOME") or DEFAULT_HOME,
        callback=_possible,
        help="A home directory or a postgresql:// address; else OSTLER_HOME, else ~/.ostler.",
    )(command)


def _possible(context: click.Context, option: click.Parameter, home: str) -> str:
    """Refused before anything is read or made there."""
    if not home.strip():
        raise click.BadParameter("it is empty; name a directory, or leave the option out", context, option)
    if is_address(home):
        return home
    try:
        is_file = stat.S_ISREG(home_path(home).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return home  # whoever opens it says how one comes to be
    except OSError as error:
        why = f"{home} cannot be looked at ({error.strerror}); check who owns it, or name another"
        raise click.BadParameter(why, context, option) from error
    except ValidationError as error:
        raise click.BadParameter(f"{error.faults[0].message}", context, option) from error
    if is_file:
        raise click.BadParameter(f"{home} is a file, and a home is a directory; name another", context, option)
    return home


def is_address(home: str) -> bool:
    return "://" in home


def home_words(home: str) -> str:
    """What a command must say to mean the same home as this one; a password is not repeated."""
    if click.get_current_context().get_parameter_source("home") is not ParameterSource.COMMANDLINE:
        return ""
    secret = is_address(home) and urlsplit(home).password is not None
    return f" --home {'ADDRESS' if secret else shlex.quote(home)}"


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
