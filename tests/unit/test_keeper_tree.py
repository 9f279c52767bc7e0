"""Who a process is, and that no other is ever signalled in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from ostler.keeper.boxes import BoxLimits
from ostler.keeper.policing import Duty, Watch

from ostler.keeper import cgroupfs, tree
from ostler.keeper.tree import Process, Stat

_SLEEP = "import time; print('up', flush=True); time.sleep(60)"
_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-S', '-c', {_SLEEP!r}])"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with _started(_SLEEP) as process:
        yield process
        process.kill()


def _started(code: str, **env: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_a_process_is_its_pid_and_its_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    found = tree.living(sleeper.pid)

    assert found == Process(sleeper.pid, tree.start_time(sleeper.pid) or 0)
    assert tree.is_alive(found)
    assert not tree.is_alive(Process(found.pid, found.start_time + 1))
    assert tree.thread_count(sleeper.pid) == 1
    assert tree.rss_bytes(sleeper.pid) > 1_000_000
    assert 0 < (tree.pss_bytes(sleeper.pid) or 0) <= tree.rss_bytes(sleeper.pid)
    assert tree.cpu_seconds(sleeper.pid) >= 0


def test_another_with_the_same_pid_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    started = tree.start_time(sleeper.pid)
    assert started is not None

    assert not tree.signal_pid(sleeper.pid, started - 1, signal.SIGKILL)
    assert not tree.signal_pid(sleeper.pid, started + 1, signal.SIGKILL)
    assert sleeper.poll() is None
    assert tree.signal_pid(sleeper.pid, started, signal.SIGKILL)
    assert sleeper.wait(60) == -signal.SIGKILL


def test_a_zombie_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    started = tree.start_time(sleeper.pid)
    assert started is not None
    tree.signal_pid(sleeper.pid, started, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)

    assert tree.is_zombie(sleeper.pid)
    assert tree.living(sleeper.pid) is None
    assert not tree.signal_pid(sleeper.pid, started, signal.SIGTERM)
    assert sleeper.pid not in tree.census()


def test_who_has_vanished_is_nobody() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    process.wait(30)
    pid = process.pid

    assert tree.stat(pid) is None
    assert tree.start_time(pid) is None
    assert tree.children(pid) == []
    assert tree.descendants(pid) == set()
    assert tree.mark_of(pid) == ""
    assert not tree.is_zombie(pid)
    assert not tree.signal_pid(pid, 1, signal.SIGKILL)
    assert (tree.rss_bytes(pid), tree.cpu_seconds(pid), tree.thread_count(pid)) == (0, 0.0, 0)


def test_descendants_are_found_through_their_parents() -> None:
    with _started(_PARENT) as parent:
        children = tree.children(parent.pid)
        try:
            assert len(children) == 1
            assert tree.descendants(parent.pid) == set(children)
            assert tree.children(parent.pid) == tree._children_by_parent(parent.pid)  # noqa: SLF001 - the other way to the same
            assert parent.pid in tree.children(os.getpid())
            assert {parent.pid, os.getpid()} <= tree.ancestors(children[0])
            census = tree.census()
            assert census[children[0]].parent == parent.pid
        finally:
            parent.kill()
            for child in children:
                tree.signal_pid(child, tree.start_time(child) or 0, signal.SIGKILL)


def test_a_mark_is_found_whole_and_by_its_beginning_only() -> None:
    with _started(_SLEEP, OSTLER_MARK="feedbeef:abc.1", X_OSTLER_MARK="feedbeef:other") as process:
        try:
            assert tree.mark_of(process.pid) == "feedbeef:abc.1"
            assert process.pid in tree.marked("feedbeef:")
            assert process.pid in tree.marked("feedbeef:abc")
            assert process.pid not in tree.marked("eedbeef:")
            assert process.pid not in tree.marked("feedbeef:other")
            assert tree.end_marked("feedbeef:") == [process.pid]
        finally:
            process.kill()


def test_a_name_full_of_parentheses_is_read_right() -> None:
    code = "open('/proc/self/comm', 'w').write('a) S 1 (b'); " + _SLEEP
    with _started(code) as process:
        try:
            found = tree.stat(process.pid)
            assert found is not None
            assert found.parent == os.getpid()
        finally:
            process.kill()


def test_our_groups_are_found_through_the_mounts() -> None:
    mounts = (
        "30 20 0:26 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw\n"
        "31 20 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "32 20 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "33 20 0:29 /elsewhere /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
        "34 20 0:30 / /proc rw - proc proc rw\n"
    )
    own = "4:memory:/docker/abc/sub\n3:cpu,cpuacct:/\n2:pids:/docker/abc\n1:freezer:/\n0::/user.slice/x:y.scope\n"

    assert cgroupfs.own_groups(mounts, own) == {
        "": "/sys/fs/cgroup/unified/user.slice/x:y.scope",
        "memory": "/sys/fs/cgroup/memory/sub",
        "cpu": "/sys/fs/cgroup/cpu,cpuacct",
        "cpuacct": "/sys/fs/cgroup/cpu,cpuacct",
    }


def _using(*, threads: int = 1, rss: int = 0, cpu: float = 0.0) -> list[Stat]:
    who = Process(2**30, 1)
    return [Stat(who, parent=1, session=1, state="R", threads=threads, cpu_seconds=cpu, rss_bytes=rss)]


def test_a_watch_says_which_limit_was_passed() -> None:
    watch = Watch(BoxLimits(memory_bytes=1000, pids=4), {"memory", "pids"})

    assert watch.look(_using(threads=4, rss=1000)) is None
    assert "pids" in (watch.look(_using(threads=5)) or "")
    assert watch.memory_kills == 0
    assert "memory" in (watch.look(_using(rss=1001)) or "")
    assert watch.memory_kills == 1
    assert not Watch(BoxLimits(memory_bytes=1000), {"pids"}).is_needed


def test_duty_makes_a_busy_tree_rest_as_long_as_is_fair() -> None:
    duty = Duty(25)
    now, used, worked = 0.0, 0.0, 0
    for _ in range(400):
        rests = duty.must_rest(_using(cpu=used), now)
        now += 0.1
        used += 0 if rests else 0.1
        worked += not rests

    assert 0.23 <= worked / 400 <= 0.27
