"""Exchanging the code of a running keeper: the new one takes over every process, descriptor and promise.

The same process executes the new code, so its children stay its children. What it knows goes along as JSON in a file
in memory. First a child of it runs the new code on that file: only what has read it may take over.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from ostler.keeper.asking import Reply
from ostler.keeper.children import Ended
from ostler.keeper.keeping import Keeper
from ostler.keeper.output import Tail
from ostler.keeper.spawning import CHANNEL_FD, Files, spawn
from ostler.keeper.takeover import LIMITS, STATE_VERSION, descriptors_in
from ostler.keeper.units import ENDED, LIVING, Room, Unit

CHECK, RESUME = "--check", "--resume"
PASSED = "ok"
_QUIET_SECONDS = 10.0
_CHECK_SECONDS = 10.0
_POLL_SECONDS = 0.01


class Upgrade:
    """`place` is what `main` needs: the directory, and the lock that must not be let go."""

    def __init__(self, keeper: Keeper, place: Mapping[str, Any]) -> None:
        self._keeper = keeper
        self._place = place
        self._under_way = False

    def begin(self, argv: list[str], reply: Reply) -> None:
        if self._under_way:
            reply.refuse("upgrade", "another upgrade is under way")
            return
        self._under_way = True
        self._when_quiet(time.monotonic() + _QUIET_SECONDS, lambda: self._check(argv, reply), reply)

    def _refuse(self, reply: Reply, sentence: str) -> None:
        self._under_way = False
        reply.refuse("upgrade", sentence)

    def _when_quiet(self, until: float, then: Callable[[], None], reply: Reply) -> None:
        """What is half done cannot be handed over."""
        busy = self._busy()
        if not busy:
            then()
        elif time.monotonic() > until:
            self._refuse(reply, f"it did not come to rest within {_QUIET_SECONDS:.0f} seconds: {busy}")
        else:
            self._keeper.loop.later(_POLL_SECONDS, lambda: self._when_quiet(until, then, reply))

    def _busy(self) -> str:
        states = [unit.state for unit in self._keeper.house.units.values()]
        manager = self._keeper.server.manager
        moving = len(states) - states.count(LIVING) - states.count(ENDED)
        if moving:
            return f"{moving} starts or ends are under way"
        if len(self._keeper.stops):
            return f"{len(self._keeper.stops)} stops are under way"
        return "answers wait to be read" if manager is not None and manager.is_waiting else ""

    # --- the trial ---------------------------------------------------------------------------------

    def _check(self, argv: list[str], reply: Reply) -> None:
        state = _in_memory(self._state(None))
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            settle = {"env": dict(os.environ), "keeper": os.getpid()}
            pid, report = spawn([*argv, CHECK, str(CHANNEL_FD)], settle, Files(output=write, channel=state))
        except OSError as error:
            os.close(read)
            self._refuse(reply, f"the new code cannot be tried: {error}")
            return
        finally:
            os.close(write)
            os.close(state)
        loop, children = self._keeper.loop, self._keeper.children
        said = Tail(loop, read)
        slow = loop.later(_CHECK_SECONDS, lambda: children.kill(pid, signal.SIGKILL, said))

        def ended(how: Ended) -> None:
            slow.cancel()
            text = os.read(report, 4096).decode(errors="replace") or said.text()
            os.close(report)
            said.close()
            if how.code == 0 and text.splitlines()[-1:] == [PASSED]:
                self._when_quiet(time.monotonic() + _QUIET_SECONDS, lambda: self._exchange(argv, reply), reply)
            else:
                end = f"signal {how.signal}" if how.signal else f"code {how.code}"
                self._refuse(reply, f"the new code cannot take over ({end}): {text or 'it said nothing'}")

        children.add(pid, ended, said)

    # --- the deed ----------------------------------------------------------------------------------

    def _exchange(self, argv: list[str], reply: Reply) -> None:
        """Until the new code has hidden itself its memory can be read by whoever runs, so all agents stand still."""
        keeper = self._keeper
        keeper.house.journal.flush()
        keeper.starter.templates.close()
        moving = [room.box for room in keeper.house.rooms.values() if not room.frozen and room.has_living]
        moving += keeper.starter.templates.boxes  # what a module started at its import is somebody too
        for sentence in keeper.house.boxes.freeze_all(moving):
            keeper.warn(f"while the code is exchanged an agent goes on, and can look into the keeper: {sentence}")
        try:
            _go_on_as(argv, self._state(reply.number))
        except OSError as error:
            for box in moving:
                with contextlib.suppress(OSError):
                    box.thaw()
            self._refuse(reply, f"the new code cannot be executed: {error}")

    def _state(self, answer: Any) -> dict[str, Any]:
        keeper = self._keeper
        server, house = keeper.server, keeper.house
        return {
            **self._place,
            "state": STATE_VERSION,
            "token": house.token,
            "epoch": keeper.epoch,
            "lease": keeper.lease.seconds,
            "nofile": keeper.starter.nofile,
            "listener": server.listener.fileno() if server.listener is not None else -1,
            "manager": server.manager.fileno() if server.manager is not None else -1,
            "answer": answer,
            "templates": [box.name for box in keeper.starter.templates.boxes],
            "rooms": [_room_state(room) for room in house.rooms.values()],
            "units": [_unit_state(unit) for unit in house.units.values()],
        }


def _room_state(room: Room) -> dict[str, Any]:
    limits = {key: getattr(room.limits, key) for key in LIMITS}
    return {"name": room.name, "limits": limits, "frozen": room.frozen, "held": room.box.held()}


def _unit_state(unit: Unit) -> dict[str, Any]:
    return {
        "unit": unit.name,
        "box": unit.room.name,
        "leaf": unit.leaf,
        "pid": unit.pid,
        "start_time": unit.start_time,
        "grown_from": unit.grown_from,
        "channel": unit.channel,
        "output": unit.output.state() if unit.output is not None else None,
        "by": unit.by,
        "why": unit.why,
        "oom_before": unit.oom_before,
        "exit": unit.exit,
    }


def _go_on_as(argv: list[str], state: Mapping[str, Any]) -> None:
    """Never returns, unless by `OSError`; then all is as it was."""
    memory = _in_memory(state)
    inherited = [memory, *descriptors_in(state)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        for one in inherited:
            os.set_inheritable(one, True)
        os.execvpe(argv[0], [*argv, RESUME, str(memory)], dict(os.environ))  # noqa: S606 - a program without a shell
    except OSError:
        for one in inherited:
            os.set_inheritable(one, False)
        os.close(memory)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise


def _in_memory(state: Mapping[str, Any]) -> int:
    body = memoryview(json.dumps(state).encode())
    descriptor = os.memfd_create("ostler-keeper", os.MFD_CLOEXEC)
    while body:
        body = body[os.write(descriptor, body) :]
    return descriptor
