"""Finds the definitions of a project. Reads only: nothing that is found is imported, run or written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ostler.agents.files.loading import LoadedDefinition, read_definition, with_isolation
from ostler.agents.files.page import FileFault
from ostler.agents.files.project import PROJECT_FILE, Project, read_project
from ostler.errors import DefinitionError

#: Where to look, in this order: the first definition of a name wins.
FOLDERS = ((".ostler/agents", (".md",)), (".claude/agents", (".md",)), (".codex/agents", (".toml",)))
USER_SUFFIXES = (".md", ".toml")
#: A folder with more files than that is no folder of definitions.
MAX_FILES = 1000
#: It explains the folder to people; it is not an agent.
_README = "readme.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    definitions: tuple[LoadedDefinition, ...] = ()
    #: What could not be read, and why. The rest is read all the same.
    faults: tuple[FileFault, ...] = ()
    project: Project | None = None
    #: Files that were not taken because an earlier one has their name.
    shadowed: tuple[str, ...] = ()


@dataclass(slots=True)
class _Finding:
    definitions: list[LoadedDefinition] = field(default_factory=list)
    faults: list[FileFault] = field(default_factory=list)
    shadowed: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def take(self, found: LoadedDefinition) -> None:
        if found.manifest.name in self.taken:
            self.shadowed.append(found.path)
            return
        self.taken.add(found.manifest.name)
        self.definitions.append(found)

    def fail(self, path: Path, sentence: str) -> None:
        self.faults.append(FileFault(path=str(path), line=0, bound=sentence))


def discover(root: str | Path, *, user: str | Path | None = None) -> Discovery:
    """All definitions of a project: those in `ostler.toml`, in its folders, then in the folder of the user.

    A broken file holds its name, so that a mistake in it never starts another agent of that name instead.
    """
    base = Path(root)
    finding = _Finding()
    if not base.is_dir():  # else a slip in the path would look like a project without agents
        finding.fail(base, "is no directory; pass the one in which the project lies")
    project = _project(base, finding)
    for definition in project.agents if project else ():
        finding.take(definition)
    for folder, suffixes in FOLDERS:
        _read_folder(base / folder, base, suffixes, finding)
    if user is not None:
        _read_folder(Path(user), Path(user), USER_SUFFIXES, finding)
    word = project.default_isolation if project else None
    return Discovery(
        definitions=tuple(with_isolation(found, word) for found in finding.definitions),
        faults=tuple(finding.faults),
        project=project,
        shadowed=tuple(finding.shadowed),
    )


def _project(base: Path, finding: _Finding) -> Project | None:
    path = base / PROJECT_FILE
    real = _inside(path, base, finding)
    if real is None:
        return None
    try:
        return read_project(path, real, follow=False)
    except DefinitionError as error:
        finding.faults.extend(_own(error))
        return None


def _read_folder(folder: Path, base: Path, suffixes: tuple[str, ...], finding: _Finding) -> None:
    for path in _files(folder, base, suffixes, finding):
        real = _inside(path, base, finding)
        if real is None:
            continue
        try:
            finding.take(read_definition(path, real, follow=False))
        except DefinitionError as error:
            finding.faults.extend(_own(error))
            finding.taken.add(path.stem)


def _files(folder: Path, base: Path, suffixes: tuple[str, ...], finding: _Finding) -> Iterator[Path]:
    if _inside(folder, base, finding) is None:
        return
    try:
        every = sorted(
            path
            for path in folder.iterdir()
            if path.suffix in suffixes and not path.name.startswith(".") and path.name.lower() != _README
        )
    except OSError as error:
        finding.fail(folder, f"cannot be read: {error.strerror}")
        return
    if len(every) > MAX_FILES:
        finding.fail(folder, f"holds {len(every)} definitions; only the first {MAX_FILES} are read")
    yield from every[:MAX_FILES]


def _inside(path: Path, base: Path, finding: _Finding) -> Path | None:
    """Where it really is; None if it does not exist, or if links lead out of the root."""
    try:
        real = path.resolve(strict=True)
        home = base.resolve(strict=True)
    except FileNotFoundError:
        if path.is_symlink():
            finding.fail(path, "is a link that leads nowhere")
        return None
    except (OSError, RuntimeError) as error:
        finding.fail(path, f"cannot be read: {getattr(error, 'strerror', None) or error}")
        return None
    if not real.is_relative_to(home):
        finding.fail(path, "is a link that leads out of the project, and is not followed")
        return None
    return real


def _own(error: DefinitionError) -> Iterator[FileFault]:
    return (fault for fault in error.faults if isinstance(fault, FileFault))
