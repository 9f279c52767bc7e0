"""A night in a minute: twenty tasks, six agents that crash, hang, lie and conflict, a daemon that is killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from night_ground import FIRST_TASK, KILLS, TASKS, Night, Report


def night(seed: int, folder: Path) -> Report:
    folder.mkdir()
    try:
        return Night(seed, folder).run()
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(3))
def test_every_task_ends_once_with_a_reason_and_the_same_seed_gives_the_same_night(seed: int, tmp_path: Path) -> None:
    report = night(seed, tmp_path / "home")
    assert report.faults == []
    assert report.kills == KILLS + 1, "with the one in the morning"
    assert len(report.ends) == TASKS
    for key, end in report.ends.items():
        assert end.startswith("accepted") or (end.startswith("rejected: ") and end.partition(": ")[2]), (key, end)
    assert set(FIRST_TASK) <= set(report.did)
    assert night(seed, tmp_path / "home").digest == report.digest
