"""The user's checkout of a branch that has just moved: its index and its files follow, where that overwrites nothing.

Steps: a journal; git's own lock on the index; the branch moves (`review.py`); files; the new index, renamed over the
old one, which ends the lock. A process that is killed in between leaves journal and lock. `recover` then goes on: if
the branch had moved, files that are already new count as done and the others follow; if it had not, only the lock goes.
Settings, hooks and filters of the user's repository are not used, for git works from the mirror.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ostler.errors import GitError
from ostler.failpoints import FaultPoint
from ostler.store.relocate import Paths
from ostler.workdirs.files import open_file, opened, parent_of, status, sync_folder, walk, write_durably
from ostler.workdirs.git import Git, path_text
from ostler.workdirs.mirror import Change, Mirror
from ostler.workdirs.repository import Checkout, Repository

_LOCK_SECONDS = 2.0
_POLL_SECONDS = 0.05
_CHUNK = 1024 * 1024
_MODULE = b"160000"
_LINK = b"120000"
_ATTRIBUTES = b".gitattributes"
_NO_FILTER = frozenset({b"unspecified", b"unset"})
#: An entry of `ls-files -z --debug`: its path, and the time that is zero where git never wrote or compared the file.
_DEBUG_ENTRY = re.compile(rb"([^\0]+)\0  ctime: (\d+:\d+)\n(?:.*\n){4}")
#: How `ls-files -t` marks what a sparse checkout leaves out.
_SKIPPED = "S"
_SHOWN = 20
_CHANGED = "changes of yours that are not committed"
_REMEDY = "commit or stash them and try again, or move only the branch (--branch-only)"


#: Of an index: path to mark and object.
Entries = dict[bytes, tuple[str, str]]


class Obstacle(NamedTuple):
    """Why a checkout cannot follow: files of it, where they can be named, and what is wrong with them."""

    paths: tuple[str, ...]
    why: str
    remedy: str = "move only the branch (--branch-only) and bring the files up to date with git"

    @property
    def sentence(self) -> str:
        return f"{named(self.paths)} cannot follow ({self.why})" if self.paths else self.why


@dataclass(frozen=True, kw_only=True)
class Follower:
    """One checkout on its way from `before` to `after`."""

    mirror: Mirror
    repository: Repository
    checkout: Checkout
    before: str
    after: str
    fault: FaultPoint
    #: Takes back what was accepted.
    is_undo: bool = False
    #: What an index of this content holds: it is looked at before the branch moves, and again after.
    _entries_of: dict[bytes, Entries] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def _journal(self) -> Path:
        name = hashlib.sha256(os.fsencode(self.checkout.directory)).hexdigest()[:16]
        return self.mirror.folder / "follow" / f"{name}.json"

    @property
    def _lock(self) -> Path:
        return self.checkout.directory / "index.lock"

    @property
    def _mark(self) -> Path:
        """A second name of the lock, which tells it from a lock of the user's git."""
        return self.checkout.directory / "ostler-index"

    def begin(self, branch: str) -> bool:
        """Lock the index. False while the user's git holds it."""
        self._journal.parent.mkdir(exist_ok=True)
        facts = {
            "mirror": str(self.mirror.folder),
            "repository": str(self.repository.directory),
            "branch": branch,
            "path": str(self.checkout.path),
            "directory": str(self.checkout.directory),
            "before": self.before,
            "after": self.after,
        }
        write_durably(self._journal, json.dumps(facts).encode())
        self._mark.unlink(missing_ok=True)
        self._mark.touch()
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                self._lock.hardlink_to(self._mark)
            except FileExistsError:
                if time.monotonic() > deadline:
                    self.cancel()
                    return False
                time.sleep(_POLL_SECONDS)
            except OSError:  # a disk without hard links
                self.cancel()
                return False
            else:
                return True

    def cancel(self) -> None:
        """Let go of the lock, where it is ours."""
        if self.holds_lock:
            self._lock.unlink()
        self._mark.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)

    def obstacle(self) -> Obstacle | None:
        """What would keep index and files from following, looked at before the branch moves; nothing is written."""
        try:
            with self.mirror.scratch() as scratch:
                git, obstacle = self._compare(scratch / "index")
                if obstacle is None:
                    answer = git.ask("read-tree", "-m", "-u", "-n", self.before, self.after)
                    obstacle = None if answer.code == 0 else self._refused(git, answer.error)
        except (OSError, GitError) as error:
            return Obstacle((), f"the files cannot follow: {error}")
        return obstacle

    def finish(self) -> str | None:
        """Let index and files follow, and unlock. Why they did not, or None."""
        try:
            with self.mirror.scratch() as scratch:
                why = self._follow(scratch / "index")
        except (OSError, GitError) as error:
            why = f"{self.checkout.path} was left as it is: {error}"
        self.cancel()
        return why

    def why_behind(self) -> str | None:
        """Why the files are not at `after`, or None where they are."""
        behind = self._behind()
        return f"{named(behind)} in {self.checkout.path} differ from the commit" if behind else None

    @property
    def holds_lock(self) -> bool:
        try:
            return self._lock.samefile(self._mark)
        except OSError:
            return False

    def _behind(self) -> list[str]:
        """The touched files that are not as they are in `after`."""
        with opened(self.checkout.path) as root:
            return [path_text(change.path) for change in self._touched if not _is_new(root, change)]

    # --- the steps -----------------------------------------------------------------------------------

    @cached_property
    def _touched(self) -> list[Change]:
        return [
            change
            for change in self.mirror.changes(self.before, self.after)
            if _MODULE not in {change.old_mode, change.new_mode}
        ]

    def _follow(self, index: Path) -> str | None:
        current = self.checkout.directory / "index"
        git, obstacle = self._compare(index)
        if obstacle is None:
            answer = git.ask("read-tree", "-m", "-u", self.before, self.after)
            self.fault("review.files.after")
            if answer.code == 0:
                self._install(index)
                return None
            obstacle = self._refused(git, answer.error)
        why = self._left_by_undo(obstacle, git) if self.is_undo else self._left(obstacle)
        # The files stay. The index goes on where the user has staged nothing in it, so that the user's next commit does
        # not take back what was accepted.
        index.write_bytes(current.read_bytes())
        if git.ask("read-tree", "-m", "-i", self.before, self.after).code == 0:
            self._install(index)
        return why

    def _compare(self, index: Path) -> tuple[Git, Obstacle | None]:
        """A copy of the user's index at `index`, up to date with the files, and what keeps them from following."""
        current = self.checkout.directory / "index"
        if not current.is_file():
            raise GitError("it has no index; run git reset --hard there if it has no changes of yours")
        content = current.read_bytes()
        index.write_bytes(content)
        git = self.mirror.git.with_(work_tree=self.checkout.path, index=index)
        touched = self._touched
        with opened(self.checkout.path) as root:
            if content not in self._entries_of:
                self._entries_of[content] = _entries(git)
            entries = self._entries_of[content]
            self._adopt(git, root, touched, entries)
            git.ask("update-index", "-q", "--refresh")
            blocked, why = self._obstacles(git, root, touched, entries)
        if not blocked:
            return git, None
        obstacle = Obstacle(tuple(path_text(path) for path in blocked), why)
        return git, obstacle._replace(remedy=_REMEDY) if why is _CHANGED else obstacle

    def _refused(self, git: Git, error: str) -> Obstacle:
        """What git would overwrite. It names only the first file itself."""
        changed = self._changed(git)
        names = [(path_text(change.path), change.path in changed) for change in self._touched]
        refused = tuple(name for name, is_changed in names if is_changed or f"'{name}'" in error)
        return Obstacle(refused, _CHANGED, _REMEDY) if refused else Obstacle((), f"the files cannot follow: {error}")

    def _adopt(self, git: Git, root: int, touched: Sequence[Change], entries: Entries) -> None:
        """What is on the disk as it shall be counts as done: the user made the same change, or we were killed."""
        lines = []
        for change in touched:
            entry = entries.get(change.path)
            unstaged = entry is None if change.status == "A" else entry is not None and entry[1] == change.old
            if unstaged and _is_new(root, change):
                lines.append(b"%s %s\t%s" % (change.new_mode.lstrip(b"0") or b"0", change.new.encode(), change.path))
        if lines:
            git.run("update-index", "-z", "--index-info", stdin=b"\0".join([*lines, b""]))

    def _obstacles(self, git: Git, root: int, touched: Sequence[Change], entries: Entries) -> tuple[list[bytes], str]:
        """Paths that cannot follow for a reason that git would not see, and the reason."""
        skipped = [change.path for change in touched if entries.get(change.path, ("", ""))[0] == _SKIPPED]
        if skipped:
            return skipped, "left out of a sparse checkout"
        filtered = _filtered(git, touched) if _may_have_attributes(root, touched, entries) else []
        if filtered:
            return filtered, "written by a filter such as git-lfs, which Ostler does not run"
        deleted = {change.path for change in touched if change.status == "D"}
        blocked = {change.path for change in touched if change.status == "A" and _in_the_way(root, change, deleted)}
        if blocked:
            blocked |= self._changed(git)
        return [change.path for change in touched if change.path in blocked], _CHANGED

    def _changed(self, git: Git) -> set[bytes]:
        """Paths that the user changed, staged or not, and did not stage as they are in `after`."""
        form = ("--name-only", "-z", "--no-renames", "--ignore-submodules=all")
        unstaged = git.names("diff-files", *form, "--diff-filter=d")  # git brings back a file that is only missing
        staged = git.names("diff-index", "--cached", *form, self.before)
        return {*unstaged, *staged} & set(git.names("diff-index", "--cached", *form, self.after))

    def _install(self, index: Path) -> None:
        """Put the new index in the place of the old one. That is the end of the lock."""
        current = self.checkout.directory / "index"
        made = index.stat()
        with self._mark.open("wb") as file:
            file.write(index.read_bytes())
            os.fchmod(file.fileno(), stat.S_IMODE(current.stat().st_mode))
            file.flush()
            os.utime(file.fileno(), ns=(made.st_atime_ns, made.st_mtime_ns))
            os.fsync(file.fileno())
        self._lock.rename(current)
        sync_folder(self.checkout.directory)
        self.fault("review.index.after")

    def _left(self, obstacle: Obstacle) -> str:
        return (
            f"the files in {self.checkout.path} were left as they are, for {obstacle.sentence}; "
            f"to merge your changes with the accepted ones there: git diff --binary {self.before[:12]} > mine.patch && "
            "git checkout -- . && git apply --3way mine.patch"
        )

    def _left_by_undo(self, obstacle: Obstacle, git: Git) -> str | None:
        """None where only files differ that never got the work: the accept left them, with changes of the user."""
        entries = _DEBUG_ENTRY.findall(git.run("ls-files", "-z", "--debug"))
        unwritten = {path_text(path) for path, changed_at in entries if changed_at == b"0:0"}
        behind = [path for path in self._behind() if path not in unwritten]
        if not behind:
            return None
        return (
            f"the work is out of the branch, but {named(behind)} in {self.checkout.path} were left as they are, "
            f"for {obstacle.sentence}; see git status there. git restore FILE sets one back, git clean -f FILE removes "
            "an untracked one; both drop your changes in it"
        )


def _entries(git: Git) -> Entries:
    lines = [line.partition(b"\t") for line in git.names("ls-files", "-z", "-t", "--stage")]
    return {path: (facts[:1].decode(), facts.split(b" ")[2].decode()) for facts, _, path in lines}


def recover(mirror: Mirror, fault: FaultPoint) -> None:
    """Finish what a killed process left in the user's checkouts. Called under the lock of the mirror."""
    for journal in sorted((mirror.folder / "follow").glob("*.json")):
        facts = _in_this_home(json.loads(journal.read_bytes()), mirror)
        checkout = Checkout(Path(facts["path"]), Path(facts["directory"]))
        if not (checkout.path.is_dir() and checkout.directory.is_dir()):
            journal.unlink()
            continue
        repository = Repository.at(facts["repository"], mirror.held)
        before, after = facts["before"], facts["after"]
        follower = Follower(
            mirror=mirror, repository=repository, checkout=checkout, before=before, after=after, fault=fault
        )
        tip = mirror.tip(repository, facts["branch"])
        forward = mirror.is_ancestor(before, after)
        moved = mirror.is_ancestor(after, tip) and (forward or not mirror.is_ancestor(before, tip))
        if moved and follower.holds_lock:
            follower.finish()
        else:
            follower.cancel()


def _in_this_home(facts: dict[str, str], mirror: Mirror) -> dict[str, str]:
    """The same where a home was moved since, together with the checkout."""
    old, new = Path(facts.get("mirror", mirror.folder)), mirror.folder
    paths = Paths(old.parent.parent, new.parent.parent)
    return {name: paths.translate(value) for name, value in facts.items()}


def named(paths: Sequence[str]) -> str:
    return ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")


def _may_have_attributes(root: int, touched: Sequence[Change], entries: Entries) -> bool:
    """Whether a file of attributes can say something of these paths; git takes one from the index where the disk has
    none.
    """
    paths = {change.path for change in touched}
    if any(path.rpartition(b"/")[2].lower() == _ATTRIBUTES for path in paths | entries.keys()):
        return True
    folders = {path[: at + 1] for path in paths for at in range(len(path)) if path[at : at + 1] == b"/"} | {b""}
    return any(status(root, folder + _ATTRIBUTES) is not None for folder in folders)


def _filtered(git: Git, touched: Sequence[Change]) -> list[bytes]:
    names = b"\0".join([*(change.path for change in touched), b""])
    values = git.run("check-attr", "-z", "--stdin", "filter", stdin=names).split(b"\0")
    return [path for path, value in zip(values[0::3], values[2::3], strict=False) if value not in _NO_FILTER]


def _is_new(root: int, change: Change) -> bool:
    """Whether the disk has a path as the new commit has it."""
    facts = status(root, change.path)
    if change.status == "D" or facts is None:
        return change.status == "D" and (facts is None or stat.S_ISDIR(facts.st_mode))
    try:
        with parent_of(root, change.path) as (parent, name):
            if stat.S_ISLNK(facts.st_mode):
                link = os.readlink(name, dir_fd=parent)
                return change.new_mode == _LINK and _object_name(len(link), [link], change.new) == change.new
            executable = b"100755" if facts.st_mode & stat.S_IXUSR else b"100644"
            if not stat.S_ISREG(facts.st_mode) or change.new_mode != executable:
                return False
            with open_file(parent, name) as descriptor, open(descriptor, "rb", closefd=False) as file:
                return _object_name(facts.st_size, iter(lambda: file.read(_CHUNK), b""), change.new) == change.new
    except OSError:
        return False


def _object_name(size: int, parts: Iterable[bytes], like: str) -> str:
    digest = hashlib.new("sha1" if len(like) == 40 else "sha256", b"blob %d\0" % size, usedforsecurity=False)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _in_the_way(root: int, change: Change, deleted: set[bytes]) -> bool:
    """Whether something untracked stands where a new file goes."""
    parts = change.path.split(b"/")
    for depth in range(1, len(parts)):
        above = b"/".join(parts[:depth])
        facts = status(root, above)
        if facts is not None and not stat.S_ISDIR(facts.st_mode) and above not in deleted:
            return True
    facts = status(root, change.path)
    if facts is None:
        return False
    if not stat.S_ISDIR(facts.st_mode):
        return change.path not in deleted and not _is_new(root, change)
    with parent_of(root, change.path) as (parent, name), opened(name, at=parent) as folder:
        inside = [entry.path for entry in walk(folder) if not stat.S_ISDIR(entry.stat.st_mode)]
    return any(change.path + b"/" + path not in deleted for path in inside)
