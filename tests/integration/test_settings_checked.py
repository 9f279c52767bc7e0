"""Settings that a program writes are checked and coerced where they are taken, as those of a file are."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ostler
from ostler import CrewSettings, ProjectSettings, Supervisor, TaskOrchestrator, TaskSettings, ValidationError
from ostler.loop.service import Loops
from ostler.model.loop import LoopSettings

pytestmark = pytest.mark.anyio
SECOND = timedelta(seconds=1)
WRITTEN: Any = "1s"
WRONG: Any = "soon"


async def test_settings_may_be_written_as_in_a_file(tmp_path: Path) -> None:
    async with ostler.open(tmp_path / "home") as manager:
        tasks = TaskOrchestrator(manager, settings=TaskSettings(retention=WRITTEN))
        assert tasks.tasks.settings.retention == SECOND
        loops = Loops(tasks, LoopSettings(retry_interval=WRITTEN))
        assert loops.settings.retry_interval == SECOND
        crews = {"coder": CrewSettings(agent="a", backoff=WRITTEN)}
        assert Supervisor(tasks, crews).policy["coder"].backoff == SECOND
        of_config = Supervisor(tasks, get_config=lambda: ProjectSettings(crew=crews))  # type: ignore[arg-type]
        assert of_config.policy["coder"].backoff == SECOND


async def test_settings_of_a_file_pass_as_they_are(tmp_path: Path) -> None:
    settings = ProjectSettings.from_dict(
        {"tasks": {"at-once": 3}, "loop": {"max-retries": 2}, "crew": {"coder": {"agent": "a", "max-errors": 7}}}
    )
    async with ostler.open(tmp_path / "home") as manager:
        tasks = TaskOrchestrator(manager, settings=settings.tasks)
        assert tasks.tasks.settings.at_once == 3
        assert Loops(tasks, settings.loop).settings.max_retries == 2
        assert Supervisor(tasks, settings.crew).policy["coder"].max_errors == 7


async def test_wrong_settings_are_refused_where_they_are_taken(tmp_path: Path) -> None:
    async with ostler.open(tmp_path / "home") as manager:
        with pytest.raises(ValidationError, match="retention must be a duration such as 30s, was 'soon'"):
            TaskOrchestrator(manager, settings=TaskSettings(retention=WRONG))
        tasks = TaskOrchestrator(manager)
        with pytest.raises(ValidationError, match="retry_interval must be a duration"):
            Loops(tasks, LoopSettings(retry_interval=WRONG))
        with pytest.raises(ValidationError, match="backoff must be a duration"):
            Supervisor(tasks, {"coder": CrewSettings(agent="a", backoff=WRONG)})
