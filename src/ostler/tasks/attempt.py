"""One attempt at a task, from the workdir to the review.

Every step is committed before the next, and every step can be repeated: an attempt that a killed program left is run
again from the top, and finds its workdir, its instance and its checks where they are.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.agents.command import DEFAULT_PATH
from ostler.agents.commandspec import HomeKind
from ostler.agents.registry import AgentManifest
from ostler.drivers import command_of
from ostler.errors import LicenseError, OstlerError, StoreError, VersionConflictError
from ostler.lifecycle.job import JOB_ID
from ostler.lifecycle.messages import MANAGER_CLOSED
from ostler.model.attempt import Attempt, AttemptOutcome, Request, RequestState
from ostler.model.events import AgentTerminatedEvent
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits, RestartPolicy, SpawnRequest
from ostler.model.states import RestartPolicyType
from ostler.model.task import Task, TaskState
from ostler.model.text import clipped
from ostler.model.wait import Wait, WaitKind
from ostler.store import attempts as attempt_store
from ostler.store import requests as request_store
from ostler.store.events import last_events
from ostler.store.queries import list_instances
from ostler.tasks.context import (
    BY,
    TaskContext,
    environment_of,
    exists,
    find_instance,
    source_directory_of,
    workdir_key,
    workdir_of,
)
from ostler.tasks.proof import CheckStoppedError, discard_proof, prove
from ostler.tasks.retry import fail_attempt, lose_attempt, new_wait, queue_with_waits, requeue
from ostler.tasks.setup import SetupFailedError, set_up, setup_name
from ostler.workdirs.records import Snapshot, Workdir, WorkdirKind

_log = logging.getLogger("ostler.tasks")
#: Says in the record that the program ended its agents because it was stopped itself.
DAEMON_STOPPED = "the daemon is stopping"
LOOP_STOPPED = "the loop was told to stop"
#: Says likewise that a crew ended one of its members.
CREW_STOPPED = "its crew is stopping"
MEMBER_REPLACED = "its crew begins the member afresh"
#: Says that a program was killed while it started the agent.
CUT_OFF = "its start was cut off with its program"
#: Reasons of a termination after which the task goes back to the queue, unspent and not held.
UNSPENT_STOPS = frozenset({DAEMON_STOPPED, LOOP_STOPPED, MANAGER_CLOSED, CREW_STOPPED, MEMBER_REPLACED, CUT_OFF})
_NO_PLACE = timedelta(seconds=30)
_MAX_TEXT = 20_000


class AttemptFailedError(Exception):
    """It spends one of the failures that the task has. The cause is a word for the record: error, exit, check."""

    def __init__(self, message: str, cause: str = "error") -> None:
        super().__init__(message)
        self.cause = cause


class AttemptWaitsError(Exception):
    """It goes on later, and spends nothing."""

    def __init__(self, kind: WaitKind, reason: str, due_at: datetime | None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.due_at = due_at


class AttemptStoppedError(Exception):
    """A person stopped its agent: the task is kept back."""


class AttemptLostError(Exception):
    """Its agent ended with the machine or the keeper, and how is not known. It spends no failure."""


class AttemptRules:
    """How attempts at a task are run and judged. These are those of a plain task; a crew and a loop have their own."""

    #: Whether a plain directory stays as it is from one attempt to the next.
    keeps_directory = False

    def __init__(self, tasks: TaskContext) -> None:
        self.tasks = tasks

    async def work(self, task: Task) -> Task:
        """From the workdir to the review, or raise what became of it."""
        return await _work(self, task)

    async def prepare(self, task: Task) -> tuple[Task, Workdir]:
        return await prepare(self.tasks, task, keep=self.keeps_directory)

    async def prompt(self, task: Task, workdir: Workdir) -> str:  # noqa: ARG002 - for those that look at it
        return prompt_of(task)

    async def spawn(self, task: Task, workdir: Workdir) -> tuple[Task, AgentInstance]:
        return await spawn(self, task, workdir)

    def spawn_fields(self, task: Task) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Of the `SpawnRequest`, such as the crew."""
        return {}

    def environment(self, task: Task) -> dict[str, str]:
        """Variables of its agent, beside those of the workdir."""
        return {**environment_of(task), "OSTLER_HOME": str(self.tasks.home)}

    def model(self, task: Task) -> str | None:
        return task.model

    async def watch(self, task: Task, workdir: Workdir, instance: AgentInstance) -> None:  # noqa: ARG002 - as above
        """Until its agent has ended."""
        await self.tasks.manager.handle(instance.instance_id).ended()

    async def judge(self, task: Task, workdir: Workdir, instance: AgentInstance) -> Task:
        """Its agent has ended: take the work in, or raise what became of it."""
        answer = await answer_of(self.tasks, task, instance.instance_id)
        return await finish(self, await self.tasks.reload(task), workdir, answer)

    async def snapshot(self, task: Task, workdir: Workdir) -> Snapshot:
        return await self.tasks.workdirs.snapshot(workdir, f"{task.key}: {task.title}")

    async def complete(self, task: Task, changes: dict[str, Any]) -> Task:
        """It is proven: hold it for review."""
        return await self.tasks.change(task, changes, to=TaskState.COMPLETED, by=BY, reason=task.summary)

    async def failed(self, task: Task, error: str, cause: str = "error") -> Task:  # noqa: ARG002 - as above
        """Its agent failed, or a check did."""
        return await fail_attempt(self.tasks, task, error)

    async def lost(self, task: Task, error: str) -> Task:
        """Its agent ended with the machine."""
        return await lose_attempt(self.tasks, task, error)

    async def waits(self, task: Task, waits: AttemptWaitsError) -> Task:
        """It goes on later."""
        return await queue_with_waits(self.tasks, task, {}, [wait_of(self.tasks, task, waits)], str(waits))

    async def stopped(self, task: Task, reason: str) -> Task:
        """A person stopped its agent: it is kept back."""
        return await requeue(self.tasks, task, {"is_held": True, "error": reason}, reason)


async def run_attempt(rules: AttemptRules, task: Task) -> Task:
    """`task` is running. Returns it as it was left: completed, or queued again."""
    while True:
        try:
            return await _run_to_its_end(rules, task)
        except VersionConflictError:
            current = await rules.tasks.reload(task)
            if current.state is not TaskState.RUNNING or current.attempt != task.attempt:
                return current  # cancelled or requeued meanwhile
            task = current  # something else about it was changed: each step can be repeated


async def _run_to_its_end(rules: AttemptRules, task: Task) -> Task:
    tasks = rules.tasks
    try:
        task = await rules.work(task)
    except AttemptWaitsError as waits:
        return await rules.waits(await tasks.reload(task), waits)
    except AttemptStoppedError as stopped:
        return await rules.stopped(await tasks.reload(task), str(stopped))
    except AttemptLostError as lost:
        return await rules.lost(await tasks.reload(task), str(lost))
    except CheckStoppedError as stopped:
        return await _check_stopped(rules, await tasks.reload(task), stopped)
    except AttemptFailedError as failure:
        return await rules.failed(await tasks.reload(task), str(failure), failure.cause)
    except (StoreError, VersionConflictError):
        raise  # it stays as it is, and is taken up again
    except (OstlerError, OSError) as error:
        return await rules.failed(await tasks.reload(task), str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, no task stays running for ever
        _log.exception("%s failed by a fault of Ostler", task.key)
        return await rules.failed(await tasks.reload(task), f"internal error: {error!r}; see the daemon's log")
    return task


async def _check_stopped(rules: AttemptRules, task: Task, stopped: CheckStoppedError) -> Task:
    why = await _stop_reason(rules.tasks, stopped.instance)
    if why in UNSPENT_STOPS:
        return await rules.waits(task, AttemptWaitsError(WaitKind.BACKOFF, str(why), None))
    return await rules.failed(task, str(stopped), "check")


async def _work(rules: AttemptRules, task: Task) -> Task:
    tasks = rules.tasks
    instance_before, _ = await find_instance(tasks, task, _name(task))
    if (
        instance_before is not None and task.instance_id != instance_before.instance_id
    ):  # a killed program did not note it
        task = await tasks.change(task, {"instance_id": instance_before.instance_id})
    if instance_before is None:
        await end_instances(tasks, task, "another attempt begins", but=setup_name(task))
    task, workdir = await rules.prepare(task)
    tasks.active[task.key] = workdir
    if task.instance_id is None:
        task = await _set_up(tasks, task, workdir)
    task, instance = await rules.spawn(task, workdir)
    await rules.watch(task, workdir, instance)
    return await rules.judge(task, workdir, instance)


def _name(task: Task) -> str:
    return f"{task.key}-{task.attempt}"


# --- the workdir -------------------------------------------------------------------------------------


async def prepare(tasks: TaskContext, task: Task, *, keep: bool = False) -> tuple[Task, Workdir]:
    workdir = workdir_of(task)
    is_planned = workdir is not None
    if workdir is not None and task.crew is not None:  # the directory of a member, also of a crew that is gone
        tasks.workdirs.allow(Path(workdir.path).parent)
    if workdir is None:
        workdir = await tasks.workdirs.plan(workdir_key(task.workspace_id, task.key), near=source_directory_of(task))
        task = await tasks.change(task, {"workdir": workdir.to_dict(), "is_set_up": False})
    if task.instance_id is not None:
        if not exists(workdir):
            raise AttemptFailedError(f"the workdir {workdir.path} is gone; {task.key} was running in it")
        return task, workdir
    # One that waited goes on in its session, with the files that it has.
    fresh = is_planned and not keep and workdir.kind is WorkdirKind.DIRECTORY and task.session is None
    if fresh and task.is_set_up:
        task = await tasks.change(task, {"is_set_up": False})
    await tasks.workdirs.prepare(workdir, fresh=fresh)
    return task, workdir


async def _set_up(tasks: TaskContext, task: Task, workdir: Workdir) -> Task:
    try:
        return await set_up(tasks, task, workdir)
    except SetupFailedError as error:
        raise AttemptFailedError(str(error)) from error
    except LicenseError as error:
        raise _no_place(tasks, error) from error


# --- the agent ---------------------------------------------------------------------------------------


async def spawn(rules: AttemptRules, task: Task, workdir: Workdir) -> tuple[Task, AgentInstance]:
    """One instance for each attempt, however often this is called."""
    tasks = rules.tasks
    if task.instance_id is not None:
        return task, await tasks.manager.require_instance(task.instance_id)
    manifest = tasks.definition_of(task)
    options = AgentSpawnOptions(
        name=_name(task),
        workdir=str(workdir.path),
        env={**_own_environment(manifest), **workdir.environment(), **rules.environment(task)},
        priority=task.priority,
        tags=task.tags or None,
        restart_policy=RestartPolicy(type=RestartPolicyType.NONE),
    )
    declared = manifest.defaults.resource_limits if manifest.defaults is not None else None
    if task.timeout is not None or declared is None or "execution_timeout" not in declared.fields_set:
        limits = ResourceLimits(execution_timeout=task.timeout or tasks.settings_of(task.project).timeout)
        options = options.evolve(resource_limits=limits)
    job: dict[str, Any] = {"prompt": await rules.prompt(task, workdir)}
    if (model := rules.model(task)) is not None:
        job["model"] = model
    command = command_of(manifest)
    if command is not None and command.home is HomeKind.PRIVATE:
        job["home"] = str(task.task_id)  # one for all attempts: sessions are kept there
    if task.session is not None:
        job |= {"session": task.session, "session_usage": task.session_usage}
    request = SpawnRequest(
        agent_definition_id=manifest.id,
        project=task.project,
        options=options,
        job={"request": job},
        task_id=task.task_id,
        **rules.spawn_fields(task),
    )
    try:
        _, cut_off = await find_instance(tasks, task, _name(task))
        key = f"task:{task.task_id}:{task.attempt}:{cut_off}"
        instance = await tasks.manager.spawn(request, idempotency_key=key)
    except LicenseError as error:
        raise _no_place(tasks, error) from error
    return await tasks.change(task, {"instance_id": instance.instance_id}), instance


def _no_place(tasks: TaskContext, error: LicenseError) -> AttemptWaitsError:
    due = tasks.manager.now() + _NO_PLACE
    return AttemptWaitsError(WaitKind.QUOTA, f"no place for its agent: {error}", due)


def own_program() -> str | None:
    """The program `ostler`, with which an agent can say where it stands."""
    beside = Path(sys.executable).with_name("ostler")
    return str(beside) if beside.exists() else shutil.which("ostler")


def _path(manifest: AgentManifest) -> str:
    """As its definition has it."""
    command = command_of(manifest)
    environment = {**((command and command.set_env) or {}), **(manifest.env or {})}
    if (path := environment.get("PATH")) is not None:
        return path
    passed_on = command is None or "PATH" in command.env or "PATH" in environment
    return os.environ.get("PATH", os.defpath) if passed_on else DEFAULT_PATH


def _own_environment(manifest: AgentManifest) -> Mapping[str, str]:
    """That of its definition, which the spawn lays its own over; with the program `ostler` on its PATH."""
    environment = dict((manifest.defaults.env if manifest.defaults is not None else None) or {})
    path, program = environment.get("PATH") or _path(manifest), own_program()
    if program is not None and shutil.which("ostler", path=path) is None:
        environment["PATH"] = f"{path}:{Path(program).parent}"
    return environment


def prompt_of(task: Task) -> str:
    """What the agent is told: the task, then what was said about earlier attempts, as quotations."""
    parts = [task.task]
    if task.comments:
        parts.append("What was said about the earlier attempts (the newest last):")
        parts += ["\n".join(f"> {line}" for line in comment.splitlines()) for comment in task.comments]
    return "\n\n".join(parts)


async def answer_of(tasks: TaskContext, task: Task, instance_id: UUID) -> Any:
    """What the agent answered; from the store, so that any program can read it."""
    row = await tasks.store.read(request_store.get_request, instance_id, JOB_ID)
    answer = None if row is None or row.answer is None else json.loads(row.answer)
    if row is not None and row.state is RequestState.DONE:
        _require_done(answer)
        return answer
    if isinstance(answer, Mapping):
        task = await tasks.change(task, used_by(task, answer))
        _require_no_limit(tasks, answer)
    record = await tasks.manager.require_instance(instance_id)
    last = await tasks.store.read(attempt_store.get_attempt, instance_id, record.attempt)
    if last is not None and last.outcome is AttemptOutcome.STOPPED:
        why = await _stop_reason(tasks, record)
        if why in UNSPENT_STOPS:
            raise AttemptWaitsError(WaitKind.BACKOFF, str(why), None)
        raise AttemptStoppedError(f"its agent was stopped{f': {why}' if why else ''}")
    if last is not None and last.outcome is AttemptOutcome.LOST:
        raise AttemptLostError(last.detail or "its agent ended, and how is not known")
    raise _failure(record, last, row)


async def _stop_reason(tasks: TaskContext, record: AgentInstance) -> str | None:
    """As the caller of terminate gave it. Without a termination a recovery ended the instance with its start."""
    events = await tasks.store.read(last_events, 10, workspace_id=record.workspace_id, instance_id=record.instance_id)
    reasons = [event.reason for event in events if isinstance(event, AgentTerminatedEvent)]
    return reasons[-1] if reasons else CUT_OFF


def _require_done(answer: Any) -> None:
    """A command may say by its exit code that it has to come again, or cannot go on."""
    if not isinstance(answer, Mapping) or answer.get("meaning") not in {"retry", "blocked"}:
        return
    message = _first_lines(str(answer.get("output") or "")) or f"exit code {answer.get('exit_code')}"
    if answer["meaning"] == "blocked":
        raise AttemptWaitsError(WaitKind.HUMAN, f"its agent cannot go on: {message}", None)
    raise AttemptFailedError(f"its agent asks to be run again: {message}")


def _require_no_limit(tasks: TaskContext, answer: Mapping[str, Any]) -> None:
    if answer.get("meaning") == "limited":
        due = datetime.fromisoformat(str(answer["retry_at"]))
        reason = f"usage limit until {due.astimezone():%H:%M}"
        raise AttemptWaitsError(WaitKind.QUOTA, reason, max(due, tasks.manager.now()))


def _failure(record: AgentInstance, last: Attempt | None, row: Request | None) -> AttemptFailedError:
    detail = (last.detail if last is not None else None) or (row.error if row is not None else None)
    return AttemptFailedError(clipped(detail or record.error_message or "it ended without an answer", _MAX_TEXT))


# --- the submission ----------------------------------------------------------------------------------


async def finish(rules: AttemptRules, task: Task, workdir: Workdir, answer: Any) -> Task:
    """Take the work in, prove it, and hold it for review."""
    tasks = rules.tasks
    submitted = submission_of(answer)
    snapshot = await rules.snapshot(task, workdir)
    changes = {
        **submitted,
        **used_by(task, answer),
        "changed_files": tuple(change.path for change in snapshot.files),
        "snapshot": snapshot.to_dict(),
    }
    task = await tasks.change(task, changes)
    receipts = await prove(tasks, task, workdir, snapshot)
    failed = next((receipt for receipt in receipts if not receipt.passed), None)
    if failed is not None:
        how = "did not end in its time" if failed.exit_code is None else f"failed with exit code {failed.exit_code}"
        error = f"the check `{failed.command}` {how}:\n{failed.output}"
        task = await tasks.change(task, {"receipts": receipts})
        return await rules.failed(task, error, "check")
    return await rules.complete(task, {"receipts": receipts, "error": None, "failures": 0, "lost": 0})


def submission_of(answer: Any) -> dict[str, Any]:
    """Its own words, as claims: the summary, the files it says it changed, text in place of files."""
    if isinstance(answer, str):
        return {"summary": _first_lines(answer), "generated_code": clipped(answer, 10 * _MAX_TEXT)}
    if not isinstance(answer, Mapping):
        return {}
    summary = answer.get("summary") or answer.get("message") or answer.get("output")
    claimed = answer.get("changed_files")
    code = answer.get("generated_code") or answer.get("code")
    submission: dict[str, Any] = {
        "claimed_files": tuple(str(path) for path in claimed) if isinstance(claimed, list) else None
    }
    if isinstance(summary, str):
        submission["summary"] = _first_lines(summary)
    if isinstance(code, str):
        submission["generated_code"] = clipped(code, 10 * _MAX_TEXT)
    return submission


def _first_lines(text: str) -> str:
    return clipped(text.strip(), 2000)


def used_by(task: Task, answer: Any) -> dict[str, Any]:
    """Tokens and cost of a run, added to those of the task; and where its session can go on."""
    if not isinstance(answer, Mapping):
        return {}
    changes: dict[str, Any] = {"session": answer.get("session"), "session_usage": answer.get("session_usage")}
    used, spent = answer.get("tokens"), answer.get("cost_usd")
    if isinstance(used, Mapping):
        count = int(used.get("input") or 0) + int(used.get("output") or 0)
        changes["tokens"] = task.tokens + count
    if isinstance(spent, int | float):
        changes["cost_usd"] = (task.cost_usd or 0.0) + spent
    return changes


# --- the end -----------------------------------------------------------------------------------------


def wait_of(tasks: TaskContext, task: Task, waits: AttemptWaitsError) -> Wait | None:
    if waits.kind is WaitKind.BACKOFF:  # what only has to be begun again waits for nothing
        return None
    return new_wait(tasks, task, waits.kind, str(waits), due_at=waits.due_at)


async def stop_agent(tasks: TaskContext, task: Task, reason: str) -> None:
    """End what runs for a task, its agent and its checks, proven, and the work on it in this program."""
    under_way = tasks.running.pop(task.key, None)
    if under_way is not None:
        under_way.cancel()
        await asyncio.wait([under_way])
    await end_instances(tasks, task, reason)
    await discard_proof(tasks, task)


async def end_instances(tasks: TaskContext, task: Task, reason: str, *, but: str | None = None) -> None:
    """All that live, `but` one of this name."""
    active = GetInstancesFilter(task_id=task.task_id, limit=1000)
    for instance in await tasks.store.read(list_instances, active, task.workspace_id):
        if instance.name != but:
            await tasks.manager.handle(instance.instance_id).stop(reason=reason)
