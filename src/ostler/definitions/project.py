"""The file of a project, `ostler.toml`: settings, one record for each table, and agents without a file of their own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from functools import lru_cache
from pathlib import Path

from ostler.definitions.keys import FileRecord, InlineAgent
from ostler.definitions.load import CheckedFile, LoadedDefinition, define, locate, read_text
from ostler.definitions.parse import read_toml
from ostler.errors import DefinitionError
from ostler.home import DATABASE_FILE, HOME_NAME, SETTINGS_FILE, default_home, project_of
from ostler.model.crew import CrewSettings, crew_name_faults
from ostler.model.loop import LoopSettings
from ostler.model.record import record
from ostler.model.spawn import command_target, tcp_target
from ostler.model.task import TaskSettings
from ostler.model.text import name_faults, variable_faults
from ostler.model.types import DEFAULT_RATE, OutputRate
from ostler.model.validation import Fault, as_written, named
from ostler.policy.retention import RetentionPolicy

#: The last good settings, in the home.
LAST_GOOD = "settings.last-good.toml"
_log = logging.getLogger("ostler.agents")
#: Differs when the file has changed: path, time, size, inode. None: there is no file.
_Stamp = tuple[str, int, int, int] | None


@record
class DaemonSettings(FileRecord):
    #: HOST:PORT of a loopback address, beside the socket of the home.
    listen: str | None = None
    #: A command line for `sh`, run in the project when an agent or a task begins to wait for a person.
    on_wait: str | None = None
    #: When an agent or a task has failed and nothing tries again.
    on_failed: str | None = None
    #: When the queue has become empty and nobody works.
    on_idle: str | None = None
    #: Show a notification of the desktop, where there is one, for each of the three that names no command.
    notify: bool = True
    #: Names of the variables that agents see of the daemon's environment; without it, those that every program needs.
    environment: tuple[str, ...] | None = None
    #: What each agent may write in a second; what is beyond is dropped and counted.
    output_rate: OutputRate = DEFAULT_RATE

    def rules(self) -> Iterator[Fault]:
        hooks = {"on-wait": self.on_wait, "on-failed": self.on_failed, "on-idle": self.on_idle}
        commands = [(key, text, command_target) for key, text in hooks.items()]
        for key, text, parse in (("listen", self.listen, tcp_target), *commands):
            try:
                parse(text) if text is not None else None
            except ValueError as error:
                yield Fault(field=key, bound=str(error), value=as_written(text))
        yield from variable_faults("environment", self.environment or ())


@record
class RetentionSettings(FileRecord, RetentionPolicy):
    """How long finished records are kept."""


@record
class TasksTable(FileRecord, TaskSettings):
    """How tasks are worked on."""


@record
class LoopTable(FileRecord, LoopSettings):
    """How loops run, where a task does not say otherwise."""


@record
class CrewTable(FileRecord, CrewSettings):
    """A crew: agents of one type that are kept at work on the queue."""


@record
class OrchestratorTable(FileRecord):
    #: Where the members of crews work on tasks without a repository; relative to the home.
    workdir: str = "work"


@record
class ProjectSettings(FileRecord):
    """Each field is a table; a mapping holds tables with names, as `[agent.NAME]`."""

    daemon: DaemonSettings = field(default_factory=DaemonSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    tasks: TasksTable = field(default_factory=TasksTable)
    loop: LoopTable = field(default_factory=LoopTable)
    orchestrator: OrchestratorTable = field(default_factory=OrchestratorTable)
    crew: Mapping[str, CrewTable] = field(default_factory=dict)
    agent: Mapping[str, InlineAgent] = field(default_factory=dict)

    def rules(self) -> Iterator[Fault]:
        for name in self.crew:
            yield from crew_name_faults(f"crew.{named(name)}", name)
        for name in self.agent:
            yield from name_faults(f"agent.{named(name)}", name)


def load_settings(root: str | Path) -> ProjectSettings:
    """Of the nearest `ostler.toml` from `root` upwards, or the defaults where there is none.

    Raises one `DefinitionError` that carries every fault of the file.
    """
    path = find_project(root)
    if path is None:
        return ProjectSettings()
    real = locate(path, path.parent, is_above=path.parent != Path(root).absolute())
    return read_project(path, real)[0]


def find_project(root: str | Path) -> Path | None:
    here = Path(root).absolute()
    return next((path for folder in (here, *here.parents) if (path := folder / SETTINGS_FILE).is_file()), None)


def read_project(
    shown: Path, real: Path, *, follow: bool = True
) -> tuple[ProjectSettings, tuple[LoadedDefinition, ...]]:
    """The settings, and the agents that have no file of their own."""
    file = CheckedFile(str(shown))
    settings = file.check(ProjectSettings, file.read(read_toml, read_text(file, real, follow=follow)))
    definitions = []
    for name, keys in settings.agent.items() if settings is not None else ():
        texts = {"name": name, "description": keys.description, "prompt": keys.instructions}
        definitions.append(define(file, texts, keys))
    file.raise_faults()
    return settings or ProjectSettings(), tuple(definitions)


# --- the settings in force ---------------------------------------------------------------------------


class ConfigFile:
    """`ostler.toml` of one project. Safe to use from several threads.

    A copy of the last good file is kept in the home, for programs that start while the file is broken.
    """

    def __init__(self, root: str | os.PathLike[str], *, copy: Path | None = None) -> None:
        """The `copy` of the last good file is in the home of the project, where no other place is named."""
        self.root = Path(root)
        self._copy_path = copy
        self._lock = threading.Lock()
        self._stamp: _Stamp = None
        self._good: ProjectSettings | None = None
        self._trouble: DefinitionError | None = None

    def __call__(self) -> ProjectSettings:
        """The settings now. Raises `DefinitionError` with file and line where the file was never good."""
        with self._lock:
            stamp = _stamp_of(find_project(self.root))
            if stamp != self._stamp or (self._good is None and self._trouble is None):
                self._read()
                self._stamp = stamp
            if self._good is None and self._trouble is not None:
                raise self._trouble
            return self._good or ProjectSettings()

    @property
    def trouble(self) -> DefinitionError | None:
        """What is wrong with the file as it is now."""
        return self._trouble

    def _read(self) -> None:
        try:
            self._good, self._trouble = load_settings(self.root), None
        except DefinitionError as error:
            self._trouble = error
            if self._good is None:
                self._good = self._read_copy()
            if self._good is not None:
                _log.warning("the last good settings stay in force: %s", error)
        else:
            self._write_copy()

    def _read_copy(self) -> ProjectSettings | None:
        copy = self._copy()
        try:
            return None if copy is None else read_project(copy, copy, follow=False)[0]
        except DefinitionError:  # there is none, or it is of another version
            return None

    def _write_copy(self) -> None:
        path, copy = find_project(self.root), self._copy()
        if path is None or copy is None:
            return
        with suppress(OSError):  # a home of another user; then there is no copy
            text = path.read_bytes()
            if not copy.is_file() or copy.read_bytes() != text:
                copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                written = copy.with_name(f"{copy.name}.{os.getpid()}")
                written.write_bytes(text)
                written.replace(copy)

    def _copy(self) -> Path | None:
        """In the home of the project; None where there is no home."""
        if self._copy_path is not None:
            return self._copy_path
        if (self.root / HOME_NAME).is_dir():
            return self.root / HOME_NAME / LAST_GOOD
        return self.root / LAST_GOOD if (self.root / DATABASE_FILE).is_file() else None


def _stamp_of(path: Path | None) -> _Stamp:
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (str(path), status.st_mtime_ns, status.st_size, status.st_ino)


def get_config(root: str | os.PathLike[str] | None = None) -> ProjectSettings:
    """The current settings of the project at `root`, or of the project of the home that is in force here.

    While the file is broken these are the last good settings, and a warning in the log says so.
    """
    return _config_file(str(project_of(default_home()) if root is None else Path(root).absolute()))()


def settings_fault(root: str | os.PathLike[str]) -> tuple[Path, DefinitionError] | None:
    """The broken `ostler.toml` of the project at `root` and what is wrong with it; None where nothing is."""
    config = _config_file(str(Path(root).absolute()))
    with suppress(DefinitionError):
        config()
    path = find_project(Path(root))
    return None if config.trouble is None or path is None else (path, config.trouble)


@lru_cache(maxsize=64)
def _config_file(root: str) -> ConfigFile:
    return ConfigFile(root)
