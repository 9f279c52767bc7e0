"""Review of what was submitted: what its target says against it, and the merge of it, whole or in part."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ostler.errors import InvalidOperationError, MergeConflictError, OstlerError, TaskNotFoundError
from ostler.model.access import OWNER, Actor
from ostler.model.task import Task, TaskState
from ostler.tasks.context import TaskContext, exists, workdir_of
from ostler.tasks.proof import CheckStoppedError, checks_of, discard_proof, prove
from ostler.tasks.retire import retired_workdir
from ostler.workdirs.records import Accepted, Snapshot, Workdir

#: Characters of the output of a failed check in a refusal.
_SHOWN_OUTPUT = 1000


async def submitted(tasks: TaskContext, task: Task) -> tuple[Workdir, Snapshot]:
    workdir = workdir_of(task) or retired_workdir(task)
    if workdir is None:
        raise TaskNotFoundError(f"{task.key} has no workdir yet")
    if task.snapshot is not None and task.state is not TaskState.RUNNING:
        return workdir, Snapshot.from_dict(task.snapshot)
    return workdir, await tasks.workdirs.snapshot(workdir, f"{task.key}: {task.title}")


async def moved_target(tasks: TaskContext, task: Task) -> str | None:
    """What its target says against it, for its agent; whose repository then has the target as it is now."""
    workdir, snapshot = await submitted(tasks, task)
    if workdir.repository is None or not exists(workdir):
        return None
    change = await tasks.workdirs.changed_since_base(workdir, snapshot)
    if change.merges_cleanly:
        return None
    await tasks.workdirs.bring_target(workdir)
    return (
        f"The branch {workdir.target} has moved on since you began, and your work conflicts with it in "
        f"{', '.join(change.conflicts)}. It is in your repository as {workdir.target}. Run `git merge "
        f"{workdir.target}`, edit these files until no <<<<<<< is left, then `git add -A` and `git commit`."
    )


async def merge_work(
    tasks: TaskContext, task: Task, paths: Sequence[str], message: str | None, by: Actor, *, branch_only: bool
) -> Accepted | None:
    """Merge the work into its target, without a word in the record of the task; None without a repository."""
    workdir, snapshot = await submitted(tasks, task)
    if workdir.repository is None:
        if paths:
            raise InvalidOperationError(f"{task.key} has no repository, so it is accepted whole; leave the paths out")
        return None
    chosen = tuple(paths) or None
    try:
        accepted = await tasks.workdirs.accept(
            workdir,
            snapshot,
            paths=chosen,
            message=_commit_message(task, message, by),
            tree=await _checked_tree(tasks, task, workdir, snapshot, chosen),
            branch_only=branch_only,
        )
    except MergeConflictError:
        with contextlib.suppress(OstlerError, OSError):  # so that a person can merge the target there
            await tasks.workdirs.bring_target(workdir)
        raise
    if task.accepted is not None:
        same = task.accepted["commit"] == accepted.commit
        accepted = accepted.evolve(earlier=task.accepted.get("earlier") if same else task.accepted)
    return accepted


def _commit_message(task: Task, message: str | None, by: Actor) -> str:
    text = message or f"{task.title}\n\n{task.summary or ''}"
    trailers = {"Ostler-Task": task.key, "Ostler-Agent": task.agent}
    if by.name != OWNER.name:
        trailers["Ostler-Accepted-By"] = by.name
    lines = [f"{name}: {value}" for name, value in trailers.items() if value]
    return "\n".join([text.strip(), "", *lines, ""])


async def _checked_tree(
    tasks: TaskContext, task: Task, workdir: Workdir, snapshot: Snapshot, paths: tuple[str, ...] | None
) -> str | None:
    """Run the checks on the target with these files alone, for no check has seen that; its tree."""
    if paths is None or not checks_of(tasks, task):
        return None
    preview = await tasks.workdirs.preview(workdir, snapshot, paths)
    label = f"accept-{tasks.manager.new_id().hex[-12:]}"
    try:
        receipts = await prove(tasks, task, workdir, preview, label=label)
    except CheckStoppedError as error:
        await discard_proof(tasks, task, label)
        raise InvalidOperationError(f"{error}, so nothing was accepted; try again") from error
    failed = next((receipt for receipt in receipts if not receipt.passed), None)
    if failed is not None:
        how = "did not end in its time" if failed.exit_code is None else f"ended with code {failed.exit_code}"
        raise InvalidOperationError(
            f"with these files alone the check `{failed.command}` of {task.key} {how}; accept more files, or all. "
            f"Nothing was changed. It said: {failed.output[-_SHOWN_OUTPUT:].strip()}"
        )
    return preview.tree
