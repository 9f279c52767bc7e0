"""How an agent in a process of its own ends: by itself, by its manager, by a signal, and alone."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import pytest
from inside_agents import MODULE, directory, load, shared, template
from inside_ground import Template

__all__ = ["directory", "load", "shared", "template"]


@pytest.mark.parametrize(
    ("how", "code", "kind"),
    [
        ("exit", 3, "SystemExit"),
        ("text", 1, "SystemExit"),
        ("none", 0, "SystemExit"),
        ("key", 130, "KeyboardInterrupt"),
        ("generator", 1, "GeneratorExit"),
        ("own task", 4, "SystemExit"),
        ("loop", 1, None),
    ],
)
def test_a_crash_is_told_to_all_who_wait(template: Template, how: str, code: int, kind: str | None) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    other = agent.call({"do": "hang"})
    agent.hear("say")
    number = agent.call({"do": "leave", "how": how})
    assert agent.hear("say")["name"] == "last words"
    answers = {one["id"]: one["crash"] for one in (agent.hear("answer"), agent.hear("answer"))}
    assert set(answers) == {other, number}
    assert all(one["exception_type"] == kind for one in answers.values())
    assert agent.wait() == code
    assert ("ostler: because\n" in agent.output()) is (how == "text")


def test_a_stop_lets_work_tidy_up(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    numbers = {agent.call({"do": "hang"}) for _ in range(3)}
    for _ in numbers:
        agent.hear("say")
    agent.tell({"t": "stop"})
    with contextlib.suppress(BrokenPipeError):  # it may be gone by now
        agent.tell({"t": "stop"})
    heard = [agent.next() for _ in range(6)]
    assert sum(one.get("name") == "stopped" for one in heard) == 3
    assert {one["id"] for one in heard if one["t"] == "answer" and one["cancelled"]} == numbers
    assert agent.wait() == 0


def test_a_stop_before_the_beginning(template: Template) -> None:
    agent = template.start("Scripted", begins=False)
    agent.tell({"t": "stop"})
    assert agent.wait() == 0


def test_term_shuts_it_down(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    number = agent.call({"do": "hang"})
    agent.hear("say")
    os.kill(agent.pid, signal.SIGTERM)
    heard = [agent.next() for _ in range(3)]
    assert [one["name"] for one in heard if one["t"] == "say"] == ["stopped", "shut down"]
    assert [one["id"] for one in heard if one["t"] == "answer"] == [number]
    assert agent.wait() == 0


def test_one_dies_alone(template: Template) -> None:
    first, second = template.start("Scripted"), template.start("Scripted")
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert second.ask(verb="initialize")["ok"] is None


def test_agents_live_on_without_their_template(load: Callable[..., Template]) -> None:
    template = load(MODULE)
    agent = template.start("Scripted")
    template.sock.close()
    assert template.process.wait(60) == 0
    assert agent.ask(verb="initialize")["ok"] is None
