"""The report: what happened to tasks and agents since a moment, from the log."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from lifecycle_ground import THREAD, Crew, S, at, do
from tasks_ground import opened, repository

from ostler import Report, RetentionPolicy, TaskState, ValidationError
from ostler.store import retention
from ostler.testing.clock import ManualClock

__all__ = ["repository"]  # fixtures
pytestmark = pytest.mark.anyio
HOUR = 3600.0


async def test_tasks_are_told_by_what_became_of_them(repository: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", clock=clock) as ground:
        early = await ground.done("echo early > early.txt")
        clock.advance(HOUR)
        since = ground.manager.now()
        clock.advance(60)
        accepted, undone = await ground.done("echo 1 > one.txt"), await ground.done("echo 2 > two.txt")
        await ground.tasks.accept(early.key)
        await ground.tasks.accept(accepted.key)
        await ground.tasks.accept(undone.key)
        await ground.tasks.undo(undone.key)
        retried = await ground.add("test -e tried || { touch tried; exit 3; }", backoff="0s")
        assert (await ground.tasks.run(retried.key)).state is TaskState.QUEUED
        assert (await ground.tasks.run(retried.key)).state is TaskState.COMPLETED
        await ground.tasks.reject(retried.key, reason="not needed")
        parked = await ground.add("exit 3", max_failures=1)
        await ground.tasks.run(parked.key)
        held = await ground.add("exit 0", hold=True)
        report = await ground.manager.report(since)
    assert report.done == (accepted.key, undone.key, retried.key)
    assert report.accepted == (early.key, accepted.key)
    assert report.rejected == (retried.key,)
    assert report.failed == (retried.key, parked.key)
    assert report.parked == (parked.key,)
    assert held.key not in str(report)
    assert (report.since, report.is_whole) == (since, True)


@at(THREAD)
async def test_agents_are_told_by_their_restarts_their_time_and_what_they_used(crew: Crew) -> None:
    early = await crew.start(name="early")
    await early.stop()
    crew.advance(HOUR)
    old = await crew.start(name="old")
    crew.advance(HOUR)
    ended = await crew.start(name="ended")
    failed = await crew.start(name="failed", restart_policy={"type": "linear", "max_retries": 1, "initial_delay": 1})
    for agent in (old, ended, failed):
        await agent.ask(do("speak", tokens=100, metrics={"cost_usd": 0.25}))
    crew.advance(600)
    await ended.stop()
    await crew.crash(failed)
    await crew.comes_back(failed, 2, 5)
    await crew.crash(failed)
    await crew.reaches(failed, S.FAILED)
    report = await crew.manager.report("30min")
    assert (report.failed, report.restarts, report.done) == (("failed",), 1, ())
    assert report.tokens == 300
    assert report.cost_usd == pytest.approx(0.75)
    # The oldest one counts for the half hour, the others for the ten minutes that they lived.
    assert timedelta(minutes=50) <= report.time < timedelta(minutes=51)
    assert report.until - report.since == timedelta(minutes=30)


@at(THREAD)
async def test_a_report_says_that_a_part_of_the_log_is_gone(crew: Crew) -> None:
    agent = await crew.start(name="ada")
    await agent.stop()
    assert (await crew.manager.report("1d")).is_whole
    crew.advance(31 * 24 * HOUR)
    await crew.manager.store.run(retention.sweep, RetentionPolicy())
    await crew.start(name="bob")
    assert not (await crew.manager.report("60d")).is_whole


@at(THREAD)
async def test_a_report_begins_at_a_moment_or_after_so_long(crew: Crew) -> None:
    now = crew.manager.now()
    assert await crew.manager.report(now.isoformat()) == Report(since=now, until=now)
    assert (await crew.manager.report(90)).since == now - timedelta(seconds=90)
    with pytest.raises(ValidationError, match="since must be a duration"):
        await crew.manager.report("yesterday")
