"""Kill -9 of a writing program at every step: what was acknowledged is there, what is there is whole and legal."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from kill_points import KINDS, Ending, Victims, count_writes, killed_at, strace_missing, victims
from store_ground import HOME, Place
from store_invariants import all_instances, invariant_faults

from ostler.clock import SystemClock
from ostler.failpoints import POINTS
from ostler.model.attempt import RequestState
from ostler.model.states import AgentState
from ostler.store import attempts, requests, waits
from ostler.store.connection import migrations
from ostler.store.sqlite import SqliteConnection
from ostler.store.store import Store
from ostler.store.transaction import Reader

#: How many of all calls `make test` passes over between two kills; `make torture` visits every one.
_STRIDE = 120
MIGRATE = "store.migrate."
FAULT_POINTS = sorted(point for point in POINTS if point.startswith("store.") and not point.startswith(MIGRATE))
#: The visits of each point at which the program is killed: the first ones, and some in the midst of shared commits.
VISITS = (1, 2, 9, 19)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Place]:
    """Gives a new, empty place each time it is called."""
    made: list[Place] = []

    def fresh() -> Place:
        if request.param == "sqlite":
            made.append(Place("sqlite", str(tmp_path / f"home-{len(made)}")))
        else:
            made.append(Place("postgres", request.getfixturevalue("make_database")()))
        return made[-1]

    return fresh


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    with victims(tmp_path_factory.mktemp("victims")) as opened:
        yield opened


# --- what was left -----------------------------------------------------------------------------------


async def faults_of(ending: Ending) -> list[str]:
    """Everything that is wrong with what a killed run left behind."""
    async with Store(ending.where) as store:
        faults = list(await invariant_faults(store, SystemClock().wall()))
        return faults + await store.read(_faults, ending)


def _faults(reader: Reader, ending: Ending) -> list[str]:
    found = {one.instance_id: one for one in all_instances(reader, HOME)}
    faults: list[str] = []
    for line in ending.acknowledged:
        key, said = UUID(line["id"]), line["said"]
        match line["kind"]:
            case "instance":
                kept = key in found and found[key].version >= said
            case "wait":
                wait = waits.get_wait(reader, key)
                kept = wait is not None and wait.outcome == said and wait.answer == {"yes": True}
            case "request":
                asked = requests.get_request(reader, key, said)
                kept = asked is not None and (asked.state, asked.answer) == (RequestState.DONE, '"done"')
            case _:
                attempt = attempts.get_attempt(reader, key, 1)
                kept = attempt is not None and attempt.heard >= said
        if not kept:
            faults.append(f"{line} was acknowledged and is not there")
    known = {f"process-{one.name}" for one in found.values()}
    faults += [
        f"{marker.name} runs, and no record knows of it"
        for marker in ending.markers.glob("process-*")
        if marker.name not in known
    ]
    for one in found.values():
        attempt = attempts.get_attempt(reader, one.instance_id, one.attempt)
        assert attempt is not None
        halves = {
            "being started without an open intent": one.state is AgentState.INITIALIZING and not attempt.is_open,
            "ready without a handle": one.state is AgentState.READY and attempt.handle is None,
            "failed without the end of its attempt": one.state is AgentState.FAILED and attempt.is_open,
            "failed without the wait that it was to have": one.state is AgentState.FAILED
            and not waits.open_waits(reader, instance_id=one.instance_id),
            "terminated without what it left": one.state is AgentState.TERMINATED and one.final_state is None,
        }
        faults += [f"{one.name} is {half}" for half, true in halves.items() if true]
    return faults


def check(ending: Ending, what: str) -> None:
    faults = asyncio.run(faults_of(ending))
    assert not faults, f"killed at {what}: " + "; ".join(faults)


# --- at every named point ----------------------------------------------------------------------------


def test_the_scenario_ends_well_where_it_is_not_killed(place: Callable[[], Place], lives: Victims) -> None:
    ending = lives.play(place().where)
    assert (ending.was_killed, len(ending.acknowledged)) == (False, 37)
    check(ending, "nothing")


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_kill_at_each_named_point_loses_nothing_and_leaves_no_half(
    place: Callable[[], Place], lives: Victims, point: str
) -> None:
    for nth in VISITS:
        ending = lives.play(place().where, fault=f"{point}:{nth}:kill")
        assert ending.was_killed, f"{point} was not reached {nth} times"
        check(ending, f"{point} number {nth}")


def test_the_next_program_goes_on_where_a_kill_left_off(place: Callable[[], Place], lives: Victims) -> None:
    where = place().where
    for point in ("store.commit.before", "store.commit.after", "store.save.after"):
        assert lives.play(where, fault=f"{point}:9:kill").was_killed
        assert not lives.play(where, flags=("--reopen",)).was_killed
    ending = lives.play(where)
    check(ending, "three lives before, and then played to its end")


# --- in the midst of a migration ---------------------------------------------------------------------


def shape(place: Place) -> tuple[int, int]:
    """Version and number of tables, read without Ostler."""
    if place.kind == "sqlite":
        with closing(sqlite3.connect(Path(place.where) / "ostler.db")) as file:
            version: int = file.execute("PRAGMA user_version").fetchone()[0]
            tables: int = file.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
        return version, tables
    with psycopg.connect(place.where) as server:
        found = server.execute("SELECT coalesce(max(version), 0) FROM ostler_schema").fetchone()
        count = server.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    assert found is not None
    assert count is not None
    return int(found[0]), int(count[0]) - 1


def statements() -> dict[int, list[str]]:
    connection = SqliteConnection(None)
    return {migration.number: list(migration.statements(connection)) for migration in migrations()}


def test_a_migration_that_is_killed_at_any_step_leaves_the_old_shape_or_the_new(
    place: Callable[[], Place], lives: Victims
) -> None:
    where, tables = place(), 0
    for number, script in statements().items():
        steps = [(f"{MIGRATE}before:1", 0), *((f"{MIGRATE}statement:{nth}", 0) for nth in range(1, len(script) + 1))]
        for step, _ in steps:
            assert lives.play(where.where, fault=f"{step}:kill").was_killed, step
            assert shape(where) == (number - 1, tables), step
        assert lives.play(where.where, fault=f"{MIGRATE}after:1:kill").was_killed
        tables += sum(statement.startswith("CREATE TABLE") for statement in script)
        tables -= sum(statement.startswith("DROP TABLE") for statement in script)
        assert shape(where) == (number, tables)
    ending = lives.play(where.where)
    assert not ending.was_killed, "the next program takes it from there"
    check(ending, "every step of the migrations, and then played to its end")


# --- at every system call ----------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def every_call(folder: Path) -> list[tuple[str, int]]:
    """Each write-class call of the scenario, counted on a run that is not disturbed."""
    return sorted(count_writes(folder / "count"))


def spread(points: list[tuple[str, int]], stride: int) -> list[tuple[str, int]]:
    return [point for kind in KINDS for point in [one for one in points if one[0] == kind][::stride]]


def walk(folder: Path, points: list[tuple[str, int]]) -> None:
    """Kill one run at each of these points, and look at what it left."""
    landed = 0
    for kind, nth in points:
        ending = killed_at(folder, kind, nth)
        landed += ending.was_killed
        check(ending, f"{kind} number {nth}")
        shutil.rmtree(ending.markers)
    # Commits that meet are written together, so a run may make fewer calls than the counted one.
    assert landed > len(points) * 0.8, f"only {landed} of {len(points)} kills landed"


def test_a_kill_at_a_sample_of_all_calls_loses_nothing(folder: Path, every_call: list[tuple[str, int]]) -> None:
    walk(folder, spread(every_call, _STRIDE))


@pytest.mark.torture
@pytest.mark.parametrize("shard", range(8))
def test_a_kill_at_every_call_loses_nothing(folder: Path, every_call: list[tuple[str, int]], shard: int) -> None:
    assert {kind for kind, _ in every_call} >= {"pwrite64", "write", "fdatasync", "ftruncate", "mknodat", "unlink"}
    walk(folder, every_call[shard::8])


@pytest.mark.torture
def test_a_kill_during_the_recovery_from_a_kill_loses_nothing(folder: Path, every_call: list[tuple[str, int]]) -> None:
    for kind, nth in spread(every_call, 10):
        first = killed_at(folder / "twice", kind, nth)
        for time in range(1, 4):
            killed_at(folder / "twice", kind, nth, again=f"pwrite64:{time}")
        check(first, f"{kind} number {nth}, and again while it was opened")
        shutil.rmtree(first.markers)


def test_the_harness_finds_a_process_that_was_started_before_its_record(
    place: Callable[[], Place], lives: Victims
) -> None:
    """A mutant that starts first and writes afterwards must be caught, or the tests above prove nothing."""
    # The third commit is the first reservation: the migration is none, the lease is the first.
    for nth in range(1, 5):
        ending = lives.play(place().where, fault=f"store.commit.before:{nth}:kill", flags=("--mutant",))
        if any("no record knows of it" in fault for fault in asyncio.run(faults_of(ending))):
            return
    pytest.fail("intent-first was switched off and the harness did not see it")
