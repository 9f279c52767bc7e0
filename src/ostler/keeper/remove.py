"""Removing run directories. An agent may have put a million files into its own, and the loop must not wait for that."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

from ostler.keeper.exec_child import exec_child
from ostler.keeper.exits import Children

_FEW = 8
_REMOVED = ".removed-"
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


class Remover:
    def __init__(self, children: Children, run: str, warn: Callable[[str], None]) -> None:
        self._children = children
        self._run = run
        self._warn = warn
        try:
            left = [name for name in os.listdir(run) if name.startswith(_REMOVED)]
        except OSError:
            left = []
        for name in left:  # by an earlier keeper, which ended meanwhile
            self._start_rm(os.path.join(run, name))

    def remove(self, path: str) -> None:
        """The name is free afterwards. Never raises; harmless when there is nothing."""
        try:
            if not _remove_few(path):
                aside = os.path.join(self._run, f"{_REMOVED}{os.urandom(8).hex()}")
                os.rename(path, aside)
                self._start_rm(aside)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._warn(f"{path} cannot be removed: {error}")

    def _start_rm(self, path: str) -> None:
        plan = {"env": _ENVIRONMENT, "keeper": os.getpid(), "nice": 10}
        try:
            pid, report = exec_child(["rm", "-rf", "--", path], plan)
        except OSError as error:
            self._warn(f"{path} cannot be removed: {error}")
            return
        os.close(report)
        self._children.claim(pid, lambda _: None)


def _remove_few(path: str) -> bool:
    """At once, if it holds a few files and no directory."""
    with os.scandir(path) as entries:
        first = list(itertools.islice(entries, _FEW + 1))
    if len(first) > _FEW or any(entry.is_dir(follow_symlinks=False) for entry in first):
        return False
    for entry in first:
        os.unlink(entry.path)
    os.rmdir(path)
    return True
