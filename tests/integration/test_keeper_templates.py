"""Agents that are forks: a real keeper and real templates, also such as lie, hang, or say too much."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from keeper_client import SOURCE, Home, Manager, Refused, is_alive, marked, wait_until

from ostler.isolation.process.templates import Templates
from ostler.keeper import tree
from ostler.keeper.protocol import AGENT_SOCKET, connect

TEMPLATE = [sys.executable, "-I", "-S", str(Path(__file__).parent / "keeper_template.py"), SOURCE]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home" / "keeper")
    yield made
    made.end()


@pytest.fixture
def manager(home: Home) -> Manager:
    return home.manager()


class Agent:
    """One start of an agent from a template."""

    def __init__(self, manager: Manager, unit: str, setup: dict[str, Any] | None = None, **more: Any) -> None:
        self.manager = manager
        self.unit = unit
        template = {
            "key": more.pop("key", "key"),
            "argv": more.pop("template_argv", TEMPLATE),
            "fresh_argv": ["/bin/sh", "-c", "echo fresh; sleep 1000"],
            "env": {},
            "cwd": "/",
            "setup": setup or {},
        }
        self._number = manager.say_start(unit, [], template=template, **more)

    def started(self) -> dict[str, Any]:
        return self.manager.hear(self._number)

    def says(self, word: str) -> list[str]:
        with connect(str(self.manager.directory.parent / "run" / self.unit), AGENT_SOCKET) as channel:
            channel.settimeout(60)
            channel.send(word.encode())
            return channel.recv(1000).decode().split(" ")


def children(manager: Manager, agents: Sequence[int] = ()) -> list[int]:
    """Templates and spares: the living children of the keeper that are no agents."""
    return [pid for pid in tree.children(manager.about["pid"]) if pid not in agents and is_alive(pid)]


def number_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().strip().isdigit())
    return int(path.read_text())


# --- what an agent gets ---


def test_an_agent_is_a_child_of_the_keeper_and_has_its_socket(manager: Manager) -> None:
    agent = Agent(manager, "a.1", {"word": "up"}, env={"SAID": "so"})
    pid = agent.started()["pid"]
    assert agent.says("word") == [str(pid), str(manager.about["pid"]), "word", "so"]
    assert agent.says("exit 5") == [""]
    record = manager.exit_of("a.1")
    assert (record["pid"], record["code"], record["written"]) == (pid, 5, 3)
    assert manager.log_of("a.1").read_text() == "up\n"


def test_what_an_agent_executes_gets_neither_its_socket_nor_its_connection(manager: Manager) -> None:
    agent = Agent(manager, "a.1")
    agent.started()
    agent.says("look")
    agent.says("exit 0")
    manager.exit_of("a.1")  # then its log is complete
    log = manager.log_of("a.1").read_text()
    assert "/dev/null" in log
    assert "socket:" not in log


def test_its_environment_may_be_large(manager: Manager) -> None:
    agent = Agent(manager, "a.1", env={"SAID": "so", "MUCH": "x" * 1_000_000})
    agent.started()
    assert agent.says("word")[3] == "so"


def test_a_fork_of_a_fork_belongs_to_the_keeper_too(home: Home, manager: Manager) -> None:
    agent = Agent(manager, "a.1", {"twice": True})
    pid = agent.started()["pid"]
    assert agent.says("word")[:2] == [str(pid), str(manager.about["pid"])]
    agent.says("exit 5")
    assert manager.exit_of("a.1")["code"] == 5
    agent = Agent(manager, "b.1", {"twice": True})
    pid = agent.started()["pid"]
    agent.says("word")
    os.kill(manager.about["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))
    home.launch()


def test_three_hundred_at_once_while_the_template_still_loads(manager: Manager, tmp_path: Path) -> None:
    setup = {"until": str(tmp_path / "go")}
    agents = [Agent(manager, f"u{number}.1", setup) for number in range(300)]
    manager.ask("renew")
    (tmp_path / "go").touch()
    pids = [agent.started()["pid"] for agent in agents]
    assert len(set(pids)) == 300
    assert [agent.says("x")[0] for agent in agents] == [str(pid) for pid in pids]
    wait_until(lambda: len(children(manager, pids)) <= 2)  # the template and one child ahead
    for number in [manager.say("stop", name=agent.unit, grace=0) for agent in agents]:
        assert manager.hear(number)["left"] == []


# --- what does not come to life ---


def test_a_template_cannot_have_a_stranger_taken_for_its_agent(manager: Manager) -> None:
    for number, pid in enumerate((os.getpid(), 1, -1, 1 << 40)):
        agent = Agent(manager, f"a{number}.1", {"lie": pid}, key=f"key{number}")
        with pytest.raises(Refused, match="no child of the keeper"):
            agent.started()
    honest = Agent(manager, "b.1")
    pid = honest.started()["pid"]
    daemon = int(honest.says("daemon")[2])
    wait_until(lambda: daemon in tree.children(manager.about["pid"]))
    for number, named in enumerate((pid, daemon)):
        with pytest.raises(Refused, match="no child"):
            Agent(manager, f"c{number}.1", {"lie": named}, key=f"other{number}").started()
    assert honest.says("word")[0] == str(pid)


def test_an_agent_that_ends_before_its_pid_is_told_is_no_other(manager: Manager) -> None:
    """It stays a zombie until then, so that its pid is its own."""
    with pytest.raises(Refused, match="ended before it began"):
        Agent(manager, "a.1", {"stillborn": True}).started()
    wait_until(lambda: not any(not is_alive(pid) for pid in tree.children(manager.about["pid"])))
    agent = Agent(manager, "b.1", {"exit": 6}, key="other")
    begun = agent.started()
    record = manager.exit_of("b.1")
    assert (record["pid"], record["code"], record["start_time"]) == (begun["pid"], 6, begun["start_time"])
    assert record["start_time"] > 0


def test_what_does_not_come_to_life_says_why(manager: Manager) -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"fail": "no module named x"}, "no module named x"),
        ({"fail": "a long trace\n", "times": 60_000}, "a long trace\na long trace"),
        ({"die": True}, "its template ended with code 9"),
        ({"refuse": "no more processes"}, "no more processes"),
        ({"garbage": "[1]"}, "does not keep to the protocol"),
        ({"garbage": "\x00"}, "does not keep to the protocol"),
        ({"garbage": '{"ready": true, "files": [], "forks": 1}'}, "does not keep to the protocol"),
        ({"garbage": "in a file"}, "does not keep to the protocol"),
        ({"file": True}, "no child of the keeper"),
    ]
    for number, (setup, words) in enumerate(wrongs):
        with pytest.raises(Refused) as refused:
            Agent(manager, "a.1", setup, key=f"key{number}").started()
        assert refused.value.kind == "start"
        assert words in refused.value.sentence
    with pytest.raises(Refused, match="the program '/no/such' was not found"):
        Agent(manager, "a.1", key="none", template_argv=["/no/such"]).started()
    assert manager.ask("list") == {"units": []}


def test_a_module_of_many_files_starts_and_an_edit_of_the_last_is_seen(manager: Manager, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    paths = [folder / f"module{number}.py" for number in range(3000)]
    for path in paths:
        path.touch()
    setup = {"files": [str(path) for path in paths]}
    Agent(manager, "a.1", setup).started()
    paths[-1].write_text("edited")
    templates = children(manager)
    Agent(manager, "b.1", setup).started()
    wait_until(lambda: not is_alive(templates[0]))


# --- templates come and go ---


def test_a_template_dies_with_no_agent_and_costs_no_start(manager: Manager) -> None:
    agents = [Agent(manager, f"u{number}.1") for number in range(10)]
    pids = [agent.started()["pid"] for agent in agents]
    wait_until(lambda: len(children(manager, pids)) == 2)
    template = min(children(manager, pids))
    os.kill(template, signal.SIGKILL)
    late = Agent(manager, "late.1")  # the keeper may not have noticed yet
    pid = late.started()["pid"]
    assert late.says("x")[0] == str(pid)
    assert all(is_alive(pid) for pid in pids)


def test_orders_of_a_template_that_was_killed_get_another(manager: Manager, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    setup = {"deaf": str(asked)}
    agents = [Agent(manager, f"u{number}.1", setup) for number in range(3)]
    wait_until(asked.exists)
    asked.unlink()
    os.kill(children(manager)[0], signal.SIGKILL)
    wait_until(asked.exists)  # the next one has them
    os.kill(children(manager)[0], signal.SIGKILL)
    for agent in agents:
        with pytest.raises(Refused, match="killed by signal 9"):
            agent.started()


def test_a_changed_file_makes_a_new_template(manager: Manager, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("1")
    setup = {"files": [str(module)], "begun": str(tmp_path / "begun")}
    pid = Agent(manager, "a.1", setup).started()["pid"]
    Agent(manager, "b.1", setup).started()
    (old,) = (tmp_path / "begun").read_text().split()
    module.write_text("22")
    Agent(manager, "c.1", setup).started()
    wait_until(lambda: not is_alive(int(old)))
    assert len((tmp_path / "begun").read_text().split()) == 2
    assert is_alive(pid)


def test_an_edit_while_agents_start_loses_none(manager: Manager, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("1")
    setup = {"files": [str(module)]}
    Agent(manager, "first.1", setup).started()
    before = [Agent(manager, f"u{number}.1", setup) for number in range(30)]
    module.write_text("22")
    after = [Agent(manager, f"v{number}.1", setup) for number in range(3)]
    pids = [agent.started()["pid"] for agent in (*before, *after)]
    assert [agent.says("x")[0] for agent in (*before, *after)] == [str(pid) for pid in pids]


def test_one_that_cannot_be_forked_gets_a_program_of_its_own(manager: Manager) -> None:
    agents = [Agent(manager, f"u{number}.1", {"threads": True}) for number in range(3)]
    pids = {agent.started()["pid"] for agent in agents}
    assert len(pids) == 3
    logs = [manager.log_of(agent.unit) for agent in agents]
    wait_until(lambda: all(log.exists() and log.read_text() == "fresh\n" for log in logs))


def test_the_least_used_template_goes(manager: Manager) -> None:
    pids = [Agent(manager, f"u{number}.1", key=f"key{number}").started()["pid"] for number in range(10)]
    wait_until(lambda: len(children(manager, pids)) == 16)  # eight, each with a child ahead


def test_what_a_module_started_ends_with_its_template_and_the_agents_live_on(manager: Manager, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("one")
    setup = {"helper": str(tmp_path / "helper"), "files": [str(source)]}
    first = Agent(manager, "a.1", setup)
    pid = first.started()["pid"]
    helper = number_in(tmp_path / "helper")
    daemon = int(first.says("daemon")[2])
    source.write_text("another")
    Agent(manager, "b.1", {**setup, "helper": None}).started()
    wait_until(lambda: not is_alive(helper))
    assert first.says("word")[0] == str(pid)
    assert is_alive(daemon)


# --- stopped while it starts ---


def test_a_stop_while_its_module_is_imported(manager: Manager, tmp_path: Path) -> None:
    agent = Agent(manager, "a.1", {"until": str(tmp_path / "go")})
    assert manager.stop("a.1", 5.0)["left"] == []
    with pytest.raises(Refused, match="stopped while it was being started"):
        agent.started()
    assert manager.ask("list") == {"units": []}


@pytest.mark.parametrize("hangs", ["import", "fork", "stopped"])
def test_a_template_that_hangs_is_replaced(manager: Manager, tmp_path: Path, hangs: str) -> None:
    begun = tmp_path / "begun"
    setup: dict[str, Any] = {"begun": str(begun)}
    if hangs == "import":
        setup["until"] = str(tmp_path / "go")
    elif hangs == "fork":
        setup["deaf"] = str(tmp_path / "deaf")
    else:
        Agent(manager, "first.1", setup).started()
        wait_until(lambda: len(children(manager)) == 3)
        os.kill(number_in(begun), signal.SIGSTOP)
        Agent(manager, "spare.1", setup).started()
    agents = [Agent(manager, f"u{number}.1", setup) for number in range(2)]
    template = number_in(begun)
    if hangs == "fork":
        wait_until((tmp_path / "deaf").exists)
    assert manager.stop("u0.1")["left"] == []
    with pytest.raises(Refused, match="stopped while"):
        agents[0].started()
    wait_until(lambda: not is_alive(template))
    wait_until(lambda: len(begun.read_text().split()) == 2)  # the other one waits with a new template
    if hangs == "import":
        (tmp_path / "go").touch()
    if hangs != "fork":
        pid = agents[1].started()["pid"]
        assert agents[1].says("x")[0] == str(pid)


@pytest.mark.parametrize("follows", [True, False], ids=["another manager", "no manager"])
def test_a_start_whose_manager_is_gone_is_undone(home: Home, manager: Manager, tmp_path: Path, follows: bool) -> None:
    """Its caller does not know of it, and the next manager never adopts what was half started."""
    manager.start("other.1", ["sleep", "1000"])
    Agent(manager, "a.1", {"until": str(tmp_path / "go"), "word": "up"})
    manager.ask("renew")  # the keeper has begun with it
    if not follows:
        manager.close()
    second = home.manager(epoch=2)
    wait_until(lambda: "a.1" not in second.statuses())
    (tmp_path / "go").touch()
    Agent(second, "b.1", {}, key="other").started()
    assert not marked(f"{home.token}:a.1")
    assert not second.log_of("a.1").exists()


# --- the child forked ahead ---


def test_a_child_ahead_goes_with_its_template_and_with_the_keeper(home: Home, manager: Manager) -> None:
    pid = Agent(manager, "a.1").started()["pid"]
    wait_until(lambda: len(children(manager, [pid])) == 2)
    template, spare = sorted(children(manager, [pid]))
    os.kill(template, signal.SIGKILL)
    wait_until(lambda: not is_alive(spare))
    other = Agent(manager, "b.1").started()["pid"]
    wait_until(lambda: len(children(manager, [pid, other])) == 2)
    left = children(manager, [pid, other])
    os.kill(manager.about["pid"], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, left)))
    home.launch()


_LOADS = """
from pathlib import Path
Path({begun!r}).touch()
while {hangs}:
    pass
"""


@pytest.mark.parametrize("when", ["it loads", "it is idle", "its child waits"])
def test_a_real_template_ends_with_a_keeper_that_is_killed(
    home: Home, manager: Manager, tmp_path: Path, when: str
) -> None:
    """Without another keeper, which would sweep."""
    module, begun = tmp_path / "loads.py", tmp_path / "begun"
    module.write_text(_LOADS.format(begun=str(begun), hangs=when == "it loads"))
    source = {"module": "loads", "path": str(module), "qualname": "Agent", "main": False}
    template = Templates().find(source, {}, "/")
    agent = Agent(manager, "a.1", template["setup"], template_argv=template["argv"])
    wait_until(begun.exists)
    if when != "it loads":
        pid = agent.started()["pid"]
        wait_until(lambda: len(children(manager, [pid])) == 2)
    kept = children(manager)
    if when == "it is idle":
        os.kill(max(kept), signal.SIGKILL)  # the child ahead is the youngest
    os.kill(manager.about["pid"], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, kept)))
    home.launch()


def test_a_keeper_short_of_descriptors_refuses_and_keeps_its_manager(manager: Manager) -> None:
    keeper = manager.about["pid"]
    hard = resource.prlimit(keeper, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(keeper, resource.RLIMIT_NOFILE, (110, hard))
    units: list[str] = []
    with contextlib.suppress(Refused):
        while len(units) < 60:
            Agent(manager, f"u{len(units)}.1").started()
            units.append(f"u{len(units)}.1")
    assert 5 < len(units) < 60
    with pytest.raises(Refused, match="too few file descriptors"):
        manager.start("more.1", ["true"])
    assert manager.stop(units[0])["left"] == []
    assert manager.stop(units[1])["left"] == []
    Agent(manager, "again.1").started()
