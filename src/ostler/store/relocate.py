"""A home that was moved or copied: the paths in its records, and what a copy must not go on with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostler.errors import InvalidOperationError
from ostler.home import project_of
from ostler.model.access import Actor
from ostler.model.attempt import AttemptOutcome
from ostler.model.states import INACTIVE_STATES, AgentState
from ostler.model.task import TaskState
from ostler.model.wait import WaitKind
from ostler.store import attempts, moves, tasks
from ostler.store.attempts import AttemptEnd
from ostler.store.transaction import Reader, Transaction
from ostler.store.waits import all_open_waits, end_waits_of

_BY = Actor(name="home")
_COPIED = "its home was copied; the work goes on in the home that it was copied from"
#: By table: the columns that name a row, and those that hold paths, as JSON or as they are. The history stays as it is.
_COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tasks": (("id",), ("near", "project", "workdir_json", "accepted_json", "vault_json", "loop_json")),
    "agent_instances": (("id",), ("spawn_options_json", "project")),
    "attempts": (("instance_id", "number"), ("handle_json",)),
    "waits": (("id",), ("detail_json",)),
    "definitions": (("id",), ("source", "manifest_json")),
    "simulation_runs": (("id",), ("scenario_json",)),
}


@dataclass(frozen=True)
class Paths:
    """Where a home was and where it is now; what lies in its project may have come along."""

    old: Path
    new: Path

    def translate(self, text: str) -> str:
        moved = _below(text, str(self.old), str(self.new))
        if moved is not None:
            return moved
        moved = _below(text, str(project_of(self.old)), str(project_of(self.new)))
        return text if moved is None or not os.path.lexists(moved) else moved


def _below(text: str, old: str, new: str) -> str | None:
    return new + text[len(old) :] if text == old or text.startswith(f"{old}/") else None


def earlier_home(reader: Reader) -> Path | None:
    """Where a home was that did not note it yet, from the workdirs of its tasks."""
    rows = reader.fetch("SELECT workdir_json FROM tasks WHERE workdir_json IS NOT NULL ORDER BY id DESC LIMIT 100")
    for (text,) in rows:
        place = Path(json.loads(text)["path"]).parent
        if place.name == "tasks":
            return place.parent
    return None


def rewrite_paths(tx: Transaction, paths: Paths) -> int:
    """How many rows held paths of the old place. Doing it twice changes nothing."""
    pattern = json.dumps(str(project_of(paths.old)), ensure_ascii=False)[1:-1]
    for character in "\\%_":
        pattern = pattern.replace(character, f"\\{character}")
    changed = 0
    for table, (keys, columns) in _COLUMNS.items():
        where = " OR ".join(f"{column} LIKE :pattern ESCAPE '\\'" for column in columns)
        rows = tx.fetch(f"SELECT {', '.join((*keys, *columns))} FROM {table} WHERE {where}", pattern=f"%{pattern}%")
        for row in rows:
            old = dict(zip((*keys, *columns), row, strict=True))
            new = {name: _translated(name, old[name], paths.translate) for name in columns}
            if any(new[name] != old[name] for name in columns):
                assignments = ", ".join(f"{name} = :{name}" for name in columns)
                match = " AND ".join(f"{name} = :{name}" for name in keys)
                tx.execute(f"UPDATE {table} SET {assignments} WHERE {match}", **{**old, **new})
                changed += 1
    return changed


def _translated(column: str, value: str | None, translate: Callable[[str], str]) -> str | None:
    if value is None or not column.endswith("_json"):
        return None if value is None else translate(value)
    document = json.loads(value)
    changed = _walk(document, translate)
    return value if changed == document else json.dumps(changed, ensure_ascii=False)


def _walk(value: Any, translate: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return translate(value)
    if isinstance(value, list):
        return [_walk(item, translate) for item in value]
    if isinstance(value, dict):
        return {name: _walk(item, translate) for name, item in value.items()}
    return value


def detach_copy(tx: Transaction) -> tuple[int, int]:
    """End in the records what runs in the other home, and hold its tasks back. How many attempts and tasks."""
    opened = attempts.open_attempts(tx)
    for attempt in opened:
        attempts.end_attempt(
            tx, attempt.instance_id, attempt.number, AttemptEnd(outcome=AttemptOutcome.LOST, detail=_COPIED)
        )
        instance = moves.get_instance(tx, attempt.instance_id)
        if instance is None or instance.state in INACTIVE_STATES:
            continue
        end_waits_of(tx, instance.instance_id, "copied")
        try:
            moves.move_instance(tx, instance, moves.Move(to=AgentState.FAILED, by=_BY, reason=_COPIED, is_final=True))
        except InvalidOperationError:
            continue  # a termination, which is finished as after a crash
    for wait in all_open_waits(tx):
        if wait.kind is WaitKind.BACKOFF and wait.instance_id is not None:
            end_waits_of(tx, wait.instance_id, "copied")
    held = [
        task
        for task in tasks.tasks_in(tx, frozenset({TaskState.QUEUED, TaskState.RUNNING}))
        if task.state is TaskState.RUNNING or not task.is_held
    ]
    for task in held:
        tasks.change_task(tx, task, {"is_held": True}, to=TaskState.QUEUED, by=_BY, reason=_COPIED)
    tx.execute("UPDATE crews SET is_up = 0")
    return len(opened), len(held)
