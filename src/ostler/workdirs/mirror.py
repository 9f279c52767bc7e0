"""Our own bare repository beside each one of the user's: objects of both the user and the agents, settings of neither.

It holds what is judged and merged: an agent can write into its own repository, which borrows objects from here, but not
here. Refs: `refs/user/…` as the user's repository was last seen, `refs/ostler/KEY/…` what belongs to a workdir.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple

from ostler.errors import GitError, InvalidOperationError
from ostler.workdirs.files import locked, remove_tree, write_durably
from ostler.workdirs.git import ASLEEP_SECONDS, Git, is_object_id, object_id, path_text
from ostler.workdirs.repository import Repository

#: The mirror of plain directories, which have no repository.
PLAIN = "plain"
_USER = "refs/user/"
_LONG_SECONDS = 900.0
#: Up to this many objects are stored as single files, more as a pack.
_LOOSE_OBJECTS = 200
_MANY_REFS = 200
_MANY_PACKS = 40
#: Settings of the user that say how files are written; none of them names a program.
_FILE_SETTINGS = ("core.autocrlf", "core.eol", "core.filemode", "core.symlinks", "core.ignorecase")
_OURS = "# of the user's settings"
_MAX_EXCLUDES = 1024 * 1024


class Change(NamedTuple):
    path: bytes
    status: str
    old_mode: bytes
    new_mode: bytes
    old: str
    new: str


class Merge(NamedTuple):
    tree: str
    conflicts: tuple[str, ...]


@dataclass(frozen=True)
class Author:
    name: str
    email: str
    when: datetime

    @property
    def stamp(self) -> str:
        return f"{self.name} <{self.email}> {int(self.when.timestamp())} +0000"


#: The author of commits that stay in the mirror.
MIRROR_AUTHOR = Author("Ostler", "ostler@localhost", datetime.fromtimestamp(0, UTC))


@dataclass(frozen=True)
class Mirror:
    folder: Path
    held: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def directory(self) -> Path:
        return self.folder / "trusted.git"

    @property
    def git(self) -> Git:
        return Git(directory=self.directory, held=self.held)

    @contextmanager
    def lock(self) -> Iterator[Mirror]:
        """One writer at a time, and none while a git that a killed process left behind still runs."""
        with locked(self.folder / "lock") as descriptor:
            busy = self.folder / "busy"
            if busy.exists():
                self._clear()
            busy.touch()
            yield Mirror(self.folder, (descriptor,))
            busy.unlink()

    def _clear(self) -> None:
        """Remove what a holder of the lock that was killed or failed may have left; no git runs here now."""
        remove_tree(self.folder / "tmp")
        for pattern in ("trusted.git/*.lock", "trusted.git/refs/**/*.lock", "workdirs/*/*.lock"):
            for stale in self.folder.glob(pattern):
                stale.unlink(missing_ok=True)

    def own(self, key: str) -> Path:
        """What only we may write about a workdir: its index and its excludes."""
        place = self.folder / "workdirs" / key
        place.mkdir(parents=True, exist_ok=True)
        return place

    def forget(self, key: str) -> None:
        """Forget a workdir that is gone. Its commits stay, for repositories of agents may borrow them: nothing is ever
        pruned. Packs are joined when there are many.
        """
        remove_tree(self.folder / "workdirs" / key)
        if len(list((self.directory / "objects" / "pack").glob("*.pack"))) > _MANY_PACKS:
            self.git.run("repack", "-a", "-d", "-k", "--quiet", seconds=_LONG_SECONDS)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for an index and the like, on the disk of the home."""
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=self.folder / "tmp"))
        try:
            yield place
        finally:
            remove_tree(place)

    # --- contents ------------------------------------------------------------------------------------

    def create(self, object_format: str = "sha1") -> None:
        if self.directory.is_dir():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / "part.git"
        remove_tree(part)
        Git(at=self.folder).run(
            "init", "--quiet", "--bare", "--template=", f"--object-format={object_format}", str(part)
        )
        (part / "info").mkdir()
        part.replace(self.directory)

    def follow(self, repository: Repository, noted: Mapping[str, str] | None = None) -> None:
        """Take over what the user's repository has, and the settings that say how files are written.

        `noted` are refs of ours to commits; those that came over are set with the rest.
        """
        if not self.directory.is_dir():
            self.create(repository.format)
        settings = dict(repository.settings)
        if any(name.endswith((".promisor", ".partialclone")) for name in settings):
            raise InvalidOperationError(
                f"{repository.directory} is a partial clone, so parts of its history are elsewhere; "
                "clone it again without --filter and use that"
            )
        self._write_settings(settings)
        write_durably(self.directory / "info" / "exclude", _excludes(repository, settings))
        theirs = {_USER + name.removeprefix("refs/"): commit for name, commit in repository.refs().items()}
        ours = self.refs(_USER)
        try:
            self.take(repository.objects, list(theirs.values()), shallow=repository.shallow())
        except GitError:
            theirs = {}  # one of them is broken; the base of the work, which comes next, may still be whole
        gone = [f"delete {name}" for name in ours if name not in theirs]
        new = [f"update {name} {commit}" for name, commit in theirs.items() if ours.get(name) != commit]
        new += [f"update {name} {commit}" for name, commit in (noted or {}).items() if commit in theirs.values()]
        for lines in (gone, new):  # apart, for `a` may have made room for `a/b`
            if lines:
                self.git.run("update-ref", "--stdin", stdin="\n".join([*lines, ""]).encode())
        if len(new) > _MANY_REFS:
            self.git.run("pack-refs", "--all")

    def tip(self, repository: Repository, branch: str) -> str:
        """Where the user's branch is now; its objects are here afterwards."""
        tip = repository.tip(branch)
        if tip is None:
            raise InvalidOperationError(
                f"there is no branch {branch} in {repository.directory}; create it and try again"
            )
        if tip != self.seen(branch):
            self.take(repository.objects, [tip], shallow=repository.shallow())
            self.set_ref(f"{_USER}heads/{branch}", tip)
        return tip

    def seen(self, branch: str) -> str | None:
        """Where the user's branch was when it was last looked at."""
        return self.refs(f"{_USER}heads/{branch}").get(f"{_USER}heads/{branch}")

    def take(
        self, source: int | Path, tips: Sequence[str], *, shallow: bytes | None = None, strict: bool = False
    ) -> None:
        """Copy all that the tips need. No program of the source's settings runs, for they are not read."""
        present = set(self.refs("refs/").values())
        if shallow is not None and shallow != self.shallow():
            write_durably(self.directory / "shallow", shallow)
            present = set()
        missing = sorted({object_id(tip) for tip in tips} - present)
        if not missing:
            return
        revisions = "\n".join([*missing, *(f"^{commit}" for commit in sorted(present)), ""]).encode()
        with tempfile.TemporaryFile(dir=self.folder, buffering=0) as pack:
            # What an agent wrote may make git wait for ever; it costs others a moment, not their time.
            git = self.git.with_(borrowed=source)
            if strict:
                _pack(git, pack, revisions, seconds=30, asleep_seconds=ASLEEP_SECONDS)
            else:
                _pack(git, pack, revisions, seconds=_LONG_SECONDS)
            _unpack(self.git, pack, strict=strict)
        if strict:  # the indexes of borrowed packs may have lied; what came over must be whole
            self.git.run("rev-list", "--objects", "--quiet", "--stdin", stdin=revisions)

    def give(self, commit: str, have: str, objects: Path) -> None:
        """Copy a commit into the object directory of a repository that has `have`."""
        with tempfile.TemporaryFile(dir=self.folder, buffering=0) as pack:
            _pack(self.git, pack, f"{commit}\n^{have}\n".encode(), seconds=_LONG_SECONDS)
            _unpack(self.git.with_(objects=objects), pack, strict=False)

    def shallow(self) -> bytes:
        file = self.directory / "shallow"
        return file.read_bytes() if file.is_file() else b""

    def _write_settings(self, settings: Mapping[str, str]) -> None:
        file = self.directory / "config"
        before = file.read_text()
        lines = [
            f"\t{name.partition('.')[2]} = {quoted(settings[name])}" for name in _FILE_SETTINGS if name in settings
        ]
        text = before.partition(_OURS)[0] + "\n".join([_OURS, "[core]", *lines, ""])
        if text != before:
            write_durably(file, text.encode())

    # --- refs ----------------------------------------------------------------------------------------

    def refs(self, prefix: str) -> dict[str, str]:
        """Those below a prefix, or of that name. Read as files: only we write them, and a program would take longer."""
        if (self.directory / "reftable").is_dir():
            listing = self.git.text("for-each-ref", "--format=%(refname) %(objectname)", prefix)
            return dict(line.split(" ") for line in listing.splitlines())
        below = f"{prefix.removesuffix('/')}/"
        refs = {name: commit for name, commit in self._packed_refs() if name.startswith(below) or name == prefix}
        for path in _files(self.directory / prefix):
            commit = path.read_text("ascii", "replace").strip()
            if path.suffix != ".lock" and is_object_id(
                commit
            ):  # a crash may leave an empty one, which git ignores, too
                refs[path.relative_to(self.directory).as_posix()] = commit
        return dict(sorted(refs.items()))

    def _packed_refs(self) -> Iterator[tuple[str, str]]:
        try:
            text = (self.directory / "packed-refs").read_text("utf-8", "surrogateescape")
        except FileNotFoundError:
            return
        for line in text.split("\n"):
            commit, _, name = line.partition(" ")
            if is_object_id(commit):  # else a comment, or the object that a tag is of
                yield name, commit

    def set_ref(self, name: str, commit: str) -> None:
        self.git.run("update-ref", name, commit)

    def set_refs(self, commits: Mapping[str, str]) -> None:
        """All of them or none."""
        lines = [f"update {name} {commit}\n" for name, commit in commits.items()]
        self.git.run("update-ref", "--stdin", stdin="".join(lines).encode())

    # --- commits -------------------------------------------------------------------------------------

    def commit(self, tree: str, parents: Sequence[str], message: str, author: Author) -> str:
        people = [f"author {author.stamp}", f"committer {author.stamp}"]
        head = [f"tree {tree}", *(f"parent {parent}" for parent in parents), *people]
        text = "\n".join([*head, "", message.rstrip("\n"), ""])
        return self.git.text("hash-object", "-t", "commit", "-w", "--stdin", stdin=text.encode("utf-8", "replace"))

    def empty(self) -> str:
        """The commit that a plain directory begins with; always the same one."""
        tree = self.git.text("hash-object", "-t", "tree", "-w", "--stdin", stdin=b"")
        return self.commit(tree, [], "empty", MIRROR_AUTHOR)

    def tree_of(self, commit: str) -> str:
        return self.git.text("rev-parse", "--verify", "--end-of-options", f"{object_id(commit)}^{{tree}}")

    def parent_of(self, commit: str) -> str:
        return self.git.text("rev-parse", "--verify", "--end-of-options", f"{object_id(commit)}^1")

    def merge_base(self, ours: str, theirs: str) -> str | None:
        answer = self.git.ask("merge-base", "--", object_id(ours), object_id(theirs))
        return answer.output.decode().split()[0] if answer.code == 0 else None

    def is_ancestor(self, older: str, newer: str) -> bool:
        return self.git.ask("merge-base", "--is-ancestor", object_id(older), object_id(newer)).code == 0

    def count(self, since: str, until: str) -> int:
        return int(self.git.text("rev-list", "--count", f"{object_id(since)}..{object_id(until)}", "--"))

    def merge_on(self, base: str, ours: str, theirs: str) -> Merge:
        """As if both had begun at `base`, whatever their history says."""
        first, second = (self.commit(self.tree_of(side), [base], "side", MIRROR_AUTHOR) for side in (ours, theirs))
        return self.merge(first, second)

    def merge(self, ours: str, theirs: str) -> Merge:
        """Three-way, in memory; no file and no index is touched."""
        how = ("--write-tree", "-z", "--name-only", "--no-messages")
        answer = self.git.ask("merge-tree", *how, object_id(ours), object_id(theirs))
        if answer.code not in {0, 1}:
            raise GitError(f"git could not merge: {answer.error}")
        tree, *paths = [part for part in answer.output.split(b"\0") if part]
        names = sorted({path_text(path) for path in paths}) if answer.code == 1 else []
        return Merge(tree.decode(), tuple(names))

    def changes(self, old: str, new: str) -> list[Change]:
        parts = self.git.run(
            "diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", object_id(old), object_id(new), "--"
        ).split(b"\0")
        return _changes(parts)

    def counted_changes(self, old: str, new: str) -> list[tuple[Change, int | None, int | None]]:
        """With the numbers of lines that came and went; None of a file that is no text."""
        how = ("-r", "-z", "--raw", "--numstat", "--no-renames", "--no-abbrev", "--no-textconv", "--no-ext-diff")
        parts = self.git.run("diff-tree", *how, object_id(old), object_id(new), "--").split(b"\0")
        first = next((at for at in range(0, len(parts), 2) if not parts[at].startswith(b":")), len(parts))
        counts: dict[bytes, tuple[int | None, int | None]] = {}
        for line in filter(None, parts[first:]):
            added, removed, path = line.split(b"\t", 2)
            counts[path] = (None, None) if added == b"-" else (int(added), int(removed))
        return [(change, *counts.get(change.path, (None, None))) for change in _changes(parts[:first])]


def _changes(parts: Sequence[bytes]) -> list[Change]:
    changes = []
    for facts, path in zip(parts[0::2], parts[1::2], strict=False):
        old_mode, new_mode, before, after, letter = facts.removeprefix(b":").split(b" ")
        changes.append(Change(path, letter.decode(), old_mode, new_mode, before.decode(), after.decode()))
    return changes


def _files(place: Path) -> Iterator[Path]:
    """The file of that name, or all files below."""
    if place.is_file():
        yield place
    for folder, _, names in os.walk(place):
        yield from (Path(folder, name) for name in names)


def mirror_name(repository: str, base: str) -> str:
    """One mirror per repository and object format, so that a repository of the other format can take its place."""
    return hashlib.sha256(f"{len(base)}\0{repository}".encode("utf-8", "surrogateescape")).hexdigest()[:16]


def quoted(value: str) -> str:
    """A value as a configuration file of git holds it."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _pack(git: Git, out: IO[bytes], revisions: bytes, *, seconds: float, asleep_seconds: float | None = None) -> None:
    arguments = ("pack-objects", "--revs", "--stdout", "--quiet", "--delta-base-offset")
    git.run(*arguments, stdin=revisions, out=out, seconds=seconds, asleep_seconds=asleep_seconds)


def _unpack(git: Git, pack: IO[bytes], *, strict: bool) -> None:
    pack.seek(0)
    count = int.from_bytes(pack.read(12)[8:], "big")
    pack.seek(0)
    check = ["--strict"] if strict else []
    if count > _LOOSE_OBJECTS:
        git.run("index-pack", "--stdin", *check, stdin=pack, seconds=_LONG_SECONDS)
    elif count:
        git.run("unpack-objects", "-q", *check, stdin=pack, seconds=_LONG_SECONDS)


def _excludes(repository: Repository, settings: Mapping[str, str]) -> bytes:
    """What the user's own git leaves out: the excludes of the repository and of the user."""
    fallback = os.path.join(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "git/ignore")  # noqa: PTH118
    of_user = Path(settings.get("core.excludesfile") or fallback).expanduser()
    patterns = b""
    for file in (repository.directory / "info" / "exclude", of_user):
        try:
            with file.open("rb") as source:
                patterns += source.read(_MAX_EXCLUDES) + b"\n"
        except OSError:
            continue
    return patterns
