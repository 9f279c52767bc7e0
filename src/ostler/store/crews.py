"""Crews: which are up, how many members were asked for by hand, and how often each member was begun."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from ostler.model.access import SYSTEM, Actor
from ostler.model.crew import CrewRecord
from ostler.model.events import CrewChangedEvent
from ostler.model.task import Task
from ostler.model.text import MAX_REASON, clipped
from ostler.store.record_table import RecordTable
from ostler.store.tasks import TASKS, claim_task
from ostler.store.transaction import Reader, Transaction

CREWS = RecordTable(CrewRecord, "crews", key_columns=2)


class Claim(NamedTuple):
    """A task that a member has begun, and the number of its start."""

    task: Task
    generation: int


def get_crew(reader: Reader, workspace_id: UUID, name: str) -> CrewRecord | None:
    row = reader.fetch_one(
        f"{CREWS.select} WHERE workspace_id = :space AND name = :name", space=workspace_id, name=name
    )
    return CREWS.read_one(row)


def list_crews(reader: Reader, workspace_id: UUID) -> list[CrewRecord]:
    return CREWS.read(reader.fetch(f"{CREWS.select} WHERE workspace_id = :space ORDER BY name", space=workspace_id))


def put_crew(
    tx: Transaction, workspace_id: UUID, name: str, changes: dict[str, Any], *, act: str, by: Actor = SYSTEM
) -> CrewRecord:
    """Change its row, or make it; with its event and its audit entry."""
    existing = get_crew(tx, workspace_id, name)
    old = existing or CrewRecord(workspace_id=workspace_id, name=name, updated_at=tx.now)
    new = old.evolve(**changes, updated_at=tx.now).checked()
    if new.reason is not None:
        new = new.evolve(reason=clipped(new.reason, MAX_REASON))
    values = CREWS.encode(new)
    if existing is None:
        CREWS.insert(tx, new)
    else:
        changed = ", ".join(f"{column} = :{column}" for column in values if column not in {"workspace_id", "name"})
        tx.execute(f"UPDATE crews SET {changed} WHERE workspace_id = :workspace_id AND name = :name", **values)
    _emit(tx, new, is_stopping=not new.is_up, by=by)
    tx.audit(workspace_id, by, act, f"crew:{name}", detail=new.reason)
    return new


def tell_stopped(tx: Transaction, workspace_id: UUID, name: str) -> None:
    """The last of its members has ended."""
    crew = get_crew(tx, workspace_id, name)
    if crew is not None and not crew.is_up:
        _emit(tx, crew, is_stopping=False, by=SYSTEM)


def _emit(tx: Transaction, crew: CrewRecord, *, is_stopping: bool, by: Actor) -> None:
    event = CrewChangedEvent(
        workspace_id=crew.workspace_id,
        crew=crew.name,
        is_up=crew.is_up,
        is_stopping=is_stopping,
        count=crew.count,
        reason=crew.reason,
    )
    tx.emit(event, by)


def claim_for_member(
    tx: Transaction, task: Task, *, crew: str, member: str, agent: str, by: Actor = SYSTEM
) -> Claim | None:
    """Give a task to a member, as its next generation; None where it cannot be begun now."""
    claimed = claim_task(tx, task, by=by, crew=crew, member=member, agent=agent)
    if claimed is None:
        return None
    rows = tx.fetch(
        """INSERT INTO crew_members (workspace_id, crew, member, generation) VALUES (:space, :crew, :member, 1)
           ON CONFLICT (workspace_id, crew, member) DO UPDATE SET generation = crew_members.generation + 1
           RETURNING generation""",
        space=task.workspace_id,
        crew=crew,
        member=member,
    )
    return Claim(claimed, int(rows[0][0]))


def generations(reader: Reader, workspace_id: UUID, crew: str) -> dict[str, int]:
    """By member, how often it was begun."""
    rows = reader.fetch(
        "SELECT member, generation FROM crew_members WHERE workspace_id = :space AND crew = :crew",
        space=workspace_id,
        crew=crew,
    )
    return {str(member): int(generation) for member, generation in rows}


def tasks_in_directory(reader: Reader, workspace_id: UUID, path: str) -> list[Task]:
    """Tasks whose files are in this directory."""
    rows = reader.fetch(
        f"{TASKS.select} WHERE workspace_id = :space AND workdir_json LIKE :path ORDER BY id",
        space=workspace_id,
        path=f'%/{path.rpartition("/")[2]}"%',
    )
    return [task for task in TASKS.read(rows) if task.workdir is not None and task.workdir["path"] == path]
