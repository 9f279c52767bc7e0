"""The loops of one home: their rules, the waits that outside events end, and the pull requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ostler.errors import InvalidOperationError, OstlerError
from ostler.loop.blockers import cycles, wait_graph
from ostler.loop.parts import LoopParts
from ostler.loop.rules import IterationRules
from ostler.model.access import Permission
from ostler.model.loop import CiResult, Iteration, LoopSettings, OnClose, PullRequest, PullRequestState, TaskLoop
from ostler.model.task import FINISHED_STATES, MAX_COMMENT, Task, TaskState
from ostler.model.validation import fault
from ostler.model.wait import Wait
from ostler.store import loops as rows
from ostler.store import tasks as task_rows
from ostler.store import waits as wait_rows
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.shared import BY

_log = logging.getLogger("ostler.loop")


class Loops:
    """On behalf of the principal of an orchestrator."""

    def __init__(
        self, orchestrator: TaskOrchestrator, settings: LoopSettings | None = None, parts: LoopParts | None = None
    ) -> None:
        self.orchestrator = orchestrator
        self.settings = LoopSettings.coerced(settings)
        self.parts = parts or LoopParts.of(orchestrator.tasks)
        self._store = orchestrator.manager.store

    def acting_as(self, orchestrator: TaskOrchestrator) -> Loops:
        return Loops(orchestrator, self.settings, self.parts)

    def rules(self, task: Task) -> IterationRules | None:
        """None for a task without a loop."""
        return None if task.loop is None else IterationRules(self.parts)

    def new_loop(self, **given: Any) -> TaskLoop:
        """The settings of the project, with those that are given over them."""
        base = {name: getattr(self.settings, name) for name in LoopSettings.__dataclass_fields__}
        return TaskLoop.from_dict({**base, **{name: value for name, value in given.items() if value is not None}})

    def given(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Checked, as a loop keeps them: people may write 30 or "30s"."""
        loop = self.new_loop(**settings)
        return {name: getattr(loop, name) for name in settings}

    async def put_in_loop(self, task: Task, agent: str | None = None, **given: Any) -> Task:
        """An unfinished task; one that has a loop goes on with it, and with what is given now."""
        if task.is_finished:
            raise InvalidOperationError(f"{task.key} is {task.state}; a loop needs an unfinished task")
        loop = self.new_loop(**given) if task.loop is None else task.loop.evolve(**given)
        changes: dict[str, Any] = {"loop": loop.checked()}
        if agent is not None:
            changes["agent"] = agent
        return await self._store.run(task_rows.change_task, task, changes, by=self.orchestrator.manager.actor)

    async def iterations(self, key: str) -> list[Iteration]:
        task = await self.orchestrator.get(key)
        return await self._store.read(rows.list_iterations, task.task_id)

    async def graph(self) -> dict[str, Any]:
        """Who waits for whom, and where that leads back."""
        await self.orchestrator.manager.require(Permission.TASKS_READ)
        found = await self._store.read(wait_graph, self._space)
        return {"waits": {key: others for key, others in found.items() if others}, "cycles": cycles(found)}

    @property
    def _space(self) -> Any:
        return self.orchestrator.manager.principal.workspace_id

    # --- what ends waits -------------------------------------------------------------------------

    async def settle(self) -> None:
        """End every wait whose reason is over. It looks at what is, so that nothing that came early is lost."""
        for wait in await self._store.read(wait_rows.all_open_waits):
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
            result = await self._store.read(rows.get_ci_result, wait.workspace_id, name)
            if result is not None:
                said = "CI passed" if result.passed else "CI failed"
                answer = {"output": result.output[-4000:]} if result.output else None
                await self._store.run(task_rows.end_task_wait, wait, said, answer, by=BY)
        elif kind == "pr":
            await self._settle_pull_request(wait, int(name))

    async def _settle_dependency(self, wait: Wait, key: str) -> None:
        """One that is not in the plan any more was finished, and is purged since."""
        task = None if wait.task_id is None else await self._store.read(task_rows.get_task, wait.task_id)
        state = None if task is None else await self.parts.plan.state_of(task, key)
        if state is None or state in FINISHED_STATES:
            await self._store.run(task_rows.end_task_wait, wait, f"{key} was {state or 'purged'}", by=BY)

    async def _settle_pull_request(self, wait: Wait, number: int) -> None:
        pull = await self._store.read(rows.get_pull_request, wait.workspace_id, number)
        task = await self._store.read(task_rows.get_task, pull.task_id)
        if task is None or task.state is not TaskState.COMPLETED:
            return
        if pull.state is PullRequestState.CLOSED:
            await self._closed(task, pull)
        elif pull.state is PullRequestState.OPEN and pull.ci == "pending" and pull.commit is not None:
            result = await self._store.read(rows.get_ci_result, wait.workspace_id, pull.commit)
            if result is not None:
                state = "passed" if result.passed else "failed"
                await self._store.run(rows.change_pull_request, pull, {"ci": state})
                if not result.passed:
                    await self.orchestrator.send_back(
                        task.key, f"CI failed on #{number}: {result.output}"[:MAX_COMMENT]
                    )

    async def report_ci(self, commit: str, *, passed: bool, output: str = "") -> CiResult:
        """What CI said of a commit. It is kept, also when nobody waits for it yet."""
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
        kept = await self._store.run(rows.report_ci, result.checked(), self.orchestrator.manager.actor)
        await self.settle()
        return kept

    # --- pull requests ---------------------------------------------------------------------------

    async def pull_requests(self, *, include_ended: bool = False) -> list[PullRequest]:
        await self.orchestrator.manager.require(Permission.TASKS_READ)
        found = await self._store.read(rows.list_pull_requests, self._space, include_ended=True)
        current = [await self._current(pull) for pull in found]
        return [one for one in current if include_ended or one.state is PullRequestState.OPEN]

    async def pull_request(self, number: int) -> PullRequest:
        await self.orchestrator.manager.require(Permission.TASKS_READ)
        return await self._current(await self._store.read(rows.get_pull_request, self._space, number))

    async def _current(self, pull: PullRequest) -> PullRequest:
        """An open one whose task was accepted or rejected by hand follows it."""
        if pull.state is not PullRequestState.OPEN:
            return pull
        task = await self._store.read(task_rows.get_task, pull.task_id)
        ends = {TaskState.ACCEPTED: PullRequestState.MERGED, TaskState.REJECTED: PullRequestState.CLOSED}
        state = None if task is None else ends.get(task.state)
        return pull if state is None else await self._store.run(rows.change_pull_request, pull, {"state": state})

    async def comment(self, number: int, text: str) -> PullRequest:
        """What is to be done better. A fresh agent gets it."""
        pull = await self._open(number)
        if not text.strip() or len(text) > MAX_COMMENT:
            raise fault("comment", f"must be 1 to {MAX_COMMENT} characters", text[:100])
        changed = await self._store.run(rows.comment_on, pull, text, self.orchestrator.manager.actor)
        task = await self.orchestrator.get(pull.task_key)
        if task.state is TaskState.COMPLETED:
            await self.orchestrator.send_back(task.key, f"On pull request #{number}: {text}")
        return changed

    async def approve(self, number: int) -> PullRequest:
        pull = await self._open(number)
        names = tuple(dict.fromkeys((*pull.approved_by, self.orchestrator.manager.actor.name)))
        return await self._store.run(rows.change_pull_request, pull, {"approved_by": names})

    async def merge(self, number: int) -> PullRequest:
        """Its task is accepted. A conflict is named, and changes nothing."""
        pull = await self._open(number)
        if pull.ci == "failed":
            raise InvalidOperationError(f"CI failed on #{number}; comment on it, or accept its task {pull.task_key}")
        await self.orchestrator.accept(pull.task_key)
        return await self._current(pull)

    async def close(self, number: int, *, reason: str | None = None) -> PullRequest:
        """Without a merge: its task is rejected or sent back, as its loop says."""
        pull = await self._open(number)
        closed = await self._store.run(rows.change_pull_request, pull, {"state": PullRequestState.CLOSED})
        task = await self.orchestrator.get(pull.task_key)
        if task.state is TaskState.COMPLETED:
            await self._closed(task, closed, reason)
        return closed

    async def _closed(self, task: Task, pull: PullRequest, reason: str | None = None) -> None:
        said = f"pull request #{pull.number} was closed without a merge{f': {reason}' if reason else ''}"
        if (task.loop or TaskLoop()).on_close is OnClose.SEND_BACK:
            await self.orchestrator.send_back(task.key, said)
        else:
            await self.orchestrator.reject(task.key, reason=said)

    async def _open(self, number: int) -> PullRequest:
        await self.orchestrator.manager.require(Permission.TASKS_REVIEW)
        pull = await self.pull_request(number)
        if pull.state is not PullRequestState.OPEN:
            raise InvalidOperationError(f"pull request #{number} is {pull.state} already")
        return pull
