"""Numbers that are somebody else's by now: of a template that has ended."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ostler.keeper.boxes import BoxLimits
from ostler.keeper.children import Children, Ended
from ostler.keeper.plainboxes import PlainBoxes
from ostler.keeper.spare import Spare
from ostler.keeper.spawning import Files, has_descriptors, spawn
from ostler.keeper.template import Birth, Recipe, Template

from ostler.keeper import protocol, template
from ostler.keeper.loop import Loop
from ostler.keeper.protocol import Line


@pytest.fixture
def loop() -> Iterator[Loop]:
    failures: list[BaseException] = []
    made = Loop(failures.append)
    yield made
    made.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert failures == []


def settle() -> dict[str, Any]:
    return {"env": {"PATH": os.environ["PATH"]}, "cwd": "/", "keeper": os.getpid()}


# --- a template --------------------------------------------------------------------------------------


class Kept:
    def __init__(self, loop: Loop, argv: list[str]) -> None:
        self.children = Children()
        loop.on_signal(signal.SIGCHLD, self._reap)
        box = PlainBoxes("0" * 16).make("template-1", BoxLimits())
        recipe = Recipe(argv=argv, settle=settle(), setup={})
        self.template = Template(loop, self.children, recipe, box, ready=lambda _: None, gone=lambda _: None)

    def _reap(self) -> None:
        self.children.reap()


def until_over(loop: Loop, template: Template) -> None:
    end = time.monotonic() + 20
    while not template.is_over:
        assert time.monotonic() < end, "it did not end"
        loop.later(0.1, lambda: None)
        loop.turn()


def test_the_last_call_of_a_template_that_has_ended_hits_nobody(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_END_SECONDS", 0.1)
    kept = Kept(loop, ["/bin/sh", "-c", "exit 0"])
    kept.template.retire()
    until_over(loop, kept.template)
    ends: list[Ended] = []
    pid, report = spawn(["sleep", "1000"], settle(), Files())
    kept.children.add(pid, ends.append, "an agent")
    kept.template.pid = pid  # as if the kernel had given its number out again
    kept.template.kill()
    over = time.monotonic() + 0.3
    while time.monotonic() < over:
        loop.later(0.05, lambda: None)
        loop.turn()
    assert ends == []
    kept.children.kill(pid, signal.SIGKILL, "an agent")
    end = time.monotonic() + 20
    while not ends:
        assert time.monotonic() < end
        loop.later(0.05, lambda: None)
        loop.turn()
    os.close(report)


def test_a_birth_that_cannot_be_told_fails_with_a_sentence(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(loop, ["sleep", "1000"])
    told: list[tuple[str, str]] = []
    birth = Birth("a.1", {}, made=lambda _: None, failed=lambda *words: told.append(words))
    birth.give(os.dup(0))

    def send(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Line, "send", send)
    kept.template.bring_forth(birth)
    monkeypatch.undo()
    assert [kind for kind, _ in told] == ["start"]
    assert "Too many open files" in told[0][1]
    assert kept.template.told == {}
    kept.template.kill()
    until_over(loop, kept.template)


# --- small ones --------------------------------------------------------------------------------------


def test_a_few_descriptors_are_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_descriptors()
    lowest = os.dup(0)
    os.close(lowest)
    bounds = {64: False, 65: True}
    for more, enough in bounds.items():
        monkeypatch.setattr("resource.getrlimit", lambda _, more=more: (lowest + more, -1))
        assert has_descriptors() is enough


def test_who_was_reaped_before_it_was_told_of_is_nobodys_spare() -> None:
    children = Children()
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    children.expect()
    children.put_back(Ended(gone.pid, 0, None))
    assert children.is_newborn(gone.pid)
    assert not children.is_unclaimed(gone.pid)


def test_an_order_that_is_too_long_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    children = Children()
    monkeypatch.setattr(protocol, "MAX_MESSAGE", 100)
    with its:
        spare = Spare(children, os.getpid(), ours.detach())
        assert not spare.hand_over({"env": {"LONG": "x" * 200}}, ())
        assert its.recv(10) == b""
