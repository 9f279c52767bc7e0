"""The other side of an exchange of code: what the keeper before us knew, read and made our own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from ostler.keeper.asking import Reply
from ostler.keeper.boxes import BoxLimits
from ostler.keeper.keeping import Keeper
from ostler.keeper.output import Output
from ostler.keeper.units import ENDED, LIVING, Room, Unit

#: Raised when an older keeper could not make sense of the state. With 2 all stand still while it changes hands, and
#: who reads it has to let them go.
STATE_VERSION = 2
OLDEST_STATE = 1
LIMITS = ("memory_bytes", "cpu_percent", "pids", "weight")


class StateError(Exception):
    """What another keeper left cannot be taken over; the sentence says why."""


def read_state(descriptor: int) -> dict[str, Any]:
    """What the keeper before us knew. Raises `StateError`."""
    try:
        state = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        if not OLDEST_STATE <= state["state"] <= STATE_VERSION:
            readable = "" if OLDEST_STATE == STATE_VERSION else f"{OLDEST_STATE} to "
            raise StateError(f"its state is of version {state['state']}, this code reads {readable}{STATE_VERSION}")
        descriptors_in(state)
        for room in state["rooms"]:
            _limits(room)
            [(int(pid), int(started)) for pid, started in room.get("held") or ()]
        for key in ("directory", "token", "epoch", "lease", "nofile", "answer"):
            state[key]
        for unit in state["units"]:
            for key in ("unit", "box", "leaf", "pid", "start_time", "by", "why", "oom_before", "exit"):
                unit[key]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise StateError(f"its state cannot be read: {error!r}") from error
    return dict(state)


def _limits(room: Mapping[str, Any]) -> BoxLimits:
    return BoxLimits(**{key: room["limits"][key] for key in LIMITS})


def descriptors_in(state: Mapping[str, Any]) -> list[int]:
    """Those that change hands with it."""
    found = [state["listener"], state["manager"], state["lock"]]
    for unit in state["units"]:
        found.append(unit["channel"])
        if unit["output"] is not None:
            found.append(unit["output"]["fd"])
    return [one for one in found if one >= 0]


def keep_private(state: Mapping[str, Any]) -> None:
    """Nothing that came over may go on to an agent."""
    for one in descriptors_in(state):
        os.set_inheritable(one, False)


def take_over(keeper: Keeper, state: Mapping[str, Any]) -> None:
    """All of it is ours from here on; the one who asked for the exchange hears that it is done."""
    house = keeper.house
    keeper.epoch = state["epoch"]
    keeper.starter.nofile = state["nofile"]
    for one in state["rooms"]:
        limits = _limits(one)
        house.rooms[one["name"]] = Room(one["name"], house.boxes.find(one["name"], limits), limits)
    for one in state["units"]:
        _take_unit(keeper, one)
    for one in state["rooms"]:
        _let_go_on(house.rooms[one["name"]], one)
    keeper.starter.templates.clear(state.get("templates", ()))
    if state["manager"] >= 0:
        peer = keeper.server.adopt(socket.socket(fileno=state["manager"]))
        keeper.lease.manager_came(state["lease"])
        Reply(state["answer"], peer.send).ok()
    else:
        keeper.lease.seconds = state["lease"]
        keeper.lease.manager_left()


def _take_unit(keeper: Keeper, state: Mapping[str, Any]) -> None:
    room = keeper.house.rooms[state["box"]]
    unit = Unit(state["unit"], room, state["leaf"])
    unit.pid, unit.start_time, unit.channel = state["pid"], state["start_time"], state["channel"]
    unit.by, unit.why, unit.oom_before = state["by"], state["why"], state["oom_before"]
    unit.grown_from = state.get("grown_from")
    unit.exit = state["exit"]
    unit.state = LIVING if unit.exit is None else ENDED
    keeper.house.add(unit)
    if unit.exit is not None and unit.name not in keeper.house.journal.known:
        keeper.house.journal.add(unit.exit)  # the disk had refused it; it waited in the memory that is gone
    if state["output"] is not None:
        unit.output = Output.resumed(keeper.loop, state["output"])
    if unit.state == LIVING:
        room.box.took_in(unit.pid, unit.leaf)
        keeper.starter.sessions.weigh(unit)
        keeper.children.add(unit.pid, lambda ended: keeper.undertaker.bury(unit, ended), unit)


def _let_go_on(room: Room, state: Mapping[str, Any]) -> None:
    """All stood still while the code changed; now only those whom their manager has frozen do."""
    room.frozen = state["frozen"]
    room.box.resume(state.get("held"), frozen=room.frozen)
    if not room.frozen:
        with contextlib.suppress(OSError):
            room.box.thaw()
