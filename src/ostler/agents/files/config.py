"""The current settings of a project: read again when the file changes; a broken file leaves the last good ones."""

from __future__ import annotations

import logging
import os
import threading
from functools import lru_cache
from pathlib import Path

from ostler.agents.files.project import ProjectSettings, find_project, load_settings
from ostler.errors import DefinitionError
from ostler.home import default_home, project_of

_log = logging.getLogger("ostler.agents")
#: What says that a file is another one than before: path, time, size, inode. None: there is no file.
_Sign = tuple[str, int, int, int] | None


class ConfigFile:
    """`ostler.toml` of one project. Safe to use from several threads."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._lock = threading.Lock()
        self._sign: _Sign = None
        self._good: ProjectSettings | None = None
        self._trouble: DefinitionError | None = None

    def __call__(self) -> ProjectSettings:
        """The settings now. Raises `DefinitionError` with file and line where the file was never good."""
        with self._lock:
            sign = _sign_of(self.root)
            if sign != self._sign or (self._good is None and self._trouble is None):
                self._read()
                self._sign = sign
            if self._good is None and self._trouble is not None:
                raise self._trouble
            return self._good or ProjectSettings()

    def reload(self) -> ProjectSettings:
        """Read the file again, whether it seems to have changed or not."""
        with self._lock:
            self._sign = _sign_of(self.root)
            self._read()
        return self()

    @property
    def trouble(self) -> DefinitionError | None:
        """What is wrong with the file as it is now."""
        return self._trouble

    def _read(self) -> None:
        try:
            self._good, self._trouble = load_settings(self.root), None
        except DefinitionError as error:
            self._trouble = error
            if self._good is not None:
                _log.warning("the last good settings stay in force: %s", error)


def _sign_of(root: Path) -> _Sign:
    found = find_project(root)
    if found is None:
        return None
    try:
        status = found.stat()
    except OSError:
        return None
    return str(found), status.st_mtime_ns, status.st_size, status.st_ino


def get_config(root: str | os.PathLike[str] | None = None) -> ProjectSettings:
    """The current settings of the project at `root`, or of the project of the home that is in force here."""
    return _config_file(str(project_of(default_home()) if root is None else Path(root).absolute()))()


@lru_cache(maxsize=64)
def _config_file(root: str) -> ConfigFile:
    return ConfigFile(root)
