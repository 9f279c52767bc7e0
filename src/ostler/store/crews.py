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

CREWS = RecordTable(CrewRecord, "crews", key_columns=3)


class Claim(NamedTuple):
    """A task that a member has begun, and the number of its start."""

    task: Task
    generation: int


class Place(NamedTuple):
    """Where names of crews are unique."""

    workspace_id: UUID
    #: The directory of the project; empty for the project of the home.
    project: str = ""


def get_crew(reader: Reader, place: Place, name: str) -> CrewRecord | None:
    row = reader.fetch_one(
        f"{CREWS.select} WHERE workspace_id = :space AND project = :project AND name = :name",
        space=place.workspace_id,
        project=place.project,
        name=name,
    )
    return CREWS.read_one(row)


def list_crews(reader: Reader, place: Place) -> list[CrewRecord]:
    rows = reader.fetch(
        f"{CREWS.select} WHERE workspace_id = :space AND project = :project ORDER BY name",
        space=place.workspace_id,
        project=place.project,
    )
    return CREWS.read(rows)


def projects_at_work(reader: Reader, workspace_id: UUID) -> list[str]:
    """The directories of the projects that have crews which are up, or tasks that crews may work on."""
    rows = reader.fetch(
        """SELECT project FROM crews WHERE workspace_id = :space AND is_up = 1 AND project <> ''
           UNION SELECT project FROM tasks
           WHERE workspace_id = :space AND state IN ('queued', 'running') AND project IS NOT NULL""",
        space=workspace_id,
    )
    return sorted(str(project) for (project,) in rows)


def put_crew(
    tx: Transaction, place: Place, name: str, changes: dict[str, Any], *, act: str, by: Actor = SYSTEM
) -> CrewRecord:
    """Change its row, or make it; with its event and its audit entry."""
    existing = get_crew(tx, place, name)
    old = existing or CrewRecord(**place._asdict(), name=name, updated_at=tx.now)
    new = old.evolve(**changes, updated_at=tx.now).checked()
    if new.reason is not None:
        new = new.evolve(reason=clipped(new.reason, MAX_REASON))
    values = CREWS.encode(new)
    if existing is None:
        CREWS.insert(tx, new)
    else:
        keys = ("workspace_id", "project", "name")
        changed = ", ".join(f"{column} = :{column}" for column in values if column not in keys)
        match = " AND ".join(f"{column} = :{column}" for column in keys)
        tx.execute(f"UPDATE crews SET {changed} WHERE {match}", **values)
    _emit(tx, new, is_stopping=not new.is_up, by=by)
    tx.audit(place.workspace_id, by, act, f"crew:{name}", detail=new.reason)
    return new


def tell_stopped(tx: Transaction, place: Place, name: str) -> None:
    """The last of its members has ended."""
    crew = get_crew(tx, place, name)
    if crew is not None and not crew.is_up:
        _emit(tx, crew, is_stopping=False, by=SYSTEM)


def _emit(tx: Transaction, crew: CrewRecord, *, is_stopping: bool, by: Actor) -> None:
    event = CrewChangedEvent(
        workspace_id=crew.workspace_id,
        crew=crew.name,
        project=crew.project,
        is_up=crew.is_up,
        is_stopping=is_stopping,
        count=crew.count,
        reason=crew.reason,
    )
    tx.emit(event, by)


def claim_for_member(  # noqa: PLR0913 - the member and its task
    tx: Transaction, task: Task, *, project: str, crew: str, member: str, agent: str, by: Actor = SYSTEM
) -> Claim | None:
    """Give a task to a member, as its next generation; None where it cannot be begun now."""
    claimed = claim_task(tx, task, by=by, crew=crew, member=member, agent=agent)
    if claimed is None:
        return None
    rows = tx.fetch(
        """INSERT INTO crew_members (workspace_id, project, crew, member, generation)
           VALUES (:space, :project, :crew, :member, 1)
           ON CONFLICT (workspace_id, project, crew, member) DO UPDATE SET generation = crew_members.generation + 1
           RETURNING generation""",
        space=task.workspace_id,
        project=project,
        crew=crew,
        member=member,
    )
    return Claim(claimed, int(rows[0][0]))


def generations(reader: Reader, place: Place, crew: str) -> dict[str, int]:
    """By member, how often it was begun."""
    rows = reader.fetch(
        """SELECT member, generation FROM crew_members
           WHERE workspace_id = :space AND project = :project AND crew = :crew""",
        space=place.workspace_id,
        project=place.project,
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
