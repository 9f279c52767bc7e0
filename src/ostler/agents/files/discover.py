"""Finds the definitions of a project and registers them. What a file names is imported when it is started."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ostler.agents.files.load import (
    FileFault,
    LoadedDefinition,
    file_faults,
    load_agent_file,
    locate,
    read_definition,
)
from ostler.agents.files.project import find_project, read_project
from ostler.agents.manifest import AgentManifest
from ostler.agents.registry import AgentRegistry
from ostler.errors import AgentNotFoundError, ConflictError, DefinitionError
from ostler.home import AGENTS_FOLDER, HOME_NAME

#: Where to look in each directory, in this order: the first definition of a name wins.
FOLDERS = (
    (f"{HOME_NAME}/{AGENTS_FOLDER}", (".md", ".toml")),
    (".claude/agents", (".md",)),
    (".codex/agents", (".toml",)),
)
#: A folder with more files than that is no folder of definitions.
MAX_FILES = 1000

#: It explains the folder to people; it is not an agent.
_README = "readme.md"
#: A file that changed so lately may change again without a later time in its stat.
_UNSETTLED_NS = 2_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    definitions: tuple[LoadedDefinition, ...] = ()
    #: Everything that is wrong. The files that are right are read all the same.
    faults: tuple[FileFault, ...] = ()
    #: The faults of broken files by the names that these hold; such a name is not to be started.
    broken: Mapping[str, tuple[FileFault, ...]] = field(default_factory=dict)
    #: Every file that was read, with its faults.
    files: tuple[tuple[Path, tuple[FileFault, ...]], ...] = ()


def register_file(registry: AgentRegistry, path: str | Path) -> AgentManifest:
    """Add the definition of one file; it takes the place of what has its name."""
    found = load_agent_file(path)
    return registry.add(found.manifest, found.maker, replace=True)


def register_files(
    registry: AgentRegistry, root: str | Path, *, user: str | Path | None = None, replace: bool = False
) -> Discovery:
    """Add every definition that `discover` finds. Called again it reads and adds only what has changed.

    A name that something else has taken is a fault, unless the file is to `replace` it.
    """
    found = discover(root, user=user)
    added, faults = [], list(found.faults)
    for one in found.definitions:
        try:
            if not _is_registered(registry, one):
                registry.add(one.manifest, one.maker, replace=replace)
        except ConflictError as error:
            faults.append(_whole(Path(one.manifest.source or ""), str(error)))
        else:
            added.append(one)
    return dataclasses.replace(found, definitions=tuple(added), faults=tuple(faults))


def _is_registered(registry: AgentRegistry, definition: LoadedDefinition) -> bool:
    """A file that is read again has a new maker."""
    try:
        return registry.maker(definition.manifest.id) is definition.maker
    except AgentNotFoundError:
        return False


def validate_files(root: str | Path) -> list[tuple[Path, tuple[FileFault, ...]]]:
    """Every file that `discover` reads, `ostler.toml` included, with its faults."""
    return list(discover(root).files)


def discover(root: str | Path, *, user: str | Path | None = None) -> Discovery:
    """All definitions of the nearest `ostler.toml`, of the folders from `root` upwards, and of those of the `user`.

    A broken file holds its name, so that a mistake in it never starts another agent of that name instead.
    """
    base = Path(root).absolute()
    finding = _Finding(base)
    if not base.is_dir():  # else a slip in the path would look like a project without agents
        finding.note(base, [_whole(base, "is no directory; name that of the project")])
    project = find_project(base)
    if project is not None:
        finding.read_project(project)
    for place in dict.fromkeys((base, *base.parents, *([Path(user).absolute()] if user is not None else []))):
        for folder, suffixes in FOLDERS:
            if os.path.lexists(place / folder):
                finding.read_folder(place, place / folder, suffixes)
    faults = tuple(fault for _, found in finding.files for fault in found)
    return Discovery(
        definitions=tuple(finding.taken.values()), faults=faults, broken=finding.broken, files=tuple(finding.files)
    )


class _Finding:
    def __init__(self, base: Path) -> None:
        self._base = base
        self.taken: dict[str, LoadedDefinition] = {}
        self.broken: dict[str, tuple[FileFault, ...]] = {}
        self.files: list[tuple[Path, tuple[FileFault, ...]]] = []

    def note(self, path: Path, faults: Iterable[FileFault]) -> None:
        self.files.append((path, tuple(faults)))

    def read_project(self, path: Path) -> None:
        for definition in (self._read(read_project, path.parent, path) or (None, ()))[1]:
            self._take(definition)

    def read_folder(self, place: Path, folder: Path, suffixes: tuple[str, ...]) -> None:
        try:
            real = self._locate(place, folder)
            names = sorted(_names(real, suffixes))
        except DefinitionError as error:
            self.note(folder, file_faults(error))
            return
        except OSError as error:
            self.note(folder, [_whole(folder, f"cannot be read: {error.strerror}")])
            return
        if len(names) > MAX_FILES:
            self.note(folder, [_whole(folder, f"holds {len(names)} definitions; only the first {MAX_FILES} are read")])
        for name in names[:MAX_FILES]:
            found = self._read(read_definition, place, folder / name, real / name)
            if found is not None:
                self._take(found)
            elif Path(name).stem not in self.taken:
                self.broken.setdefault(Path(name).stem, self.files[-1][1])

    def _read(self, reader: Callable[..., Any], place: Path, path: Path, real: Path | None = None) -> Any:
        """What the reader makes of the file; None where it has faults, which are noted."""
        try:
            if real is None or real.is_symlink():
                real = self._locate(place, path)
            found, faults = _read_again(reader, path, real)
        except DefinitionError as error:
            found, faults = None, file_faults(error)
        except OSError as error:  # it has gone in the meantime
            found, faults = None, (_whole(path, f"cannot be read: {error.strerror}"),)
        self.note(path, faults)
        return found

    def _locate(self, place: Path, path: Path) -> Path:
        return locate(path, place, is_above=place in self._base.parents)

    def _take(self, definition: LoadedDefinition) -> None:
        if definition.manifest.name not in self.broken:
            self.taken.setdefault(definition.manifest.name, definition)


def _whole(path: Path, sentence: str) -> FileFault:
    return FileFault(path=str(path), line=0, sentence=sentence)


def _names(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    for path in folder.iterdir():
        if path.suffix in suffixes and not path.name.startswith(".") and path.name.lower() != _README:
            yield path.name


def _read_again(reader: Callable[..., Any], shown: Path, real: Path) -> tuple[Any, tuple[FileFault, ...]]:
    """The same as the last time where the stat of the file is the same."""
    found = real.lstat()
    stamp = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
    settled = time.time_ns() - max(stamp[:2]) > _UNSETTLED_NS
    return (_read_file if settled else _read_file.__wrapped__)(reader, shown, real, stamp)


@lru_cache(maxsize=2 * MAX_FILES)
def _read_file(
    reader: Callable[..., Any], shown: Path, real: Path, _stamp: tuple[int, ...]
) -> tuple[Any, tuple[FileFault, ...]]:
    """What the reader makes of the file, and its faults. The stamp tells one state of the file from another."""
    try:
        return reader(shown, real, follow=False), ()
    except DefinitionError as error:
        return None, file_faults(error)
