"""Who may speak to a keeper, also where /proc shows to each user only its own processes."""

from __future__ import annotations

import os

import pytest

from ostler.keeper import peers, tree
from ostler.keeper.tree import Process, Stat

#: A program, its shell, and a service of root's that has started the shell.
PROGRAM, SHELL, ROOTS = 4_000_003, 4_000_002, 4_000_001
USER = 1000


class Machine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: By pid: its parent.
        self.readable = {PROGRAM: SHELL, SHELL: ROOTS}
        #: Who may be signalled.
        self.own = {PROGRAM, SHELL}
        #: What the keeper has started.
        self.below: set[int] = set()
        monkeypatch.setattr(tree, "stat", self._stat)
        monkeypatch.setattr(peers, "_descendants", lambda _: self.below)
        monkeypatch.setattr(os, "kill", self._kill)
        monkeypatch.setattr(os, "geteuid", lambda: USER)

    def _stat(self, pid: int) -> Stat | None:
        if pid not in self.readable:
            return None
        return Stat(Process(pid, pid), self.readable[pid], "S", 1, 0.0, 0)

    def _kill(self, pid: int, number: int) -> None:
        assert number == 0, "nobody is signalled"
        if pid not in self.own:
            raise PermissionError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_who_was_started_by_another_user_is_no_agent(machine: Machine) -> None:
    assert not machine.readable.keys() & {ROOTS}
    assert peers.descends_from_keeper(PROGRAM) is False


def test_an_own_process_that_hides_is_looked_for_from_above(machine: Machine) -> None:
    """The one who has started the shell; then the program itself, which may be a manager or an agent."""
    machine.own.add(ROOTS)
    assert peers.descends_from_keeper(PROGRAM) is False
    machine.readable.clear()
    assert peers.descends_from_keeper(PROGRAM) is False
    machine.below.add(PROGRAM)
    assert peers.descends_from_keeper(PROGRAM) is True


def test_where_another_below_us_hides_too_nobody_can_tell(machine: Machine) -> None:
    machine.readable.clear()
    machine.below.add(SHELL)
    assert peers.descends_from_keeper(PROGRAM) is None


def test_a_parent_that_is_another_by_now_proves_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def reused(pid: int, number: int) -> None:
        assert (pid, number) == (ROOTS, 0)
        machine.readable[SHELL] = os.getpid()  # it has ended, its child is ours now, and root's has its number
        raise PermissionError

    monkeypatch.setattr(os, "kill", reused)
    assert peers.descends_from_keeper(PROGRAM) is None


def test_a_keeper_of_roots_does_not_go_by_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agents may become other users."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert machine.readable
    assert peers.descends_from_keeper(PROGRAM) is None
