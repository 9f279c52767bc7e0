"""Control groups of version 2 with controllers, before a tree of plain files that behaves as the kernel does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ostler.keeper import cgroup_files
from ostler.keeper.cgroup_v2 import CgroupV2Groups, pass_controllers_on
from ostler.keeper.groups import APPROXIMATED, ENFORCED, Limits

_FILES = {
    "cgroup.type": "domain\n",
    "cgroup.procs": "",
    "cgroup.subtree_control": "",
    "cgroup.events": "populated 0\nfrozen 0\n",
    "cgroup.freeze": "0\n",
    "cgroup.kill": "",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1000000\n",
}
_OF_CONTROLLERS = {
    "memory": ("memory.max", "memory.swap.max", "memory.oom.group", "memory.events", "memory.current"),
    "cpu": ("cpu.max", "cpu.weight"),
    "pids": ("pids.max", "pids.current"),
}


class FakeKernel:
    def __init__(self, own: Path, *, available: str = "cpuset cpu memory pids") -> None:
        self.refuses: set[str] = set()
        self.does_freeze = True
        self.make_as(own, available)

    def make_as(self, path: Path, available: str) -> None:
        path.mkdir()
        (path / "cgroup.controllers").write_text(available)
        for name, text in _FILES.items():
            (path / name).write_text(text)

    def make(self, path: str) -> None:
        group = Path(path)
        handed = (group.parent / "cgroup.subtree_control").read_text()
        self.make_as(group, handed)
        for controller in handed.split():
            for name in _OF_CONTROLLERS.get(controller, ()):
                (group / name).write_text("")

    def write(self, path: str, text: str) -> None:
        file = Path(path)
        if not file.exists():
            raise FileNotFoundError(2, "no such file", path)
        if file.name in self.refuses:
            raise PermissionError(13, "permission denied", path)
        match file.name:
            case "cgroup.subtree_control":
                self._hand_down(file, text.removeprefix("+"))
            case "cgroup.procs":
                self._move(file, text)
            case "cgroup.kill":
                for procs in file.parent.rglob("cgroup.procs"):
                    procs.write_text("")
            case "cgroup.freeze" if self.does_freeze:
                (file.parent / "cgroup.events").write_text(f"populated 1\nfrozen {text}\n")
            case _:
                file.write_text(text)

    def _hand_down(self, file: Path, controller: str) -> None:
        if (file.parent / "cgroup.procs").read_text().split():
            raise OSError(16, "no processes may stand where controllers are handed down", str(file))
        if controller not in (file.parent / "cgroup.controllers").read_text().split():
            raise FileNotFoundError(2, "no such controller", str(file))
        file.write_text(" ".join({*file.read_text().split(), controller}))

    def _move(self, file: Path, pid: str) -> None:
        for other in (file.parent, file.parent.parent, *file.parent.iterdir()):
            procs = other / "cgroup.procs"
            if procs.exists():
                procs.write_text("\n".join(one for one in procs.read_text().split() if one != pid))
        file.write_text(f"{file.read_text()}\n{pid}\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "scope"


@pytest.fixture
def kernel(own: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel(own)

    def remove(path: str) -> bool:
        shutil.rmtree(path, ignore_errors=True)
        return True

    monkeypatch.setattr(cgroup_files, "make", kernel.make)
    monkeypatch.setattr(cgroup_files, "write", kernel.write)
    monkeypatch.setattr(cgroup_files, "remove", remove)
    return kernel


def _opened(own: Path) -> CgroupV2Groups:
    base, controllers = pass_controllers_on(str(own))
    groups = CgroupV2Groups(base, "token", controllers)
    groups.open()
    return groups


@pytest.mark.usefixtures("kernel")
def test_our_group_hands_down_once_all_in_it_have_moved(own: Path) -> None:
    (own / "cgroup.procs").write_text("11\n12\n")

    base, controllers = pass_controllers_on(str(own))

    assert base == str(own)
    assert controllers == {"memory", "cpu", "pids"}
    assert not (own / "cgroup.procs").read_text().split()
    assert set((own / "keeper/cgroup.procs").read_text().split()) == {"11", "12"}
    # The next keeper, and this one after an exchange, is found in the lower group.
    assert pass_controllers_on(str(own / "keeper")) == (base, controllers)


def test_who_may_not_hand_down_moves_back(own: Path, kernel: FakeKernel) -> None:
    (own / "cgroup.procs").write_text("11\n")
    kernel.refuses.add("cgroup.subtree_control")

    assert pass_controllers_on(str(own)) == (str(own), frozenset())
    assert (own / "cgroup.procs").read_text().split() == ["11"]


@pytest.mark.usefixtures("kernel")
def test_the_topmost_group_need_not_be_empty(tmp_path: Path) -> None:
    top = tmp_path / "top"
    FakeKernel(top, available="hugetlb")
    (top / "cgroup.type").unlink()
    (top / "cgroup.procs").write_text("1\n2\n")

    assert pass_controllers_on(str(top)) == (str(top), frozenset())
    assert (top / "cgroup.procs").read_text().split() == ["1", "2"]


@pytest.mark.usefixtures("kernel")
def test_every_limit_is_written_where_the_kernel_reads_it(own: Path) -> None:
    groups = _opened(own)
    group = groups.make("a.1", Limits(memory_bytes=64 << 20, cpu_percent=150, pids=9, weight=300))
    directory = own / "ostler-token/a.1"
    names = ("memory.max", "memory.swap.max", "memory.oom.group", "cpu.max", "cpu.weight", "pids.max")

    assert [(directory / name).read_text() for name in names] == [str(64 << 20), "0", "1", "150000 100000", "300", "9"]
    assert set(groups.enforcement().values()) == {ENFORCED}
    assert not groups.polls
    assert group.add("a.1") == [f"{directory}/unit-1/cgroup.procs"]
    assert group.directory("a.1") == f"{directory}/unit-1"


@pytest.mark.usefixtures("kernel")
def test_without_limits_nothing_is_written(own: Path) -> None:
    _opened(own).make("a.1", Limits())

    assert (own / "ostler-token/a.1/memory.max").read_text() == ""
    assert (own / "ostler-token/a.1/cpu.weight").read_text() == ""


@pytest.mark.usefixtures("kernel")
def test_members_of_all_units_are_seen_and_killed(own: Path) -> None:
    group = _opened(own).make("a.1", Limits())
    for unit, pids in (("a.1.x", "101\n"), ("a.1.y", "102\n103\n")):
        Path(group.add(unit)[0]).write_text(pids)

    assert group.pids() == {101, 102, 103}
    assert group.pids("a.1.y") == {102, 103}
    group.kill("a.1.y")
    assert group.pids() == {101}
    group.kill()
    assert not group.pids()
    group.remove()
    assert not (own / "ostler-token/a.1").exists()


def test_a_freeze_waits_for_the_kernel(own: Path, kernel: FakeKernel) -> None:
    group = _opened(own).make("a.1", Limits())
    assert group.freeze()
    assert "frozen 1" in (own / "ostler-token/a.1/cgroup.events").read_text()
    group.thaw()
    assert "frozen 0" in (own / "ostler-token/a.1/cgroup.events").read_text()

    kernel.does_freeze = False
    assert not group.freeze()
    assert not group.freeze()
    group.thaw()
    assert (own / "ostler-token/a.1/cgroup.freeze").read_text() == "0"


@pytest.mark.usefixtures("kernel")
def test_what_was_used_and_killed_is_read(own: Path) -> None:
    group = _opened(own).make("a.1", Limits(memory_bytes=1 << 20))
    directory = own / "ostler-token/a.1"
    (directory / "memory.current").write_text("4096\n")
    (directory / "pids.current").write_text("3\n")
    (directory / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 1\n")

    assert group.oom_kills() == 2
    usage = group.usage()
    assert (usage.cpu_seconds, usage.memory_bytes, usage.threads) == (1.5, 4096, 3)


def test_a_limit_that_is_refused_leaves_no_box(own: Path, kernel: FakeKernel) -> None:
    groups = _opened(own)
    kernel.refuses.add("pids.max")

    with pytest.raises(PermissionError):
        groups.make("a.1", Limits(pids=5))
    assert not (own / "ostler-token/a.1").exists()


@pytest.mark.usefixtures("kernel")
def test_what_the_kernel_does_not_hold_is_said(own: Path) -> None:
    (own / "cgroup.controllers").write_text("cpu pids")
    groups = _opened(own)

    assert groups.enforcement() == {"memory": APPROXIMATED, "cpu": ENFORCED, "pids": ENFORCED}
    assert groups.polls


@pytest.mark.usefixtures("kernel")
def test_a_sweep_empties_and_removes_all_boxes(own: Path) -> None:
    groups = _opened(own)
    groups.make("a.1", Limits())
    (own / "ostler-token/a.1/cgroup.procs").write_text("4000001\n")

    assert groups.sweep() == [4_000_001]
    assert not (own / "ostler-token").exists()
    groups.make("a.2", Limits(pids=5))  # the root is made again, with its controllers
    assert (own / "ostler-token/a.2/pids.max").read_text() == "5"
