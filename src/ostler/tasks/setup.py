"""Before the agent of an attempt begins: a port of its own, and a workdir in which the project can run."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from ostler.errors import AgentNotFoundError
from ostler.model.task import Receipt, Task
from ostler.store import tasks as task_store
from ostler.tasks.context import TaskContext, find_instance
from ostler.tasks.proof import CheckLostError, run_command
from ostler.workdirs.records import Workdir

#: Below the ports that the kernel gives to programs which ask for none in particular.
_PORTS = range(20_000, 32_000)
_TRIES = 200
_LABEL = "setup"


class SetupFailedError(Exception):
    """The workdir could not be prepared; the text says how the command ended, with its last lines."""


async def set_up(tasks: TaskContext, task: Task, workdir: Workdir) -> Task:
    """Lease a port to the task and, once in each workdir, run its setup there. Raises `SetupFailedError`."""
    instance, _ = await find_instance(tasks, task, setup_name(task))
    if instance is None:  # one that is under way may listen on the port already
        task = await tasks.store.run(task_store.lease_port, task, tuple(_candidates(tasks, task)))
    command = setup_of(tasks, task)
    if command is None or task.is_set_up:
        return task
    receipt = await _run(tasks, task, command, workdir)
    if not receipt.passed:
        limit = tasks.settings_of(task.project).setup_timeout
        timed_out = f"did not end within {limit.total_seconds():g} s"
        how = timed_out if receipt.exit_code is None else f"failed with exit code {receipt.exit_code}"
        raise SetupFailedError(f"the setup `{command}` {how}:\n{receipt.output}")
    return await tasks.change(await tasks.reload(task), {"is_set_up": True})


def setup_name(task: Task) -> str:
    """The name of the instance that runs the setup of the present attempt."""
    return f"{task.key}-{task.attempt}-{_LABEL}"


def setup_of(tasks: TaskContext, task: Task) -> str | None:
    """Its own command line; else that of its agent's definition, else that of the settings."""
    if task.setup is not None:
        return task.setup
    of_agent = None
    with contextlib.suppress(AgentNotFoundError):  # the spawn says so
        of_agent = None if task.agent is None else tasks.definition_of(task).setup
    return tasks.settings_of(task.project).setup if of_agent is None else of_agent


async def _run(tasks: TaskContext, task: Task, command: str, workdir: Workdir) -> Receipt:
    limit = tasks.settings_of(task.project).setup_timeout
    while True:
        try:
            return await run_command(tasks, task, command, label=_LABEL, place=Path(workdir.path), limit=limit)
        except CheckLostError:  # with the machine; begun again a bounded number of times
            continue


def _candidates(tasks: TaskContext, task: Task) -> Iterator[int]:
    """Free ports: first the one that it has had, so that attempts share it."""
    if task.port is not None and _is_free(task.port):
        yield task.port
    yield from (port for port in tasks.chance.sample(_PORTS, _TRIES) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that has just ended is no server
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True
