"""The description, for the keeper, of the preloaded parent that a Python agent is forked from."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ostler
from ostler.isolation.process.launch import template_argv
from ostler.isolation.process.sources import import_path

_KEPT = 64
_PACKAGE = str(Path(ostler.__file__).parent)


class Templates:
    """The same description for the same circumstances, without writing it down anew for each of many starts."""

    def __init__(self) -> None:
        self._descriptions: dict[tuple[Any, ...], dict[str, Any]] = {}
        #: When our own code was last written: a template of older code is no parent for agents of this manager.
        self._written = _last_written(_PACKAGE)

    def find(self, source: Mapping[str, Any], env: Mapping[str, str], cwd: str) -> dict[str, Any]:
        """Agents with the same key share a parent: the same module, found the same way, in the same surroundings."""
        place = (source["module"], source["path"], source["main"], source.get("package"))
        program = (tuple(template_argv()), tuple(sys.path), tuple(sys.argv))
        circumstances = (place, program, tuple(sorted(env.items())), cwd)
        description = self._descriptions.get(circumstances)
        if description is None:
            if len(self._descriptions) >= _KEPT:
                self._descriptions.clear()
            description = self._descriptions[circumstances] = _described(source, env, cwd, self._written)
        return description


def _last_written(directory: str) -> int:
    """Of the sources in it and below. Not by pathlib, which takes four times as long: the first spawn waits for it."""
    last = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                last = max(last, entry.stat().st_mtime_ns)
            elif entry.name != "__pycache__" and entry.is_dir():
                last = max(last, _last_written(entry.path))
    return last


def _described(source: Mapping[str, Any], env: Mapping[str, str], cwd: str, written: int) -> dict[str, Any]:
    setup = {"sys_path": import_path(), "source": {**source, "qualname": None}, "written": written}
    if source["main"]:
        setup["argv"] = list(sys.argv)
    template = {"argv": template_argv(), "env": dict(env), "cwd": cwd, "setup": setup}
    key = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:32]
    return {"template": key, **template}
