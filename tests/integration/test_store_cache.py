"""What the writer keeps in memory: the living, and not those that it has written and seen end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from ostler.errors import InvalidOperationError
from ostler.model import AgentState, AttemptOutcome, SpawnRequest
from ostler.seams import Uuid7Source
from ostler.store import cache as caching
from ostler.store import open_store
from ostler.store.cache import Cache
from ostler.store.commands import AttemptEnd, Beside, Command, Idempotency, MoveInstance, ReserveInstance
from ostler.store.kinds import Kind
from ostler.store.opening import sqlite_backend
from ostler.store.unit import Unit
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

S = AgentState
Commit = Callable[[Command[Any]], Any]


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
async def commit(tmp_path: Path, cache: Cache) -> AsyncIterator[Commit]:
    """One command, one transaction, as the writer does it."""
    async with open_store(tmp_path):
        pass
    backend, clock = sqlite_backend(tmp_path / "ostler.db"), ManualClock()
    assert backend.open_writer is not None
    session = backend.open_writer(lambda _: None)

    def run(command: Command[Any]) -> Any:
        head = session.begin()
        cache.check(head)
        unit = Unit(session, head, cache, clock.wall(), Uuid7Source(clock))
        unit.start()
        try:
            answer = command.apply(unit)
        except InvalidOperationError:
            session.rollback()
            raise
        unit.accept()
        changes = unit.changes()
        assert changes is not None
        session.save(changes)
        session.commit()
        cache.committed(changes)
        return answer

    yield run
    session.close()


def spawned(commit: Commit) -> UUID:
    request = SpawnRequest(agent_definition_id=uuid4())
    key = Idempotency.of(uuid4().hex, request.to_json())
    one: UUID = commit(ReserveInstance(request=request, idempotency=key)).instance_id
    commit(MoveInstance(instance_id=one, to=S.READY))
    return one


def kept(cache: Cache) -> dict[Kind, int]:
    per_life = (Kind.INSTANCE, Kind.ATTEMPT, Kind.WAIT, Kind.IDEMPOTENCY)
    return {kind: sum(slot[0] is kind for slot in cache.rows) for kind in per_life}


def end(commit: Commit, one: UUID, how: str) -> None:
    ended = Beside(ended=AttemptEnd(outcome=AttemptOutcome.STOPPED))
    if how == "failed":
        commit(MoveInstance(instance_id=one, to=S.FAILED, beside=ended))
        return
    commit(MoveInstance(instance_id=one, to=S.TERMINATING))
    commit(MoveInstance(instance_id=one, to=S.TERMINATED, beside=ended))


async def test_after_many_ends_only_the_living_are_kept(commit: Commit, cache: Cache) -> None:
    living = [spawned(commit) for _ in range(3)]
    for turn in range(20):
        end(commit, spawned(commit), "failed" if turn % 2 else "terminated")
    assert kept(cache) == {Kind.INSTANCE: 3, Kind.ATTEMPT: 3, Kind.WAIT: 0, Kind.IDEMPOTENCY: 0}
    for one in living:
        end(commit, one, "terminated")
    assert set(kept(cache).values()) == {0}


async def test_what_is_over_and_only_looked_at_does_not_stay(commit: Commit, cache: Cache) -> None:
    living, over = spawned(commit), spawned(commit)
    end(commit, over, "terminated")
    with pytest.raises(InvalidOperationError):
        commit(MoveInstance(instance_id=over, to=S.READY))
    commit(MoveInstance(instance_id=living, to=S.PROCESSING))
    assert kept(cache)[Kind.INSTANCE] == 1


async def test_of_too_many_the_oldest_go(commit: Commit, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "MOST_ROWS", 20)
    every = [spawned(commit) for _ in range(30)]
    assert len(cache.rows) <= 20 + 5
    newest = (Kind.INSTANCE, every[-1].int)
    assert newest in cache.rows
    for one in every:  # whether it is kept or not, it is found
        end(commit, one, "terminated")
