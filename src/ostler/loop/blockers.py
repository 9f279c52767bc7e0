"""What an agent says it is blocked on, as durable waits; and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from ostler.model.loop import Breakpoint
from ostler.model.task import Task, TaskState
from ostler.model.wait import Wait, WaitKind
from ostler.store import tasks as task_rows
from ostler.store import waits as wait_rows
from ostler.store.transaction import Reader
from ostler.tasks.retry import new_wait
from ostler.tasks.shared import Tasks

_HUMAN = ("human", "you", "person")


@dataclass
class Blockers:
    """The blockers of one breakpoint, sorted by what they are."""

    waits: list[Wait] = field(default_factory=list)
    #: Over already, or never to come; told to the next agent.
    told: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    wants_ci: bool = False


def sort_blockers(tasks: Tasks, task: Task, said: Breakpoint, states: Mapping[str, TaskState | None]) -> Blockers:
    """`states` are those of the tasks that it may name, by their keys."""
    found = Blockers()
    for name in said.blocked_on or ("human",):
        word, _, question = name.partition(":")
        state = states.get(name)
        if word.strip().lower() in _HUMAN:
            reason = question.strip() or said.summary or "the agent is blocked and did not say on what"
            found.waits.append(new_wait(tasks, task, WaitKind.HUMAN, reason))
        elif word.strip().lower() == "ci":
            found.wants_ci = True
        elif state is None:
            found.unknown.append(name)
        elif state in {TaskState.ACCEPTED, TaskState.REJECTED}:
            found.told.append(f"{name} is {state}, so it is not waited for")
        else:
            found.waits.append(new_wait(tasks, task, WaitKind.DEPENDENCY, f"waits for {name}", wake_key=f"task:{name}"))
    return found


# --- who waits for whom ------------------------------------------------------------------------------


def wait_graph(reader: Reader, workspace_id: UUID) -> dict[str, list[str]]:
    """Key of a task to the keys that it waits for: what it depends on, and what it said it is blocked on."""
    unfinished = [
        task
        for task in task_rows.tasks_in(reader, frozenset(TaskState) - {TaskState.ACCEPTED, TaskState.REJECTED})
        if task.workspace_id == workspace_id
    ]
    edges = {task.key: list(task_rows.unmet(reader, task)) for task in unfinished}
    keys = {task.task_id: task.key for task in unfinished}
    for wait in wait_rows.all_open_waits(reader):
        if wait.kind is WaitKind.DEPENDENCY and wait.task_id in keys and wait.wake_key is not None:
            edges[keys[wait.task_id]].append(wait.wake_key.removeprefix("task:"))
    return {key: sorted(set(others)) for key, others in edges.items()}


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Each as the keys on the way, from the least one round to itself."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        way = path_to(graph, start, start)
        if way is not None:
            found.setdefault(frozenset(way), way)
    return list(found.values())


def path_to(graph: Mapping[str, Iterable[str]], start: str, goal: str) -> list[str] | None:
    """A way of at least one step."""
    waiting, seen = [[start]], set[str]()
    while waiting:
        way = waiting.pop(0)
        for following in graph.get(way[-1], ()):
            if following == goal:
                return [*way, goal]
            if following not in seen:
                seen.add(following)
                waiting.append([*way, following])
    return None
