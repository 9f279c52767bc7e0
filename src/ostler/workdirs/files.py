"""Files below a directory that an agent can change at any moment: reached by descriptors, never through a link.

Every step opens one component with `O_NOFOLLOW`, relative to the directory opened before. So a link that an agent puts
in the place of a directory makes a step fail; it never leads outside. Names and paths are bytes, as in the system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ostler.errors import DeadlineError, InvalidOperationError
from ostler.workdirs.git import path_text

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Without waiting for a writer, should it be a FIFO by now.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Directories inside one another that are read. Deeper ones can only be removed.
_DEPTH = 200
#: How often a step is tried again while something else changes the same place.
_PATIENCE = 1000
_CHUNK = 1024 * 1024
_LOCK_SECONDS = 300.0
_LOCK_POLL_SECONDS = 0.02
#: What the system answers where nothing is, or a link or a file stands in the way.
NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_serial = itertools.count(1)


class Entry(NamedTuple):
    """What a walk yields. `parent` is open only until the walk goes on."""

    path: bytes
    stat: os.stat_result
    parent: int
    name: bytes


@contextlib.contextmanager
def opened(path: Path | bytes, at: int | None = None) -> Iterator[int]:
    """A directory, not followed where it is a link."""
    descriptor = os.open(path, _FOLDER, dir_fd=at)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def parent_of(root: int, path: bytes, *, make: bool = False) -> Iterator[tuple[int, bytes]]:
    """The open directory that holds `path`, and the last name of it. `make`: directories that are missing are made."""
    *folders, name = path.split(b"/")
    if not name or any(part in {b"", b".", b".."} for part in (*folders, name)):
        raise InvalidOperationError(f"{path_text(path)} is not a path inside the directory")
    here = os.dup(root)
    try:
        for folder in folders:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=here)
            inner = os.open(folder, _FOLDER, dir_fd=here)
            os.close(here)
            here = inner
        yield here, name
    finally:
        os.close(here)


def status(root: int, path: bytes) -> os.stat_result | None:
    """What stands at `path`, itself; None where there is nothing or the way leads through a link."""
    try:
        with parent_of(root, path) as (parent, name):
            return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        if error.errno in NOTHING_THERE:
            return None
        raise


def read_small(root: int, path: bytes, limit: int) -> bytes | None:
    """The contents of a regular file that is not larger than `limit`; None for all else."""
    try:
        with parent_of(root, path) as (parent, name), open_file(parent, name) as descriptor:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > limit:
                return None
            return os.read(descriptor, limit)
    except OSError:
        return None


@contextlib.contextmanager
def open_file(parent: int, name: bytes) -> Iterator[int]:
    """A file for reading. One of ours that denies its owner is made readable first."""
    try:
        descriptor = os.open(name, _FILE, dir_fd=parent)
    except PermissionError:
        _permit(parent, name)
        descriptor = os.open(name, _FILE, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def walk(root: int) -> Iterator[Entry]:
    """All that is below `root`: a directory, then what is in it, by name."""
    stack = [(os.dup(root), b"", iter(names_in(root)))]
    try:
        while stack:
            parent, prefix, names = stack[-1]
            name = next(names, None)
            if name is None:
                os.close(parent)
                stack.pop()
                continue
            path = prefix + name
            facts, folder = _look(parent, name)
            if facts is None:
                continue
            if folder is not None:
                stack.append((folder, path + b"/", iter(names_in(folder))))
                if len(stack) > _DEPTH:
                    raise InvalidOperationError(
                        f"directories are more than {_DEPTH} deep in {path_text(path[:60])}; remove some and try again"
                    )
            yield Entry(path, facts, parent, name)
    finally:
        for descriptor, *_ in stack:
            os.close(descriptor)


def special_files(folder: int, prefix: bytes = b"", depth: int = 0) -> Iterator[bytes]:
    """Paths of pipes, sockets and devices below an open directory, from the kinds in the directories alone."""
    with os.scandir(folder) as listing:
        entries = [
            (os.fsencode(entry.name), entry.is_dir(follow_symlinks=False), entry.is_symlink() or entry.is_file())
            for entry in listing
        ]
    for name, is_folder, is_plain in entries:
        if is_folder and depth < _DEPTH:
            with contextlib.suppress(OSError), opened(name, at=folder) as inner:
                yield from special_files(inner, prefix + name + b"/", depth + 1)
        elif not (is_folder or is_plain):
            yield prefix + name


def names_in(folder: int) -> list[bytes]:
    return sorted(os.fsencode(name) for name in os.listdir(folder))


def _look(parent: int, name: bytes) -> tuple[os.stat_result | None, int | None]:
    """The status of a name and, of a directory, its descriptor. Both belong to the same file."""
    for _ in range(_PATIENCE):
        try:
            facts = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None, None
        if not stat.S_ISDIR(facts.st_mode):
            return facts, None
        folder = _open_folder(parent, name)
        if folder is not None:
            # The mode from before, for `_open_folder` may have had to permit reading.
            return (facts if os.fstat(folder).st_ino == facts.st_ino else os.fstat(folder)), folder
    raise InvalidOperationError(f"{path_text(name)} changes all the time; stop what works there and try again")


def _open_folder(parent: int, name: bytes) -> int | None:
    """None where it is no directory any more."""
    for permitted in (False, True):
        try:
            return os.open(name, _FOLDER, dir_fd=parent)
        except PermissionError:
            if permitted:
                raise
            _permit(parent, name)
        except OSError as error:
            if error.errno in NOTHING_THERE:
                return None
            raise
    return None


def _permit(parent: int, name: bytes) -> None:
    """Let the owner read and enter. By a descriptor that names the thing itself, so that no link is followed."""
    thing = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        mode = os.fstat(thing).st_mode
        if not stat.S_ISLNK(mode):
            Path(f"/proc/self/fd/{thing}").chmod(stat.S_IMODE(mode) | (0o700 if stat.S_ISDIR(mode) else 0o400))
    finally:
        os.close(thing)


# --- copy --------------------------------------------------------------------------------------------


class TooLargeError(Exception):
    """A file has more bytes than may be copied."""


def copy(source: int, path: bytes, target: int, limit: int) -> int:
    """Copy one file or link to the same path below another directory. How many bytes it has; -1 for another thing.

    A file of more than `limit` bytes raises `TooLargeError`, also where it grows meanwhile. Holes stay holes.
    """
    with parent_of(source, path) as (parent, name):
        facts = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(facts.st_mode):
            link = os.readlink(name, dir_fd=parent)
            with parent_of(target, path, make=True) as (place, new):
                os.symlink(link, new, dir_fd=place)
            return len(link)
        if not stat.S_ISREG(facts.st_mode):
            return -1
        with open_file(parent, name) as descriptor:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return -1
            with parent_of(target, path, make=True) as (place, new):
                return _copy_into(descriptor, place, new, stat.S_IMODE(facts.st_mode) & 0o777 | 0o600, limit)


def _copy_into(source: int, place: int, name: bytes, mode: int, limit: int) -> int:
    if os.fstat(source).st_size > limit:
        raise TooLargeError(path_text(name))
    target = os.open(name, _NEW, mode, dir_fd=place)
    try:
        size = 0
        while (start := _next_data(source, size)) is not None:
            os.lseek(source, start, os.SEEK_SET)
            os.lseek(target, start, os.SEEK_SET)
            part = os.read(source, _CHUNK)
            if not part:
                break
            size = start + len(part)
            if size > limit:
                raise TooLargeError(path_text(name))
            write_all(target, part)
        size = min(max(size, os.fstat(source).st_size), limit)
        os.ftruncate(target, size)
    finally:
        os.close(target)
    return size


def _next_data(descriptor: int, offset: int) -> int | None:
    """Where the next bytes that are no hole begin; None behind the last of them."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno == errno.EINVAL:  # a file system that does not tell of holes
            return offset
        raise


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def create(place: int, name: bytes) -> int:
    """A new file for writing; it must not be there."""
    return os.open(name, _NEW, 0o600, dir_fd=place)


def replace_file(place: int, name: bytes, data: bytes) -> None:
    """A small file in an open directory, as a whole."""
    new = name + b".ostler"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=place)
    descriptor = create(place, new)
    try:
        write_all(descriptor, data)
    finally:
        os.close(descriptor)
    os.rename(new, name, src_dir_fd=place, dst_dir_fd=place)


# --- remove ------------------------------------------------------------------------------------------


def remove_tree(path: Path) -> None:
    """Delete what stands at `path`, with all that is in it; of a link only the link. Missing is fine.

    What cannot be deleted raises the first `PermissionError`, after all else is deleted.
    """
    refused: list[PermissionError] = []
    try:
        with opened(path.parent) as parent:
            _remove(parent, os.fsencode(path.name), None, 0, refused)
    except FileNotFoundError:
        return
    if refused:
        raise refused[0]


def _remove(parent: int, name: bytes, top: int | None, depth: int, refused: list[PermissionError]) -> None:
    for _ in range(_PATIENCE):
        try:
            if _unlink(parent, name) or _remove_folder(parent, name, top, depth, refused):
                return
        except PermissionError as error:
            refused.append(error)
            return
    raise InvalidOperationError(f"{path_text(name)} changes all the time; stop what works there and try again")


def _unlink(parent: int, name: bytes) -> bool:
    """Whether nothing of that name is there any more; False for a directory."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except IsADirectoryError:
        return False
    return True


def _remove_folder(parent: int, name: bytes, top: int | None, depth: int, refused: list[PermissionError]) -> bool:
    """Whether it is gone; False where it changed meanwhile, to be looked at again."""
    if top is not None and depth >= _DEPTH:
        # Descriptors are few: what lies deeper is moved up, and removed when the top is emptied again.
        os.rename(name, b".ostler-deep-%d-%d" % (os.getpid(), next(_serial)), src_dir_fd=parent, dst_dir_fd=top)
        return True
    before = len(refused)
    folder = _open_folder(parent, name)
    if folder is None:
        return False
    try:
        if os.fstat(folder).st_mode & 0o300 != 0o300:
            os.fchmod(folder, 0o700)
        for inner in names_in(folder):
            _remove(folder, inner, folder if top is None else top, depth + 1, refused)
    finally:
        os.close(folder)
    if len(refused) > before:
        return True  # as far as that is possible
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            return False
        raise
    return True


# --- durable -----------------------------------------------------------------------------------------


def sync_folder(path: Path) -> None:
    with opened(path) as descriptor:
        os.fsync(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file of ours as a whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{next(_serial)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    part.replace(path)
    sync_folder(path.parent)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock of a file of ours. A child that inherits the descriptor holds it too, until the child ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"{path} is held by another process; end it and try again") from None
                time.sleep(_LOCK_POLL_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)
