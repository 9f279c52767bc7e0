"""One iteration: a snapshot, a fresh instance, work until a breakpoint, and what follows from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ostler.aio import first_of
from ostler.clock import Deadline
from ostler.errors import NotFoundError, ValidationError
from ostler.lifecycle.job import JOB_ID
from ostler.loop.blockers import path_to, sort_blockers, wait_graph
from ostler.loop.collaborators import LocalCi, LoopCollaborators
from ostler.loop.context import ContextBuilder
from ostler.loop.signals import SignalFile, breakpoint_of, last_breakpoint
from ostler.model.events import AgentSignalEvent
from ostler.model.instance import AgentInstance
from ostler.model.loop import Breakpoint, BreakpointType, Iteration, PullRequest, TaskLoop
from ostler.model.task import Task, TaskState
from ostler.model.text import clipped
from ostler.model.wait import Wait, WaitKind
from ostler.store import loops as loop_store
from ostler.store import requests as request_store
from ostler.store import tasks as task_store
from ostler.store.transaction import Transaction
from ostler.tasks import attempt
from ostler.tasks.attempt import AttemptFailedError, AttemptRules, AttemptWaitsError
from ostler.tasks.context import BY, MAX_LOST
from ostler.tasks.proof import checks_of
from ostler.tasks.retry import new_wait
from ostler.workdirs.records import Snapshot, Workdir

_log = logging.getLogger("ostler.loop")
AT_BREAKPOINT = "it reached a breakpoint"
#: The cause of a failure that would come in the same way again: a person has to look.
HOPELESS = "hopeless"
_MAX_COMMENTS = 20
_MAX_TEXT = 20_000


class IterationRules(AttemptRules):
    """Of one attempt at a task that has a loop."""

    keeps_directory = True

    def __init__(self, parts: LoopCollaborators) -> None:
        super().__init__(parts.tasks)
        self.parts = parts
        self.builder = ContextBuilder(parts.tasks)
        self._iteration: Iteration | None = None
        self._file: SignalFile | None = None
        self._breakpoint: Breakpoint | None = None
        self._ended_by: str | None = None
        self._before = (0, 0.0)
        self._ci_is_told_later = False

    # --- before ----------------------------------------------------------------------------------

    async def prepare(self, task: Task) -> tuple[Task, Workdir]:
        task, workdir = await self.parts.workspaces.prepare(task)
        self._before = (task.tokens, task.cost_usd or 0.0)
        self._file = SignalFile.of(self.tasks, task, workdir)
        self._iteration = await self.tasks.store.read(loop_store.get_iteration, task.task_id, task.attempt)
        if self._iteration is None:
            task = await self._renew_allowance(task)
            await asyncio.to_thread(self._file.clear)
            files = await self.parts.branches.snapshot(task, workdir) if task.attempt > 1 else None
            snapshot = await self.builder.capture(task, workdir, files)
            begun = Iteration(
                task_id=task.task_id,
                number=task.attempt,
                snapshot=snapshot,
                prompt=self.builder.prompt(task, snapshot),
                started_at=self.tasks.manager.now(),
            )
            self._iteration = await self.tasks.store.run(loop_store.begin_iteration, task, begun)
        return task, workdir

    async def _renew_allowance(self, task: Task) -> Task:
        """A person who answers that a parked task may go on gives it as much again."""
        loop = task.loop or TaskLoop()
        earlier = await self.tasks.store.read(loop_store.list_iterations, task.task_id, 1)
        since = earlier[-1].started_at if earlier else task.created_at
        changes: dict[str, Any] = {}
        for wait in await self.tasks.store.read(loop_store.waits_ended_since, task.task_id, since):
            cause, limit = (wait.detail or {}).get("cause"), (wait.detail or {}).get("limit")
            if cause is not None and wait.outcome is not None:
                changes["retries"] = 0
            if cause == "max_iterations" and limit is not None:
                changes["max_iterations"] = task.attempt - 1 + int(limit)
            elif cause == "max_tokens" and limit is not None:
                changes["max_tokens"] = task.tokens + int(limit)
            elif cause == "max_cost_usd" and limit is not None:
                changes["max_cost_usd"] = (task.cost_usd or 0.0) + float(limit)
        return await self.tasks.change(task, {"loop": loop.evolve(**changes)}) if changes else task

    async def prompt(self, task: Task, workdir: Workdir) -> str:  # noqa: ARG002 - kept with the iteration
        return task.task if self._iteration is None else self._iteration.prompt

    async def spawn(self, task: Task, workdir: Workdir) -> tuple[Task, AgentInstance]:
        try:
            return await self.parts.terminals.spawn(self, task, workdir)
        except (ValidationError, NotFoundError) as error:
            raise AttemptFailedError(str(error), HOPELESS) from error

    # --- meanwhile -------------------------------------------------------------------------------

    async def watch(self, task: Task, workdir: Workdir, instance: AgentInstance) -> None:
        """Until it has ended, or a short time after its breakpoint. Its process tree is gone when this returns."""
        loop, file = task.loop or TaskLoop(), self._file or SignalFile.of(self.tasks, task, workdir)
        ended = asyncio.ensure_future(self.parts.terminals.ended(instance))
        try:
            await first_of(
                ended,
                self._hear(instance),
                self._read(file, instance, loop.breakpoint_check_interval.total_seconds()),
            )
            if not ended.done():
                with contextlib.suppress(TimeoutError):
                    async with Deadline(self.tasks.manager.clock, loop.grace):
                        await asyncio.shield(ended)
                await self.parts.terminals.stop(instance, AT_BREAKPOINT)
            await ended
        finally:
            ended.cancel()
        await file.take(instance, has_ended=True)

    async def _hear(self, instance: AgentInstance) -> None:
        async for event in self.tasks.manager.observe(instance.instance_id, after=0):
            if isinstance(event, AgentSignalEvent) and breakpoint_of(event) is not None:
                return
        await asyncio.get_running_loop().create_future()  # it has ended, which is seen elsewhere

    async def _read(self, file: SignalFile, instance: AgentInstance, interval: float) -> None:
        async for _ in file.watch(interval):
            if await file.take(instance):
                return

    # --- after -----------------------------------------------------------------------------------

    async def judge(self, task: Task, workdir: Workdir, instance: AgentInstance) -> Task:
        signal, answer = await last_breakpoint(self.tasks, instance), await self._answer(instance)
        if signal is None:
            answer = await attempt.answer_of(self.tasks, task, instance.instance_id)
            signal = self._until(task, answer)
            self._ended_by = None if signal is None else "until"
        task = await self.tasks.reload(task)
        if signal is None:
            await self.tasks.change(
                task, {**attempt.used_by(task, answer), **_files_of(await self.snapshot(task, workdir))}
            )
            raise AttemptFailedError(_without_signal(answer, self._file), "exit")
        self._breakpoint = signal
        match signal.type:
            case BreakpointType.TASK_COMPLETE:
                return await attempt.finish(self, task, workdir, _submission(signal, answer))
            case BreakpointType.PR_CREATED:
                return await self._pull_request(task, workdir, signal, answer)
            case BreakpointType.BLOCKED:
                return await self._blocked(task, workdir, signal, answer)

    async def _answer(self, instance: AgentInstance) -> Any:
        row = await self.tasks.store.read(request_store.get_request, instance.instance_id, JOB_ID)
        return None if row is None or row.answer is None else json.loads(row.answer)

    def _until(self, task: Task, answer: Any) -> Breakpoint | None:
        words = None if task.loop is None else task.loop.until
        if words is None or words not in _said(answer):
            return None
        return Breakpoint(type=BreakpointType.TASK_COMPLETE, task_id=task.key, summary=f"it said {words}")

    async def snapshot(self, task: Task, workdir: Workdir) -> Snapshot:
        return await self.parts.branches.snapshot(task, workdir)

    async def complete(self, task: Task, changes: dict[str, Any]) -> Task:
        """Proven; and where it is a pull request, that is waited for."""
        loop = task.loop or TaskLoop()
        waits: list[Wait] = []
        pull = await self._mark_ci(task, "passed")
        if pull is not None:
            due = self.tasks.manager.now() + loop.pr_merge_timeout
            reason = f"pull request #{pull.number}"
            waits = [
                new_wait(self.tasks, task, WaitKind.PULL_REQUEST, reason, wake_key=f"pr:{pull.number}", due_at=due)
            ]
        changes = {**changes, "session": None}
        done = await self._end(task, changes, waits, task.summary or "", TaskState.COMPLETED)
        await self.parts.plan.completed(done)
        return done

    async def _mark_ci(self, task: Task, state: str) -> PullRequest | None:
        """The pull request of this breakpoint, with how its CI ended; unless that is told later."""
        if self._breakpoint is None or self._breakpoint.type is not BreakpointType.PR_CREATED:
            return None
        pull = await self.tasks.store.read(loop_store.pull_request_of, task)
        if pull is None or pull.ci != "pending" or self._ci_is_told_later:
            return pull
        return await self.tasks.store.run(loop_store.change_pull_request, pull, {"ci": state})

    async def _pull_request(self, task: Task, workdir: Workdir, signal: Breakpoint, answer: Any) -> Task:
        snapshot = await self.snapshot(task, workdir)
        loop, ci = task.loop or TaskLoop(), self.parts.ci
        now = self.tasks.manager.now()
        new = PullRequest(
            workspace_id=task.workspace_id,
            number=0,
            task_id=task.task_id,
            task_key=task.key,
            url=signal.pr_url or "",
            title=clipped(signal.summary or task.title, 200),
            branch=workdir.branch,
            commit=snapshot.commit,
            ci="pending" if self._has_ci(task) else None,
            created_at=now,
            updated_at=now,
        )
        pull = await self.tasks.store.run(loop_store.open_pull_request, task, new)
        if loop.ci or not isinstance(ci, LocalCi):
            result = await ci.check(task, workdir, snapshot)
            self._ci_is_told_later = result is None
            if result is not None and not result.passed:
                await self.tasks.change(task, attempt.used_by(task, answer))
                raise AttemptFailedError(f"CI failed on pull request #{pull.number}: {result.output}", "check")
        return await attempt.finish(self, task, workdir, _submission(signal, answer))

    def _has_ci(self, task: Task) -> bool:
        loop, ci = task.loop or TaskLoop(), self.parts.ci
        return bool(loop.ci) or not isinstance(ci, LocalCi) or bool(checks_of(self.tasks, task))

    async def _blocked(self, task: Task, workdir: Workdir, signal: Breakpoint, answer: Any) -> Task:
        signal = signal.evolve(blocked_on=tuple([await self._key_of(task, name) for name in signal.blocked_on]))
        states = {name: await self.parts.plan.state_of(task, name) for name in signal.blocked_on}
        blockers = sort_blockers(self.tasks, task, signal, states)
        used = attempt.used_by(task, answer)
        if blockers.unknown:
            await self.tasks.change(task, used)
            names = ", ".join(blockers.unknown)
            raise AttemptFailedError(
                f'you said that you are blocked on {names}, but there is no such task; name a task, ci, or "human: '
                f'your question"'
            )
        snapshot = await self.snapshot(task, workdir)
        if blockers.wants_ci:
            result = await self.parts.ci.check(task, workdir, snapshot)
            if result is None:
                wake = f"ci:{snapshot.commit}"
                blockers.waits.append(new_wait(self.tasks, task, WaitKind.CI, "waits for CI", wake_key=wake))
            else:
                blockers.notes.append(f"CI {'passed' if result.passed else f'failed: {result.output}'}")
        if not blockers.waits and set(blockers.notes) <= set(task.comments):
            # Told before. It would be started for ever, since there is nothing to wait for.
            await self.tasks.change(task, used)
            raise AttemptFailedError(f"it is blocked on {', '.join(signal.blocked_on)}, which it was told is over")
        changes = {
            **used,
            "session": None,
            "comments": (*task.comments, *blockers.notes)[-_MAX_COMMENTS:],
            **_files_of(snapshot),
        }
        circle = await self._circle(task, blockers.waits)
        if circle is not None:
            reason = f"{' waits for '.join(circle)}: they wait for one another"
            waits = [new_wait(self.tasks, task, WaitKind.HUMAN, reason, detail={"cause": "cycle"})]
            return await self._end(task, changes, waits, reason)
        limit = (task.loop or TaskLoop()).blocked_timeout
        due = None if limit is None else self.tasks.manager.now() + limit
        waits = [wait.evolve(due_at=due) for wait in blockers.waits]
        return await self._end(task, changes, waits, signal.summary or "blocked")

    async def _key_of(self, task: Task, name: str) -> str:
        """An agent may write the key of a task in another case."""
        other = await self.tasks.store.read(task_store.find_task, task.workspace_id, name.strip())
        return name.strip() if other is None else other.key

    async def _circle(self, task: Task, waits: Sequence[Wait]) -> list[str] | None:
        graph = await self.tasks.store.read(wait_graph, task.workspace_id)
        for wait in waits:
            if wait.kind is WaitKind.DEPENDENCY and wait.wake_key is not None:
                other = wait.wake_key.removeprefix("task:")
                way = [task.key] if other == task.key else path_to(graph, other, task.key)
                if way is not None:
                    return [task.key, *way] if other != task.key else [task.key, task.key]
        return None

    # --- how it ended ----------------------------------------------------------------------------

    async def failed(self, task: Task, error: str, cause: str = "error") -> Task:
        """A retry: told to the next agent, after a while; or parked when too many were spent."""
        if task.state is not TaskState.RUNNING:
            return task
        if cause == "check":
            await self._mark_ci(task, "failed")
        loop = (task.loop or TaskLoop()).evolve(retries=(task.loop or TaskLoop()).retries + 1)
        text = clipped(error, _MAX_TEXT)
        changes: dict[str, Any] = {
            "loop": loop,
            "error": text,
            "session": None,
        }
        if cause != "exit":  # that is in the history already
            comment = text if cause == "check" else f"start {task.attempt} failed: {text}"
            changes["comments"] = (*task.comments, clipped(comment, _MAX_TEXT))[-_MAX_COMMENTS:]
        waits = []
        if cause == HOPELESS:
            waits = [self._parked(task, f"its agent cannot be started: {_line(error)}", HOPELESS)]
        elif loop.retries > loop.max_retries:
            waits = [
                self._parked(task, f"{loop.max_retries} retries are spent, at last: {_line(error)}", "max_retries")
            ]
        elif loop.retry_interval > timedelta(0) and not (cause == "exit" and loop.until is not None):
            due = self.tasks.manager.now() + loop.retry_interval
            waits = [new_wait(self.tasks, task, WaitKind.BACKOFF, "the next retry", due_at=due)]
        return await self._end(task, changes, waits, error, ended_by=cause)

    async def lost(self, task: Task, error: str) -> Task:
        """Begun again at once; parked where the machine ended under it too often in a row."""
        lost, waits = task.lost + 1, []
        if lost > MAX_LOST:
            waits = [self._parked(task, f"lost {lost} times in a row, at last: {_line(error)}", "lost")]
        changes = {"lost": 0 if waits else lost, "error": clipped(error, _MAX_TEXT), "session": None}
        return await self._end(task, changes, waits, f"start {task.attempt} was lost: {_line(error)}", ended_by="lost")

    async def waits(self, task: Task, waits: AttemptWaitsError) -> Task:
        wait = attempt.wait_of(self.tasks, task, waits)
        return await self._end(
            task, {"session": None}, [] if wait is None else [wait], str(waits), ended_by="limit" if wait else "stopped"
        )

    async def stopped(self, task: Task, reason: str) -> Task:
        return await self._end(task, {"is_held": True, "error": reason}, [], reason, ended_by="stopped")

    def _parked(self, task: Task, reason: str, cause: str, limit: float | None = None) -> Wait:
        detail = {"cause": cause, **({} if limit is None else {"limit": limit})}
        sentence = f"{reason}. Answer to let it go on: ostler answer {task.key} yes"
        return new_wait(self.tasks, task, WaitKind.HUMAN, sentence, detail=detail)

    def _cap(self, task: Task, loop: TaskLoop) -> Wait | None:
        """Where a limit of the whole loop is reached, nothing more is spent without a person."""
        if loop.max_iterations is not None and task.attempt >= loop.max_iterations:
            return self._parked(task, f"{task.attempt} iterations", "max_iterations", loop.max_iterations)
        if loop.max_tokens is not None and task.tokens >= loop.max_tokens:
            return self._parked(task, f"{task.tokens} tokens are used", "max_tokens", loop.max_tokens)
        if loop.max_cost_usd is not None and (task.cost_usd or 0.0) >= loop.max_cost_usd:
            return self._parked(task, f"${task.cost_usd:.2f} are spent", "max_cost_usd", loop.max_cost_usd)
        return None

    async def _end(
        self,
        task: Task,
        changes: dict[str, Any],
        waits: Sequence[Wait],
        summary: str,
        to: TaskState = TaskState.QUEUED,
        *,
        ended_by: str | None = None,
    ) -> Task:
        if task.state is not TaskState.RUNNING:
            return task
        changes = {"lost": 0, **changes}
        signal = self._breakpoint
        by = ended_by or self._ended_by or ("breakpoint" if signal is not None else "exit")
        if to is TaskState.QUEUED and not any(wait.kind is WaitKind.HUMAN for wait in waits):
            cap = self._cap(task.evolve(**changes), changes.get("loop") or task.loop or TaskLoop())
            waits = waits if cap is None else [cap]
        tokens, cost = self._before
        now = task.evolve(**changes)
        about = {
            "breakpoint": signal,
            "summary": clipped(summary, 2000),
            "changed_files": None if now.changed_files is None else len(now.changed_files),
            "tokens": now.tokens - tokens,
            "cost_usd": None if now.cost_usd is None else now.cost_usd - cost,
        }
        return await self.tasks.store.run(_end_iteration, task, changes, waits, to, by, about)


def _end_iteration(  # noqa: PLR0913, PLR0917 - as above
    tx: Transaction,
    task: Task,
    changes: dict[str, Any],
    waits: Sequence[Wait],
    to: TaskState,
    ended_by: str,
    about: Mapping[str, Any],
) -> Task:
    loop_store.end_iteration(tx, task.evolve(**changes), ended_by, **about)
    changed = task_store.change_task(tx, task, changes, to=to, by=BY, reason=about["summary"])
    for wait in waits:
        task_store.open_task_wait(tx, changed, wait)
    return changed


def _files_of(snapshot: Snapshot) -> dict[str, Any]:
    return {"changed_files": tuple(change.path for change in snapshot.files), "snapshot": snapshot.to_dict()}


def _submission(signal: Breakpoint, answer: Any) -> dict[str, Any]:
    """The answer of the run, with the summary of the breakpoint."""
    values = dict(answer) if isinstance(answer, Mapping) else {}
    return {**values, "summary": signal.summary or values.get("summary")}


def _said(answer: Any) -> str:
    if isinstance(answer, Mapping):
        return str(answer.get("message") or answer.get("output") or answer.get("summary") or "")
    return str(answer or "")


def _without_signal(answer: Any, file: SignalFile | None) -> str:
    last = _said(answer).strip().splitlines()[-1:]
    last_words = f"; it said last: {clipped(last[0], 300)}" if last else ""
    fault = "" if file is None or file.fault is None else f"; {clipped(file.fault, 300)}"
    return f"it ended without a signal{fault}{last_words}"


def _line(text: str) -> str:
    return clipped(text.splitlines()[0] if text else "", 300)
