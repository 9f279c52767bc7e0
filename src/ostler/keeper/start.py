"""Starting a unit: make its cell and its run directory, start the process, undo all of it when that fails."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ostler.keeper import tree
from ostler.keeper.exec_child import exec_child
from ostler.keeper.exits import Children, ExitRecorder
from ostler.keeper.groups import ENFORCED, Limits, nice_for
from ostler.keeper.loop import Loop
from ostler.keeper.output import Log, Output
from ostler.keeper.protocol import AGENT_BACKLOG, AGENT_SOCKET, MARK, SPEC, STDIN, UNIT_NAME, listen
from ostler.keeper.remove import Remover
from ostler.keeper.rlimit_tag import tag_for
from ostler.keeper.state import ENDED, RUNNING, STARTING, RequestError, State, Unit, cell_of
from ostler.keeper.templates import ForkOrder, Templates
from ostler.keeper.terminal import Consoles, size_of

#: Descriptors that the keeper keeps for itself: to answer, to look at processes, to end them.
_RESERVED = 64
Reply = Callable[[dict[str, Any]], None]


class Starter:
    def __init__(
        self,
        loop: Loop,
        state: State,
        children: Children,
        exits: ExitRecorder,
        templates: Templates,
        remover: Remover,
    ) -> None:
        self._loop = loop
        self._state = state
        self._children = children
        self._exits = exits
        self._templates = templates
        self._remover = remover
        self.consoles = Consoles(loop)
        self._orders: dict[str, ForkOrder] = {}
        self._failed: Callable[[Unit], None] = lambda _: None
        self._on_output: Callable[[Unit], None] = lambda _: None
        self.nofile = list(resource.getrlimit(resource.RLIMIT_NOFILE))

    def on_failed(self, call: Callable[[Unit], None]) -> None:
        self._failed = call

    def on_output(self, call: Callable[[Unit], None]) -> None:
        self._on_output = call

    def start(self, request: Mapping[str, Any], reply: Reply, refuse: Callable[[str, str], None]) -> None:
        _check(request)
        name = str(request["unit"])
        if name in self._state.units or name in self._state.journal.records:
            raise RequestError("taken", f"unit {name} exists already")
        if not _has_descriptors():
            raise RequestError("start", "the keeper has too few file descriptors left; raise its limit (ulimit -n)")
        if request.get("terminal") is not None:
            size_of(request["terminal"])
        try:
            cell = self._state.make_cell(cell_of(name), Limits(**request["limits"]))
        except OSError as error:
            raise RequestError("start", f"its group could not be made: {error}") from error
        if cell.frozen or cell.stopping:
            raise RequestError("busy", f"cell {cell.name} is {'frozen' if cell.frozen else 'being stopped'}")
        unit = Unit(name, cell, str(request["log"]), int(request["log_bytes"]))
        self._state.units[name] = cell.units[name] = unit

        def answer(sentence: str | None) -> None:
            unit.on_started = None
            if sentence is None:
                reply(self._state.status(name))
            else:
                refuse("start", sentence)

        unit.on_started = answer
        try:
            self._begin(unit, request)
        except OSError as error:
            self._fail(unit, f"it could not be started: {error}")

    def _begin(self, unit: Unit, request: Mapping[str, Any]) -> None:
        reads, writes = self._open_streams(unit, request)
        unit.output = Output(self._loop, reads, Log(unit.log, unit.log_bytes), int(request["log_rate"]))
        unit.output.on_data = partial(self._on_output, unit)
        if unit.console is not None:
            unit.output.tap = unit.console.take
        try:
            unit.oom_before = unit.cell.group.oom_kills()
            unit.started_at = time.monotonic()
            plan = self._plan(unit, request)
            if "argv" in request:
                unit.is_command = True
                self._execute(unit, request, plan, writes)
            else:
                self._fork(unit, request, plan, writes)
        finally:
            for descriptor in writes:
                os.close(descriptor)

    def _open_streams(self, unit: Unit, request: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, int]]:
        """The ends to read, and the program's standard output and standard error."""
        if request.get("terminal") is not None:
            unit.console, ours, theirs = self.consoles.open_terminal(unit.name, size_of(request["terminal"]))
            return (ours,), (theirs, os.dup(theirs))
        if request.get("open_stdin"):
            unit.console = self.consoles.open_pipe(unit.name)
        return _make_pipes()

    def _plan(self, unit: Unit, request: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "group_files": unit.cell.group.add(unit.name),
            "group_directory": unit.cell.group.directory(unit.name),
            "env": {**request["env"], MARK: f"{self._state.token}:{unit.name}"},
            "cwd": request["cwd"],
            "nice": self._nice(request),
            "umask": request.get("umask"),
            "keeper": os.getpid(),
            "nofile": self.nofile,
            "tag": tag_for(self._state.token, unit.name),
            "terminal": request.get("terminal") is not None,
        }

    def _nice(self, request: Mapping[str, Any]) -> int:
        nice = int(request.get("nice") or 0)
        if self._state.groups.enforcement()["cpu"] == ENFORCED:
            return nice
        return max(nice, nice_for(Limits(**request["limits"]).weight))

    def _execute(
        self, unit: Unit, request: Mapping[str, Any], plan: Mapping[str, Any], outputs: tuple[int, int]
    ) -> None:
        argv = [str(word) for word in request["argv"]]
        stdin = -1 if unit.console is None else unit.console.release_stdin()
        if request.get("stdin"):
            if stdin >= 0:
                os.close(stdin)
            stdin = os.open(os.path.join(self._state.run_directory(unit.name), STDIN), os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid, report = exec_child(argv, plan, stdin=stdin, output=outputs[0], errors=outputs[1])
        finally:
            if stdin >= 0:
                os.close(stdin)
        self._is_executing(unit, pid, report)

    def _is_executing(self, unit: Unit, pid: int, report: int) -> None:
        unit.report = report
        os.set_blocking(report, False)
        self._has_process(unit, pid, running=False)
        self._loop.watch(report, lambda: self._read_report(unit))

    def _read_report(self, unit: Unit) -> None:
        """The pipe ended: the program was executed, or a sentence says why not; then the child ends by itself."""
        try:
            unit.start_error = os.read(unit.report, 4096).decode(errors="replace")
        except BlockingIOError:
            return
        self._loop.unwatch(unit.report)
        os.close(unit.report)
        unit.report = -1
        if not unit.start_error:
            unit.state = RUNNING
            if unit.on_started is not None:
                unit.on_started(None)

    def _fork(self, unit: Unit, request: Mapping[str, Any], plan: Mapping[str, Any], outputs: tuple[int, int]) -> None:
        directory = self._state.run_directory(unit.name)
        self._make_empty(directory)
        unit.key = os.urandom(12).hex()
        with listen(directory, AGENT_SOCKET, AGENT_BACKLOG) as listener:
            copies = _copy(outputs)
            descriptors = [listener.detach(), *copies]
        order = ForkOrder(
            unit.name,
            {"plan": plan, "key": unit.key, "run": directory},
            descriptors,
            forked=lambda pid: self._forked(unit, pid),
            failed=lambda sentence: self._fork_failed(unit, sentence),
            unforkable=lambda order: self._execute_python(unit, request, plan, order),
        )
        self._orders[unit.name] = order
        template_plan = {"keeper": os.getpid(), "nofile": self.nofile, "nice": 0}
        try:
            self._templates.fork(request["template"], template_plan, order)
        except OSError:
            self._orders.pop(unit.name, None)
            order.close()
            raise

    def _execute_python(
        self, unit: Unit, request: Mapping[str, Any], plan: Mapping[str, Any], order: ForkOrder
    ) -> None:
        """A module that cannot be forked (it has threads or sockets) gets a fresh interpreter for each agent."""
        self._orders.pop(unit.name, None)
        directory, template = self._state.run_directory(unit.name), request["template"]
        try:
            with open(os.path.join(directory, SPEC), "w", encoding="utf-8") as file:
                json.dump({**template["setup"], "key": unit.key, "run": directory}, file)
            listener, output, errors = order.descriptors
            argv = [*template["fresh_argv"], directory]
            pid, report = exec_child(argv, plan, output=output, errors=errors, inherited=listener)
        except OSError as error:
            order.close()
            self._fail(unit, f"it could not be started: {error}")
            return
        order.close()
        self._is_executing(unit, pid, report)

    def _make_empty(self, directory: str) -> None:
        try:
            os.mkdir(directory, 0o700)
        except (FileExistsError, FileNotFoundError):
            self._remover.remove(directory)
            os.makedirs(directory, 0o700)

    def _forked(self, unit: Unit, pid: int) -> None:
        self._orders.pop(unit.name, None)
        self._has_process(unit, pid, running=True)
        if unit.on_started is not None:
            if unit.by:  # stopped while it was being started
                unit.on_started("it was stopped while it was being started")
            else:
                unit.on_started(None)
        if unit.by and unit.state == RUNNING:
            unit.cell.group.kill(unit.name)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # it may not have entered its group yet; our unreaped child

    def _fork_failed(self, unit: Unit, sentence: str) -> None:
        self._orders.pop(unit.name, None)
        self._fail(unit, sentence)

    def _has_process(self, unit: Unit, pid: int, *, running: bool) -> None:
        unit.pid = pid
        unit.start_time = tree.start_time(pid)
        if running:
            unit.state = RUNNING
        unit.cell.group.started(unit.name, pid)
        self._children.claim(pid, lambda status: self._main_ended(unit, status))

    def _main_ended(self, unit: Unit, wait_status: int) -> None:
        if unit.report >= 0:
            self._read_report(unit)  # a short command may have ended before the pipe was looked at
        if unit.state == STARTING and not unit.is_unanswered:
            self._fail(unit, unit.start_error or "the new process ended before its program began")
        else:
            unit.why = unit.why or unit.start_error
            self._exits.main_ended(unit, wait_status)

    def _fail(self, unit: Unit, sentence: str) -> None:
        """Nothing is left of it."""
        unit.cell.group.kill(unit.name)
        if unit.output is not None:
            unit.output.finish()
        if unit.console is not None:
            unit.console.finish()
        self._remover.remove(self._state.run_directory(unit.name))
        unit.state = ENDED
        self._state.drop(unit)
        if unit.on_started is not None:
            unit.on_started(sentence)
        self._failed(unit)

    def cancel(self, unit: Unit) -> None:
        """A stop came while it is being started."""
        order = self._orders.get(unit.name)
        if order is not None and order.descriptors:  # no child has it yet
            self._orders.pop(unit.name)
            order.cancel()
            self._loop.later(0.0, lambda: self._fail(unit, "it was stopped while it was being started"))
        elif unit.pid:
            unit.cell.group.kill(unit.name)
            with contextlib.suppress(OSError):
                os.kill(unit.pid, signal.SIGKILL)


def _check(request: Mapping[str, Any]) -> None:
    """All that can be wrong with it, before anything is made for it. Raises `ValueError`, `KeyError`, `TypeError`."""
    if UNIT_NAME.fullmatch(str(request["unit"])) is None:
        raise ValueError(f"unit {request['unit']!r:.80} is no name of a unit")
    for name, value in Limits(**request["limits"])._asdict().items():
        if value is not None and (not isinstance(value, int) or value <= 0):
            raise ValueError(f"{name} must be a whole number above 0, not {value!r:.20}")
    for name in ("log_bytes", "log_rate"):
        if int(request[name] or 0) <= 0:
            raise ValueError(f"{name} must be above 0, not {request[name]!r:.20}")
    int(request.get("nice") or 0)
    for name in ("cwd", "log"):
        if not isinstance(request[name], str):
            raise TypeError(f"{name} must be a text")
    _check_env(request["env"])
    argv = request.get("argv")
    if "template" in request:
        _check_template(request["template"])
    elif not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise TypeError("argv must be a list of texts")


def _check_env(env: Mapping[str, Any]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or not isinstance(value, str) or "\0" in value:
            raise ValueError(f"env cannot have {name!r:.80}")


def _check_template(template: Mapping[str, Any]) -> None:
    for name in ("key", "argv", "fresh_argv", "env", "cwd", "setup"):
        if name not in template:
            raise KeyError(f"template.{name}")


def _make_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """For standard output and standard error: the ends to read, and the ends to write."""
    output_read, output_write = os.pipe2(os.O_CLOEXEC)
    try:
        errors_read, errors_write = os.pipe2(os.O_CLOEXEC)
    except OSError:
        os.close(output_read)
        os.close(output_write)
        raise
    return (output_read, errors_read), (output_write, errors_write)


def _copy(outputs: tuple[int, int]) -> list[int]:
    first = os.dup(outputs[0])
    try:
        return [first, os.dup(outputs[1])]
    except OSError:
        os.close(first)
        raise


def _has_descriptors() -> bool:
    """The kernel gives out the lowest free number, so one tells how many are in use."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return True
    try:
        lowest = os.dup(0)
    except OSError:
        return False
    os.close(lowest)
    return lowest + _RESERVED < limit
