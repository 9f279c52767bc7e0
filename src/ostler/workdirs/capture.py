"""The files of a workdir as a tree in the mirror, whatever an agent does to its repository or its files meanwhile.

git only lists names here. Each file that differs is copied by descriptors (`files.py`) into a directory of ours, and
git adds it from there: what is added lies below the workdir for certain, and no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostler.errors import GitError, InvalidOperationError, OstlerError
from ostler.model.text import clipped
from ostler.workdirs.files import (
    NOTHING_THERE,
    TooLargeError,
    copy,
    opened,
    parent_of,
    read_small,
    special_files,
    status,
)
from ostler.workdirs.git import ASLEEP_SECONDS, Git, GitAsleepError, object_id, path_bytes, path_text
from ostler.workdirs.mirror import Author, Change, Mirror
from ostler.workdirs.records import SIGNAL_FILE, FileChange, Snapshot, Workdir, WorkdirKind
from ostler.workdirs.repository import Repository

_MAX_FILES = 200_000
_MAX_BYTES = 8 * 1024**3
_MAX_INDEX_BYTES = 256 * 1024 * 1024
_MAX_REF_BYTES = 16 * 1024 * 1024
#: Repositories inside the workdir whose files are taken.
_MAX_NESTED = 50
_MAX_LEFT_OUT = 100
#: Changed files that a snapshot names.
_MAX_LISTED = 5000
_LINK_TO_REPOSITORY = b"160000"
#: Names that git refuses, since other systems take them for `.git`.
_RESERVED = re.compile(rb"(?:^|[/\\])(?:\.git|git~1)[ .]*(?:[/\\:]|$)", re.IGNORECASE)
_REF = re.compile(r"ref: (refs/[\w./-]{1,200})")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
#: An address that names a helper program, such as ext::sh.
_PROGRAM_URL = re.compile(r"\s*[\w+.-]+::")
#: Files that git reads in every directory of a work tree.
_OPENED_BY_GIT = frozenset({b".gitignore", b".gitattributes"})
_CONFLICT_MARK = b"<<<<<<< "


def snapshot(mirror: Mirror, workdir: Workdir, message: str, author: Author) -> Snapshot:
    """Keep the files of a workdir as a commit on the agent's own; the last snapshot again where nothing changed."""
    place = Path(workdir.path)
    if not place.is_dir() or place.is_symlink():
        raise InvalidOperationError(f"the workdir {place} is not there; prepare it, or restore it from the vault")
    worktree = workdir.kind is WorkdirKind.WORKTREE
    if not worktree:
        mirror.create()
    base = object_id(str(workdir.base)) if worktree else mirror.empty()
    capture = Capture(mirror, place, mirror.own(workdir.key), worktree)
    head = capture.head(base) if worktree else None
    tree = capture.tree(base)
    merged = _resolved_merge(mirror, workdir, tree, head or base) if worktree else None
    number, last = _last(mirror, workdir.key)
    is_new = last is None or (mirror.tree_of(last), mirror.parent_of(last)) != (tree, head or base)
    if last is None or is_new or (merged is not None and not mirror.is_ancestor(merged, last)):
        parents = [head or base, *([merged] if merged is not None else [])]
        number, last = number + 1, mirror.commit(tree, parents, message, author)
        mirror.set_ref(f"refs/ostler/{workdir.key}/{number}", last)
    compared = merge_base(mirror, workdir, last, parent=head or base)
    changes = mirror.counted_changes(compared, last)
    files = [_file_change(*change) for change in changes[:_MAX_LISTED]]
    return Snapshot(
        key=workdir.key,
        number=number,
        mirror=mirror.name,
        commit=last,
        tree=tree,
        base=compared,
        head=head,
        files=tuple(files),
        more=len(changes) - len(files),
        left_out=tuple(capture.left_out),
        warnings=tuple(submodule_warnings(mirror, [change for change, _, _ in changes])),
    )


def _resolved_merge(mirror: Mirror, workdir: Workdir, tree: str, head: str) -> str | None:
    """The commit of the target that the agent has merged without committing the merge; None while a file that
    conflicted still has the marks of the conflict.
    """
    with opened(Path(workdir.path)) as root, contextlib.suppress(OSError, GitError):
        commit = (read_small(root, b".git/MERGE_HEAD", 4096) or b"").decode("ascii", "replace").strip()
        tip = mirror.seen(str(workdir.target))
        if tip is None or not _COMMIT.fullmatch(commit) or not mirror.is_ancestor(commit, tip):
            return None
        for path in mirror.merge(head, commit).conflicts:
            content = mirror.git.ask("cat-file", "blob", tree.encode() + b":" + path_bytes(path)).output
            if any(line.startswith(_CONFLICT_MARK) for line in content.splitlines()):
                return None
        return commit
    return None


def merge_base(mirror: Mirror, workdir: Workdir, commit: str, *, parent: str | None = None) -> str:
    """Where the work and its target part. Without the user's repository, as it was last seen.

    `parent` is one of the commit, where it is known: often it is the target.
    """
    if workdir.kind is WorkdirKind.DIRECTORY:
        return mirror.empty()
    target = str(workdir.target)
    try:
        tip: str | None = mirror.tip(Repository.at(str(workdir.repository), mirror.held), target)
    except OstlerError:
        tip = mirror.seen(target)
    if tip is not None and tip == parent:
        return tip
    return mirror.merge_base(tip or str(workdir.base), commit) or str(workdir.base)


def _last(mirror: Mirror, key: str) -> tuple[int, str | None]:
    """The number and the commit of the last snapshot."""
    prefix = f"refs/ostler/{key}/"
    commits = {name.removeprefix(prefix): commit for name, commit in mirror.refs(prefix).items()}
    number = max((int(name) for name in commits if name.isdigit()), default=0)
    return number, commits.get(str(number))


def _file_change(change: Change, added: int | None, removed: int | None) -> FileChange:
    status: Any = change.status
    return FileChange(path=path_text(change.path), status=status, added=added, removed=removed)


def submodule_warnings(mirror: Mirror, changes: Iterable[Change]) -> Iterator[str]:
    """What is dangerous in a `.gitmodules` that the work changes: git of the user may act on it after the merge."""
    for change in changes:
        if not _is_modules(change.path) or change.status == "D":
            continue
        name = path_text(change.path)
        answer = mirror.git.ask("config", f"--blob={change.new}", "--list", "-z")
        if answer.code != 0:
            yield f"{name}: git cannot read it ({answer.error})"
            continue
        for entry in answer.output.decode("utf-8", "replace").split("\0"):
            setting, _, value = entry.partition("\n")
            yield from (f"{name}: {setting} = {clipped(value, 200)!r} {why}" for why in _dangers(setting, value))


def _is_modules(path: bytes) -> bool:
    return path.rpartition(b"/")[2].lower() == b".gitmodules"


def _is_link(root: int, path: bytes) -> bool:
    facts = status(root, path)
    return facts is not None and stat.S_ISLNK(facts.st_mode)


def _dangers(setting: str, value: str) -> Iterator[str]:
    _, _, rest = setting.partition(".")
    module, _, key = rest.rpartition(".")
    if key == "path":  # every submodule has one, so its name is looked at once
        if ".." in re.split(r"[/\\]", module):
            yield "has a name that leads out of the repository"
        if value.startswith(("-", "/")) or ".." in re.split(r"[/\\]", value):
            yield "leads out of the repository, or looks like an option"
    elif key == "url" and (value.startswith("-") or _PROGRAM_URL.match(value) or not value.isprintable()):
        yield "runs a program, or looks like an option"
    elif key == "update" and value.startswith("!"):
        yield "runs a program"


@dataclass
class Capture:
    """One run over a workdir."""

    mirror: Mirror
    root: Path
    #: Ours, and kept. The index in it knows what is unchanged since the last time.
    own: Path
    #: False for a plain directory: a repository that an agent makes in it means nothing.
    worktree: bool
    left_out: list[str] = field(default_factory=list)

    @property
    def index(self) -> Path:
        return self.own / "index"

    def tree(self, base: str) -> str:
        with self.mirror.scratch() as scratch, opened(self.root) as root:
            special = list(special_files(root))
            self._remove_pipes(root, special)
            git = self.mirror.git.with_(work_tree=self.root, index=self.index)
            entries = self._index_entries(git, base)
            theirs = self._agent_index(root, scratch, entries) if self.worktree else {}
            own = (f"--exclude-from={self.own / 'exclude'}", f"--exclude=/{SIGNAL_FILE}")
            listed = self._listed(git, "-m", *own)
            paths = {path for path in listed if not path.endswith(b"/")}
            paths |= {path for path in theirs if path not in entries}
            paths |= self._nested([path for path in listed if path.endswith(b"/")], scratch)
            modules = {path for path, (mode, _) in entries.items() if mode == _LINK_TO_REPOSITORY}
            if (own_file := SIGNAL_FILE.encode()) in paths & entries.keys():
                self._leave_out(own_file, "what an agent signals is no part of its work")
            self._stage(root, paths - modules - {own_file}, scratch)
            self._take_modules(modules, theirs)
            self._name_others(special, {path.rpartition(b"/")[0] for path in paths | entries.keys()})
            return git.text("write-tree")

    def head(self, base: str) -> str | None:
        """The agent's last commit, its objects taken over; None where it cannot be read or has nothing to do with base.

        Its repository is read as files. Were git run in it, the agent's settings would count.
        """
        try:
            with opened(self.root) as root:
                head = _read_head(root)
                if head == base:
                    return None
                if head is not None and len(head) == len(base):
                    with parent_of(root, b".git/objects/x") as (objects, _):
                        if pipes := sorted(special_files(objects)):
                            raise InvalidOperationError(f"objects/{path_text(pipes[0])} is no file")
                        self.mirror.take(objects, [head], strict=True)
                    if self.mirror.merge_base(base, head):
                        return head
        except (OSError, OstlerError) as error:
            self._leave_out(b".git", f"the agent's commits cannot be read ({error})")
            return None
        self._leave_out(b".git", "HEAD is on no commit that came from the base")
        return None

    def _index_entries(self, git: Git, base: str) -> dict[bytes, tuple[bytes, bytes]]:
        """What our index holds. Without one of an earlier run every file is compared by its contents."""
        (self.own / "exclude").touch()
        if self.index.exists():
            with contextlib.suppress(GitError):
                return _entries(git)
            self.index.unlink()
        git.run("read-tree", base)
        return _entries(git)

    def _agent_index(
        self, root: int, scratch: Path, entries: dict[bytes, tuple[bytes, bytes]]
    ) -> dict[bytes, tuple[bytes, bytes]]:
        """What the agent itself has added, which may be a file that is ignored. `entries` are those of our index, of
        which an agent that never used git still has a copy.
        """
        data = read_small(root, b".git/index", _MAX_INDEX_BYTES)
        if data is None:
            return {}
        if data == self.index.read_bytes():
            return entries
        copied = scratch / "index"
        copied.write_bytes(data)
        with contextlib.suppress(GitError):
            return _entries(self.mirror.git.with_(index=copied))
        return {}

    def _nested(self, folders: Iterable[bytes], scratch: Path) -> set[bytes]:
        """The files of repositories inside the workdir, by their own ignore rules."""
        paths: set[bytes] = set()
        waiting = list(folders)
        seen = 0
        while waiting:
            folder = waiting.pop()
            seen += 1
            if seen > _MAX_NESTED:
                self._leave_out(folder, f"more than {_MAX_NESTED} repositories lie inside")
                continue
            self._leave_out(folder + b".git", "a repository inside; its files are kept, its history is not")
            place = self.root / Path(folder.decode("utf-8", "surrogateescape"))
            git = Git(directory=self.mirror.directory, work_tree=place, index=scratch / "none")
            with contextlib.suppress(OSError, GitError):
                for name in self._listed(git):
                    (waiting.append if name.endswith(b"/") else paths.add)(folder + name)
        return paths

    def _stage(self, root: int, paths: set[bytes], scratch: Path) -> None:
        if len(paths) > _MAX_FILES:
            raise InvalidOperationError(
                f"{len(paths)} files changed in {self.root}, and at most {_MAX_FILES} are taken; "
                "list what is not part of the work in .gitignore"
            )
        staging = scratch / "files"
        staging.mkdir()
        added: list[bytes] = []
        removed: list[bytes] = []
        size = 0
        with opened(staging) as target:
            for path in sorted(paths):
                if _RESERVED.search(path):
                    self._leave_out(path, "git does not keep files of that name")
                    continue
                if _is_modules(path) and _is_link(root, path):
                    self._leave_out(path, "git does not keep a link of that name")
                    removed.append(path)
                    continue
                copied = self._copy(root, path, target, _MAX_BYTES - size)
                if copied is None:
                    removed.append(path)
                elif copied >= 0:
                    added.append(path)
                    size += copied
        git = self.mirror.git.with_(work_tree=staging, index=self.index)
        if removed:
            git.run("update-index", "-z", "--force-remove", "--stdin", stdin=b"\0".join([*removed, b""]))
        if added:
            git.run("update-index", "-z", "--add", "--replace", "--stdin", stdin=b"\0".join([*added, b""]), seconds=900)

    def _copy(self, root: int, path: bytes, target: int, limit: int) -> int | None:
        """How many bytes were copied; None where no file is, -1 where it may not be read."""
        facts = status(root, path)
        if facts is None or stat.S_ISDIR(facts.st_mode):
            return None
        try:
            size = copy(root, path, target, limit)
        except TooLargeError as error:
            raise InvalidOperationError(
                f"with {path_text(path)} more than {_MAX_BYTES >> 30} GiB changed in {self.root}; "
                "remove it, or name it in .gitignore"
            ) from error
        except PermissionError:
            self._leave_out(path, "it may not be read")
            return -1
        except OSError as error:
            if error.errno in NOTHING_THERE:
                return None  # it went while it was looked at
            raise
        return size if size >= 0 else None

    def _take_modules(self, modules: set[bytes], theirs: dict[bytes, tuple[bytes, bytes]]) -> None:
        """Submodules are what the agent has added them as; their files are not looked at."""
        lines = []
        for path in modules if theirs else ():
            mode, commit = theirs.get(path, (b"0", b"0" * 40))
            if mode in {b"0", _LINK_TO_REPOSITORY}:
                lines.append(mode + b" " + commit + b"\t" + path)
        if lines:
            git = self.mirror.git.with_(index=self.index)
            git.run("update-index", "-z", "--index-info", stdin=b"\0".join([*lines, b""]))

    def _listed(self, git: Git, *options: str) -> list[bytes]:
        """Untracked files that are not ignored; with `-m` also changed ones. The agent may work there meanwhile."""
        try:
            arguments = ("ls-files", "-z", "-o", "--exclude-standard", *options)
            return [name for name in git.run(*arguments, asleep_seconds=ASLEEP_SECONDS).split(b"\0") if name]
        except GitAsleepError as error:
            raise InvalidOperationError(
                f"git waits for a pipe or a device that an inner repository of {self.root} leads to; "
                "remove that repository and try again"
            ) from error

    def _remove_pipes(self, root: int, special: Iterable[bytes]) -> None:
        """Remove what git would open and wait for: it holds no work, and every task of the repository would wait."""
        for path in special:
            *folders, name = path.split(b"/")
            if folders[:1] == [b".git"] or (name not in _OPENED_BY_GIT and b".git" not in folders):
                continue
            with contextlib.suppress(OSError), parent_of(root, path) as (parent, last):
                if not stat.S_ISSOCK(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
                    os.unlink(last, dir_fd=parent)
                    self._leave_out(path, "a pipe or a device, which git would wait for; it was removed")

    def _name_others(self, special: Iterable[bytes], folders: set[bytes]) -> None:
        """Git lists neither sockets nor pipes. Those beside other files are named."""
        for path in sorted(special):
            folder, _, name = path.rpartition(b"/")
            if folder in folders | {b""} and name not in _OPENED_BY_GIT:
                self._leave_out(path, "neither a file nor a link")

    def _leave_out(self, path: bytes, why: str) -> None:
        if len(self.left_out) < _MAX_LEFT_OUT:
            self.left_out.append(f"{path_text(path)}: {why}")


def _entries(git: Git) -> dict[bytes, tuple[bytes, bytes]]:
    """Path to mode and object."""
    entries = {}
    for line in git.names("ls-files", "-z", "--stage"):
        facts, _, path = line.partition(b"\t")
        mode, name, _ = facts.split(b" ")
        entries[path] = (mode, name)
    return entries


def _read_head(root: int) -> str | None:
    text = (read_small(root, b".git/HEAD", 4096) or b"").decode("utf-8", "replace").strip()
    named = _REF.fullmatch(text)
    if named is None:
        return text if _COMMIT.fullmatch(text) else None
    if ".." in named[1] or "//" in named[1]:
        return None
    loose = read_small(root, b".git/" + named[1].encode(), 4096)
    if loose is not None:
        commit = loose.decode("utf-8", "replace").strip()
        return commit if _COMMIT.fullmatch(commit) else None
    packed = (read_small(root, b".git/packed-refs", _MAX_REF_BYTES) or b"").decode("utf-8", "replace")
    for line in packed.splitlines():
        commit, _, name = line.partition(" ")
        if name == named[1] and _COMMIT.fullmatch(commit):
            return commit
    return None
