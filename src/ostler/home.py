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
#: What agents wrote, and the private homes of instances: a directory for each.
LOGS, HOMES = "logs", "homes"
#: Definitions of agents, in a home that belongs to a project.
AGENTS_FOLDER = "agents"
#: Settings of a project, beside its home.
SETTINGS_FILE = "ostler.toml"
#: What makes a directory a project.
PROJECT_MARKERS = (SETTINGS_FILE, HOME_NAME, ".claude/agents", ".codex/agents")


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


def project_near(directory: Path, home: Path) -> Path | None:
    """The directory of the project that `directory` is in; None for that of the home, which is also that of a
    directory in no project.

    It is the nearest one that holds definitions or settings, else the nearest repository. What the user's own directory
    holds is for all projects.
    """
    own = Path.home()
    folders = [folder for folder in (directory, *directory.parents) if folder != own and folder not in own.parents]
    if home in folders:  # such as a workdir, which holds copies of what a project has
        return None
    for markers in (PROJECT_MARKERS, (".git",)):
        for folder in folders:
            if any((folder / marker).exists() for marker in markers):
                return None if folder == project_of(home) else folder
    return None


def project_of(home: Path) -> Path:
    """The directory that a home inside a project belongs to; its own directory for any other home."""
    return home.parent if home.name == HOME_NAME and home.parent != Path.home() else home
