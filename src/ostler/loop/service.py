"""The loops of one home: their rules, the waits that outside events end, and the pull requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ostler.errors import ConflictError, InvalidOperationError, OstlerError
from ostler.loop.blockers import cycles, wait_graph
from ostler.loop.collaborators import LoopCollaborators
from ostler.loop.rules import IterationRules
from ostler.model.access import Actor, Permission
from ostler.model.loop import (
    CiResult,
    Iteration,
    LoopSettings,
    OnClose,
    OnMerge,
    PullRequest,
    PullRequestState,
    TaskLoop,
)
from ostler.model.task import FINISHED_STATES, MAX_COMMENT, Task, TaskState
from ostler.model.validation import fault
from ostler.model.wait import Wait, WaitKind
from ostler.store import loops as loop_store
from ostler.store import tasks as task_store
from ostler.store import waits as wait_store
from ostler.store.transaction import Transaction
from ostler.tasks.context import BY
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.retry import new_wait

_log = logging.getLogger("ostler.loop")
_MAX_COMMENTS = 20
#: The cause of a wait for a person who has to make way for a merge.
_MERGE = "merge"


class Loops:
    """On behalf of the principal of an orchestrator."""

    def __init__(
        self,
        orchestrator: TaskOrchestrator,
        settings: LoopSettings | None = None,
        parts: LoopCollaborators | None = None,
    ) -> None:
        self.orchestrator = orchestrator
        self.settings = LoopSettings.coerced(settings)
        self.parts = parts or LoopCollaborators.of(orchestrator.tasks)
        self._store = orchestrator.manager.store

    def acting_as(self, orchestrator: TaskOrchestrator, settings: LoopSettings | None = None) -> Loops:
        """On behalf of another principal, and with the settings of another project where they are given."""
        return Loops(orchestrator, settings or self.settings, self.parts)

    def rules(self, task: Task) -> IterationRules | None:
        """None for a task without a loop."""
        return None if task.loop is None else IterationRules(self.parts)

    def new_loop(self, **settings: Any) -> TaskLoop:
        """The settings of the project, with those that are given over them."""
        base = {name: getattr(self.settings, name) for name in LoopSettings.__dataclass_fields__}
        return TaskLoop.from_dict({**base, **{name: value for name, value in settings.items() if value is not None}})

    def checked_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Checked, as a loop keeps them: people may write 30 or "30s"."""
        loop = self.new_loop(**settings)
        return {name: getattr(loop, name) for name in settings}

    async def put_in_loop(self, task: Task, agent: str | None = None, **settings: Any) -> Task:
        """An unfinished task; one that has a loop goes on with it, and with what is given now."""
        if task.is_finished:
            raise InvalidOperationError(f"{task.key} is {task.state}; a loop needs an unfinished task")
        loop = self.new_loop(**settings) if task.loop is None else task.loop.evolve(**settings)
        changes: dict[str, Any] = {"loop": loop.checked()}
        if agent is not None:
            changes["agent"] = agent
        return await self._store.run(task_store.change_task, task, changes, by=self.orchestrator.manager.actor)

    async def iterations(self, key: str) -> list[Iteration]:
        task = await self.orchestrator.get(key)
        return await self._store.read(loop_store.list_iterations, task.task_id)

    async def graph(self) -> dict[str, Any]:
        """Who waits for whom, and where that leads back."""
        await self.orchestrator.manager.require(Permission.TASKS_READ)
        graph = await self._store.read(wait_graph, self._space)
        return {"waits": {key: others for key, others in graph.items() if others}, "cycles": cycles(graph)}

    @property
    def _space(self) -> Any:
        return self.orchestrator.manager.principal.workspace_id

    # --- what ends waits -------------------------------------------------------------------------

    async def settle(self) -> None:
        """End every wait whose reason is over. It looks at what is, so that nothing that came early is lost."""
        for wait in await self._store.read(wait_store.all_open_waits):
            if wait.task_id is None or wait.wake_key is None:
                continue
            try:
                await self._settle(wait)
            except OstlerError as error:
                _log.warning("%s: %s", wait.reason, error)

    async def _settle(self, wait: Wait) -> None:
        kind, _, name = (wait.wake_key or "").partition(":")
        if kind == "task":
            await self._settle_dependency(wait, name)
        elif kind == "ci":
            result = await self._store.read(loop_store.get_ci_result, wait.workspace_id, name)
            if result is not None:
                outcome = "CI passed" if result.passed else "CI failed"
                answer = {"output": result.output[-4000:]} if result.output else None
                await self._store.run(task_store.end_task_wait, wait, outcome, answer, by=BY)
        elif kind == "pr":
            await self._settle_pull_request(wait, int(name))

    async def _settle_dependency(self, wait: Wait, key: str) -> None:
        """One that is not in the plan any more was finished, and is purged since."""
        task = None if wait.task_id is None else await self._store.read(task_store.get_task, wait.task_id)
        state = None if task is None else await self.parts.plan.state_of(task, key)
        if state is None or state in FINISHED_STATES:
            await self._store.run(task_store.end_task_wait, wait, f"{key} was {state or 'purged'}", by=BY)

    async def _settle_pull_request(self, wait: Wait, number: int) -> None:
        pull = await self._store.read(loop_store.get_pull_request, wait.workspace_id, number)
        task = await self._store.read(task_store.get_task, pull.task_id)
        if task is None or task.state is not TaskState.COMPLETED:
            return
        if pull.state is PullRequestState.CLOSED:
            move = await self._move_after_close(task, pull)
            await self._store.run(task_store.change_task, task, **move)
        elif pull.state is PullRequestState.OPEN and pull.ci == "pending" and pull.commit is not None:
            result = await self._store.read(loop_store.get_ci_result, wait.workspace_id, pull.commit)
            if result is not None:
                state = "passed" if result.passed else "failed"
                await self._store.run(loop_store.change_pull_request, pull, {"ci": state})
                if not result.passed:
                    await self.orchestrator.send_back(
                        task.key, f"CI failed on #{number}: {result.output}"[:MAX_COMMENT]
                    )

    async def report_ci(self, commit: str, *, passed: bool, output: str = "") -> CiResult:
        """What CI said of a commit. It is kept, also when nothing waits for it yet."""
        await self.orchestrator.manager.require(Permission.TASKS_WRITE)
        if not commit or len(commit) > 100:
            raise fault("commit", "must be the id of a commit", commit[:100])
        result = CiResult(
            workspace_id=self._space,
            commit=commit.lower(),
            passed=passed,
            output=output[-20_000:],
            reported_at=self.orchestrator.manager.now(),
        )
        kept = await self._store.run(loop_store.report_ci, result.checked(), self.orchestrator.manager.actor)
        await self.settle()
        return kept

    # --- pull requests ---------------------------------------------------------------------------

    async def pull_requests(self, *, include_ended: bool = False) -> list[PullRequest]:
        await self.orchestrator.manager.require(Permission.TASKS_READ)
        pulls = await self._store.read(loop_store.list_pull_requests, self._space, include_ended=True)
        current = [await self._current(pull) for pull in pulls]
        return [pull for pull in current if include_ended or pull.state is PullRequestState.OPEN]

    async def pull_request(self, number: int) -> PullRequest:
        await self.orchestrator.manager.require(Permission.TASKS_READ)
        return await self._current(await self._store.read(loop_store.get_pull_request, self._space, number))

    async def _current(self, pull: PullRequest) -> PullRequest:
        """An open one whose task was accepted or rejected by hand follows it."""
        if pull.state is not PullRequestState.OPEN:
            return pull
        task = await self._store.read(task_store.get_task, pull.task_id)
        ends = {TaskState.ACCEPTED: PullRequestState.MERGED, TaskState.REJECTED: PullRequestState.CLOSED}
        state = None if task is None else ends.get(task.state)
        return pull if state is None else await self._store.run(loop_store.change_pull_request, pull, {"state": state})

    async def comment(self, number: int, text: str) -> PullRequest:
        """What is to be done better. A fresh agent gets it."""
        pull = await self._open(number)
        if not text.strip() or len(text) > MAX_COMMENT:
            raise fault("comment", f"must be 1 to {MAX_COMMENT} characters", text[:100])
        changed = await self._store.run(loop_store.comment_on, pull, text, self.orchestrator.manager.actor)
        task = await self.orchestrator.get(pull.task_key)
        if task.state is TaskState.COMPLETED:
            await self.orchestrator.send_back(task.key, f"On pull request #{number}: {text}")
        return changed

    async def approve(self, number: int) -> PullRequest:
        pull = await self._open(number)
        names = tuple(dict.fromkeys((*pull.approved_by, self.orchestrator.manager.actor.name)))
        return await self._store.run(loop_store.change_pull_request, pull, {"approved_by": names})

    async def merge(self, number: int, *, unattended: bool = False) -> PullRequest:
        """Its task is accepted, or a fresh start goes on with the rest, as its loop says.

        A conflict, and changes of the user that stand in the way, are named and change nothing. With `unattended` that
        is no error: it becomes a wait for a person, and the pull request stays open.
        """
        pull = await self._open(number)
        if pull.ci == "failed":
            raise InvalidOperationError(f"CI failed on #{number}; comment on it, or accept its task {pull.task_key}")
        task = await self.orchestrator.get(pull.task_key)
        try:
            if (task.loop or TaskLoop()).on_merge is OnMerge.CONTINUE and task.state is TaskState.COMPLETED:
                return await self._merge_and_continue(task, pull)
            await self.orchestrator.accept(pull.task_key)
        except ConflictError as error:
            if not unattended:
                raise
            await self._leave_to_a_person(task, pull, str(error))
        return await self._current(pull)

    async def _merge_and_continue(self, task: Task, pull: PullRequest) -> PullRequest:
        accepted = await self.orchestrator.merge_work(task)
        comment = f"Pull request #{pull.number} was merged into {accepted.target if accepted else 'nothing'}. Go on."
        changes: dict[str, Any] = {
            "comments": (*task.comments, comment)[-_MAX_COMMENTS:],
            "accepted": None if accepted is None else accepted.to_dict(),
            "session": None,
        }
        return await self._store.run(_continue, task, pull, changes, comment, self.orchestrator.manager.actor)

    async def _leave_to_a_person(self, task: Task, pull: PullRequest, error: str) -> None:
        waits = await self._store.read(task_store.task_waits, task.task_id)
        if any((wait.detail or {}).get("cause") == _MERGE for wait in waits):
            return
        reason = f"pull request #{pull.number} could not be merged: {error}; then: ostler pr merge {pull.number}"
        wait = new_wait(self.orchestrator.tasks, task, WaitKind.HUMAN, reason, detail={"cause": _MERGE})
        await self._store.run(task_store.open_task_wait, task, wait, by=self.orchestrator.manager.actor)
        _log.warning("%s: %s", task.key, reason)

    async def close(self, number: int, *, reason: str | None = None) -> PullRequest:
        """Without a merge: its task is rejected or sent back, as its loop says."""
        pull = await self._open(number)
        task = await self.orchestrator.get(pull.task_key)
        if task.state is not TaskState.COMPLETED:
            return await self._store.run(loop_store.change_pull_request, pull, {"state": PullRequestState.CLOSED})
        move = await self._move_after_close(task, pull, reason)
        # In one commit: between two, the queue would see the close, and move the task without the reason.
        return await self._store.run(_close, task, pull, move)

    async def _move_after_close(self, task: Task, pull: PullRequest, reason: str | None = None) -> dict[str, Any]:
        comment = f"pull request #{pull.number} was closed without a merge{f': {reason}' if reason else ''}"
        by = self.orchestrator.manager.actor
        if (task.loop or TaskLoop()).on_close is OnClose.SEND_BACK:
            changes = await self.orchestrator.changes_to_send_back(task, comment)
            reason = changes["comments"][-1]
            return {"changes": changes, "to": TaskState.QUEUED, "reason": reason, "act": "task.send_back", "by": by}
        error = {"error": comment}
        return {"changes": error, "to": TaskState.REJECTED, "reason": comment, "act": "task.reject", "by": by}

    async def _open(self, number: int) -> PullRequest:
        await self.orchestrator.manager.require(Permission.TASKS_REVIEW)
        pull = await self.pull_request(number)
        if pull.state is not PullRequestState.OPEN:
            raise InvalidOperationError(f"pull request #{number} is {pull.state} already")
        return pull


def _close(tx: Transaction, task: Task, pull: PullRequest, move: Mapping[str, Any]) -> PullRequest:
    closed = loop_store.change_pull_request(tx, pull, {"state": PullRequestState.CLOSED})
    task_store.change_task(tx, task, **move)
    return closed


def _continue(
    tx: Transaction, task: Task, pull: PullRequest, changes: Mapping[str, Any], reason: str, by: Actor
) -> PullRequest:
    merged = loop_store.change_pull_request(tx, pull, {"state": PullRequestState.MERGED})
    task_store.change_task(tx, task, changes, to=TaskState.QUEUED, by=by, reason=reason, act="task.merge")
    return merged
