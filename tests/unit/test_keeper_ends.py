"""Numbers that are somebody else's by now: of a template that has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from ostler.keeper import templates
from ostler.keeper.exits import Children
from ostler.keeper.groups import Limits
from ostler.keeper.loop import Loop
from ostler.keeper.process_tree import ProcessTreeGroups
from ostler.keeper.templates import Template


@pytest.fixture
def loop() -> Iterator[Loop]:
    failures: list[BaseException] = []
    made = Loop(failures.append)
    yield made
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(signal.set_wakeup_fd(-1))
    assert failures == []


def turn_until(loop: Loop, events: list[object]) -> None:
    end = time.monotonic() + 60
    while not events:
        assert time.monotonic() < end, "it did not come to be in time"
        loop.later(0.01, lambda: None)
        loop.turn()


def test_the_last_kill_of_a_template_that_has_ended_hits_no_other_process(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "_END_SECONDS", 0.05)
    ends: list[object] = []
    group = ProcessTreeGroups("0" * 16).make("template-1", Limits())
    template = Template(loop, Children(loop), group, ends.append, ends.append)
    plan = {"env": {"PATH": os.environ["PATH"]}, "cwd": "/", "keeper": os.getpid()}
    template.start(["/bin/sh", "-c", "exit 0"], plan, {}, 2)
    turn_until(loop, ends)
    with subprocess.Popen(["sleep", "1000"]) as other:
        template.pid = other.pid  # as if the kernel had given its number out again
        template.kill()
        later: list[object] = []
        loop.later(0.2, lambda: later.append(None))  # after the kill that was set when its socket was closed
        turn_until(loop, later)
        assert other.poll() is None
        other.kill()
