"""Why a task is where it is, and what would change that: one answer for every state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from ostler.durations import due, since, span
from ostler.home import SETTINGS_FILE
from ostler.model.task import Task, TaskState, TaskWhy
from ostler.model.wait import Wait, WaitKind
from ostler.store import tasks as task_store
from ostler.store.transaction import Reader
from ostler.tasks.context import Taker, TaskContext
from ostler.tasks.make_room import brake
from ostler.tasks.retry import first_line

_S = TaskState
_WAITS_FOR = {
    WaitKind.QUOTA: "it waits for a limit to pass",
    WaitKind.CI: "it waits for CI",
    WaitKind.PULL_REQUEST: "it waits for its pull request",
    WaitKind.DEPENDENCY: "it waits for another task, which its agent named",
}
#: What comes before the command in the reason of a parked task.
_ADVICES = ("; go on: ", ". Answer to let it go on: ")
#: What makes room on the disk.
_ROOM = (
    "`ostler df` shows what takes it",
    "accepted and rejected work makes room by itself: review what `ostler task list` shows",
    f"or raise `disk` below [retention] of {SETTINGS_FILE}, then `ostler restart-daemon`",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    task: Task
    now: datetime
    #: Those that are open.
    waits: tuple[Wait, ...] = ()
    #: The tasks that it depends on and that are not accepted.
    unmet: Mapping[str, TaskState] = field(default_factory=dict)
    #: What would take it up: the queue, or crews.
    takers: tuple[Taker, ...] = ()
    #: Tasks that are taken up before it.
    ahead: tuple[str, ...] = ()
    #: Why no new task begins at all: the limit of the disk.
    brake: str | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    verdict: str
    evidence: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


async def explain_task(tasks: TaskContext, workspace_id: UUID, key: str) -> TaskWhy:
    task, waits, unmet, claimable = await tasks.store.read(_read, workspace_id, key)
    takers = tasks.takers_of(task)
    names = {taker.name for taker in takers}
    keys = [other.key for other in claimable if any(taker.name in names for taker in tasks.takers_of(other))]
    facts = TaskFacts(
        task=task,
        now=tasks.manager.now(),
        waits=tuple(waits),
        unmet=unmet,
        takers=takers,
        ahead=tuple(keys[: keys.index(task.key)]) if task.key in keys else (),
        brake=brake(tasks.manager.disk_now),
    )
    return explain(facts)


def _read(reader: Reader, workspace_id: UUID, key: str) -> tuple[Task, list[Wait], Mapping[str, TaskState], list[Task]]:
    task, waits = task_store.task_with_waits(reader, workspace_id, key)
    claimable = task_store.claimable_tasks(reader, workspace_id, 1000) if task.state is TaskState.QUEUED else []
    return task, waits, task_store.unmet(reader, task), claimable


def explain(facts: TaskFacts) -> TaskWhy:
    task = facts.task
    match task.state:
        case _S.QUEUED:
            answer = _queued(facts)
        case _S.RUNNING:
            answer = _running(facts)
        case _S.COMPLETED:
            answer = _completed(facts)
        case _S.ACCEPTED:
            answer = _Answer("it is accepted", changes=(f"`ostler undo {task.key}` takes it back out of its branch",))
        case _S.REJECTED:
            answer = _Answer("it is rejected, which is final", changes=("nothing; add it as a new task",))
    return TaskWhy(
        key=task.key,
        state=task.state,
        verdict=answer.verdict,
        evidence=(*answer.evidence, *_history(facts)),
        what_would_change_it=answer.changes,
    )


def _history(facts: TaskFacts) -> list[str]:
    task, lines = facts.task, []
    if task.attempt:
        # Parked, it has all its failures before it again: those that parked it stand in the wait.
        spent = [wait.detail["failures"] for wait in facts.waits if wait.detail and "failures" in wait.detail]
        failures = max(spent, default=task.failures)
        lines.append(f"attempts: {task.attempt}; failures that count: {failures} of {task.max_failures}")
    if task.error and not any(wait.reason and first_line(task.error) in wait.reason for wait in facts.waits):
        lines.append(f"at last: {first_line(task.error)}")
    return lines


def _running(facts: TaskFacts) -> _Answer:
    task = facts.task
    if task.instance_id is None:
        evidence = f"it was claimed {since(task.updated_at, facts.now)}"
        return _Answer(
            f"attempt {task.attempt} is being prepared", (evidence,), ("its agent starts when that is done",)
        )
    agent = f"{task.key}-{task.attempt}"
    return _Answer(
        f"attempt {task.attempt} is under way",
        (f"its agent is {agent}{'' if task.member is None else f', the member {task.member} of its crew'}",),
        (
            f"it is completed when its agent has ended and its checks pass; `ostler why {agent}` says more",
            f"`ostler task requeue {task.key}` begins it again; `ostler task cancel {task.key}` ends it",
        ),
    )


def _completed(facts: TaskFacts) -> _Answer:
    key = facts.task.key
    passed = sum(receipt.passed for receipt in facts.task.receipts)
    evidence = [f"{passed} of its checks passed"] if passed else []
    evidence += [wait.reason for wait in facts.waits if wait.reason]
    verbs = f"`ostler accept {key}`, `ostler task send-back {key}`, `ostler reject {key} -m WHY`"
    return _Answer("it is done and waits for your review", tuple(evidence), (f"`ostler diff {key}` shows it; {verbs}",))


def _queued(facts: TaskFacts) -> _Answer:
    """The most lasting reason first."""
    key = facts.task.key
    if any(wait.kind is WaitKind.RESUME for wait in facts.waits):
        changes = (
            f"it is given back when the session is left; `ostler resume-session {key}` opens that again",
            f"`ostler task requeue {key}` gives it back to its agent",
        )
        return _Answer("it is taken over by hand", changes=changes)
    if facts.task.is_held:
        return _Answer("it is held back", changes=(f"`ostler task requeue {key}` releases it",))
    people = [wait for wait in facts.waits if wait.kind is WaitKind.HUMAN]
    if people:
        changes = (
            f"`ostler task requeue {key}` or `ostler answer {key} TEXT` lets it go on",
            f"`ostler reject {key} -m WHY` ends it",
        )
        return _Answer("it waits for you", tuple(wait.reason or "" for wait in people), changes)
    if facts.unmet:
        return _dependent(facts)
    if facts.waits:
        return _waiting(facts, facts.waits[0])
    trouble = untaken(facts.task, facts.takers)
    if trouble is not None:
        return trouble
    if facts.brake is not None:
        return _Answer("the limit of the disk is reached", (facts.brake,), _ROOM)
    return _in_turn(facts)


def _dependent(facts: TaskFacts) -> _Answer:
    evidence = tuple(f"{key} is {state}" for key, state in facts.unmet.items())
    dead = [key for key, state in facts.unmet.items() if state is _S.REJECTED]
    done = [key for key, state in facts.unmet.items() if state is _S.COMPLETED]
    changes = [f"it goes on when {'it is' if len(facts.unmet) == 1 else 'all of them are'} accepted"]
    changes += [f"`ostler accept {key}`" for key in done]
    if dead:
        changes = [f"{', '.join(dead)} will never be accepted; `ostler task cancel {facts.task.key}` ends it"]
    return _Answer(f"it waits for {', '.join(facts.unmet)}", evidence, tuple(changes))


def _waiting(facts: TaskFacts, wait: Wait) -> _Answer:
    evidence = (wait.reason,) if wait.reason else ()
    by_hand = f"`ostler task requeue {facts.task.key}` lets it go on now"
    when = () if wait.due_at is None else (f"it goes on {due(wait.due_at, facts.now)}",)
    verdict = _WAITS_FOR.get(wait.kind, "it failed and is tried again" if facts.task.failures else "it waits")
    return _Answer(verdict, evidence, (*when, by_hand))


def _in_turn(facts: TaskFacts) -> _Answer:
    taker = max(facts.takers, key=lambda taker: taker.places - len(taker.at_work))
    evidence = []
    if taker.at_work:
        evidence.append(f"{taker.name} works on {', '.join(taker.at_work)}")
    if facts.ahead:
        evidence.append(f"before it {'is' if len(facts.ahead) == 1 else 'are'} {_some(facts.ahead)}")
    if len(taker.at_work) < taker.places:
        return _Answer(f"{taker.name} begins it now", tuple(evidence))
    places = "the only place" if taker.places == 1 else f"all {taker.places} places"
    changes = ("it is begun when one of them is done",) if taker.places > 1 else ("it is begun when that is done",)
    return _Answer(f"{places} of {taker.name} {'is' if taker.places == 1 else 'are'} taken", tuple(evidence), changes)


def _some(keys: tuple[str, ...], most: int = 5) -> str:
    rest = len(keys) - most
    return ", ".join(keys[:most]) + (f" and {rest} more" if rest > 0 else "")


def untaken(task: Task, takers: tuple[Taker, ...]) -> _Answer | None:
    """Why nothing will take a queued task up; None where something will."""
    if any(taker.is_up and taker.places and taker.trouble is None for taker in takers):
        return None
    if not takers:
        if task.agent is None:
            changes = ('add it with `--agent NAME`, or bring up a crew that takes it (`tasks = "*"` or its tag)',)
            return _Answer("nothing takes it up: it names no agent, and no crew takes it", changes=changes)
        return _Answer("nothing takes it up: no queue is worked here", changes=("`ostler up` starts the daemon",))
    taker = takers[0]
    if not taker.is_up:
        return _Answer(f"{taker.name} takes it, and is not up", _known(taker), (taker.cure,))
    if taker.trouble is not None:
        return _Answer(f"{taker.name} cannot begin anything now", _known(taker), (taker.cure,))
    return _Answer(f"{taker.name} has no places", _known(taker), (taker.cure,))


def _known(taker: Taker) -> tuple[str, ...]:
    return () if taker.trouble is None else (taker.trouble,)


# --- in a few words ----------------------------------------------------------------------------------


def next_step(facts: TaskFacts) -> str:
    """What it waits for, or what a person can do with it, for a list."""
    task = facts.task
    match task.state:
        case _S.COMPLETED:
            return f"{_merged_part(task)}needs review: ostler diff {task.key}"
        case _S.REJECTED:
            return first_line(task.error) if task.error else ""
        case _S.QUEUED:
            return _queued_shortly(facts)
        case _:
            return ""


def _queued_shortly(facts: TaskFacts) -> str:
    task = facts.task
    if any(wait.kind is WaitKind.RESUME for wait in facts.waits):
        return f"taken over by hand; go on: ostler resume-session {task.key}"
    if task.is_held:
        return f"held; release it: ostler task requeue {task.key}"
    if facts.unmet:
        return f"waits for {', '.join(facts.unmet)}"
    if facts.waits:
        return _waiting_shortly(facts)
    trouble = untaken(task, facts.takers)
    if trouble is None:
        return "" if facts.brake is None else "the limit of the disk is reached: ostler df"
    return "names no agent" if task.agent is None and not facts.takers else trouble.verdict


def _waiting_shortly(facts: TaskFacts) -> str:
    """What to do first, or when it goes on: a narrow list cuts the end, and reasons are long."""
    key, wait = facts.task.key, facts.waits[0]
    people = [wait for wait in facts.waits if wait.kind is WaitKind.HUMAN]
    if not people:
        again = "" if wait.due_at is None else f"again in {span(wait.due_at - facts.now)}; "
        return f"{again}{wait.reason or wait.kind}"
    reason, by_cause = people[0].reason or "", (people[0].detail or {}).get("cause") is not None
    for advice in _ADVICES:
        before, _, command = reason.rpartition(advice)
        if before and key in command:  # the end of a long reason is cut
            return f"go on: {command}; {before}"
    command = f"go on: ostler task requeue {key}" if by_cause else f"answer: ostler answer {key} yes"
    return f"{command}; {reason}" if reason else command


def _merged_part(task: Task) -> str:
    if task.accepted is None:
        return ""
    files = task.accepted["files"]
    return f"{files - task.accepted['left']} of {files} files accepted; "
