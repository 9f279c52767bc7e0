"""Which directory is the home, and what lies where in it. Imports nothing heavy: every command asks it."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "OSTLER_HOME"
#: The token of a person for a daemon at a TCP address; never handed on to an agent.
TOKEN_VARIABLE = "OSTLER_TOKEN"  # noqa: S105 - the name of a variable, not a token
HOME_NAME = ".ostler"
DATABASE_FILE = "ostler.db"
LOCK_FILE = "manager.lock"
#: The id of the home and the path where it was last opened.
IDENTITY_FILE = "identity.json"
SOCKET_FILE = "daemon.sock"
DAEMON_LOG = "daemon.log"
#: Of the program that parents agent processes.
KEEPER = "keeper"
#: Definitions of agents, in a home that belongs to a project.
AGENTS_FOLDER = "agents"
#: Settings of a project, beside its home.
SETTINGS_FILE = "ostler.toml"


def default_home() -> Path:
    """`$OSTLER_HOME`, else `.ostler` in this directory or one above it, else `~/.ostler`."""
    if named := os.environ.get(HOME_VARIABLE):
        return Path(named).expanduser().absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / HOME_NAME).is_dir():
            return folder / HOME_NAME
    return Path.home() / HOME_NAME


def chosen_home(named: str | os.PathLike[str] | None) -> Path:
    """The home that was named, else the default one."""
    return default_home() if named is None else Path(named).expanduser().absolute()


def modules_of(home: Path) -> Path:
    """Where the modules of `python:` agents are: beside a home inside a directory, also the user's own; else in it."""
    return home.parent if home.name == HOME_NAME else home


def project_of(home: Path) -> Path:
    """The directory that a home inside a project belongs to; its own directory for any other home."""
    return home.parent if home.name == HOME_NAME and home.parent != Path.home() else home
