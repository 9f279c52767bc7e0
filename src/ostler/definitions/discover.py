"""Finds the definitions of a project and registers them. Modules that a file names are imported at the start."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ostler.agents.registry import AgentManifest, AgentRegistry, definition_id, maker_of
from ostler.definitions.load import (
    FileFault,
    LoadedDefinition,
    file_faults,
    load_agent_file,
    locate,
    read_definition,
)
from ostler.definitions.project import find_project, read_project
from ostler.errors import AgentNotFoundError, ConflictError, DefinitionError
from ostler.home import AGENTS_FOLDER, HOME_NAME, SETTINGS_FILE

#: Where to look in each directory, in this order: the first definition of a name wins.
FOLDERS = (
    (f"{HOME_NAME}/{AGENTS_FOLDER}", (".md", ".toml")),
    (".claude/agents", (".md",)),
    (".codex/agents", (".toml",)),
)
#: Files of one folder that are read.
MAX_FILES = 1000

#: It explains the folder to people; it is not an agent.
_README = "readme.md"
#: A file that changed within this time may change again without a later time in its stat.
_UNSETTLED_NS = 2_000_000_000
#: The definitions of a file, or its faults.
_Outcome = tuple[tuple[LoadedDefinition, ...], tuple[FileFault, ...]]


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
    definition = load_agent_file(path)
    return registry.add(definition.manifest, definition.maker, replace=True)


def register_files(
    registry: AgentRegistry,
    root: str | Path,
    *,
    user: str | Path | None = None,
    replace: bool = False,
    project: str | None = None,
) -> Discovery:
    """Add every definition that `discover` finds. Called again it reads and adds only what has changed.

    A name that something else has taken is a fault, unless the file is to `replace` it. With a `project` they are
    definitions of that one alone; see `AgentRegistry`.
    """
    discovery = discover(root, user=user)
    added, faults = [], list(discovery.faults)
    for file_definition in discovery.definitions:
        definition = file_definition if project is None else _of_project(file_definition, project)
        try:
            if not _is_registered(registry, definition):
                registry.add(definition.manifest, definition.maker, replace=replace)
        except ConflictError as error:
            faults.append(_whole(Path(definition.manifest.source or ""), str(error)))
        else:
            added.append(definition)
    return dataclasses.replace(discovery, definitions=tuple(added), faults=tuple(faults))


def _of_project(definition: LoadedDefinition, project: str) -> LoadedDefinition:
    manifest = definition.manifest
    owned = manifest.evolve(id=definition_id(manifest.kind, manifest.name, project), project=project)
    return LoadedDefinition(manifest=owned, maker=maker_of(owned))


def _is_registered(registry: AgentRegistry, definition: LoadedDefinition) -> bool:
    """A file that is read again has a new maker."""
    manifest = definition.manifest
    try:
        if manifest.project is not None:
            return registry.manifest(manifest.id) == manifest
        return registry.maker(manifest.id) is definition.maker
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
    places = (base, *base.parents) if user is None else (base, *base.parents, Path(user).absolute())
    definitions_by_name: dict[str, LoadedDefinition] = {}
    broken: dict[str, tuple[FileFault, ...]] = {}
    files = []
    for place, path, unreadable in _candidates(base, dict.fromkeys(places)):
        definitions, faults = ((), unreadable) if unreadable else _read(path, place, is_above=place in base.parents)
        files.append((path, faults))
        for definition in definitions:
            if definition.manifest.name not in broken:
                definitions_by_name.setdefault(definition.manifest.name, definition)
        if faults and not unreadable and path.name != SETTINGS_FILE and path.stem not in definitions_by_name:
            broken.setdefault(path.stem, faults)
    faults = tuple(fault for _, some in files for fault in some)
    return Discovery(definitions=tuple(definitions_by_name.values()), faults=faults, broken=broken, files=tuple(files))


_Candidate = tuple[Path, Path, tuple[FileFault, ...]]


def _candidates(base: Path, places: Iterable[Path]) -> Iterator[_Candidate]:
    """Each file with the directory that it is found in; also what cannot be looked at, with the reason."""
    if not base.is_dir():  # else a slip in the path would look like a project without agents
        yield base, base, (_whole(base, "is no directory; name that of the project"),)
    if (project := find_project(base)) is not None:
        yield project.parent, project, ()
    for place in places:
        for folder, suffixes in FOLDERS:
            if os.path.lexists(place / folder):
                yield from _folder(place, place / folder, suffixes, is_above=place in base.parents)


def _folder(place: Path, folder: Path, suffixes: tuple[str, ...], *, is_above: bool) -> Iterator[_Candidate]:
    try:
        locate(folder, place, is_above=is_above)
        every = sorted(folder.iterdir())
    except DefinitionError as error:
        yield place, folder, file_faults(error)
        return
    except OSError as error:
        yield place, folder, (_whole(folder, f"cannot be read: {error.strerror}"),)
        return
    paths = [path for path in every if path.suffix in suffixes and path.name[0] != "." and path.name.lower() != _README]
    if len(paths) > MAX_FILES:
        sentence = f"holds {len(paths)} definitions; only the first {MAX_FILES} are read"
        yield place, folder, (_whole(folder, sentence),)
    for path in paths[:MAX_FILES]:
        yield place, path, ()


def _whole(path: Path, sentence: str) -> FileFault:
    return FileFault(path=str(path), line=0, sentence=sentence)


def _read(path: Path, place: Path, *, is_above: bool) -> _Outcome:
    """As the last time where the stat of the file is the same."""
    try:
        above = is_above and path.name == SETTINGS_FILE  # of a folder it was asked already
        real = locate(path, place, is_above=above) if above or path.is_symlink() else path
        status = real.lstat()
    except DefinitionError as error:
        return (), file_faults(error)
    except OSError as error:  # it has gone in the meantime
        return (), (_whole(path, f"cannot be read: {error.strerror}"),)
    stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
    settled = time.time_ns() - max(stamp[:2]) > _UNSETTLED_NS
    return (_read_file if settled else _read_file.__wrapped__)(path, real, stamp)


@lru_cache(maxsize=2 * MAX_FILES)
def _read_file(shown: Path, real: Path, _stamp: tuple[int, ...]) -> _Outcome:
    """The stamp tells one state of the file from another."""
    try:
        if shown.name == SETTINGS_FILE:
            return read_project(shown, real, follow=False)[1], ()
        return (read_definition(shown, real, follow=False),), ()
    except DefinitionError as error:
        return (), file_faults(error)
