"""Proof: the checks of a task, run by Ostler itself on a clean checkout of what was submitted.

A check runs code that the agent wrote, so it is spawned like an agent: in a process tree of its own, limited, ended
whole, and found again by the next program.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from datetime import timedelta
from pathlib import Path

from ostler.agents.commandspec import KIB, CommandSpec, ExitMeaning, PromptBy
from ostler.errors import AgentInitializationError, InvalidOperationError
from ostler.lifecycle.job import JOB_ID
from ostler.model.access import Actor
from ostler.model.attempt import AttemptOutcome, RequestState
from ostler.model.instance import AgentInstance
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits, RestartPolicy, SpawnRequest
from ostler.model.states import RestartPolicyType
from ostler.model.task import Receipt, Task
from ostler.model.text import clipped
from ostler.store import attempts as attempt_store
from ostler.store import requests as request_store
from ostler.store.transaction import Transaction
from ostler.tasks.context import BY, MAX_LOST, TaskContext, environment_of, find_instance
from ostler.workdirs.records import Snapshot, Workdir

_log = logging.getLogger("ostler.tasks")
PROOF = "proof"
_SHOWN = 8_000
#: In JSON, where a byte may need six, an answer of this size can still be kept.
_KEPT = 128 * KIB
#: Every exit code is an answer; whether it passed is seen from it.
_ANY_EXIT = {str(code): ExitMeaning.DONE for code in range(256)}
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")


class CheckLostError(Exception):
    """A check ended with the machine; it is run again on a fresh checkout."""


class CheckStoppedError(Exception):
    """A check was ended from outside, so that it says nothing about the work."""

    def __init__(self, instance: AgentInstance) -> None:
        super().__init__(f"{instance.name} was stopped")
        self.instance = instance


async def prove(
    tasks: TaskContext,
    task: Task,
    workdir: Workdir,
    snapshot: Snapshot,
    *,
    commands: tuple[str, ...] | None = None,
    label: str = "check",
) -> tuple[Receipt, ...]:
    """The receipt of every check, up to the first that fails."""
    checks = checks_of(tasks, task) if commands is None else commands
    if not checks:
        return ()
    while True:
        place = await _checkout(tasks, task, workdir, snapshot, label)
        try:
            receipts = await _run_checks(tasks, task, checks, label, place, snapshot.tree)
        except CheckLostError:
            await discard_proof(tasks, task, label)
        else:
            await discard_proof(tasks, task, label)
            return receipts


async def _checkout(tasks: TaskContext, task: Task, workdir: Workdir, snapshot: Snapshot, label: str) -> Path:
    place = _place_of(tasks, task, label)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    if not place.is_dir():  # else a check that outlived a killed program may be at work there
        part = place.with_name(f"{place.name}.new")
        await tasks.workdirs.remove(part)
        await tasks.workdirs.checkout(snapshot, part, include_for=workdir)
        part.rename(place)
    return place


async def _run_checks(
    tasks: TaskContext, task: Task, checks: tuple[str, ...], label: str, place: Path, tree: str | None
) -> tuple[Receipt, ...]:
    receipts: list[Receipt] = []
    for number, command in enumerate(checks, 1):
        limit = tasks.settings_of(task.project).check_timeout
        receipt = await run_command(
            tasks, task, command, label=f"{label}-{number}", place=place, tree=tree, limit=limit
        )
        await tasks.store.run(_note, task, receipt)
        receipts.append(receipt)
        if not receipt.passed:
            break
    return tuple(receipts)


async def discard_proof(tasks: TaskContext, task: Task, label: str = "check") -> None:
    """Remove the checkout of the present attempt; nothing runs in it any more."""
    if not tasks.home.joinpath(PROOF).is_dir():
        return
    try:
        await tasks.workdirs.remove(_place_of(tasks, task, label))
    except InvalidOperationError as error:  # what a check left there says nothing about the work
        _log.warning("the checkout of a check of %s: %s", task.key, error)


def _place_of(tasks: TaskContext, task: Task, label: str) -> Path:
    return tasks.home / PROOF / f"{task.key}-{task.attempt}-{label}-{task.task_id.hex[-8:]}"


def checks_of(tasks: TaskContext, task: Task) -> tuple[str, ...]:
    """Its own; else those of its agent's definition."""
    if task.checks or task.agent is None:
        return task.checks
    return tasks.definition_of(task).checks


async def run_command(  # noqa: PLR0913 - what is run, where, and for how long
    tasks: TaskContext,
    task: Task,
    command: str,
    *,
    label: str,
    place: Path,
    limit: timedelta,
    tree: str | None = None,
) -> Receipt:
    """Run a command line for a task, as an instance of its own. Run again in the same attempt it finds that one."""
    spec = CommandSpec(
        argv=("sh", "-c", command.replace("{", "{{").replace("}", "}}")),
        env=_PASSED_ON,
        prompt_by=PromptBy.STDIN,
        max_output_bytes=_KEPT,
        exit_codes=_ANY_EXIT,
    )
    digest = hashlib.sha256(command.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    manifest = tasks.manager.registry.register(spec, name=f"command/check-{digest}", replace=True)
    name = f"{task.key}-{task.attempt}-{label}"
    options = AgentSpawnOptions(
        name=name,
        workdir=str(place),
        env={**environment_of(task), "HOME": os.environ.get("HOME", "/")},
        restart_policy=RestartPolicy(type=RestartPolicyType.NONE),
        resource_limits=ResourceLimits(execution_timeout=limit),
    )
    request = SpawnRequest(
        agent_definition_id=manifest.id,
        project=task.project,
        options=options,
        job={"request": ""},
        task_id=task.task_id,
    )
    instance, cut_off = await find_instance(tasks, task, name, again_after_loss=True)
    if cut_off > MAX_LOST:
        return _receipt(command, tree, None, 0.0, f"it was begun {cut_off} times and lost with the machine each time")
    if instance is None:
        key = f"{label}:{task.task_id}:{task.attempt}:{cut_off}"
        try:
            instance = await tasks.manager.spawn(request, idempotency_key=key)
        except AgentInitializationError as error:
            return _receipt(command, tree, None, 0.0, str(error))
    await tasks.manager.handle(instance.instance_id).ended()
    row = await tasks.store.read(request_store.get_request, instance.instance_id, JOB_ID)
    if row is not None and row.state is RequestState.DONE and row.answer is not None:
        answer = json.loads(row.answer)
        return _receipt(command, tree, answer["exit_code"], answer["duration_seconds"], answer["output"])
    last = await tasks.store.read(attempt_store.get_attempt, instance.instance_id, instance.attempt)
    if last is not None and last.outcome is AttemptOutcome.STOPPED:
        raise CheckStoppedError(instance)
    if last is not None and last.outcome is AttemptOutcome.LOST:
        raise CheckLostError
    why = "it did not end" if last is None or last.detail is None else last.detail
    code = None if last is None or last.outcome is AttemptOutcome.TIMEOUT else 128 + (last.exit_signal or 0)
    return _receipt(command, tree, code, 0.0, why)


def _receipt(command: str, tree: str | None, code: int | None, seconds: float, output: str) -> Receipt:
    digest = hashlib.sha256(output.encode("utf-8", "surrogatepass")).hexdigest()
    shown = output if len(output) <= _SHOWN else f"…\n{output[-_SHOWN:]}"
    return Receipt(
        command=command,
        tree=tree,
        exit_code=code,
        seconds=round(seconds, 3),
        output_digest=digest,
        output=clipped(shown, _SHOWN + 10),
    )


def _note(tx: Transaction, task: Task, receipt: Receipt, by: Actor = BY) -> None:
    code = "timed out" if receipt.exit_code is None else f"exit code {receipt.exit_code}"
    detail = f"{receipt.command}: {code}; tree {receipt.tree}; output sha256 {receipt.output_digest}"
    outcome = "ok" if receipt.passed else "failed"
    tx.audit(task.workspace_id, by, "task.check", f"task:{task.key}", outcome=outcome, detail=detail)
