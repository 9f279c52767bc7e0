"""What an agent says it is blocked on, as durable waits; and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from ostler.model.loop import Breakpoint
from ostler.model.task import Task, TaskState
from ostler.model.wait import Wait, WaitKind
from ostler.store import tasks as task_store
from ostler.store import waits as wait_store
from ostler.store.transaction import Reader
from ostler.tasks.context import TaskContext
from ostler.tasks.retry import new_wait

_HUMAN = ("human", "you", "person")


@dataclass
class Blockers:
    """The blockers of one breakpoint, sorted by what they are."""

    waits: list[Wait] = field(default_factory=list)
    #: Over already, or never to come; the next agent gets them as comments.
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    wants_ci: bool = False


def sort_blockers(
    tasks: TaskContext, task: Task, signal: Breakpoint, states: Mapping[str, TaskState | None]
) -> Blockers:
    """`states` are those of the tasks that it may name, by their keys."""
    blockers = Blockers()
    for name in signal.blocked_on or ("human",):
        word, _, question = name.partition(":")
        state = states.get(name)
        if word.strip().lower() in _HUMAN:
            reason = question.strip() or signal.summary or "the agent is blocked and did not say on what"
            blockers.waits.append(new_wait(tasks, task, WaitKind.HUMAN, reason))
        elif word.strip().lower() == "ci":
            blockers.wants_ci = True
        elif state is None:
            blockers.unknown.append(name)
        elif state in {TaskState.ACCEPTED, TaskState.REJECTED}:
            blockers.notes.append(f"{name} is {state}, so it is not waited for")
        else:
            blockers.waits.append(
                new_wait(tasks, task, WaitKind.DEPENDENCY, f"waits for {name}", wake_key=f"task:{name}")
            )
    return blockers


# --- who waits for whom ------------------------------------------------------------------------------


def wait_graph(reader: Reader, workspace_id: UUID) -> dict[str, list[str]]:
    """Key of a task to the keys that it waits for: what it depends on, and what it said it is blocked on."""
    unfinished = [
        task
        for task in task_store.tasks_in(reader, frozenset(TaskState) - {TaskState.ACCEPTED, TaskState.REJECTED})
        if task.workspace_id == workspace_id
    ]
    edges = {task.key: list(task_store.unmet(reader, task)) for task in unfinished}
    keys = {task.task_id: task.key for task in unfinished}
    for wait in wait_store.all_open_waits(reader):
        if wait.kind is WaitKind.DEPENDENCY and wait.task_id in keys and wait.wake_key is not None:
            edges[keys[wait.task_id]].append(wait.wake_key.removeprefix("task:"))
    return {key: sorted(set(others)) for key, others in edges.items()}


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Each as the keys on the way, from the least one round to itself."""
    cycles_by_keys: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        way = path_to(graph, start, start)
        if way is not None:
            cycles_by_keys.setdefault(frozenset(way), way)
    return list(cycles_by_keys.values())


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
