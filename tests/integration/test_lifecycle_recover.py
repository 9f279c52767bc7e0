"""After `kill -9`: every record is true, nothing is stuck, and what should come back does."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from lifecycle_aids import Scene, kill_manager

from ostler.agents import AgentRegistry
from ostler.model import AgentInstance, AgentState, AttemptOutcome, GetInstancesFilter, WaitKind
from ostler.store.opening import DATABASE_FILE
from ostler.testing.clock import ManualClock, invariant_faults

pytestmark = pytest.mark.anyio

S = AgentState
LOST, STOPPED, ERROR = AttemptOutcome.LOST, AttemptOutcome.STOPPED, AttemptOutcome.ERROR
GONE = "the program it lived in has ended"


@pytest.fixture(scope="module")
def wreck(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, UUID]]:
    """A home whose manager was killed with agents in every state. Use a copy."""
    home = tmp_path_factory.mktemp("wreck")
    return home, kill_manager(home, "every_state")


class Copy(Scene):
    """The wreck, opened again."""

    names: dict[str, UUID]

    def __init__(self, home: Path, names: dict[str, UUID]) -> None:
        super().__init__(home=home, clock=ManualClock(datetime.now(UTC)))
        self.names = names

    async def named(self, name: str) -> AgentInstance:
        found = await self.manager.store.get_instance(self.names[name])
        assert found is not None
        return found


@pytest.fixture
def scene(wreck: tuple[Path, dict[str, UUID]], tmp_path: Path) -> Copy:
    home, names = wreck
    for file in home.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return Copy(tmp_path, dict(names))


async def test_every_record_is_true_after_a_kill(scene: Copy) -> None:
    expected = {
        "ready": (S.FAILED, 1, [LOST]),
        "thread": (S.FAILED, 1, [LOST]),
        "idle": (S.FAILED, 1, [LOST]),
        "waiting": (S.FAILED, 1, [LOST]),
        "processing": (S.FAILED, 1, [LOST]),
        "initializing": (S.FAILED, 1, [LOST]),
        "returns": (S.READY, 2, [LOST, None]),
        "returns_later": (S.FAILED, 1, [LOST]),
        "terminated": (S.TERMINATED, 1, [STOPPED]),
        "terminating": (S.TERMINATED, 1, [LOST]),
        "failed": (S.FAILED, 1, [ERROR]),
        "failed_returns": (S.FAILED, 1, [ERROR]),
        "held": (S.SUSPENDED, 1, [LOST]),
        "parked": (S.SUSPENDED, 1, [STOPPED]),
    }
    assert scene.names.keys() == expected.keys()
    async with scene.open() as manager:
        await scene.reaches(await scene.named("returns"), S.READY)
        for name, (state, attempt, outcomes) in expected.items():
            record = await scene.named(name)
            assert (record.state, record.attempt) == (state, attempt), name
            assert [one.outcome for one in await scene.attempts(record)] == outcomes, name
        lost = await scene.named("processing")
        assert lost.error_message == GONE
        # Nobody holds a place in the plan who does not live, and nothing waits that nobody waits for.
        living = {scene.names[name] for name in ("returns", "held", "parked")}
        assert {one.instance_id for one in await manager.get_active_instances()} == living
        assert (await manager.get_statistics()).active_instances == 3
        waits = {one.instance_id: one.kind for one in await manager.store.open_waits()}
        assert waits == {
            scene.names["held"]: WaitKind.RESUME,
            scene.names["parked"]: WaitKind.RESUME,
            scene.names["returns_later"]: WaitKind.BACKOFF,
            scene.names["failed_returns"]: WaitKind.BACKOFF,
        }
        assert {one.instance_id for one in await manager.store.open_attempts()} == {scene.names["returns"]}
        assert not list(await invariant_faults(manager.store, scene.clock.wall()))


async def test_what_should_come_back_does_when_it_is_due(scene: Copy) -> None:
    async with scene.open() as manager:
        scene.clock.advance(61)
        for name in ("returns_later", "failed_returns"):
            await scene.reaches(await scene.named(name), S.READY, attempt=2)
        assert await scene.state(await scene.named("held")) is S.SUSPENDED
        scene.clock.advance(3600)
        await scene.reaches(await scene.named("held"), S.READY, attempt=2)
        for name in ("parked", "processing"):
            record = await scene.named(name)
            back = manager.resume if name == "parked" else manager.restart
            assert (await back(record.instance_id)).state is S.READY
            assert await manager.process(record.instance_id, "hello") == "hello"


async def test_what_is_not_registered_waits_and_can_be_ended(scene: Copy) -> None:
    registry = AgentRegistry()
    async with scene.open(registry=registry) as manager:
        scene.clock.advance(2 * 3600)
        await scene.calm()
        everything = await manager.get_active_instances(GetInstancesFilter(include_terminated=True))
        assert {one.attempt for one in everything} == {1}
        await manager.terminate(scene.names["held"])
        scene.register(registry)
        for name in ("returns", "returns_later", "failed_returns"):
            await scene.reaches(await scene.named(name), S.READY, attempt=2)
        assert await scene.state(await scene.named("held")) is S.TERMINATED


async def test_recovering_twice_changes_nothing_more(scene: Copy) -> None:
    registry = AgentRegistry()
    async with scene.open(registry=registry) as manager:
        before = (await manager.store.head()).sequence
    async with scene.open(registry=registry) as manager:
        assert (await manager.store.head()).sequence == before


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE agent_instances SET spawn_options_json = '{' WHERE id = ?",
        "UPDATE agent_instances SET health_json = 'no' WHERE id = ?",
        "UPDATE agent_instances SET state = 'dreaming' WHERE id = ?",
    ],
)
async def test_one_bad_record_does_not_stop_the_others(
    scene: Copy, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = scene.names.pop("processing")
    with closing(sqlite3.connect(scene.home / DATABASE_FILE)) as database, database:
        assert database.execute(damage, (as_stored(database, bad),)).rowcount == 1
    async with scene.open() as manager:
        await scene.reaches(await scene.named("returns"), S.READY)
        for name in ("ready", "waiting", "idle", "thread"):
            assert (await scene.named(name)).state is S.FAILED, name
        assert (await manager.spawn(scene.request())).state is S.READY
    assert str(bad) in caplog.text


def as_stored(database: sqlite3.Connection, wanted: UUID) -> object:
    (sample,) = database.execute("SELECT id FROM agent_instances LIMIT 1").fetchone()
    return wanted.bytes if isinstance(sample, bytes) else str(wanted)


async def test_a_pause_survives_a_kill_and_no_jump_makes_it_longer(scene: Copy) -> None:
    scene.clock.jump(-timedelta(days=365))
    async with scene.open():
        scene.clock.advance(3590)
        await scene.calm()
        assert await scene.state(await scene.named("held")) is S.SUSPENDED
        scene.clock.advance(20)
        await scene.reaches(await scene.named("held"), S.READY, attempt=2)
