"""Starting a unit: make its cell and its run directory, start the process, undo all of it when that fails."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from ostler.keeper import tree
from ostler.keeper.exec_child import exec_child
from ostler.keeper.exits import Children, ExitRecorder
from ostler.keeper.groups import Limits
from ostler.keeper.loop import Loop
from ostler.keeper.output import Log, Output
from ostler.keeper.protocol import AGENT_SOCKET, BACKLOG, MARK, SPEC, STDIN, listen
from ostler.keeper.rlimit_tag import tag_for
from ostler.keeper.state import RUNNING, STARTING, RequestError, State, Unit, cell_of
from ostler.keeper.templates import ForkOrder, Templates

#: Descriptors that the keeper keeps for itself: to answer, to look at processes, to end them.
_RESERVED = 64
Reply = Callable[[dict[str, Any]], None]


class Starter:
    def __init__(self, loop: Loop, state: State, children: Children, exits: ExitRecorder, templates: Templates) -> None:
        self._loop = loop
        self._state = state
        self._children = children
        self._exits = exits
        self._templates = templates
        self._orders: dict[str, ForkOrder] = {}
        self._failed: Callable[[Unit], None] = lambda unit: None
        self.nofile = list(resource.getrlimit(resource.RLIMIT_NOFILE))

    def on_failed(self, call: Callable[[Unit], None]) -> None:
        self._failed = call

    def start(self, request: Mapping[str, Any], reply: Reply, refuse: Callable[[str, str], None]) -> None:
        name = str(request["unit"])
        if name in self._state.units or name in self._state.journal.records:
            raise RequestError("taken", f"unit {name} exists already")
        if not _has_descriptors():
            raise RequestError("start", "the keeper has too few file descriptors left; raise its limit (ulimit -n)")
        limits = Limits(**request["limits"])
        try:
            cell = self._state.make_cell(cell_of(name), limits)
        except OSError as error:
            raise RequestError("start", f"its group could not be made: {error}") from error
        if cell.frozen:
            raise RequestError("busy", f"cell {cell.name} is frozen")
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
        reads, writes = _make_pipes()
        unit.output = Output(self._loop, reads, Log(unit.log, unit.log_bytes), int(request["log_rate"]))
        unit.oom_before = unit.cell.group.oom_kills()
        unit.started_at = time.monotonic()
        try:
            plan = self._plan(unit, request)
            if "argv" in request:
                self._execute(unit, request, plan, writes)
            else:
                self._fork(unit, request, plan, writes)
        finally:
            for descriptor in writes:
                os.close(descriptor)

    def _plan(self, unit: Unit, request: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "group_files": unit.cell.group.add(unit.name),
            "env": {**request["env"], MARK: f"{self._state.token}:{unit.name}"},
            "cwd": request["cwd"],
            "nice": int(request.get("nice") or 0),
            "umask": request.get("umask"),
            "keeper": os.getpid(),
            "nofile": self.nofile,
            "tag": tag_for(self._state.token, unit.name),
        }

    def _execute(
        self, unit: Unit, request: Mapping[str, Any], plan: Mapping[str, Any], outputs: tuple[int, int]
    ) -> None:
        argv, stdin = [str(word) for word in request["argv"]], -1
        if request.get("stdin"):
            stdin = os.open(os.path.join(self._state.run_directory(unit.name), STDIN), os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid, report = exec_child(argv, plan, stdin=stdin, output=outputs[0], errors=outputs[1])
        finally:
            if stdin >= 0:
                os.close(stdin)
        self._has_process(unit, pid, running=False)
        os.set_blocking(report, False)
        self._loop.watch(report, lambda: self._executed(unit, report))

    def _executed(self, unit: Unit, report: int) -> None:
        """The report pipe ended: the program was executed, or a sentence says why not."""
        try:
            sentence = os.read(report, 4096).decode(errors="replace")
        except BlockingIOError:
            return
        self._loop.unwatch(report)
        os.close(report)
        if unit.state != STARTING:
            return
        if sentence:
            unit.start_error = sentence
            return  # the child exits, and `_main_ended` fails the start
        unit.state = RUNNING
        if unit.on_started is not None:
            unit.on_started(None)

    def _fork(self, unit: Unit, request: Mapping[str, Any], plan: Mapping[str, Any], outputs: tuple[int, int]) -> None:
        directory = self._state.run_directory(unit.name)
        _make_empty(directory)
        unit.key = secrets.token_hex(12)
        listener = listen(directory, AGENT_SOCKET, BACKLOG)
        descriptors = [listener.detach(), *map(os.dup, outputs)]
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
        self._has_process(unit, pid, running=False)
        os.set_blocking(report, False)
        self._loop.watch(report, lambda: self._executed(unit, report))

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
        if unit.state == STARTING:  # a command: it was executed and is quick, or it failed
            self._loop.later(0.0, lambda: self._judge_start(unit, wait_status))
        else:
            self._exits.main_ended(unit, wait_status)

    def _judge_start(self, unit: Unit, wait_status: int) -> None:
        """A turn later the report pipe was read."""
        if unit.state == RUNNING:
            self._exits.main_ended(unit, wait_status)
        else:
            sentence = unit.start_error or "the new process ended before its program began"
            unit.cell.group.kill(unit.name)
            self._fail(unit, sentence)

    def _fail(self, unit: Unit, sentence: str) -> None:
        """Nothing is left of it."""
        if unit.output is not None:
            unit.output.finish()
        shutil.rmtree(self._state.run_directory(unit.name), ignore_errors=True)
        unit.state = "ended"
        self._state.drop(unit)
        if unit.on_started is not None:
            unit.on_started(sentence)
        self._failed(unit)

    def cancel(self, unit: Unit) -> None:
        """A stop came while it is being started."""
        order = self._orders.get(unit.name)
        if order is not None and order.descriptors:  # not sent to the template yet
            order.cancelled = True
            order.close()
            self._orders.pop(unit.name)
            self._loop.later(0.0, lambda: self._fail(unit, "it was stopped while it was being started"))
        elif unit.pid:
            unit.cell.group.kill(unit.name)
            with contextlib.suppress(OSError):
                os.kill(unit.pid, signal.SIGKILL)


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


def _make_empty(directory: str) -> None:
    try:
        os.mkdir(directory, 0o700)
    except (FileExistsError, FileNotFoundError):
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory, 0o700)


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
