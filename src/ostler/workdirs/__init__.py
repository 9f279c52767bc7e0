"""Where an agent works: a directory or a worktree of its own; diff, accept, undo, and the vault for what is retired."""

from ostler.workdirs.records import (
    Accepted,
    BaseChange,
    FileChange,
    Snapshot,
    Undone,
    VaultEntry,
    Workdir,
    WorkdirKind,
)
from ostler.workdirs.workdirs import Workdirs

__all__ = [
    "Accepted",
    "BaseChange",
    "FileChange",
    "Snapshot",
    "Undone",
    "VaultEntry",
    "Workdir",
    "WorkdirKind",
    "Workdirs",
]
