"""The check that every kill -9 test leans on goes red when log and tables are made to disagree on a real disk."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ostler.model import AgentState, TaskState
from ostler.store import Seams, open_store
from ostler.store.commands import CreateTask, MoveTask
from ostler.testing.clock import ManualClock, invariant_faults
from ostler.testing.store_suite.ground import brought_to

pytestmark = pytest.mark.anyio

CLOCK = ManualClock()
MOVED = "event_type = 'agent_state_changed' AND event_data_json LIKE '%\"new_state\":\"ready\"%'"
EDITED_MOVE = f"""
UPDATE agent_instance_events
SET event_data_json = replace(event_data_json, '"new_state":"ready"', '"new_state":"waiting"')
WHERE {MOVED}
"""
EDITED_TASK = """
UPDATE agent_instance_events
SET event_data_json = replace(event_data_json, '"new_state":"running"', '"new_state":"accepted"')
WHERE event_type = 'task_state_changed'
"""
CASES = {
    "an edited move of an agent": (EDITED_MOVE, "from initializing to waiting, which is no legal move"),
    "a removed move of an agent": (f"DELETE FROM agent_instance_events WHERE {MOVED}", "but it was initializing"),
    "an edited move of a task": (EDITED_TASK, "from queued to accepted, which is no legal move"),
    "an edited task": ("UPDATE tasks SET state = 'queued'", "the log gives state completed, the table has queued"),
}


async def faults(home: Path) -> list[str]:
    async with open_store(home, Seams(clock=CLOCK)) as store:
        return await invariant_faults(store, CLOCK.wall())


@pytest.mark.parametrize("case", CASES)
async def test_a_tampered_log_or_table_is_found(tmp_path: Path, case: str) -> None:
    async with open_store(tmp_path, Seams(clock=CLOCK)) as store:
        await brought_to(store, AgentState.PROCESSING)
        task = await store.commit(CreateTask(task="mend the gate"))
        for state in (TaskState.RUNNING, TaskState.COMPLETED):
            await store.commit(MoveTask(task_id=task.task_id, to=state))
    sql, sentence = CASES[case]
    assert await faults(tmp_path) == []
    with closing(sqlite3.connect(tmp_path / "ostler.db")) as file, file:
        assert file.execute(sql).rowcount > 0
    found = await faults(tmp_path)
    assert any(sentence in fault for fault in found), found
