from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from ostler.model import AgentState, AuditHead, AuditReport
from ostler.policy import RetentionPolicy
from ostler.store import Seams, open_store
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.ground import brought_to

pytestmark = pytest.mark.anyio

COLUMNS = (
    "workspace_id, {number}, occurred_at, actor, action, subject, outcome, detail, correlation_id, sequence, "
    "previous_hash, hash"
)


def copy_of(number: int, as_number: int) -> str:
    return f"INSERT INTO audit SELECT {COLUMNS.format(number=as_number)} FROM audit WHERE number = {number}"


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path)
    make: Callable[[], str] = request.getfixturevalue("make_database")
    return make()


@pytest.fixture
async def home(address: str) -> str:
    """A store with nine audit entries: 1 to 9."""
    async with open_store(address) as store:
        await brought_to(store, AgentState.TERMINATED)
        await brought_to(store, AgentState.SUSPENDED)
        await brought_to(store, AgentState.READY)
    return address


def tamper(home: str, *sql: str) -> None:
    if home.startswith("postgresql://"):
        with psycopg.connect(home) as server:
            for statement in sql:
                assert server.execute(statement.encode()).rowcount != 0, statement
        return
    with closing(sqlite3.connect(Path(home) / "ostler.db")) as file, file:
        for statement in sql:
            assert file.execute(statement).rowcount != 0, statement


async def report_on(home: str, kept: AuditHead | None = None) -> AuditReport:
    async with open_store(home) as store:
        return await store.verify_audit(kept_head=kept)


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "an edited actor": (("UPDATE audit SET actor = 'mallory' WHERE number = 4",), ("entry 4 was edited",)),
    "an edited outcome": (("UPDATE audit SET outcome = 'ok2' WHERE number = 1",), ("entry 1 was edited",)),
    "an edited detail": (("UPDATE audit SET detail = NULL WHERE number = 9",), ("entry 9 was edited",)),
    "an edited link to the log": (("UPDATE audit SET sequence = 1 WHERE number = 5",), ("entry 5 was edited",)),
    "a moved time": (
        ("UPDATE audit SET occurred_at = (SELECT occurred_at FROM audit WHERE number = 1) WHERE number = 6",),
        ("entry 6 was edited",),
    ),
    "one removed from the middle": (("DELETE FROM audit WHERE number = 5",), ("entry 5 is missing",)),
    "several removed": (("DELETE FROM audit WHERE number BETWEEN 3 AND 5",), ("entries 3 to 5 are missing",)),
    "the first removed": (("DELETE FROM audit WHERE number = 1",), ("entry 1 is missing",)),
    "the tail removed": (("DELETE FROM audit WHERE number > 7",), ("entries 8 to 9 are missing",)),
    "all removed": (("DELETE FROM audit",), ("entries 1 to 9 are missing",)),
    "two swapped": (
        (
            "UPDATE audit SET number = -1 WHERE number = 3",
            "UPDATE audit SET number = 3 WHERE number = 6",
            "UPDATE audit SET number = 6 WHERE number = -1",
        ),
        ("entry 3 was edited", "entry 6 was edited"),
    ),
    "one put in at the end": ((copy_of(9, 10),), ("entry 10 was put in",)),
    "one put in far beyond the end": ((copy_of(9, 500),), ("entry 500 was put in",)),
    "one put in before the beginning": ((copy_of(1, 0),), ("entry 0",)),
    "one replaced by a copy of another": (
        ("DELETE FROM audit WHERE number = 4", copy_of(5, 4)),
        ("entry 4 was edited",),
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_tampering_is_found_and_the_row_named(home: str, case: str) -> None:
    assert (await report_on(home)).is_sound
    sql, sentences = CASES[case]
    tamper(home, *sql)
    report = await report_on(home)
    assert not report.is_sound
    for sentence in sentences:
        assert any(sentence in fault for fault in report.faults), report.faults
    if "was edited" in sentences[0]:
        assert len(report.faults) <= len(sentences) + 2, "what is sound is not accused"


async def test_an_entry_rehashed_by_a_forger_breaks_the_next_link(home: str) -> None:
    async with open_store(home) as store:
        (entry,) = await store.read_audit(after=3, limit=1)
    forged = entry.evolve(actor="mallory")
    tamper(home, f"UPDATE audit SET actor = 'mallory', hash = '{forged.computed_hash}' WHERE number = 4")
    report = await report_on(home)
    assert report.faults == ("entry 5 does not follow from entry 4: one of them was replaced",)


async def test_a_chain_cut_together_with_its_ledger_shows_against_a_head_kept_outside(home: str) -> None:
    async with open_store(home) as store:
        kept = await store.audit_head()
        entries = await store.read_audit()
    tamper(
        home,
        "DELETE FROM audit WHERE number > 7",
        f"UPDATE workspace_ledgers SET audit_number = 7, audit_hash = '{entries[6].hash}'",
    )
    assert (await report_on(home)).is_sound, "nothing inside the file can show this"
    assert "entry 9" in (await report_on(home, kept)).faults[0]


async def test_an_old_entry_put_back_after_retention_is_found(address: str) -> None:
    clock = ManualClock()
    policy = RetentionPolicy(audit=timedelta(days=1))
    async with open_store(address, Seams(clock=clock)) as store:
        await brought_to(store, AgentState.READY)
        clock.advance(2 * 86_400)
        await brought_to(store, AgentState.READY)
        assert (await store.sweep(policy)).audit == 2
        assert (await store.verify_audit()).is_sound
    tamper(address, copy_of(3, 2))
    assert any("entry 2" in fault for fault in (await report_on(address)).faults)


async def test_a_front_that_was_cut_off_and_anchored_by_hand_is_found(home: str) -> None:
    async with open_store(home) as store:
        entries = await store.read_audit()
    tamper(
        home,
        "DELETE FROM audit WHERE number <= 3",
        f"UPDATE workspace_ledgers SET anchor_number = 3, anchor_hash = '{entries[2].hash}'",
    )
    report = await report_on(home)
    assert report.faults == ("no entry tells that retention removed those up to 3: they were cut off",)
