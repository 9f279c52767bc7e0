"""PostgreSQL: lost connections, lost commits, refusals of the server, several programs on one database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from store_ground import (
    audit_head,
    brought_to,
    count,
    current,
    moved,
    newest,
    ready,
    reserved,
    verified,
    whole_log,
)
from store_invariants import fold, invariant_faults

from ostler.errors import (
    NotFoundError,
    OutcomeUnknownError,
    StoreBusyError,
    StoreError,
    StoreFailedError,
    StoreTooNewError,
)
from ostler.failpoints import Seams
from ostler.model.states import AgentState
from ostler.store import events, moves
from ostler.store.postgres import PostgresConnection, mapped_errors
from ostler.store.store import Store, view
from ostler.store.transaction import Reader, Transaction
from ostler.testing.clock import ManualClock
from ostler.testing.postgres import temporary_postgres

pytestmark = pytest.mark.anyio


def sql(address: str, text: str) -> list[tuple[Any, ...]]:
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


# --- opening -----------------------------------------------------------------------------------------


async def test_a_store_of_a_newer_program_is_refused_and_left_as_it_is(postgres_address: str) -> None:
    async with Store(postgres_address) as store:
        await reserved(store)
    sql(postgres_address, "INSERT INTO ostler_schema (version) VALUES (99)")
    with pytest.raises(StoreTooNewError, match=r"shape 99, this program knows up to \d+: it was made by a newer"):
        await Store(postgres_address).open()
    assert sql(postgres_address, "SELECT count(*) FROM agent_instances") == [(1,)]


async def test_several_that_open_an_empty_database_at_once_all_get_in(postgres_address: str) -> None:
    stores = [Store(postgres_address) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(reserved(store) for store in stores))
    assert await stores[0].read(count("agent_instances")) == 4
    await asyncio.gather(*(store.close() for store in stores))


async def test_every_commit_waits_for_the_disk_whatever_the_role_says(postgres_address: str) -> None:
    lax = f"{postgres_address}&options=-c%20synchronous_commit%3Doff"

    def shown(reader: Reader) -> object:
        return reader.fetch("SHOW synchronous_commit")[0][0]

    def written(tx: Transaction) -> object:
        return shown(tx)

    async with Store(lax) as store:
        assert (await store.read(shown), await store.run(written)) == ("on", "on")


async def test_a_server_that_is_not_there_is_said_in_one_sentence() -> None:
    with pytest.raises(StoreError, match="the database server did not answer") as told:
        await Store("postgresql://ostler:secret@/none?host=/nowhere").open()
    assert "unknown" not in str(told.value), "nothing was to be written"
    assert "secret" not in str(told.value)


async def test_a_server_that_refuses_has_answered(postgres_address: str) -> None:
    with pytest.raises(StoreError, match=r"the database server refused: .*check the user, the password") as told:
        await Store(postgres_address.replace("user=postgres", "user=no-such-user")).open()
    assert "did not answer" not in str(told.value)


async def test_a_role_that_may_have_no_connection_is_told_so(postgres_address: str) -> None:
    sql(postgres_address, "DROP ROLE IF EXISTS crowded")
    sql(postgres_address, "CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
    with pytest.raises(StoreBusyError, match="too many connections for role") as told:
        await Store(postgres_address.replace("user=postgres", "user=crowded")).open()
    assert "check the user" not in str(told.value)


@pytest.mark.parametrize(
    "words",
    [
        "sorry, too many clients already",
        "remaining connection slots are reserved for roles with the SUPERUSER attribute",
        'too many connections for role "ada"',
        "the database system is starting up",
        "the database system is shutting down",
    ],
)
def test_a_server_that_is_busy_or_on_its_way_is_not_a_wrong_password(words: str) -> None:
    with pytest.raises(StoreBusyError, match="try again in a moment") as told, mapped_errors():
        raise psycopg.OperationalError(f'connection to server on socket "x" failed: FATAL:  {words}')
    assert "check the user" not in str(told.value)


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (psycopg.errors.TooManyConnections, StoreBusyError),
        (psycopg.errors.AdminShutdown, StoreBusyError),
        (psycopg.errors.CannotConnectNow, StoreBusyError),
        (psycopg.errors.SerializationFailure, StoreBusyError),
        (psycopg.errors.DeadlockDetected, StoreBusyError),
        (psycopg.errors.LockNotAvailable, StoreBusyError),
        (psycopg.errors.IoError, StoreFailedError),
        (psycopg.errors.DataCorrupted, StoreFailedError),
        (psycopg.errors.UndefinedTable, StoreFailedError),
        (psycopg.errors.UniqueViolation, StoreError),
    ],
)
def test_an_error_of_the_server_is_told_by_its_code(error: type[psycopg.Error], ours: type[StoreError]) -> None:
    with pytest.raises(ours) as told, mapped_errors():
        raise error("in another language")
    assert type(told.value) is ours


# --- a look beside the owner -------------------------------------------------------------------------


async def test_a_view_reads_beside_the_owner_and_writes_nothing(postgres_address: str) -> None:
    async with Store(postgres_address) as store:
        one = await ready(store)
        with view(postgres_address) as reader:
            assert moves.get_instance(reader, one.instance_id) == one
            with pytest.raises(StoreError, match="read-only"):
                reader.fetch("DELETE FROM agent_instances RETURNING id")


def test_a_view_of_an_empty_database_says_so_and_makes_no_table(postgres_address: str) -> None:
    with pytest.raises(NotFoundError, match="there is no Ostler store there"), view(postgres_address):
        pass
    assert sql(postgres_address, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]


# --- connections -------------------------------------------------------------------------------------


async def test_a_dropped_connection_is_made_anew_by_the_next_command(postgres_address: str) -> None:
    async with Store(postgres_address) as store:
        one = await ready(store)
        for state in (AgentState.PROCESSING, AgentState.WAITING, AgentState.SUSPENDED):
            assert drop_connections(postgres_address) >= 1
            one = await moved(store, one, state)
            assert one.state is state
            drop_connections(postgres_address)
            assert (await current(store, one)).state is state


class Dropping:
    """A fault point that cuts every connection of the store when it is passed.

    It also looks from outside: between the begin and the commit of a batch nothing of it may be seen.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.name = ""
        self.at_begin: list[tuple[Any, ...]] = []
        self.seen_early = 0

    def __call__(self, name: str) -> None:
        if not self.name:
            return
        if name == "store.begin.after":
            self.at_begin = self.look()
        elif name == "store.commit.before":
            self.seen_early += self.look() != self.at_begin
        if name == self.name:
            self.name = ""
            drop_connections(self.address)

    def look(self) -> list[tuple[Any, ...]]:
        return sql(self.address, "SELECT sequence, (SELECT count(*) FROM audit) FROM head")


@pytest.mark.parametrize("point", ["store.begin.after", "store.save.before", "store.save.after", "store.commit.before"])
async def test_a_connection_lost_inside_a_transaction_writes_all_or_nothing(postgres_address: str, point: str) -> None:
    dropping, clock = Dropping(postgres_address), ManualClock()
    async with Store(postgres_address, Seams(fault=dropping, clock=clock)) as store:
        lives = [await ready(store, f"n{number}") for number in range(3)]
        before, acts = await newest(store), (await audit_head(store)).number
        dropping.name = point
        wishes = [reserved(store, "new"), *(moved(store, one, AgentState.PROCESSING) for one in lives)]
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, BaseException)]
        assert refused
        assert all(isinstance(one, StoreError) for one in refused), answers
        done = sum(not isinstance(one, BaseException) for one in answers[1:])
        assert await newest(store) == before + done
        assert (await audit_head(store)).number == acts + (not isinstance(answers[0], BaseException))
        assert dropping.seen_early == 0, "rows were written outside of a transaction"
        assert await invariant_faults(store, clock.wall()) == []
        assert (await moved(store, await current(store, lives[0]), AgentState.TERMINATING)).is_active


async def test_a_connection_lost_at_the_commit_leaves_the_outcome_unknown(postgres_address: str) -> None:
    dropping = Dropping(postgres_address)
    async with Store(postgres_address, Seams(fault=dropping)) as store:
        dropping.name = "store.commit.before"
        with pytest.raises(OutcomeUnknownError, match="read the record again"):
            await reserved(store)
        dropping.name = "store.save.before"
        with pytest.raises(StoreError) as told:
            await reserved(store)
        assert not isinstance(told.value, OutcomeUnknownError), "what was not committed is not there"
        await reserved(store)


@contextlib.contextmanager
def restarted(address: str) -> Iterator[None]:
    """The same server, stopped in haste and started again."""
    data = Path(sql(address, "SHOW data_directory")[0][0])
    old = int((data / "postmaster.pid").read_text().split()[0])
    command = Path(f"/proc/{old}/cmdline").read_bytes().split(b"\0")[:-1]
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:  # which no server may be
        owner = data.stat()
        identity = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": [], "cwd": data}
    os.kill(old, signal.SIGINT)
    while Path(f"/proc/{old}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **identity)
    try:
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                sql(address, "SELECT 1")
                break
            time.sleep(0.02)
        yield
    finally:
        server.send_signal(signal.SIGQUIT)
        server.wait(timeout=20)


async def test_a_server_that_restarts_is_found_again() -> None:
    with temporary_postgres(durable=False) as address:
        store = Store(address)
        await store.open()
        one = await ready(store)
        with restarted(address):
            assert await current(store, one) == one
            one = await moved(store, one, AgentState.PROCESSING)
            assert await current(store, one) == one
            await store.close()


async def test_a_server_that_is_gone_refuses_and_the_store_can_be_closed() -> None:
    with temporary_postgres(durable=False) as address:
        store = Store(address)
        await store.open()
        one = await ready(store)
    for _ in range(2):
        with pytest.raises(StoreError, match="did not answer"):
            await moved(store, one, AgentState.PROCESSING)
        with pytest.raises(StoreError, match="did not answer"):
            await current(store, one)
    await store.close()


def test_what_readers_use_stays_read_only_after_a_reconnect(postgres_address: str) -> None:
    reader = PostgresConnection(postgres_address, read_only=True)
    for _ in range(2):
        with pytest.raises(StoreError, match="read-only"):
            reader.execute("CREATE TABLE stray (id INT)", {})
        drop_connections(postgres_address)
    reader.close()


def test_the_isolation_does_not_follow_the_defaults_of_the_server(postgres_address: str) -> None:
    strict = "-c%20default_transaction_isolation%3Dserializable%20-c%20default_transaction_read_only%3Don"
    connection = PostgresConnection(postgres_address)
    connection.migrate()
    connection.close()
    connection = PostgresConnection(f"{postgres_address}&options={strict}")
    connection.begin()
    assert connection.fetch("SHOW transaction_isolation", {}) == [("read committed",)]
    assert connection.fetch("SHOW transaction_read_only", {}) == [("off",)]
    connection.rollback()
    connection.close()


def test_a_commit_that_the_server_turned_into_a_rollback_is_no_commit(postgres_address: str) -> None:
    connection = PostgresConnection(postgres_address)
    connection.migrate()
    connection.begin()
    connection.execute("UPDATE head SET sequence = 7", {})
    with pytest.raises(StoreError):
        connection.execute("SELECT 1 / 0", {})
    with pytest.raises(StoreError, match="ROLLBACK; nothing was written"):
        connection.commit()
    connection.rollback()
    assert connection.begin().sequence == 0
    connection.rollback()
    connection.close()


async def test_a_lock_that_another_program_holds_is_said_and_passes(postgres_address: str) -> None:
    async with Store(f"{postgres_address}") as store:
        one = await ready(store)
        await store.run(_wait_briefly)
        with psycopg.connect(postgres_address) as other:
            other.execute("SELECT * FROM head FOR UPDATE")
            with pytest.raises(StoreBusyError):
                await moved(store, one, AgentState.PROCESSING)
            assert await current(store, one) == one
        assert (await moved(store, one, AgentState.PROCESSING)).state is AgentState.PROCESSING


def _wait_briefly(tx: Transaction) -> None:
    tx.execute("SET lock_timeout = 50")


# --- the log -----------------------------------------------------------------------------------------


async def follow(store: Store, until: int) -> list[int]:
    """Read on from a cursor, as an observer does, until so many events were seen."""
    cursor = 0
    seen: list[int] = []
    while len(seen) < until:
        page = await store.read(events.read_events, cursor, limit=7)
        seen += [event.sequence for event in page.events]
        cursor = page.cursor
    return seen


async def test_two_writers_and_a_reader_that_misses_no_event(postgres_address: str) -> None:
    stores = [Store(postgres_address) for _ in range(3)]
    await asyncio.gather(*(store.open() for store in stores))

    async def live(store: Store) -> None:
        for _ in range(10):
            await brought_to(store, AgentState.WAITING)

    reader = asyncio.ensure_future(follow(stores[2], 2 * 2 * 10 * 4))
    await asyncio.gather(*(live(store) for store in stores[:2] * 2))
    assert await reader == list(range(1, 161))
    assert fold(await whole_log(stores[2]))[1] == []
    assert (await verified(stores[2])).is_sound
    await asyncio.gather(*(store.close() for store in stores))


async def test_databases_of_one_server_do_not_mix(make_database: Callable[[], str]) -> None:
    first, second = make_database(), make_database()
    async with Store(first) as one, Store(second) as other:
        await ready(one)
        assert (await newest(one), await newest(other)) == (2, 0)
