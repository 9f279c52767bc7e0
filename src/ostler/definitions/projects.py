"""The projects that one home serves. Each is found from a directory, and has definitions and settings of its own."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from ostler.agents.registry import PYTHON_DRIVER, AgentManifest, AgentRegistry
from ostler.definitions.discover import Discovery, register_files
from ostler.definitions.load import LoadedDefinition
from ostler.definitions.project import LAST_GOOD, ConfigFile, ProjectSettings, find_project
from ostler.errors import DefinitionError
from ostler.home import project_near, project_of

#: Below the home: the last good settings of projects that it serves and does not lie in.
_FOLDER = "projects"


class Project:
    """One of them. Its `key`, which records hold, is its directory, and None for the project of the home."""

    def __init__(self, projects: Projects, key: str | None, root: Path | None) -> None:
        self.key = key
        self.root = root
        self._projects = projects
        #: None without a directory, as of a manager that has no home.
        self.config = None if root is None else ConfigFile(root, copy=projects.copy_for(key))

    def refresh(self) -> Discovery:
        """Register its definition files as they are now; a file that changed applies to the next spawn."""
        if self.root is None:
            return Discovery()
        registry = self._projects.registry
        discovery = register_files(registry, self.root, user=Path.home(), replace=True, project=self.key)
        if self.key is not None and self.key not in sys.path and any(map(_is_python, discovery.definitions)):
            sys.path.append(self.key)  # last, so that it hides nothing
        return discovery

    def find(self, name: str) -> AgentManifest:
        """One of its definitions as it is now, or one that all projects share.

        Raises `DefinitionError` where its file is broken, and `AgentNotFoundError`.
        """
        broken = self.refresh().broken.get(name)
        if broken:
            raise DefinitionError(broken)
        return self._projects.registry.find(name, self.key)

    def settings(self) -> ProjectSettings:
        """The last good ones while the file is broken. Raises `DefinitionError` where it was never good."""
        scope = self._projects.at(self.scope)
        return ProjectSettings() if scope.config is None else scope.config()

    def fault(self) -> str | None:
        """What is wrong with its own `ostler.toml`, and what is in force instead."""
        config = None if self.scope is None else self._projects.at(self.scope).config
        if config is None:
            return None
        in_force = "last good ones are in force"
        try:
            config()
        except DefinitionError:
            in_force = "defaults are in force"
        return None if config.trouble is None else f"{config.trouble}; the {in_force}"

    @property
    def scope(self) -> str | None:
        """The key of the project whose `ostler.toml` is in force: its own, one above it, or that of the home."""
        path = None if self.key is None else find_project(self.key)
        if path is None or path == self._projects.settings_file:
            return None
        return str(path.parent)


def _is_python(definition: LoadedDefinition) -> bool:
    return (definition.manifest.driver or "").startswith(PYTHON_DRIVER)


class Projects:
    """Made at first use, and kept: a home serves few. Files are read again only when they have changed."""

    def __init__(self, registry: AgentRegistry, home: Path | None) -> None:
        self.registry = registry
        self._home = home
        self._by_key: dict[str | None, Project] = {}

    @property
    def home(self) -> Project:
        """The project that the home lies in, or belongs to."""
        return self.at(None)

    def at(self, key: str | None) -> Project:
        project = self._by_key.get(key)
        if project is None:
            own = None if self._home is None else project_of(self._home)
            project = self._by_key[key] = Project(self, key, own if key is None else Path(key))
        return project

    def roots(self) -> list[Path]:
        """The directories whose `ostler.toml` is in force for a project that was used; that of the home first."""
        scopes = dict.fromkeys((None, *(project.scope for project in tuple(self._by_key.values()))))
        return [root for scope in scopes if (root := self.at(scope).root) is not None]

    def near(self, directory: str | Path | None) -> Project:
        """The project that a directory is in."""
        if directory is None or self._home is None:
            return self.home
        root = project_near(Path(directory), self._home)
        return self.at(None if root is None else str(root))

    @property
    def settings_file(self) -> Path | None:
        """The `ostler.toml` that is in force for the project of the home."""
        return None if self.home.root is None else find_project(self.home.root)

    def copy_for(self, key: str | None) -> Path | None:
        if key is None or self._home is None:
            return None
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return self._home / _FOLDER / digest / LAST_GOOD
