"""Records of a workdir, its snapshots, and what was accepted, undone or retired. The caller keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from ostler.model.record import Record, record
from ostler.model.types import Moment
from ostler.model.validation import Fault, fault, shown

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
#: The file by which an agent signals that it stops, and why; never a part of the work.
SIGNAL_FILE = "communications.json"
_KEY_RULE = "must be 1 to 64 letters, digits, '-' and '_', and not begin with '-'"


def check_key(key: str) -> str:
    """A key names directories and branches, so nothing else may stand in it."""
    if not _KEY.fullmatch(key):
        raise fault("key", _KEY_RULE, key)
    return key


class WorkdirKind(StrEnum):
    DIRECTORY = "directory"  #: an empty directory, fresh for every attempt
    WORKTREE = "worktree"  #: a checkout of its own, on a branch of its own


@record
class Workdir(Record):
    """Where one piece of work is done. As planned; whether it exists is seen on the disk."""

    kind: WorkdirKind
    key: str
    path: str
    #: The git directory of the user's repository.
    repository: str | None = None
    #: The user's checkout that it was planned in; None for a bare repository.
    checkout: str | None = None
    #: The commit that the work begins with.
    base: str | None = None
    #: The branch that the work is merged into.
    target: str | None = None
    #: The branch inside the workdir.
    branch: str | None = None
    #: The repository under `repos` of the home that it borrows objects from; it keeps its name when the home is moved.
    mirror: str | None = None

    def rules(self) -> Iterator[Fault]:
        if not _KEY.fullmatch(self.key):
            yield Fault(field="key", bound=_KEY_RULE, value=shown(self.key))
        if self.kind is WorkdirKind.WORKTREE and not (self.repository and self.base and self.target):
            yield Fault(field="repository", bound="and base and target are required for a worktree")

    def environment(self) -> dict[str, str]:
        """What a program that works here should find. Without the ceiling, git in a plain directory would find the
        repository that the home lies in.
        """
        return {"OSTLER_WORKDIR": self.path, "GIT_CEILING_DIRECTORIES": str(Path(self.path).parent)}


@record
class FileChange(Record):
    #: Printable UTF-8 as it is, any other name in git's quotes. A renamed file is one deleted and one added.
    path: str
    status: Literal["A", "M", "D", "T"]
    #: Lines; None for a binary file.
    added: int | None = None
    removed: int | None = None


@record
class Snapshot(Record):
    """The files of a workdir at one moment, as a commit that no agent can change."""

    key: str
    number: int
    #: Which repository under `repos` of the home holds it.
    mirror: str
    commit: str
    tree: str
    #: The commit that `files` compares with.
    base: str
    #: The agent's own last commit, which the snapshot lies on; None where it made none that could be read.
    head: str | None = None
    files: tuple[FileChange, ...] = ()
    #: Changed files beyond those listed.
    more: int = 0
    #: What is in the workdir and not in the snapshot, each with the reason.
    left_out: tuple[str, ...] = ()
    #: What a reviewer should look at before it is accepted.
    warnings: tuple[str, ...] = ()


@record
class BaseChange(Record):
    """How the target has moved since the work began, and whether the work still merges into it."""

    commits: int
    conflicts: tuple[str, ...] = ()

    @property
    def merges_cleanly(self) -> bool:
        return not self.conflicts


@record
class Accepted(Record):
    """One snapshot, whole or some files of it, as one commit on the target. `undo` needs nothing else."""

    key: str
    mirror: str
    repository: str
    target: str
    #: The commit that was made; equal to `before` where the target had all of it already.
    commit: str
    #: The target before.
    before: str
    #: Whether every checkout of the target has its files and its index at `commit`.
    followed: bool = False
    #: None where all followed, or where the target is not checked out.
    why_not_followed: str | None = None
    #: Changed files of the work, and those of them that the target still lacks.
    files: int = 0
    left: int = 0
    #: What was accepted of the same work before; `undo` of the task takes that back too.
    earlier: Mapping[str, Any] | None = None


@record
class Undone(Record):
    target: str
    #: The target now.
    commit: str
    #: The target before the undo.
    before: str
    #: Whether a reverting commit was made, since other work lies on top or it was already published.
    reverted: bool = False
    followed: bool = False
    why_not_followed: str | None = None


@record
class VaultEntry(Record):
    """A retired workdir, whole."""

    key: str
    number: int
    path: str
    #: SHA-256 of the manifest, which holds that of every file.
    digest: str
    #: Of the files, before compression.
    bytes: int = 0
    files: int = 0
    #: The workdir was not there any more: the entry holds the record and the log only.
    missing: bool = False
    #: Sockets and the like, which cannot be kept.
    left_out: tuple[str, ...] = ()
    #: What could not be deleted after it was saved; only in the answer to `retire`.
    not_removed: str | None = None
    workdir: Workdir
    record: Mapping[str, Any]
    saved_at: Moment
