"""The archive of a retired workdir: written from descriptors, checked as a whole before anything is unpacked.

A compressed tar with directories, files and links; names are below `work/` or `logs/`. The checker is our own: what is
not exactly that is refused, and so is an archive that does not match its manifest.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from ostler.errors import InvalidOperationError, VaultError
from ostler.workdirs.files import Entry, create, open_file, parent_of, walk, write_all
from ostler.workdirs.git import path_text

MAX_ENTRIES = 999_999
MAX_BYTES = 256 * 1024**3
_TOPS = frozenset({b"work", b"logs"})
_MAX_PATH = 4096
_MAX_NAME = 255
#: The largest header; a longer one would be read into memory whole.
_MAX_HEADER = 1024 * 1024
_CHUNK = 256 * 1024
_KINDS = {tarfile.REGTYPE: "file", tarfile.AREGTYPE: "file", tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "link"}
#: Permissions that are kept; a program with the rights of its owner is not made by unpacking.
_MODE = 0o777


class Item(NamedTuple):
    """One line of the manifest."""

    path: str
    kind: str
    mode: int
    size: int
    #: SHA-256 of a file, the text of a link.
    content: str

    @classmethod
    def of(cls, values: Sequence[Any]) -> Item:
        path, kind, mode, size, content = values
        return cls(str(path), str(kind), int(mode), int(size), str(content))


#: Of everything that was packed: enough to see whether it has changed since.
Signs = dict[bytes, tuple[int, int, int, int]]


@dataclass
class Packed:
    items: list[Item] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    signs: Signs = field(default_factory=dict)
    size: int = 0
    #: Bytes that the files take on the disk, which is less than their size where they have holes.
    allocated: int = 0


# --- write -------------------------------------------------------------------------------------------


def pack(out: IO[bytes], roots: Sequence[tuple[bytes, int]]) -> Packed:
    """Write all that is below the open directories, each under its name."""
    done = Packed()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1, mtime=0) as stream,
        tarfile.open(
            fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as archive,
    ):
        for top, root in roots:
            _add(archive, done, Entry(top, os.fstat(root), root, b"."))
            for entry in walk(root):
                _add(archive, done, entry._replace(path=top + b"/" + entry.path))
    return done


def signs_of(roots: Sequence[tuple[bytes, int]]) -> Signs:
    signs: Signs = {}
    for top, root in roots:
        signs[top] = _sign(os.fstat(root))
        signs.update({top + b"/" + entry.path: _sign(entry.stat) for entry in walk(root)})
    return signs


def _sign(facts: os.stat_result) -> tuple[int, int, int, int]:
    return stat.S_IFMT(facts.st_mode), facts.st_size, facts.st_mtime_ns, facts.st_ino


def _add(archive: tarfile.TarFile, done: Packed, entry: Entry) -> None:
    if len(done.items) >= MAX_ENTRIES:
        raise InvalidOperationError(f"more than {MAX_ENTRIES} files; remove what is not needed, then retire it again")
    done.signs[entry.path] = _sign(entry.stat)
    info = tarfile.TarInfo(entry.path.decode("utf-8", "surrogateescape"))
    info.mode, info.mtime = stat.S_IMODE(entry.stat.st_mode) & _MODE, entry.stat.st_mtime
    content, size = "", 0
    if stat.S_ISDIR(entry.stat.st_mode):
        info.type, kind = tarfile.DIRTYPE, "folder"
        archive.addfile(info)
    elif stat.S_ISLNK(entry.stat.st_mode):
        link = os.readlink(entry.name, dir_fd=entry.parent)
        info.type, kind, content = tarfile.SYMTYPE, "link", path_text(link)
        info.linkname = link.decode("utf-8", "surrogateescape")
        archive.addfile(info)
    elif stat.S_ISREG(entry.stat.st_mode):
        kind = "file"
        with open_file(entry.parent, entry.name) as descriptor:
            size = info.size = os.fstat(descriptor).st_size
            done.size += size
            if done.size > MAX_BYTES:
                raise InvalidOperationError(
                    f"with {path_text(entry.path)} there are more than {MAX_BYTES >> 30} GiB to keep; "
                    "remove what is not needed, then retire it again"
                )
            done.allocated += min(size, os.fstat(descriptor).st_blocks * 512)
            reader = _Hashing(descriptor, size)
            archive.addfile(info, reader)
        content = reader.digest.hexdigest()
    else:
        done.left_out.append(f"{path_text(entry.path)}: neither a file nor a link")
        return
    done.items.append(Item(path_text(entry.path), kind, info.mode, size, content))


class _Hashing(io.RawIOBase):
    """Exactly `size` bytes of a file, and their digest. A file that has become shorter is filled up with zeros, and the
    comparison of signs finds that it changed.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._left = size
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        remaining = self._left if size < 0 else min(size, self._left)
        parts = []
        while remaining:
            part = os.read(self._descriptor, min(remaining, _CHUNK)) or bytes(min(remaining, _CHUNK))
            parts.append(part)
            remaining -= len(part)
            self._left -= len(part)
            self.digest.update(part)
        return b"".join(parts)


# --- read --------------------------------------------------------------------------------------------


class _Forward(io.RawIOBase):
    """A compressed file that is read from front to back. Steps back and giant headers are refused."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        super().__init__()
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise VaultError("the archive has a header of more than 1 MiB; nothing was unpacked")
        return self._stream.read(size)

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset < self._stream.tell():
            raise VaultError("the archive points back into itself; nothing was unpacked")
        return self._stream.seek(offset)


Sink = Callable[[bytes, str, tarfile.TarInfo, Iterable[bytes]], None]


def _members(source: IO[bytes], sink: Sink | None, limit: int) -> list[Item]:
    """Every entry, each refused unless it is a plain one in a directory that came before it."""
    source.seek(0)
    folders = {b""}
    seen: set[bytes] = set()
    items: list[Item] = []
    total = 0
    with _refused_if_broken(), gzip.GzipFile(fileobj=source, mode="rb") as stream:
        reader: Any = _Forward(stream)
        with tarfile.open(fileobj=reader, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            while (info := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
                path = info.name.encode("utf-8", "surrogateescape")
                kind = _checked_kind(info, path, folders, seen)
                seen.add(path)
                total += info.size
                if len(seen) > MAX_ENTRIES or total > limit:
                    raise VaultError(
                        f"the archive has more than {MAX_ENTRIES} entries or {limit} bytes; nothing was unpacked"
                    )
                if kind == "folder":
                    folders.add(path)
                items.append(_item(archive, info, path, kind, sink))
    return items


def _checked_kind(info: tarfile.TarInfo, path: bytes, folders: set[bytes], seen: set[bytes]) -> str:
    kind = _KINDS.get(info.type)
    parts = path.split(b"/")
    parent = b"/".join(parts[:-1])
    if kind is None or info.issparse() or info.size < 0 or (info.size and kind != "file"):
        why = "is neither a file, a directory nor a link"
    elif (
        any(part in {b"", b".", b".."} or len(part) > _MAX_NAME for part in parts)
        or len(path) > _MAX_PATH
        or b"\0" in path
    ):
        why = "is not a plain path inside the archive"
    elif parts[0] not in _TOPS or (len(parts) == 1 and kind != "folder"):
        why = "lies outside work and logs"
    elif parent not in folders:
        why = "does not lie in a directory that came before it"
    elif path in seen:
        why = "comes twice"
    else:
        return kind
    raise VaultError(f"the archive is refused, for {path_text(path[:200])} in it {why}; nothing was unpacked")


def _item(archive: tarfile.TarFile, info: tarfile.TarInfo, path: bytes, kind: str, sink: Sink | None) -> Item:
    digest = hashlib.sha256()

    def contents() -> Iterator[bytes]:
        file = archive.extractfile(info) if kind == "file" else None
        while file is not None and (part := file.read(_CHUNK)):
            digest.update(part)
            yield part

    if sink is not None:
        sink(path, kind, info, contents())
    else:
        for _ in contents():
            pass
    link = path_text(info.linkname.encode("utf-8", "surrogateescape"))
    content = {"file": digest.hexdigest(), "link": link, "folder": ""}[kind]
    return Item(path_text(path), kind, info.mode & _MODE, info.size, content)


@contextlib.contextmanager
def _refused_if_broken() -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as error:
        raise VaultError(f"the archive cannot be read ({error}); nothing was unpacked") from error


def check(source: IO[bytes], expected: Sequence[Item]) -> None:
    """Refuse the whole archive unless it is well-formed and exactly what the manifest says."""
    if _members(source, None, _allowed(expected)) != list(expected):
        raise VaultError("the archive is not what its manifest says; nothing was unpacked")


def _allowed(expected: Sequence[Item]) -> int:
    return min(MAX_BYTES, sum(item.size for item in expected))


def unpack(source: IO[bytes], expected: Sequence[Item], roots: dict[bytes, int]) -> None:
    """Write a checked archive below open directories, one for each top that is wanted."""
    later: list[tuple[int, bytes, int, float]] = []

    def sink(path: bytes, kind: str, info: tarfile.TarInfo, parts: Iterable[bytes]) -> None:
        top, _, rest = path.partition(b"/")
        root = roots.get(top)
        if root is None or not rest:
            for _ in parts:
                pass
            if root is not None:
                later.append((root, b"", info.mode, float(info.mtime)))
            return
        with parent_of(root, rest) as (parent, name):
            _write(parent, name, kind, info, parts)
        if kind == "folder":
            later.append((root, rest, info.mode, float(info.mtime)))

    if _members(source, sink, _allowed(expected)) != list(expected):
        raise VaultError("the archive was changed while it was unpacked; try again")
    for root, path, mode, mtime in reversed(later):
        _finish_folder(root, path, mode, mtime)


def _write(parent: int, name: bytes, kind: str, info: tarfile.TarInfo, parts: Iterable[bytes]) -> None:
    moment = _nanoseconds(float(info.mtime))
    if kind == "folder":
        os.mkdir(name, 0o700, dir_fd=parent)
    elif kind == "link":
        os.symlink(info.linkname.encode("utf-8", "surrogateescape"), name, dir_fd=parent)
        os.utime(name, ns=(moment, moment), dir_fd=parent, follow_symlinks=False)
    else:
        descriptor = create(parent, name)
        try:
            for part in parts:
                if part.count(0) == len(part):
                    os.lseek(descriptor, len(part), os.SEEK_CUR)
                else:
                    write_all(descriptor, part)
            os.ftruncate(descriptor, info.size)
            os.fchmod(descriptor, info.mode & _MODE)
            os.utime(descriptor, ns=(moment, moment))
        finally:
            os.close(descriptor)


def _finish_folder(root: int, path: bytes, mode: int, mtime: float) -> None:
    """When all is in it, for a directory may deny writing, and its time changes with every file."""
    moment = _nanoseconds(mtime)
    folder = os.dup(root)
    if path:
        with parent_of(root, path) as (parent, name):
            os.close(folder)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fchmod(folder, mode & _MODE)
        os.utime(folder, ns=(moment, moment))
    finally:
        os.close(folder)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
