from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg
import pytest

from ostler.errors import OutcomeUnknownError, StoreBusyError, StoreError, StoreTooNewError
from ostler.model import AgentState
from ostler.seams import FaultPlan, InjectedCrash
from ostler.store import EngineStore, Seams, Store, open_store
from ostler.store.postgres import PostgresSession, backend, mapped_errors, migrate
from ostler.store.queries import migrations, statements
from ostler.testing.clock import ManualClock, invariant_faults
from ostler.testing.folding import sequence_faults
from ostler.testing.store_suite.ground import brought_to, moved, reservation, reserved, whole_log
from ostler.testing.store_suite.simulations import begun

pytestmark = pytest.mark.anyio

#: For each statement of all migrations: the shape that is left when it is the last that was run.
DYING = [number - 1 for number, script in migrations("postgres") for _ in statements(script)]


def sql(address: str, text: str) -> list[tuple[object, ...]]:
    with psycopg.connect(address, autocommit=True) as connection:
        done = connection.execute(text.encode())
        return done.fetchall() if done.description else []


def drop_connections(address: str) -> int:
    """What a restart of the server does to its clients."""
    return len(
        sql(
            address,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'ostler' AND pid <> pg_backend_pid()",
        )
    )


def shape(address: str) -> list[tuple[object, ...]]:
    return sql(address, "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")


# --- migration --------------------------------------------------------------------------------------


def tables_of(version: int) -> list[tuple[object, ...]]:
    scripts = [script for number, script in migrations("postgres") if number <= version]
    made = [one.split()[2] for script in scripts for one in statements(script) if one.startswith("CREATE TABLE")]
    return [(name,) for name in sorted(["ostler_schema", *made])]


async def test_a_migration_that_dies_at_any_statement_leaves_the_old_shape(make_database: Callable[[], str]) -> None:
    for version in dict.fromkeys(DYING):
        address = make_database()
        if version:  # what came before is there already
            between = FaultPlan(name="store.migrate.after", nth=version)
            with pytest.raises(InjectedCrash):
                await open_store(address, Seams(fault=between)).open()
        for nth in range(1, DYING.count(version) + 1):
            plan = FaultPlan(name="store.migrate.statement", nth=nth)
            with pytest.raises(InjectedCrash):
                await open_store(address, Seams(fault=plan)).open()
            assert shape(address) == tables_of(version), nth
            assert sql(address, "SELECT count(*) FROM ostler_schema") == [(version,)]
        async with open_store(address) as store:
            await brought_to(store, AgentState.READY)
            assert (await begun(store, turns=1)).turn == 1


async def test_a_migration_that_dies_around_its_transaction_leaves_old_or_new(
    make_database: Callable[[], str],
) -> None:
    for point, rows in (("store.migrate.before", 0), ("store.migrate.after", 1)):
        address = make_database()
        with pytest.raises(InjectedCrash):
            await open_store(address, Seams(fault=FaultPlan(name=point))).open()
        assert sql(address, "SELECT count(*) FROM ostler_schema") == [(rows,)]
        async with open_store(address) as store:
            await reserved(store)


async def test_a_store_of_a_newer_program_is_refused_and_left_as_it_is(postgres_address: str) -> None:
    async with open_store(postgres_address) as store:
        await reserved(store)
    sql(postgres_address, "INSERT INTO ostler_schema (version) VALUES (99)")
    with pytest.raises(StoreTooNewError, match=r"shape 99, this program knows up to \d+: it was made by a newer"):
        await open_store(postgres_address).open()
    assert sql(postgres_address, "SELECT count(*) FROM agent_instances") == [(1,)]


async def test_several_that_open_an_empty_database_at_once_all_get_in(postgres_address: str) -> None:
    stores = [open_store(postgres_address) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(reserved(store) for store in stores))
    assert (await stores[0].statistics()).total_spawned == 4
    await asyncio.gather(*(store.close() for store in stores))


async def test_every_commit_waits_for_the_disk(postgres_address: str) -> None:
    async with open_store(postgres_address) as store:
        await reserved(store)
        assert sql(postgres_address, "SHOW fsync") == [("on",)]
        assert sql(postgres_address, "SHOW full_page_writes") == [("on",)]
        asked = await store._read(lambda session: session.execute("SHOW synchronous_commit", {}))  # type: ignore[attr-defined]  # noqa: SLF001 - a reader is given to nobody outside
        assert dict(asked[0]) == {"synchronous_commit": "on"}


# --- connections ------------------------------------------------------------------------------------


async def test_a_dropped_connection_is_made_anew_by_the_next_command(postgres_address: str) -> None:
    async with open_store(postgres_address) as store:
        made = await reserved(store)
        for state in (AgentState.READY, AgentState.PROCESSING, AgentState.WAITING):
            assert drop_connections(postgres_address) >= 1
            assert (await moved(store, made, state)).state is state
            drop_connections(postgres_address)
            assert [one.state for one in await store.list_instances()] == [state]


class Dropping:
    """A fault point that cuts every connection of the store when it is passed.

    It also looks from outside: between the begin and the commit of a batch, nothing of it may be seen.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.name = ""
        self.at_begin: list[tuple[object, ...]] = []
        self.seen_early = 0

    def __call__(self, name: str) -> None:
        if name == "store.begin.after":
            self.at_begin = self.look()
        elif name == "store.commit.before":
            self.seen_early += self.look() != self.at_begin
        if name == self.name:
            self.name = ""
            drop_connections(self.address)

    def look(self) -> list[tuple[object, ...]]:
        return sql(self.address, "SELECT commit_number, (SELECT count(*) FROM audit) FROM store_head")


@pytest.mark.parametrize("point", ["store.begin.after", "store.save.before", "store.commit.before"])
async def test_a_connection_lost_inside_a_transaction_writes_all_or_nothing(postgres_address: str, point: str) -> None:
    dropping, clock = Dropping(postgres_address), ManualClock()
    async with open_store(postgres_address, Seams(fault=dropping, clock=clock)) as store:
        lives = [await reserved(store, f"n{number}") for number in range(3)]
        async with open_store(postgres_address) as other:  # so that the first one's cache no longer counts
            await reserved(other, "other")
        before = await store.head()
        dropping.name = point
        wishes = [store.commit(reservation("new")), *(moved(store, one, AgentState.READY) for one in lives)]
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        done = [one for one in answers if not isinstance(one, BaseException)]
        assert all(isinstance(one, StoreError) for one in answers if isinstance(one, BaseException)), answers
        after = await store.head()
        assert after.sequence == before.sequence + len(done)
        assert dropping.seen_early == 0, "rows were written outside of a transaction"
        assert (await store.audit_head()).number == after.sequence
        assert await invariant_faults(store, clock.wall()) == []
        assert (await moved(store, lives[0], AgentState.FAILED)).state is AgentState.FAILED


async def test_a_server_that_is_gone_is_said_in_one_sentence() -> None:
    with pytest.raises(StoreError, match="the database server did not answer") as told:
        await open_store("postgresql:///postgres?host=/nowhere&user=postgres").open()
    assert "unknown" not in str(told.value), "nothing was to be written"


async def test_a_connection_lost_at_the_commit_leaves_the_outcome_unknown(postgres_address: str) -> None:
    dropping = Dropping(postgres_address)
    async with open_store(postgres_address, Seams(fault=dropping)) as store:
        dropping.name = "store.commit.before"
        with pytest.raises(OutcomeUnknownError, match="read the record again"):
            await reserved(store)
        dropping.name = "store.save.before"
        with pytest.raises(StoreError) as told:
            await reserved(store)
        assert not isinstance(told.value, OutcomeUnknownError), "what was not committed is not there"


async def test_what_was_remembered_does_not_outlive_the_connection(postgres_address: str) -> None:
    """Behind the same address may stand a restored copy, with the same commit number and other rows."""
    async with open_store(postgres_address) as store:
        made = await reserved(store)
        sql(postgres_address, "UPDATE agent_instances SET version = 7")
        drop_connections(postgres_address)
        moves = (moved(store, made, AgentState.READY, expected_version=7), reserved(store))
        assert [one.version for one in await asyncio.gather(*moves)] == [8, 1]


def test_what_readers_use_stays_read_only_after_a_reconnect(postgres_address: str) -> None:
    session = backend(postgres_address).open_reader()
    assert isinstance(session, PostgresSession)
    for _ in range(2):
        with pytest.raises(StoreError, match="read-only"):
            session.execute("CREATE TABLE stray (id INT)", {})
        drop_connections(postgres_address)
    session.close()


def test_the_isolation_does_not_follow_the_defaults_of_the_server(postgres_address: str) -> None:
    strict = "-c%20default_transaction_isolation%3Dserializable%20-c%20default_transaction_read_only%3Doff"
    session = PostgresSession(f"{postgres_address}&options={strict}")
    migrate(session)
    session.begin()
    assert session.execute("SHOW transaction_isolation", {}) == [{"transaction_isolation": "read committed"}]
    session.rollback()
    session.close()


def test_a_commit_that_the_server_turned_into_a_rollback_is_no_commit(postgres_address: str) -> None:
    session = PostgresSession(postgres_address)
    migrate(session)
    session.begin()
    with pytest.raises(StoreError):
        session.execute("SELECT 1 / 0", {})
    with pytest.raises(StoreError, match="ROLLBACK; nothing was written"):
        session.commit()
    session.rollback()
    assert session.begin().commit_number == 0
    session.close()


def test_a_conflict_of_serializable_transactions_says_try_again() -> None:
    with pytest.raises(StoreBusyError), mapped_errors():
        raise psycopg.errors.SerializationFailure


# --- the log ----------------------------------------------------------------------------------------


async def follow(store: Store, until: int) -> list[int]:
    """Read on from a cursor, as an observer does, until so many events were seen."""
    cursor = 0
    seen: list[int] = []
    while len(seen) < until:
        page = await store.read_events(cursor, limit=7)
        assert sequence_faults(page, cursor) == []
        seen += [event.sequence for event in page]
        cursor = seen[-1] if seen else 0
    return seen


async def test_two_writers_and_a_reader_that_never_misses_an_event(postgres_address: str) -> None:
    stores: list[EngineStore] = [open_store(postgres_address) for _ in range(3)]
    await asyncio.gather(*(store.open() for store in stores))

    async def live(store: Store) -> None:
        for _ in range(15):
            await brought_to(store, AgentState.WAITING)

    reader = asyncio.ensure_future(follow(stores[2], 2 * 2 * 15 * 4))
    await asyncio.gather(*(live(store) for store in stores[:2] * 2))
    assert await reader == list(range(1, 241))
    numbers = [event.sequence for event in await whole_log(stores[2])]
    assert numbers == list(range(1, 241))
    assert (await stores[2].verify_audit()).is_sound
    await asyncio.gather(*(store.close() for store in stores))
