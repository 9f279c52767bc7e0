"""Ended instances are removed by hand: all of them, or those that ended long ago; what agents wrote stays."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from lifecycle_ground import NONE, Crew, at

from ostler import AuthorizationError, Role, ValidationError
from ostler.agents.command import prompt_file_of, remove_without_work
from ostler.model.access import OWNER

pytestmark = [pytest.mark.anyio, at(NONE)]
DAY = timedelta(days=1).total_seconds()


async def names(crew: Crew) -> set[str | None]:
    return {record.name for record in await crew.manager.get_active_instances()}


async def test_only_those_that_ended_long_enough_ago_go(crew: Crew) -> None:
    old, young, live = [await crew.start(name=name) for name in ("old", "young", "live")]
    await old.stop()
    crew.advance(7 * 3600)
    await young.stop()
    assert [row["name"] for row in await crew.manager.prune(dry_run=True)] == ["young", "old"]
    assert [row["name"] for row in await crew.manager.prune(older_than="6h")] == ["old"]
    assert await crew.manager.get_instance(old.instance_id) is None
    assert [row["name"] for row in await crew.manager.prune()] == ["young"]
    assert await crew.manager.prune() == []
    assert await names(crew) == {"live"}
    await live.stop()


async def test_what_an_agent_wrote_keeps_its_record(crew: Crew) -> None:
    agent = await crew.start(name="writer")
    await agent.stop()
    workdir = crew.home / "work" / str(agent.instance_id)
    workdir.mkdir(parents=True, exist_ok=True)
    prompt_file_of(workdir, "0" * 32).write_text("what it was told")
    (workdir / "result.txt").write_text("what it made")
    (kept,) = await crew.manager.prune()
    assert "holds files" in kept["kept"]
    assert (workdir / "result.txt").is_file()
    (workdir / "result.txt").unlink()
    (removed,) = await crew.manager.prune()
    assert removed["kept"] is None
    assert not workdir.exists()


async def test_who_may_not_end_agents_may_not_remove_them(crew: Crew) -> None:
    viewer = OWNER.evolve(principal_id=crew.manager.new_id(), name="eve", roles=(Role.VIEWER,))
    with pytest.raises(AuthorizationError):
        await crew.manager.acting_as(viewer).prune()


@pytest.mark.parametrize("age", ["soon", "-1h", 0])
async def test_an_age_that_is_none_is_refused(crew: Crew, age: str | int) -> None:
    with pytest.raises(ValidationError, match="older_than must be a duration above zero"):
        await crew.manager.prune(older_than=age)


async def test_only_files_of_ours_are_no_work(crew: Crew, tmp_path: Path) -> None:
    del crew
    workdir = tmp_path / "workdir"
    (workdir / ".ostler-prompt-directory.md").mkdir(parents=True)
    assert not remove_without_work(workdir)
    (workdir / ".ostler-prompt-directory.md").rmdir()
    (workdir / ".ostler-prompt-link.md").symlink_to(tmp_path)
    assert not remove_without_work(workdir)
    (workdir / ".ostler-prompt-link.md").unlink()
    assert remove_without_work(workdir)
    assert remove_without_work(workdir)
