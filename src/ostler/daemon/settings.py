"""The settings of a project, from the file `ostler.toml` beside its home."""

from __future__ import annotations

import tomllib
from dataclasses import field
from pathlib import Path

from ostler.home import SETTINGS_FILE
from ostler.isolation.base import DEFAULT_NAMES
from ostler.model.record import Record, record
from ostler.policy.retention import RetentionPolicy


@record
class ProjectSettings(Record):
    listen: str | None = None
    on_wait: str | None = None
    environment: tuple[str, ...] = DEFAULT_NAMES
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)


def load_settings(root: Path) -> ProjectSettings:
    try:
        values = tomllib.loads((root / SETTINGS_FILE).read_text())
    except FileNotFoundError:
        return ProjectSettings()
    daemon = {name.replace("-", "_"): value for name, value in values.get("daemon", {}).items()}
    return ProjectSettings.from_dict({**daemon, "retention": values.get("retention", {})})
