"""Boxes with real processes and real control groups: nobody escapes, limits hold, and nobody else is touched."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_box_ground import ENFORCING, KINDS, POLLED, Ground, cpu_of, eventually, groups_of, said, subreaper
from machine_ground import lacking

from ostler.keeper import group_probe
from ostler.keeper.groups import APPROXIMATED, ENFORCED, Group, Limits

_DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        up("ready")
        time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(60)
"""
_DEAF = """
if os.fork() == 0:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    up("ready")
    while time.monotonic() < END:
        time.sleep(1)
time.sleep(60)
"""
_STOPPED = """
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
os.waitpid(child, os.WUNTRACED)
up("ready")
time.sleep(60)
"""
_FLEEING = """
up("ready")
while time.monotonic() < END:
    if os.fork():
        os._exit(0)
"""
_SLEEP = "up('ready')\ntime.sleep(60)"
_BUSY = "up('ready')\nwhile time.monotonic() < END: pass"
_BUSY_PAIR = "os.fork()\nup('ready')\nwhile time.monotonic() < END: pass"
_GREEDY = "up('ready')\nhoard = []\nwhile time.monotonic() < END: hoard.append(b'x' * (1 << 20)); time.sleep(0.0005)"
_BOMB = """
count = 0
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
    except OSError:
        break
up(count)
time.sleep(60)
"""


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ground(kind: str) -> Iterator[Ground]:
    with subreaper():
        try:
            here = Ground(kind, secrets.token_hex(8))
        except OSError as error:
            lacking(f"no boxes of kind {kind} can be had here: {error}")
        try:
            yield here
        finally:
            here.close()
        assert not groups_of(here.token)


def _ready(ground: Ground, group: Group, code: str, run: str = "") -> int:
    process = ground.start(group, code, run=run)
    assert said(process) == "ready"
    return process.pid


@pytest.mark.parametrize("code", [_DAEMON, _DEAF, _STOPPED, _FLEEING], ids=["daemon", "deaf", "stopped", "fleeing"])
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_kill_leaves_nobody_and_hits_nobody_else(ground: Ground, code: str) -> None:
    group, other = ground.group("cell.1"), ground.group("cell.10")
    neighbour = _ready(ground, other, _SLEEP)
    _ready(ground, group, code)
    assert ground.pids(group)

    ground.kill_until_empty(group)

    assert ground.marked("cell.1") == ground.marked("cell.10") == [neighbour]
    assert ground.pids(other) == {neighbour}
    group.remove()
    ground.reap()  # as a keeper does: the dead whom nobody has reaped may have had children
    assert not ground.pids(group)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_frozen_stands_still_and_goes_on_where_it_was(ground: Ground) -> None:
    group = ground.group()
    _ready(ground, group, _BUSY_PAIR)
    eventually(lambda: len(ground.pids(group)) == 2)
    pids = sorted(ground.pids(group))

    ground.freeze(group)
    before = cpu_of(pids)
    time.sleep(0.15)  # long enough for a running one to be seen running
    assert cpu_of(pids) == before
    group.thaw()

    eventually(lambda: cpu_of(pids) > before)
    assert sorted(ground.pids(group)) == pids


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_frozen_can_be_killed(ground: Ground) -> None:
    group = ground.group()
    _ready(ground, group, _DEAF)
    ground.freeze(group)

    ground.kill_until_empty(group)

    assert not ground.marked()


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_one_unit_is_killed_and_the_other_lives(ground: Ground) -> None:
    group = ground.group()
    first, second = (_ready(ground, group, _DAEMON, run) for run in ("1", "2"))
    assert first in ground.pids(group, "cell.1.1")
    eventually(lambda: len(ground.pids(group)) == 4)  # the one between a daemon and its parent may still be ending

    ground.kill_until_empty(group, "cell.1.1")

    assert not ground.marked("cell.1.1")
    assert len(ground.pids(group, "cell.1.2")) == len(ground.pids(group)) == 2
    assert second in ground.pids(group)
    group.remove("cell.1.1")


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_one_room_of_a_frozen_box_is_killed_and_the_rest_stays_frozen(ground: Ground) -> None:
    group = ground.group()
    _ready(ground, group, _BUSY_PAIR, "1")
    busy = _ready(ground, group, _BUSY, "2")
    ground.freeze(group)
    before = cpu_of([busy])

    ground.kill_until_empty(group, "cell.1.1")

    assert ground.pids(group) == {busy}
    time.sleep(0.05)  # long enough for a running one to be seen running
    assert cpu_of([busy]) == before
    group.thaw()
    eventually(lambda: cpu_of([busy]) > before)


@pytest.mark.parametrize("kind", ENFORCING, indirect=True)
def test_memory_past_the_limit_is_counted_as_such(ground: Ground) -> None:
    group = ground.group(limits=Limits(memory_bytes=32 << 20))
    process = ground.start(group, _GREEDY)

    assert process.wait(60) == -signal.SIGKILL
    # A kernel that ends all of a group at once counts the first of them with the others, and once by itself.
    assert group.oom_kills() in ({1, 2} if ground.kind == "cgroup2" else {1})
    assert ground.groups.enforcement()["memory"] == ENFORCED


@pytest.mark.parametrize("kind", POLLED, indirect=True)
def test_memory_past_the_limit_is_seen_by_looking(ground: Ground) -> None:
    group = ground.group(limits=Limits(memory_bytes=32 << 20))
    _ready(ground, group, _GREEDY)

    eventually(lambda: _excess(ground, group) == "memory")

    assert group.oom_kills() == 1
    assert ground.groups.enforcement()["memory"] == APPROXIMATED


@pytest.mark.parametrize("limits", [Limits(), Limits(memory_bytes=64 << 20)], ids=["unlimited", "limited"])
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_who_kills_itself_did_not_die_of_memory(ground: Ground, limits: Limits) -> None:
    group = ground.group(limits=limits)
    process = ground.start(group, "os.kill(os.getpid(), signal.SIGKILL)")

    assert process.wait(60) == -signal.SIGKILL
    # None: another on this machine may have died of memory meanwhile, and nobody counts here.
    assert group.oom_kills() in ({0} if ground.kind in ENFORCING and limits.memory_bytes else {0, None})


@pytest.mark.parametrize("kind", [*ENFORCING, "trees"], indirect=True)
def test_a_quarter_of_a_core_is_a_quarter_of_a_core(ground: Ground) -> None:
    group = ground.group(limits=Limits(cpu_percent=25))
    _ready(ground, group, _BUSY_PAIR)
    _hold_for(ground, group, 0.3)
    before, began = group.usage().cpu_seconds, time.monotonic()
    _hold_for(ground, group, 1.6)
    used = group.usage().cpu_seconds - before
    share = used / (time.monotonic() - began)

    # By signals two busy ones get on the average what they may, but in gulps of up to 0.2 s.
    slack = 0.05 if ground.kind in ENFORCING else 0.15
    assert 0.05 < share <= 0.25 + slack, "a busy machine may have no quarter to give"


def _excess(ground: Ground, group: Group) -> str:
    """As the keeper polls for it."""
    ground.groups.turn()
    return (group.broken_limit() or ("", ""))[0]


def _hold_for(ground: Ground, group: Group, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _excess(ground, group)
        time.sleep(0.1)


@pytest.mark.parametrize("kind", ENFORCING, indirect=True)
def test_a_fork_bomb_stays_in_its_box(ground: Ground) -> None:
    group = ground.group(limits=Limits(pids=8))

    assert said(ground.start(group, _BOMB)) == "7"
    assert group.usage().threads == 8
    ground.kill_until_empty(group)


@pytest.mark.parametrize("kind", POLLED, indirect=True)
def test_a_fork_bomb_is_seen_by_looking(ground: Ground) -> None:
    group = ground.group(limits=Limits(pids=8))
    assert said(ground.start(group, _BOMB)) == "200"

    assert _excess(ground, group) == "pids"
    ground.kill_until_empty(group)
    assert not ground.marked()


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_usage_is_that_of_the_whole_box(ground: Ground) -> None:
    group = ground.group(limits=Limits(memory_bytes=256 << 20, cpu_percent=100))
    _ready(ground, group, "hoard = b'x' * (20 << 20)\n" + _BUSY_PAIR)

    eventually(lambda: group.usage().cpu_seconds > 0.1)
    assert group.usage().memory_bytes > 20 << 20
    assert group.usage().threads == 2


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_sweep_ends_what_an_earlier_keeper_left(ground: Ground) -> None:
    group = ground.group("cell.1", Limits(pids=50))
    frozen = ground.group("cell.2")
    pids = {_ready(ground, group, _DAEMON), _ready(ground, frozen, _DEAF)}
    ground.freeze(frozen)
    stranger = ground.start(ground.group("cell.3"), _SLEEP, enter=False)
    assert said(stranger) == "ready"  # before it has executed its program it has no mark

    killed = group_probe.sweep(ground.token)

    assert pids | {stranger.pid} <= set(killed)
    assert not ground.marked()
    assert not groups_of(ground.token)
    again = ground.group("cell.4", Limits(pids=50, memory_bytes=256 << 20))
    assert _ready(ground, again, _SLEEP) in ground.pids(again)
    assert len(group_probe.sweep(ground.token)) == 1


@pytest.mark.parametrize("kind", ENFORCING, indirect=True)
def test_a_box_that_cannot_be_made_leaves_nothing(ground: Ground) -> None:
    ground.group("twice.1")
    with pytest.raises(OSError, match="Invalid argument"):
        ground.group("twice.2", Limits(pids=-5, memory_bytes=1 << 28))

    assert not [group for group in groups_of(ground.token) if (group / "twice.2").exists()]


def test_every_kind_that_this_kernel_has_is_tested() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    has_first = any(kind == "cgroup" and "freezer" in options.split(",") for _, _, kind, options, *_ in mounts)
    has_second = any(kind == "cgroup2" for _, _, kind, *_ in mounts)
    assert ("cgroup1" in KINDS, "cgroup2" in KINDS) == (has_first, has_second)
    assert bool(ENFORCING) or not has_first


def test_the_best_that_works_here_is_found_fast() -> None:
    token = secrets.token_hex(8)
    began = time.monotonic()
    groups = group_probe.open_groups(token)
    took = time.monotonic() - began
    group_probe.sweep(token)

    assert groups.title in {"cgroup v2", "cgroup v1", "process trees"}
    assert took < 10
    assert not groups_of(token)
    with pytest.raises(ValueError, match="unknown kind"):
        group_probe.open_groups(token, force="jail")
