"""Plan a workdir, and make it: a checkout with a repository of its own, for one agent or one proof.

The repository lies in the workdir and borrows objects from the mirror. It shares nothing else with the user's or with
those of other agents: not settings, hooks, refs, stash or locks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from ostler.errors import InvalidOperationError
from ostler.failpoints import FaultPoint
from ostler.model.validation import fault
from ostler.workdirs.files import TooLargeError, copy, opened, parent_of, read_small, replace_file, write_durably
from ostler.workdirs.git import Git, object_id, path_text, require_version
from ostler.workdirs.mirror import PLAIN, Mirror, mirror_name, quoted
from ostler.workdirs.records import SIGNAL_FILE, Workdir, WorkdirKind
from ostler.workdirs.repository import Repository, discover, head_near

INCLUDE_FILE = ".worktreeinclude"
_MAX_INCLUDE_BYTES = 1024 * 1024
_MAX_INCLUDED = 20_000
_MAX_INCLUDED_BYTES = 4 * 1024**3
_REMOTE = frozenset({"url", "pushurl", "fetch", "tagopt"})
_BRANCH = frozenset({"remote", "merge"})
_PLAIN = frozenset({"user.name", "user.email", "core.autocrlf", "core.eol", "core.ignorecase"})
#: Where an agent reads its prompt; see `ostler.agents.command`.
_PROMPTS = b"/.ostler-prompt-*.md\n"
_ALTERNATES = b".git/objects/info/alternates"
_BORROWED = re.compile(rb"/[^\n]*/repos/([0-9a-f]{16})/trusted\.git/objects\n")
_SPECIAL = re.compile(rb"([\\*?\[\]!# ])")


def plan(
    work: Path, key: str, near: Path | None, kind: WorkdirKind | None, target: str | None, base: str | None
) -> Workdir:
    """Decide, from what the user's repository says now."""
    path = str(work / key)
    origin = discover(near) if near is not None and kind is not WorkdirKind.DIRECTORY else None
    if origin is None or near is None:
        if kind is WorkdirKind.WORKTREE:
            raise InvalidOperationError(f"{near} is not in a git repository; run git init there, or use a directory")
        return Workdir(kind=WorkdirKind.DIRECTORY, key=key, path=path)
    require_version()
    theirs = origin.repository
    if theirs.directory.is_relative_to(work):
        raise InvalidOperationError(f"{near} is the workdir of an agent; name the repository that it came from")
    branch = target or head_near(near)
    if branch is None:
        raise InvalidOperationError(
            f"no branch is checked out in {near}; check out the one to merge into (git switch main)"
        )
    tip = theirs.tip(branch)
    if tip is None:
        raise InvalidOperationError(
            f"the branch {branch} of {theirs.directory} has no commit; "
            "make a first one (git commit --allow-empty -m start), or check out another branch"
        )
    commit = tip if base is None else theirs.commit(base)
    if commit is None:
        raise fault("base", f"must name a commit in {theirs.directory}", base)
    return Workdir(
        kind=WorkdirKind.WORKTREE,
        key=key,
        path=path,
        repository=str(theirs.directory),
        checkout=None if origin.checkout is None else str(origin.checkout),
        base=commit,
        target=branch,
        branch=f"ostler/{key}",
        mirror=mirror_name(str(theirs.directory), commit),
    ).checked()


def make_worktree(mirror: Mirror, workdir: Workdir, into: Path, home: Path, fault: FaultPoint) -> tuple[str, ...]:
    """Make a worktree from nothing. Notes for the user."""
    base = object_id(str(workdir.base))
    theirs = Repository.at(str(workdir.repository), mirror.held)
    noted = {f"refs/ostler/{workdir.key}/base": base}
    mirror.follow(theirs, noted)
    if noted.items() - mirror.refs(f"refs/ostler/{workdir.key}/").items():  # it is on no branch
        mirror.take(theirs.objects, [base])
        mirror.set_refs(noted)
    fault("prepare.mirror.after")
    own = mirror.own(workdir.key)
    build(mirror, into, base, own / "index", workdir.branch)
    checkout = None if workdir.checkout is None else Path(workdir.checkout)
    _configure(into, theirs.settings, checkout or theirs.directory)
    copied = include(mirror, checkout, into, own / "index", home)
    _exclude(into, copied, own / "exclude")
    return _peculiarities(mirror, into, own / "index")


def build(mirror: Mirror, into: Path, commit: str, index: Path, branch: str | None = None) -> None:
    """Check a commit out into a new directory. On a branch of that name, else with a detached HEAD."""
    if os.path.lexists(into):
        raise InvalidOperationError(f"{into} is in the way; a checkout needs a directory that is not there yet")
    into.mkdir(mode=0o755)
    if mirror.name != PLAIN:
        _make_repository(mirror, into, commit, branch)
    for stale in (index, Path(f"{index}.lock")):
        stale.unlink(missing_ok=True)
    mirror.git.with_(work_tree=into, index=index).run("read-tree", "--reset", "-u", commit, seconds=900)
    if mirror.name != PLAIN:
        shutil.copyfile(index, into / ".git" / "index")


def _make_repository(mirror: Mirror, into: Path, commit: str, branch: str | None) -> None:
    object_format = "sha256" if len(commit) == 64 else "sha1"
    how = ("--quiet", "--template=", f"--object-format={object_format}", "--initial-branch=none")
    Git(at=into).run("init", *how, "--", str(into))
    place = into / ".git"
    (place / "info").mkdir()
    (place / "objects" / "info" / "alternates").write_bytes(os.fsencode(mirror.directory / "objects") + b"\n")
    own = f"refs/heads/{branch}"
    refs = {f"refs/{name.removeprefix('refs/user/')}": commit for name, commit in mirror.refs("refs/user/").items()}
    lines = [f"{commit} {name}" for name, commit in refs.items() if branch is None or not _collide(name, own)]
    (place / "packed-refs").write_text("".join(f"{line}\n" for line in lines))
    (place / "info" / "exclude").write_bytes((mirror.directory / "info" / "exclude").read_bytes())
    if shallow := mirror.shallow():
        (place / "shallow").write_bytes(shallow)
    if branch is None:
        (place / "HEAD").write_text(f"{commit}\n")
        return
    (place / own).parent.mkdir(parents=True)
    (place / own).write_text(f"{commit}\n")
    (place / "HEAD").write_text(f"ref: {own}\n")


def borrowed_mirror(place: Path) -> str | None:
    """The name of the mirror that the repository in a workdir borrows from, in whatever home that was."""
    try:
        with opened(place) as root:
            text = read_small(root, _ALTERNATES, _MAX_INCLUDE_BYTES) or b""
    except OSError:
        return None
    match = _BORROWED.fullmatch(text)
    return None if match is None else match[1].decode()


def borrow_from(place: Path, mirror: Mirror) -> None:
    """Let the repository in a workdir borrow from where the mirror is now; the home may have been moved."""
    text = os.fsencode(mirror.directory / "objects") + b"\n"
    with opened(place) as root:
        if read_small(root, _ALTERNATES, _MAX_INCLUDE_BYTES) == text:
            return
        with parent_of(root, _ALTERNATES) as (folder, name):
            replace_file(folder, name, text)


def _collide(first: str, second: str) -> bool:
    """Whether two names of refs cannot exist together."""
    return first == second or first.startswith(f"{second}/") or second.startswith(f"{first}/")


def _configure(into: Path, settings: Iterable[tuple[str, str]], relative_to: Path) -> None:
    """Give the agent the user's name, remotes and line endings. Nothing that names a program is taken over."""
    lines = ["[gc]", "\tauto = 0"]
    for name, value in settings:
        section, _, rest = name.partition(".")
        middle, _, key = rest.rpartition(".")
        if name in _PLAIN:
            lines += [f"[{section}]", f"\t{key} = {quoted(value)}"]
        elif (section == "remote" and key in _REMOTE) or (section == "branch" and key in _BRANCH):
            fixed = _absolute(value, relative_to) if key in {"url", "pushurl"} else value
            lines += [f"[{section} {quoted(middle)}]", f"\t{key} = {quoted(fixed)}"]
    with (into / ".git" / "config").open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\n".join([*lines, ""]))


def _absolute(url: str, relative_to: Path) -> str:
    """The address of a remote that is a path means the same from another directory."""
    looks_like_path = ":" not in url.partition("/")[0] and not url.startswith("/")
    return os.path.normpath(relative_to / url) if looks_like_path and url else url


def include(mirror: Mirror, checkout: Path | None, into: Path, index: Path, home: Path) -> Sequence[bytes]:
    """Copy the untracked files of the user's checkout that `.worktreeinclude` names, but nothing of the home."""
    if checkout is None or not checkout.is_dir():
        return ()
    with opened(checkout) as source, opened(into) as target, mirror.scratch() as scratch:
        patterns = read_small(source, INCLUDE_FILE.encode(), _MAX_INCLUDE_BYTES)
        if patterns is None:
            return ()
        (scratch / "patterns").write_bytes(patterns)
        git = mirror.git.with_(work_tree=checkout, index=index)
        listed = git.names("ls-files", "-z", "-o", "-i", f"--exclude-from={scratch / 'patterns'}")
        skipped = os.fsencode(os.path.relpath(home, checkout)) + b"/"
        chosen = [path for path in listed if not path.endswith(b"/") and not path.startswith(skipped)]
        copied, size = [], 0
        for path in chosen:
            with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
                try:
                    size += max(copy(source, path, target, _MAX_INCLUDED_BYTES - size), 0)
                except TooLargeError as error:
                    raise _too_much(checkout) from error
                copied.append(path)
            if len(copied) > _MAX_INCLUDED:
                raise _too_much(checkout)
        return copied


def _too_much(checkout: Path) -> InvalidOperationError:
    return InvalidOperationError(
        f"{INCLUDE_FILE} in {checkout} names more than {_MAX_INCLUDED} files or {_MAX_INCLUDED_BYTES >> 30} GiB; "
        "name less, for every workdir gets a copy"
    )


def _exclude(into: Path, paths: Sequence[bytes], ours: Path) -> None:
    """What was copied in, prompts and signals are no part of the work, neither for us nor for the agent's own git."""
    lines = _PROMPTS + b"/" + SIGNAL_FILE.encode() + b"\n"
    lines += b"".join(b"/" + _SPECIAL.sub(rb"\\\1", path) + b"\n" for path in paths if b"\n" not in path)
    write_durably(ours, lines)
    with (into / ".git" / "info" / "exclude").open("ab") as file:
        file.write(lines)


def _peculiarities(mirror: Mirror, into: Path, index: Path) -> tuple[str, ...]:
    """What a user should know of this checkout, in sentences."""
    has_modules = os.path.lexists(into / ".gitmodules")  # without it no submodule can be checked out
    listed = mirror.git.with_(index=index).names("ls-files", "-z", "--stage") if has_modules else []
    modules = [path_text(line.partition(b"\t")[2]) for line in listed if line.startswith(b"160000 ")]
    notes = []
    if modules:
        notes.append(
            f"submodules are not checked out: {', '.join(modules[:5])}; the agent can run git submodule update"
        )
    with opened(into) as root:
        attributes = read_small(root, b".gitattributes", _MAX_INCLUDE_BYTES) or b""
    if b"filter=lfs" in attributes:
        notes.append("files kept by git-lfs are pointers here, for filters do not run; the agent can run git lfs pull")
    return tuple(notes)
