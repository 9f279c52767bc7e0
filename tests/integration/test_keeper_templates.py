"""Agents that are forks: a real keeper, a real template, and a channel that is the same through all of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from keeper_client import SOURCE, Home, Manager, Refused, is_alive, pair, wait_until

from ostler.keeper.tree import marked

TEMPLATE = [sys.executable, "-I", "-S", str(Path(__file__).parent / "keeper_template.py"), SOURCE]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "keeper")
    yield made
    made.end()


@pytest.fixture
def manager(home: Home) -> Manager:
    return home.manager()


class Agent:
    """One start, and the manager's end of its channel."""

    def __init__(self, manager: Manager, unit: str, setup: dict[str, Any] | None = None, **more: Any) -> None:
        self.manager = manager
        self.channel, theirs = pair()
        self.channel.settimeout(60)
        key = more.pop("key", "key")
        how = {"template": key, "argv": TEMPLATE, "env": {}, "cwd": "/", "setup": setup or {}}
        fds = [theirs.fileno(), self.channel.fileno()]
        with theirs:
            self._number = manager.say_start(unit, [], fds, **{"how": how, "channel": True, **more})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def started(self) -> dict[str, Any]:
        return self.manager.hear(self._number)[0]

    def says(self, word: str) -> list[str]:
        self.channel.send(word.encode())
        return self.channel.recv(1000).decode().split(" ")


def test_an_agent_is_a_child_of_the_keeper_and_has_the_channel(manager: Manager, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with Agent(manager, "a.1", {"word": "up"}, env={"SAID": "so"}, log=str(log)) as agent:
        pid = agent.started()["pid"]
        assert agent.says("word") == [str(pid), str(manager.about["pid"]), "word", "so"]
        agent.channel.send(b"exit 5")
        record = manager.exit_of("a.1")
        assert (record["pid"], record["code"], record["written"]) == (pid, 5, 3)
        assert agent.channel.recv(10) == b""
    assert log.read_text() == "up\n"


def test_a_template_cannot_have_a_stranger_taken_for_its_agent(manager: Manager) -> None:
    lie = {"lie": os.getpid()}
    with Agent(manager, "a.1", lie) as agent, pytest.raises(Refused, match="not one that it has forked"):
        agent.started()
    with Agent(manager, "b.1") as honest:
        mine = honest.started()["pid"]
        with Agent(manager, "c.1", {"lie": mine}, key="other") as agent, pytest.raises(Refused, match="forked"):
            agent.started()
        assert honest.says("word")[0] == str(mine)


def test_a_fork_of_a_fork_belongs_to_the_keeper_too(home: Home, manager: Manager) -> None:
    with Agent(manager, "a.1", {"twice": True}) as agent:
        pid = agent.started()["pid"]
        assert agent.says("word")[:2] == [str(pid), str(manager.about["pid"])]
        agent.channel.send(b"exit 5")
        assert manager.exit_of("a.1")["code"] == 5
    with Agent(manager, "b.1", {"twice": True}) as agent:
        pid = agent.started()["pid"]
        agent.says("word")
        os.kill(manager.about["pid"], signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
    home.launch()


def test_one_template_serves_many_and_dies_with_nobody(manager: Manager) -> None:
    agents = [Agent(manager, f"u{number}.1") for number in range(40)]
    pids = [agent.started()["pid"] for agent in agents]
    assert [agent.says("x")[0] for agent in agents] == [str(pid) for pid in pids]
    template = _templates(manager, pids)
    assert len(template) == 1
    os.kill(template[0], signal.SIGKILL)
    wait_until(lambda: not is_alive(template[0]))
    assert all(is_alive(pid) for pid in pids)
    with Agent(manager, "late.1") as late:
        assert late.says("x")[0] == str(late.started()["pid"])
    for agent in agents:
        agent.channel.close()


def _templates(manager: Manager, agents: list[int]) -> list[int]:
    pid = manager.about["pid"]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if int(one) not in agents]


def test_an_agent_that_ends_before_its_birth_is_told_still_has_its_exit(manager: Manager) -> None:
    with Agent(manager, "a.1", {"exit": 6, "late": 0.2}) as agent:
        begun = agent.started()
        record = manager.exit_of("a.1")
    assert (record["pid"], record["code"], record["start_time"]) == (begun["pid"], 6, begun["start_time"])
    assert record["start_time"] > 0


def test_what_does_not_come_to_life_says_why(manager: Manager) -> None:
    wrongs: list[tuple[dict[str, Any], str, str]] = [
        ({"fail": "no module named x"}, "template", "no module named x"),
        ({"die": True}, "template", "its template ended with code 9: something broke inside"),
        ({"refuse": "no more processes"}, "start", "no more processes"),
    ]
    for number, (setup, kind, words) in enumerate(wrongs):
        with Agent(manager, "a.1", setup, key=f"key{number}") as agent:
            with pytest.raises(Refused) as refused:
                agent.started()
            assert (refused.value.kind, words in refused.value.sentence) == (kind, True), refused.value
            assert agent.channel.recv(10) == b""
    with pytest.raises(Refused, match="template: the program '/no/such' was not found"):
        _with_argv(manager, ["/no/such"])
    assert manager.ask("list") == {"units": []}


def _with_argv(manager: Manager, argv: list[str]) -> None:
    ours, theirs = pair()
    with ours, theirs:
        how = {"template": "other", "argv": argv, "env": {}, "setup": {}}
        manager.start("a.1", [], [theirs.fileno(), ours.fileno()], how=how, channel=True)


def test_a_changed_file_makes_a_new_template(manager: Manager, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("1")
    with Agent(manager, "a.1", {"files": [str(module)]}) as first:
        pid = first.started()["pid"]
        old = _templates(manager, [pid])
        with Agent(manager, "b.1", {"files": [str(module)]}) as second:
            assert _templates(manager, [pid, second.started()["pid"]]) == old
        module.write_text("22")
        with Agent(manager, "c.1", {"files": [str(module)]}) as third:
            third.started()
        wait_until(lambda: not is_alive(old[0]))
        assert is_alive(pid)


def test_one_that_cannot_be_forked_becomes_the_agent(manager: Manager) -> None:
    agents = [Agent(manager, f"u{number}.1", {"threads": True}) for number in range(3)]
    pids = [agent.started()["pid"] for agent in agents]
    assert [agent.says("x")[0] for agent in agents] == [str(pid) for pid in pids]
    for number, agent in enumerate(agents):
        agent.channel.send(f"exit {number}".encode())
        assert manager.exit_of(f"u{number}.1")["code"] == number
        agent.channel.close()
    with Agent(manager, "late.1", {"threads": True, "exit": 8}, key="other") as late:
        late.started()
        assert manager.exit_of("late.1")["code"] == 8


def test_a_stop_while_its_module_is_imported(manager: Manager) -> None:
    with Agent(manager, "a.1", {"slow": 0.5}) as agent:
        assert manager.stop("a.1", 5.0) == {"graceful": True, "left": []}
        with pytest.raises(Refused, match="stopped before it began"):
            agent.started()


def test_a_stop_between_its_birth_and_the_word_of_it(manager: Manager, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Agent(manager, "a.1", {"late": 0.5}, log=str(log)) as agent:
        wait_until(lambda: log.exists() and log.read_text())
        assert manager.stop("a.1") == {"graceful": False, "left": []}
        pid = agent.started()["pid"]
    record = manager.exit_of("a.1")
    assert (record["pid"], record["signal"], record["by"]) == (pid, signal.SIGKILL, "stop")


def test_a_stop_of_what_its_template_never_brings_forth(manager: Manager, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with Agent(manager, "a.1", {"deaf": str(asked)}) as agent:
        wait_until(asked.exists)
        assert manager.stop("a.1")["left"] == []
        with pytest.raises(Refused, match="its template ended by signal 9"):
            agent.started()
    assert manager.ask("list") == {"units": []}


def test_the_least_used_template_goes(manager: Manager) -> None:
    pids = []
    for number in range(10):
        with Agent(manager, f"u{number}.1", key=f"key{number}") as agent:
            pids.append(agent.started()["pid"])
    wait_until(lambda: len(_templates(manager, pids)) == 8)


def test_attach_gives_the_same_channel_with_what_was_not_read(home: Home, manager: Manager) -> None:
    with Agent(manager, "a.1") as agent:
        pid = agent.started()["pid"]
        agent.channel.send(b"before")
        agent.says("and")
    manager.close()
    second = home.manager(epoch=2)
    answer, fds = second.hear(second.say("attach", unit="a.1"))
    assert (answer["pid"], answer["exit"]) == (pid, None)
    with socket.socket(fileno=fds[0]) as channel:
        channel.settimeout(60)
        assert channel.recv(1000).decode().split()[2] == "and"
        channel.send(b"exit 3")
        assert second.exit_of("a.1")["code"] == 3
    with pytest.raises(Refused, match="unknown"):
        second.ask("attach", unit="b.1")
    answer, fds = second.hear(second.say("attach", unit="a.1"))
    assert answer["exit"]["code"] == 3
    os.close(fds[0])


@pytest.mark.parametrize("follows", [True, False], ids=["another manager", "no manager"])
def test_a_start_whose_manager_is_gone_is_undone(home: Home, manager: Manager, tmp_path: Path, follows: bool) -> None:
    """Its caller does not know of it, and the next manager never adopts what was half started."""
    log = tmp_path / "a.log"
    with Agent(manager, "a.1", {"slow": 1.0, "word": "up"}, log=str(log)):
        manager.ask("ping")  # the keeper has begun with it
        if not follows:
            manager.close()
        with home.manager(epoch=2) as second:
            second.say("ping")
            time.sleep(1.5)  # longer than its template takes
            assert all(status["exit"] for status in second.statuses().values())
            assert not marked(f"{home.token}:a.1")
            assert not log.exists() or not log.read_text()
            second.stop("a.1")
            second.ask("forget", box="a.1")
