"""The user's repository. Its objects and refs are read, one branch is moved; its settings and hooks are never used.

Work on files and trees is done by the mirror (`mirror.py`), which borrows these objects.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ostler.errors import GitError, InvalidOperationError
from ostler.model.validation import fault
from ostler.workdirs.git import Git, user_settings

_HEADS = "refs/heads/"
#: What an agent finds in its own repository, and what keeps objects from being copied twice.
_COPIED = (_HEADS, "refs/tags/", "refs/remotes/")
#: Operations that end in a commit of the index as it was before the branch moved.
_UNFINISHED = {"MERGE_HEAD": "merge", "CHERRY_PICK_HEAD": "cherry-pick", "REVERT_HEAD": "revert"}


class Checkout(NamedTuple):
    """A work tree of the user in which a branch is checked out."""

    path: Path
    #: Its own part of the repository, with index and HEAD.
    directory: Path


@dataclass(frozen=True)
class Repository:
    #: The git directory that all work trees of the repository share.
    directory: Path
    git: Git = field(repr=False)

    @classmethod
    def at(cls, directory: str, held: tuple[int, ...] = ()) -> Repository:
        place = Path(directory)
        if not (place / "objects").is_dir():
            raise InvalidOperationError(f"the repository {place} is not there any more; bring it back and try again")
        return cls(place, Git(directory=place, held=held))

    @property
    def objects(self) -> Path:
        return self.directory / "objects"

    @property
    def format(self) -> str:
        return self.git.text("rev-parse", "--show-object-format")

    def tip(self, branch: str) -> str | None:
        return self.commit(_HEADS + branch)

    def commit(self, name: str) -> str | None:
        """The commit that a name stands for, here."""
        answer = self.git.ask("rev-parse", "--quiet", "--verify", "--end-of-options", f"{name}^{{commit}}")
        return answer.output.decode().strip() if answer.code == 0 else None

    def refs(self) -> dict[str, str]:
        listing = self.git.text("for-each-ref", "--format=%(objectname) %(refname) [%(symref)]", *_COPIED)
        parts = [line.split(" ") for line in listing.splitlines()]
        return {name: commit for commit, name, symbolic in parts if symbolic == "[]"}

    def shallow(self) -> bytes:
        file = self.directory / "shallow"
        return file.read_bytes() if file.is_file() else b""

    @cached_property
    def settings(self) -> list[tuple[str, str]]:
        return user_settings(self.directory)

    def move(self, branch: str, new: str, old: str, reason: str) -> bool:
        """Compare and set. False when the branch is not at `old`."""
        answer = self.git.ask("update-ref", "-m", reason, _HEADS + branch, new, old)
        if answer.code == 0:
            return True
        if self.tip(branch) != old:
            return False
        raise GitError(f"git could not move {branch} in {self.directory}: {answer.error}")

    def published(self, commit: str) -> bool:
        """Whether a branch of a remote has it, as far as this repository knows."""
        return bool(self.git.text("for-each-ref", "--count=1", f"--contains={commit}", "refs/remotes/"))

    def checkouts(self, branch: str) -> list[Checkout]:
        """Every work tree that has the branch checked out."""
        checkouts = []
        for block in self.git.run("worktree", "list", "--porcelain", "-z").split(b"\0\0"):
            lines = [line.partition(b" ") for line in block.strip(b"\0").split(b"\0")]
            facts = {name: value for name, _, value in lines}
            if facts.get(b"branch") != os.fsencode(_HEADS + branch):
                continue
            path = Path(os.fsdecode(facts[b"worktree"]))
            if b"bare" in facts or not path.is_dir():
                continue
            checkouts.append(Checkout(path, self._directory_of(path)))
        return checkouts

    def _directory_of(self, path: Path) -> Path:
        mark = path / ".git"
        if mark.is_file():
            target = mark.read_bytes().removeprefix(b"gitdir:").strip()
            return (path / os.fsdecode(target)).resolve()
        return self.directory


def require_finished(checkout: Checkout, branch: str) -> None:
    for name, operation in _UNFINISHED.items():
        if (checkout.directory / name).exists():
            raise InvalidOperationError(
                f"a {operation} in {checkout.path} is not finished, and its commit would take back what is accepted "
                f"into {branch}; finish or abort it, then try again. Nothing was changed"
            )


class Place(NamedTuple):
    repository: Repository
    #: The work tree around the directory; None in a bare repository.
    checkout: Path | None


def discover(near: Path) -> Place | None:
    """The repository that a directory is in, or None."""
    if not near.is_dir():
        raise fault("near", "must be a directory that exists", str(near))
    asked = ("rev-parse", "--path-format=absolute", "--is-inside-work-tree", "--git-common-dir")
    here = Git(at=near)
    answer = here.ask(*asked, "--show-toplevel")
    if answer.code != 0:
        answer = here.ask(*asked)  # in a bare repository, or in the git directory of another
    if answer.code != 0:
        if "not a git repository" in answer.error:
            return None
        raise GitError(f"git does not read the repository at {near}: {answer.error}")
    inside, common, *rest = answer.output.split(b"\n", 2)
    checkout = rest[0].removesuffix(b"\n") if inside == b"true" and rest else b""
    return Place(
        Repository.at(str(Path(os.fsdecode(common)).resolve())), Path(os.fsdecode(checkout)) if checkout else None
    )


def head_near(near: Path) -> str | None:
    """The branch that is checked out in the work tree around a directory."""
    answer = Git(at=near).ask("symbolic-ref", "--quiet", "HEAD")
    name = answer.output.decode("utf-8", "surrogateescape").strip()
    return name.removeprefix(_HEADS) if answer.code == 0 and name.startswith(_HEADS) else None
