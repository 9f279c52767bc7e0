"""An audit chain that was changed from outside, and a log that was: both are found, on both databases."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from store_ground import DAY, Place, audit_head, brought_to, entries, ready, verified
from store_invariants import invariant_faults

from ostler.failpoints import Seams
from ostler.model.audit import AuditHead, AuditReport
from ostler.model.states import AgentState
from ostler.policy.retention import RetentionPolicy
from ostler.store import retention
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

COLUMNS = (
    "workspace_id, {number}, occurred_at, actor, action, subject, outcome, detail, correlation_id, sequence, "
    "previous_hash, hash"
)


def copy_of(number: int, as_number: int) -> str:
    return f"INSERT INTO audit SELECT {COLUMNS.format(number=as_number)} FROM audit WHERE number = {number}"


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place("sqlite", str(tmp_path))
    return Place("postgres", request.getfixturevalue("migrated_address"))


@pytest.fixture
async def place(empty: Place) -> Place:
    """A store with nine audit entries: 1 to 9."""
    async with empty.store(Seams(clock=ManualClock())) as store:
        for _ in range(3):
            await brought_to(store, AgentState.TERMINATED)
        await brought_to(store, AgentState.SUSPENDED)
        await ready(store)
        assert (await audit_head(store)).number == 9
    return empty


def tamper(place: Place, *sql: str) -> None:
    if place.kind == "postgres":
        with psycopg.connect(place.where) as server:
            for statement in sql:
                assert server.execute(statement.encode()).rowcount != 0, statement
        return
    with closing(sqlite3.connect(Path(place.where) / "ostler.db")) as file, file:
        for statement in sql:
            assert file.execute(statement).rowcount != 0, statement


async def report_on(place: Place, kept: AuditHead | None = None) -> AuditReport:
    async with place.store() as store:
        return await verified(store, kept=kept)


# --- the audit ---------------------------------------------------------------------------------------

CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "an edited actor": (("UPDATE audit SET actor = 'mallory' WHERE number = 4",), ("entry 4 was edited",)),
    "an edited outcome": (("UPDATE audit SET outcome = 'ok2' WHERE number = 1",), ("entry 1 was edited",)),
    "an edited detail": (("UPDATE audit SET detail = NULL WHERE number = 9",), ("entry 9 was edited",)),
    "an edited link to the log": (("UPDATE audit SET sequence = 1 WHERE number = 4",), ("entry 4 was edited",)),
    "a moved time": (("UPDATE audit SET occurred_at = occurred_at - 1 WHERE number = 6",), ("entry 6 was edited",)),
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
    "the end that the workspace knows": (
        ("UPDATE workspaces SET audit_hash = anchor_hash",),
        ("the chain ends with entry 9, which is not the end that the workspace knows",),
    ),
    "a workspace that was removed": (
        ("DELETE FROM workspaces",),
        ("there is no row of this workspace",),
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_tampering_is_found_and_the_entry_named(place: Place, case: str) -> None:
    sql, sentences = CASES[case]
    tamper(place, *sql)
    report = await report_on(place)
    assert not report.is_sound
    for sentence in sentences:
        assert any(sentence in fault for fault in report.faults), report.faults
    if "was edited" in sentences[0]:
        assert len(report.faults) <= len(sentences) + 2, "what is sound is not accused"


async def test_a_rehashed_entry_breaks_the_link_of_the_next(place: Place) -> None:
    async with place.store() as store:
        (entry,) = await entries(store, after=3, limit=1)
    forged = entry.evolve(actor="mallory")
    tamper(place, f"UPDATE audit SET actor = 'mallory', hash = '{forged.computed_hash}' WHERE number = 4")
    report = await report_on(place)
    assert report.faults == ("entry 5 does not follow from entry 4: one of them was replaced",)


async def test_a_chain_that_was_cut_with_its_end_shows_against_a_head_kept_outside(place: Place) -> None:
    async with place.store() as store:
        kept, chain = await audit_head(store), await entries(store)
    tamper(
        place,
        "DELETE FROM audit WHERE number > 7",
        f"UPDATE workspaces SET audit_number = 7, audit_hash = '{chain[6].hash}'",
    )
    assert (await report_on(place)).is_sound, "nothing inside the database can show this"
    assert "entry 9" in (await report_on(place, kept)).faults[0]


async def test_an_old_entry_that_was_put_back_after_retention_is_found(empty: Place) -> None:
    clock = ManualClock()
    async with empty.store(Seams(clock=clock)) as store:
        await brought_to(store, AgentState.TERMINATED)
        clock.advance(2 * DAY)
        await ready(store)
        assert (await store.run(retention.sweep, RetentionPolicy(audit=timedelta(days=1)))).removed >= 2
        assert (await verified(store)).is_sound
    tamper(empty, copy_of(3, 2))
    assert any("entry 2" in fault for fault in (await report_on(empty)).faults)


async def test_a_front_that_was_cut_off_and_anchored_by_hand_is_found(place: Place) -> None:
    async with place.store() as store:
        chain = await entries(store)
    tamper(
        place,
        "DELETE FROM audit WHERE number <= 3",
        f"UPDATE workspaces SET anchor_number = 3, anchor_hash = '{chain[2].hash}'",
    )
    report = await report_on(place)
    assert report.faults == ("no entry tells that retention removed those up to 3: they were cut off",)


# --- log and tables ----------------------------------------------------------------------------------

MOVE = "event_type = 'agent_state_changed' AND event_data_json LIKE '%\"new_state\":\"processing\"%'"
CONTRADICTIONS = {
    "an edited move": (
        f"""UPDATE agent_instance_events SET event_data_json =
            replace(event_data_json, '"new_state":"processing"', '"new_state":"terminated"') WHERE {MOVE}""",
        "ready to terminated is no legal move",
    ),
    "a removed move": (f"DELETE FROM agent_instance_events WHERE {MOVE}", "missing between the horizon and the head"),
    "an edited state": (
        "UPDATE agent_instances SET state = 'waiting' WHERE state = 'processing'",
        "the log gives",
    ),
    "an edited version": ("UPDATE agent_instances SET version = 1", "the log knows"),
    "a place too many": ("UPDATE workspaces SET active = active + 1", "count of places"),
    "an active flag": ("UPDATE agent_instances SET active = 0 WHERE state = 'processing'", "count as active"),
    "a lost attempt": ("DELETE FROM attempts", "without the row of their present attempt"),
    "a head that runs ahead": ("UPDATE head SET sequence = sequence + 1", "between the horizon and the head"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
async def test_the_check_of_the_kill_tests_finds_each_contradiction(empty: Place, case: str) -> None:
    sql, sentence = CONTRADICTIONS[case]
    clock = ManualClock()
    async with empty.store(Seams(clock=clock)) as store:
        await brought_to(store, AgentState.PROCESSING)
        assert await invariant_faults(store, clock.wall()) == []
        tamper(empty, sql)
        found = await invariant_faults(store, clock.wall())
        assert any(sentence in fault for fault in found), found
