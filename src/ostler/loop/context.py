"""What a fresh agent is told: the task, and a bounded summary of what came before it. Never the whole history."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ostler.model.loop import ContextSnapshot, Iteration, TaskLoop
from ostler.model.task import Task
from ostler.model.text import clipped
from ostler.model.wait import Wait, WaitKind
from ostler.store import loops as loop_store
from ostler.store import tasks as task_store
from ostler.store.transaction import Reader
from ostler.tasks.attempt import own_program
from ostler.tasks.context import TaskContext
from ostler.workdirs.records import Snapshot, Workdir

_SHOWN_FILES = 50
_SHOWN_ENDS = 10
_MAX_TEXT = 4000
#: Nothing that an agent has to know.
_TIMED = frozenset({WaitKind.BACKOFF, WaitKind.QUOTA})


class ContextBuilder:
    """Takes snapshots, and makes summaries of them."""

    def __init__(self, tasks: TaskContext) -> None:
        self._tasks = tasks

    async def capture(self, task: Task, workdir: Workdir, files: Snapshot | None) -> ContextSnapshot:
        """Before every start, the first too."""
        loop = task.loop or TaskLoop()
        earlier, states, ended = await self._tasks.store.read(_read_history, task)
        last = earlier[-1] if earlier else None
        return ContextSnapshot(
            task_id=task.key,
            title=task.title,
            spawn_count=task.attempt,
            retry_count=loop.retries,
            max_retries=loop.max_retries,
            branch=workdir.branch,
            commit=None if files is None else files.head or files.base,
            base=workdir.base,
            changed_files=() if files is None else tuple(entry.path for entry in files.files[:_SHOWN_FILES]),
            dependencies=states,
            blockers=tuple(_blocker(wait) for wait in ended if wait.kind not in _TIMED),
            last_signal=None if last is None or last.breakpoint is None else last.breakpoint.to_dict(),
            comments=tuple(
                {"from": _origin(text), "text": clipped(text, _MAX_TEXT)} for text in dict.fromkeys(task.comments[-5:])
            ),
            history=tuple(_line(entry) for entry in earlier[-_SHOWN_ENDS:]),
            taken_at=self._tasks.manager.now(),
        )

    def prompt(self, task: Task, snapshot: ContextSnapshot) -> str:
        loop = task.loop or TaskLoop()
        parts = [task.task.strip()]
        if summary := self.summary(snapshot, loop.summary_limit):
            parts.append(summary)
        parts.append(_instructions(task, loop))
        return "\n\n".join(parts) + "\n"

    def summary(self, snapshot: ContextSnapshot, limit: int = 8000) -> str:
        """What came from an agent or a person is quoted, with its origin: it is data, not an instruction of ours."""
        lines: list[str] = []
        if snapshot.history or snapshot.comments or snapshot.blockers or snapshot.dependencies:
            lines.append(
                f"You are start {snapshot.spawn_count} of {snapshot.task_id}, with a fresh context. What is known:"
            )
            lines += [f"- {line}" for line in _facts(snapshot)]
            for blocker in snapshot.blockers:
                lines += _quoted(
                    f"What was waited for, {blocker['what']}, ended: {blocker['outcome']}", blocker.get("answer")
                )
            for comment in reversed(snapshot.comments):  # the newest first, for the end is cut
                lines += _quoted(f"Said by {comment['from']}", comment["text"])
        text = "\n".join(lines)
        return text if len(text) <= limit else f"{text[: limit - 40].rstrip()}\n(shortened to {limit} characters)"


def _read_history(reader: Reader, task: Task) -> tuple[list[Iteration], dict[str, str], list[Wait]]:
    earlier = [
        iteration
        for iteration in loop_store.list_iterations(reader, task.task_id, 20)
        if iteration.number < task.attempt
    ]
    states = {}
    for key in task.depends_on:
        dependency = task_store.find_task(reader, task.workspace_id, key)
        states[key] = "accepted" if dependency is None else str(dependency.state)
    since = earlier[-1].started_at if earlier else task.created_at
    return earlier, states, loop_store.waits_ended_since(reader, task.task_id, since)


def _blocker(wait: Wait) -> dict[str, Any]:
    what = wait.reason or str(wait.kind)
    blocker: dict[str, Any] = {"what": what, "kind": str(wait.kind), "outcome": wait.outcome or ""}
    if wait.answer:
        blocker["answer"] = clipped("\n".join(f"{key}: {value}" for key, value in wait.answer.items()), _MAX_TEXT)
    return blocker


def _origin(comment: str) -> str:
    if comment.startswith("the check `"):
        return "a check that Ostler ran"
    if comment.startswith("CI "):
        return "CI"
    return "Ostler" if comment.startswith("start ") else "a reviewer"


def _line(iteration: Iteration) -> str:
    first = (iteration.summary or "").strip().splitlines()[:1]
    summary = f': "{clipped(first[0], 200)}"' if first else ""
    return f"start {iteration.number} ended by {iteration.ended_by or 'a kill'}{summary}"


def _facts(snapshot: ContextSnapshot) -> Iterable[str]:
    yield from snapshot.history
    if snapshot.branch is not None:
        yield f"branch {snapshot.branch} at {(snapshot.commit or '')[:12]}, begun from {(snapshot.base or '')[:12]}"
    if snapshot.changed_files:
        yield f"changed so far: {', '.join(snapshot.changed_files)}"
    for key, state in snapshot.dependencies.items():
        yield f"it depends on {key}, which is {state}"
    if snapshot.retry_count:
        yield f"{snapshot.retry_count} of {snapshot.max_retries} retries are spent"


def _quoted(head: str, text: str | None) -> list[str]:
    return [f"{head}{':' if text else '.'}", *(f"> {line}" for line in (text or "").splitlines())]


def _instructions(task: Task, loop: TaskLoop) -> str:
    program = own_program()
    lines = [
        f"When you stop, say where you stand, by one of{'' if program is None else f' (ostler is {program})'}:",
        '- ostler signal complete -m "what you did"',
        '- ostler signal blocked --on T002 -m "why" (a task, ci, or "human: your question")',
        '- ostler signal pr -m "what is to be reviewed"',
        (
            f'or write into communications.json in your work directory: {{"agent-{task.key}": {{"lifecycle_state": '
            f'"complete", "breakpoint": {{"type": "task_complete", "task_id": "{task.key}", "summary": "..."}}}}}}.'
        ),
    ]
    if loop.until is not None:
        lines.append(f"Or print {loop.until} when all is done.")
    return "\n".join(lines)
