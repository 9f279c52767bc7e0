"""Kill -9 at every write: what was acknowledged is there, what is there is legal, nothing runs unknown."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kill_points import KINDS, Ending, count_writes, killed_at, run, strace_missing
from ostler.testing.folding import invariant_faults

from ostler.model import AgentState, GetInstancesFilter, TaskFilter
from ostler.store import Seams, open_store
from ostler.store.queries import migrations, statements
from ostler.testing.clock import ManualClock

#: The share of all points that `make test` visits; `make torture` visits every one.
_STRIDE = 44
_SHARDS = 4
FAULT_POINTS = (
    "store.begin.before",
    "store.begin.after",
    "store.save.before",
    "store.save.after",
    "store.commit.before",
    "store.commit.after",
    "store.ack.before",
    "store.ack.after",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    missing = strace_missing()
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    made = tmp_path_factory.mktemp("kill9")
    yield made
    shutil.rmtree(made, ignore_errors=True)


async def faults_of(ending: Ending) -> list[str]:
    """Everything that is wrong with what a killed run left behind."""
    clock = ManualClock(datetime.now(UTC))
    async with open_store(ending.home, Seams(clock=clock)) as store:
        faults = list(await invariant_faults(store, clock.wall()))
        everything = GetInstancesFilter(include_terminated=True, limit=1000)
        instances = {str(one.instance_id): one for one in await store.list_instances(everything)}
        tasks = {str(one.task_id): one for one in await store.list_tasks(TaskFilter(limit=1000))}
        for line in ending.acknowledged:
            record = instances.get(str(line["id"])) or tasks.get(str(line["id"]))
            if record is None:
                faults.append(f"{line} was acknowledged and is gone")
            elif record.version < int(str(line["version"])):
                faults.append(f"{line} was acknowledged, but the record is at version {record.version}")
        known = {f"process-{one.name}" for one in instances.values()}
        unknown = [marker.name for marker in ending.home.glob("process-*") if marker.name not in known]
        faults += [f"{marker} runs, and no record knows of it" for marker in unknown]
        open_intents = {attempt.instance_id for attempt in await store.open_attempts()}
        starting = [one for one in instances.values() if one.state is AgentState.INITIALIZING]
        faults += [
            f"{one.name} is being started, but no intent says so"
            for one in starting
            if one.instance_id not in open_intents
        ]
    return faults


@pytest.fixture(scope="module")
def every_point(folder: Path) -> list[tuple[str, int]]:
    """Each write-class call of the scenario, counted on a run that nobody disturbs."""
    return sorted(count_writes(folder / "count"))


def spread(points: list[tuple[str, int]], stride: int, first: int = 0) -> list[tuple[str, int]]:
    return [point for kind in KINDS for point in [one for one in points if one[0] == kind][first::stride]]


def check(ending: Ending, what: str) -> None:
    faults = asyncio.run(faults_of(ending))
    assert not faults, f"killed at {what}: " + "; ".join(faults)


def require_landed(landed: list[bool]) -> None:
    """Nearly all: commits that meet are written together, so a run may make fewer calls than the counted one."""
    assert sum(landed) > len(landed) * 0.8, f"only {sum(landed)} of {len(landed)} kills landed"


def walk(folder: Path, points: list[tuple[str, int]]) -> None:
    """Kill one run at each of these points, and look at what it left."""
    landed = []
    for kind, nth in points:
        ending = killed_at(folder, kind, nth)
        landed.append(ending.returncode != 0)
        check(ending, f"{kind} number {nth}")
        shutil.rmtree(ending.home)
    require_landed(landed)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("shard", range(_SHARDS))
def test_a_kill_at_a_sample_of_all_writes_loses_nothing_acknowledged(
    folder: Path, every_point: list[tuple[str, int]], shard: int
) -> None:
    walk(folder, spread(every_point, _STRIDE, shard * _STRIDE // _SHARDS))


@pytest.mark.torture
@pytest.mark.parametrize("shard", range(8))
def test_a_kill_at_every_write_loses_nothing_acknowledged(
    folder: Path, every_point: list[tuple[str, int]], shard: int
) -> None:
    assert {kind for kind, _ in every_point} >= {"pwrite64", "write", "fdatasync", "ftruncate", "mknodat", "unlink"}
    walk(folder, every_point[shard::8])


@pytest.mark.torture
def test_a_kill_during_the_recovery_from_a_kill_loses_nothing_either(
    folder: Path, every_point: list[tuple[str, int]]
) -> None:
    landed = []
    for kind, nth in spread(every_point, 10):
        first = killed_at(folder / "twice", kind, nth)
        again = [killed_at(folder / "twice", kind, nth, again=f"pwrite64:{time}") for time in range(1, 4)]
        landed += [one.returncode != 0 for one in (first, *again)]
        check(first, f"{kind} number {nth}, and again while it was opened")
        shutil.rmtree(first.home)
    require_landed(landed)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_kill_at_each_named_point_of_several_commits_loses_nothing(folder: Path, point: str) -> None:
    for nth in (1, 2, 5, 9):
        ending = run(folder / f"{point}-{nth}", fault=f"{point}:{nth}:kill")
        assert ending.returncode != 0, f"{point} was not reached {nth} times"
        check(ending, f"{point} number {nth}")


def shape(home: Path) -> tuple[int, int]:
    """Version and number of tables, read without Ostler."""
    with closing(sqlite3.connect(home / "ostler.db")) as file:
        version: int = file.execute("PRAGMA user_version").fetchone()[0]
        tables: int = file.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    return version, tables


def shape_after(version: int) -> tuple[int, int]:
    scripts = [script for number, script in migrations("sqlite") if number <= version]
    made = [one for script in scripts for one in statements(script) if one.startswith("CREATE TABLE")]
    return version, len(made)


#: Each with the shape that must be left: in the first migration, in the midst of the second, and between them.
MIGRATION_POINTS = (
    ("store.migrate.statement", 1, 0),
    ("store.migrate.statement", len(statements(migrations("sqlite")[0][1])), 0),
    ("store.migrate.after", 1, 1),
    ("store.migrate.statement", len(statements(migrations("sqlite")[0][1])) + 2, 1),
)


@pytest.mark.parametrize(("point", "nth", "left"), MIGRATION_POINTS)
def test_a_migration_that_is_killed_leaves_the_old_shape_or_the_new(
    tmp_path: Path, point: str, nth: int, left: int
) -> None:
    ending = run(tmp_path, fault=f"{point}:{nth}:kill")
    assert ending.returncode != 0, f"{point} was not reached {nth} times"
    assert shape(ending.home) == shape_after(left)
    again = run(tmp_path)
    assert again.returncode == 0, "the next program takes it from there"
    check(again, f"{point} number {nth}, and then played to its end")


@pytest.mark.timeout(120)
def test_the_harness_goes_red_when_the_process_comes_before_its_record(
    folder: Path, every_point: list[tuple[str, int]]
) -> None:
    """A mutant that starts first and writes afterwards must be caught, or the tests above prove nothing."""
    writes = [point for point in every_point if point[0] == "pwrite64"]
    for kind, nth in writes[len(writes) // 4 : len(writes) // 2 : 5]:
        ending = killed_at(folder / "mutant", kind, nth, mutant=True)
        faults = asyncio.run(faults_of(ending))
        if any("no record knows of it" in fault for fault in faults):
            return
    pytest.fail("intent-first was switched off and nobody noticed")
