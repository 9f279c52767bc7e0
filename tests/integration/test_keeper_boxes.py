"""Boxes with real processes and real control groups: nobody escapes, limits hold, and nobody else is touched."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_box_ground import ENFORCING, KINDS, LOOKING, Ground, cpu_of, eventually, groups_of, said, subreaper
from machine_ground import lacking
from ostler.keeper.boxes import APPROXIMATED, ENFORCED, Box, BoxLimits
from ostler.keeper.plainbox import PlainBox

from ostler.keeper import probing, tree

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


def _ready(ground: Ground, box: Box, code: str, leaf: str | None = None) -> int:
    process = ground.start(box, code, leaf=leaf)
    assert said(process) == "ready"
    return process.pid


@pytest.mark.parametrize("code", [_DAEMON, _DEAF, _STOPPED, _FLEEING], ids=["daemon", "deaf", "stopped", "fleeing"])
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_kill_leaves_nobody_and_hits_nobody_else(ground: Ground, code: str) -> None:
    box, other = ground.box("box.1"), ground.box("box.10")
    neighbour = _ready(ground, other, _SLEEP)
    _ready(ground, box, code)
    assert box.pids()

    ground.kill_until_empty(box)

    assert ground.marked("box.1") == ground.marked("box.10") == [neighbour]
    assert other.pids() == {neighbour}
    box.remove()
    ground.reap()  # as a keeper does: the dead whom nobody has reaped may have had children
    assert not box.pids()


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_frozen_stands_still_and_goes_on_where_it_was(ground: Ground) -> None:
    box = ground.box()
    _ready(ground, box, _BUSY_PAIR)
    eventually(lambda: len(box.pids()) == 2)
    pids = sorted(box.pids())

    box.freeze()
    before = cpu_of(pids)
    time.sleep(0.15)  # long enough for a running one to be seen running
    assert cpu_of(pids) == before
    box.thaw()

    eventually(lambda: cpu_of(pids) > before)
    assert sorted(box.pids()) == pids


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_frozen_can_be_killed(ground: Ground) -> None:
    box = ground.box()
    _ready(ground, box, _DEAF)
    box.freeze()

    ground.kill_until_empty(box)

    assert not ground.marked()


@pytest.mark.parametrize("says_leaf", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_one_room_is_killed_and_the_other_lives(ground: Ground, says_leaf: bool) -> None:
    ground.says_leaf = says_leaf
    box = ground.box()
    first, second = (_ready(ground, box, _DAEMON, leaf) for leaf in ("1", "2"))
    assert first in box.pids("1")
    eventually(lambda: len(box.pids()) == 4)  # the one between a daemon and its parent may still be ending

    ground.kill_until_empty(box, "1")

    assert not ground.marked("box.1.1")
    assert len(box.pids("2")) == len(box.pids()) == 2
    assert second in box.pids()
    box.remove("1")


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_one_room_of_a_frozen_box_is_killed_and_the_rest_stays_frozen(ground: Ground) -> None:
    box = ground.box()
    _ready(ground, box, _BUSY_PAIR, "1")
    busy = _ready(ground, box, _BUSY, "2")
    box.freeze()
    before = tree.cpu_seconds(busy)

    ground.kill_until_empty(box, "1")

    assert box.pids() == {busy}
    time.sleep(0.05)  # long enough for a running one to be seen running
    assert tree.cpu_seconds(busy) == before
    box.thaw()
    eventually(lambda: tree.cpu_seconds(busy) > before)


@pytest.mark.parametrize("kind", ENFORCING, indirect=True)
def test_memory_past_the_limit_is_counted_as_such(ground: Ground) -> None:
    box = ground.box(limits=BoxLimits(memory_bytes=32 << 20))
    process = ground.start(box, _GREEDY)

    assert process.wait(60) == -signal.SIGKILL
    # A kernel that ends all of a group at once counts the first of them with the others, and once by itself.
    assert box.oom_kills() in ({1, 2} if ground.kind == "cgroup2" else {1})
    assert box.enforcement["memory"] == ENFORCED


@pytest.mark.parametrize("kind", LOOKING, indirect=True)
def test_memory_past_the_limit_is_seen_by_looking(ground: Ground) -> None:
    box = ground.box(limits=BoxLimits(memory_bytes=32 << 20))
    _ready(ground, box, _GREEDY)

    eventually(lambda: "memory" in (box.police() or ""))

    assert box.oom_kills() == 1
    assert box.enforcement["memory"] == APPROXIMATED


@pytest.mark.parametrize("limits", [BoxLimits(), BoxLimits(memory_bytes=64 << 20)], ids=["unlimited", "limited"])
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_who_kills_itself_did_not_die_of_memory(ground: Ground, limits: BoxLimits) -> None:
    box = ground.box(limits=limits)
    process = ground.start(box, "os.kill(os.getpid(), signal.SIGKILL)")

    assert process.wait(60) == -signal.SIGKILL
    # None: another on this machine may have died of memory meanwhile, and nobody counts here.
    assert box.oom_kills() in ({0} if ground.kind in ENFORCING and limits.memory_bytes else {0, None})


@pytest.mark.parametrize("kind", [*ENFORCING, "signals"], indirect=True)
def test_a_quarter_of_a_core_is_a_quarter_of_a_core(ground: Ground) -> None:
    box = ground.box(limits=BoxLimits(cpu_percent=25))
    _ready(ground, box, _BUSY_PAIR)
    _hold_for(box, 0.3)
    before, began = box.usage().cpu_seconds, time.monotonic()
    _hold_for(box, 1.6)
    used = box.usage().cpu_seconds - before
    share = used / (time.monotonic() - began)

    # By signals two busy ones get on the average what they may, but in gulps of up to 0.2 s.
    slack = 0.05 if ground.kind in ENFORCING else 0.15
    assert 0.05 < share <= 0.25 + slack, "a busy machine may have no quarter to give"


def _hold_for(box: Box, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        box.police()
        time.sleep(0.1)


@pytest.mark.parametrize("kind", ENFORCING, indirect=True)
def test_a_fork_bomb_stays_in_its_box(ground: Ground) -> None:
    box = ground.box(limits=BoxLimits(pids=8))

    assert said(ground.start(box, _BOMB)) == "7"
    assert box.usage().threads == 8
    ground.kill_until_empty(box)


@pytest.mark.parametrize("kind", LOOKING, indirect=True)
def test_a_fork_bomb_is_seen_by_looking(ground: Ground) -> None:
    box = ground.box(limits=BoxLimits(pids=8))
    assert said(ground.start(box, _BOMB)) == "200"

    assert "pids" in (box.police() or "")
    ground.kill_until_empty(box)
    assert not ground.marked()


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_usage_is_that_of_the_whole_box(ground: Ground) -> None:
    box = ground.box(limits=BoxLimits(memory_bytes=256 << 20, cpu_percent=100))
    _ready(ground, box, "hoard = b'x' * (20 << 20)\n" + _BUSY_PAIR)

    eventually(lambda: box.usage().cpu_seconds > 0.1)
    assert box.usage().memory_bytes > 20 << 20
    assert box.usage().threads == 2


@pytest.mark.parametrize("kind", ENFORCING, indirect=True)
def test_a_process_with_threads_is_fetched_in_whole(ground: Ground) -> None:
    box = ground.box(limits=BoxLimits(pids=16))
    code = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nenter()\n" + _SLEEP
    process = ground.start(box, code, enter=False)
    assert said(process) == "ready"

    box.took_in(process.pid)

    assert box.usage().threads == 2
    assert box.pids() == {process.pid}


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_box_is_found_again(ground: Ground) -> None:
    pid = _ready(ground, ground.box(), _SLEEP)

    found = ground.boxes.find("box.1", BoxLimits())
    found.took_in(pid)

    assert found.pids() == {pid}
    ground.kill_until_empty(found)
    found.remove()
    found.remove()


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_sweep_ends_what_an_earlier_keeper_left(ground: Ground) -> None:
    box = ground.box("box.1", BoxLimits(pids=50))
    frozen = ground.box("box.2")
    pids = {_ready(ground, box, _DAEMON), _ready(ground, frozen, _DEAF)}
    frozen.freeze()
    stranger = ground.start(ground.box("box.3"), _SLEEP, enter=False)
    assert said(stranger) == "ready"  # before it has executed its program it has no mark

    killed = probing.sweep(ground.token)

    assert pids | {stranger.pid} <= set(killed)
    assert not ground.marked()
    assert not ground.groups()
    again = ground.box("box.4", BoxLimits(pids=50, memory_bytes=256 << 20))
    assert _ready(ground, again, _SLEEP) in again.pids()
    assert len(ground.boxes.sweep()) == 1


@pytest.mark.parametrize("kind", ["signals"], indirect=True)
def test_by_signals_nobody_without_descent_or_mark_is_touched(ground: Ground) -> None:
    mine, other = ground.box("box.1"), ground.box("box.2")
    outsider = _ready(ground, other, _SLEEP)
    process = ground.start(mine, "up('ready')")
    process.wait(60)
    # As if its pid had been given to another: known is who began then, not who has the number now.
    ended = tree.Process(outsider, (tree.start_time(outsider) or 0) - 1)
    assert isinstance(mine, PlainBox)
    mine._known[ended] = None  # noqa: SLF001 - nobody can bring it about from outside

    mine.kill()
    mine.freeze()

    assert not mine.pids()
    seen = tree.stat(outsider)
    assert seen is not None
    assert not seen.is_stopped


@pytest.mark.parametrize("kind", ENFORCING, indirect=True)
def test_a_box_that_cannot_be_made_leaves_nothing(ground: Ground) -> None:
    ground.box("twice.1")
    with pytest.raises(OSError, match=r"no control group for box twice\.2"):
        ground.box("twice.2", BoxLimits(pids=-5, memory_bytes=1 << 28))

    assert not [group for group in ground.groups() if (group / "twice.2").exists()]


def test_every_kind_that_this_kernel_has_is_tested() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    has_first = any(kind == "cgroup" and "freezer" in options.split(",") for _, _, kind, options, *_ in mounts)
    has_second = any(kind == "cgroup2" for _, _, kind, *_ in mounts)
    assert ("cgroup1" in KINDS, "hybrid" in KINDS, "cgroup2" in KINDS) == (has_first, has_first, has_second)
    assert bool(ENFORCING) or not has_first


def test_the_best_that_works_here_is_found_fast() -> None:
    token = secrets.token_hex(8)
    began = time.monotonic()
    boxes = probing.open_boxes(token)
    took = time.monotonic() - began
    boxes.sweep()

    assert boxes.title in {"cgroup v2", "cgroup v1", "signals"}
    assert took < 10
    assert not groups_of(token)
    with pytest.raises(ValueError, match="unknown kind"):
        probing.open_boxes(token, force="jail")
