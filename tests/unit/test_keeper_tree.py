"""Who a process is, and that no other is ever signalled in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ostler.keeper import cgroup_files, tree
from ostler.keeper.groups import Poll, usage_of
from ostler.keeper.process_tree import CpuShare, marked
from ostler.keeper.tree import Process

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
    assert tree.living(sleeper.pid) == Process(sleeper.pid, tree.start_time(sleeper.pid))
    usage = usage_of([sleeper.pid])
    assert usage.threads == 1
    assert usage.memory_bytes > 1_000_000
    assert 0 < tree.pss_bytes(sleeper.pid) <= usage.memory_bytes
    assert usage.cpu_seconds >= 0


def test_another_with_the_same_pid_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    started = tree.start_time(sleeper.pid)

    assert not tree.signal_process(Process(sleeper.pid, started - 1), signal.SIGKILL)
    assert not tree.signal_process(Process(sleeper.pid, started + 1), signal.SIGKILL)
    assert sleeper.poll() is None
    assert tree.signal_process(Process(sleeper.pid, started), signal.SIGKILL)
    assert sleeper.wait(60) == -signal.SIGKILL


def test_a_zombie_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    started = tree.start_time(sleeper.pid)
    tree.signal_process(Process(sleeper.pid, started), signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)

    status = tree.stat(sleeper.pid)
    assert status is not None
    assert status.is_dead
    assert tree.living(sleeper.pid) is None
    assert not tree.signal_process(Process(sleeper.pid, started), signal.SIGTERM)
    assert sleeper.pid not in tree.census()


def test_who_has_vanished_is_nobody() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    process.wait(30)
    pid = process.pid

    assert tree.stat(pid) is None
    assert tree.start_time(pid) == 0
    assert tree.children(pid) == []
    assert tree.descendants(pid) == set()
    assert tree.mark_of(pid) == ""
    assert not tree.signal_process(Process(pid, 1), signal.SIGKILL)
    assert usage_of([pid]) == (0.0, 0, 0)


def test_descendants_are_found_through_their_parents() -> None:
    with _started(_PARENT) as parent:
        children = tree.children(parent.pid)
        try:
            assert len(children) == 1
            assert tree.descendants(parent.pid) == set(children)
            assert parent.pid in tree.children(os.getpid())
            assert {parent.pid, os.getpid()} <= tree.ancestors(children[0])
            census = tree.census()
            assert census[children[0]].parent == parent.pid
        finally:
            parent.kill()
            for child in children:
                tree.signal_process(Process(child, tree.start_time(child)), signal.SIGKILL)


def test_a_mark_is_found_whole_and_by_its_beginning_only() -> None:
    with _started(_SLEEP, OSTLER_MARK="feedbeef:abc.1", X_OSTLER_MARK="feedbeef:other") as process:
        try:
            assert tree.mark_of(process.pid) == "feedbeef:abc.1"
            assert process.pid in marked("feedbeef:")
            assert process.pid in marked("feedbeef:abc")
            assert process.pid not in marked("eedbeef:")
            assert process.pid not in marked("feedbeef:other")
            assert tree.kill_all(lambda: marked("feedbeef:")) == [process.pid]
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

    assert cgroup_files.parse_groups(mounts, own) == {
        "": "/sys/fs/cgroup/unified/user.slice/x:y.scope",
        "memory": "/sys/fs/cgroup/memory/sub",
        "cpu": "/sys/fs/cgroup/cpu,cpuacct",
        "cpuacct": "/sys/fs/cgroup/cpu,cpuacct",
    }


def test_a_limit_that_is_passed_is_described(sleeper: subprocess.Popen[bytes]) -> None:
    pids = [sleeper.pid]

    assert Poll(1 << 40, 4).broken_limit(pids) is None
    assert Poll(None, None).broken_limit(pids) is None
    assert (Poll(1 << 40, 0).broken_limit(pids) or ("", ""))[0] == "pids"
    assert (Poll(1000, 4).broken_limit(pids) or ("", ""))[0] == "memory"


def test_a_busy_cell_rests_as_long_as_is_fair() -> None:
    share = CpuShare(25)
    now, used, worked = 0.0, 0.0, 0
    for _ in range(400):
        rests = share.must_rest(used, now)
        now += 0.1
        used += 0 if rests else 0.1
        worked += not rests

    assert 0.23 <= worked / 400 <= 0.27
