"""An agent is not the owner of its home: its process is recognised, and narrowed to what is its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from workdirs_ground import make_repository

from ostler.client.blocking import BlockingClient, DaemonError
from ostler.daemon.run import serve
from ostler.errors import ExitCode
from ostler.home import HOME_NAME, SOCKET_FILE

pytestmark = pytest.mark.anyio
PROBE = Path(__file__).with_name("api_probe.py")
_SECONDS = 30.0


class Probes:
    """A daemon, and agents of it that make calls."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.client = BlockingClient(home)
        self.number = 0

    async def call(self, verb: str, **parameters: Any) -> Any:
        return await asyncio.to_thread(self.client.call, verb, **parameters)

    async def made_by_agent(
        self, *calls: tuple[str, dict[str, Any]], agent: str = "prober", words: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        """What an agent that works on a task is answered to these calls; OWN stands for its own task."""
        self.number += 1
        place = self.home.parent.parent / f"probe-{self.number}"
        place.mkdir()
        key = f"P{self.number}"
        texts = json.dumps(calls).replace("OWN", key)
        (place / "calls.json").write_text(texts)
        command = " ".join([*words, sys.executable, str(PROBE), str(self.home), str(place)])
        await self.call("add_task", new_task={"task": command, "key": key, "agent": agent, "near": str(self.project)})
        async with asyncio.timeout(_SECONDS):
            while not (place / "answers.json").exists():  # noqa: ASYNC110 - another program writes it
                await asyncio.sleep(0.02)
        answers: list[dict[str, Any]] = json.loads((place / "answers.json").read_text())
        return answers

    @property
    def project(self) -> Path:
        return self.home.parent


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def probes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Probes]:
    project = tmp_path_factory.mktemp("api-agents") / "project"
    make_repository(project, {"a.txt": "one\n"})
    home = project / HOME_NAME
    (home / "agents").mkdir(parents=True)
    run = 'driver: {command: [sh, -c, "sh $OSTLER_PROMPT_FILE"]}'
    (home / "agents" / "prober.md").write_text(f"---\nlifecycle:\n  {run}\n---\n")
    (home / "agents" / "quiet.md").write_text(f"---\nlifecycle:\n  {run}\n  may-add-tasks: false\n---\n")
    os.environ["OSTLER_TOKEN"] = "of a person"  # noqa: S105 - no daemon takes it
    daemon = asyncio.create_task(serve(home))
    while not (home / SOCKET_FILE).exists():
        assert not daemon.done(), daemon.result()
        await asyncio.sleep(0.01)
    found = Probes(home)
    yield found
    await found.call("stop_daemon")
    await daemon


async def test_an_agent_may_not_do_what_is_left_to_people(probes: Probes) -> None:
    other = await probes.call("spawn", spawn={"command": ["sleep", "600"]})
    calls = [
        ("accept", {"task": "OWN"}),
        ("reject", {"task": "OWN", "reason": "mine"}),
        ("undo", {"task": "OWN"}),
        ("send_back", {"task": "OWN", "comment": "again"}),
        ("cancel_task", {"task": "OWN"}),
        ("answer", {"wait": "x"}),
        ("create_token", {"name": "mine", "role": "admin"}),
        ("terminate", {"instance": other["instance_id"]}),
        ("suspend", {"instance": other["instance_id"]}),
        ("restart", {"instance": other["instance_id"]}),
        ("crew_scale", {"crew": "x", "count": 9}),
        ("crew_stop", {}),
        ("spawn", {"spawn": {"command": ["true"]}}),
        ("stop_daemon", {}),
        ("audit", {}),
        ("instances", {}),
    ]
    answers = await probes.made_by_agent(*calls)
    assert {verb: answer.get("code") for (verb, _), answer in zip(calls, answers, strict=True)} == {
        verb: "forbidden" for verb, _ in calls
    }
    assert "is an agent and may not call accept" in answers[0]["detail"]
    assert (await probes.call("instance", instance=other["instance_id"]))["state"] == "ready"
    denied = [entry for entry in await probes.call("audit", limit=100) if entry["outcome"] == "denied"]
    assert {entry["action"] for entry in denied if entry["actor"].startswith("agent:")} >= {verb for verb, _ in calls}
    await probes.call("terminate", instance=other["instance_id"])


async def test_an_agent_looks_at_its_own_and_at_nothing_else(probes: Probes) -> None:
    other = await probes.call("spawn", spawn={"command": ["sh", "-c", "echo secret; sleep 600"]})
    await probes.call("add_task", new_task={"task": "x", "key": "T900", "hold": True, "near": str(probes.project)})
    answers = await probes.made_by_agent(
        ("task", {"task": "OWN"}),
        ("task", {"task": "T900"}),
        ("diff", {"task": "T900"}),
        ("instance", {"instance": other["name"]}),
        ("logs", {"instance": other["name"]}),
        ("events", {"limit": 100}),
        ("events", {"limit": 100, "instance": other["name"]}),
        ("waits", {}),
    )
    codes = [answer.get("code", "ok") for answer in answers]
    assert codes == ["ok", "forbidden", "forbidden", "forbidden", "forbidden", "ok", "forbidden", "ok"]
    own = answers[0]["ok"]["instance_id"]
    assert {event["instance_id"] for event in answers[5]["ok"]} == {own}
    await probes.call("terminate", instance=other["instance_id"])


async def test_an_agent_adds_tasks_below_its_own(probes: Probes) -> None:
    answers = await probes.made_by_agent(
        ("add_task", {"new_task": {"task": "a part of it", "hold": True, "near": "/"}}),
        ("add_task", {"new_task": {"task": "of another", "parent": "T900"}}),
        ("add_task", {"new_task": {"task": "merges itself", "loop": {}}}),
    )
    assert "ok" in answers[0], answers
    made = answers[0]["ok"]
    assert [answer.get("code", "ok") for answer in answers] == ["ok", "forbidden", "forbidden"]
    assert (made["parent"], made["near"]) == (f"P{probes.number}", str(probes.project))
    assert made["created_by"].startswith("agent:")
    entries = [entry for entry in await probes.call("audit") if entry["subject"] == f"task:{made['key']}"]
    assert [entry["actor"] for entry in entries] == [made["created_by"]]


async def test_an_agent_uses_the_command_line(probes: Probes, tmp_path: Path) -> None:
    ostler = f"{sys.executable} -m ostler"
    words = (
        f"{ostler} task add --hold 'a part' > {tmp_path}/added 2>&1;",
        f"{ostler} accept $OSTLER_TASK > {tmp_path}/accepted 2>&1;",
        f"{ostler} signal complete > {tmp_path}/signalled 2>&1;",
    )
    await probes.made_by_agent(words=words)
    assert "queued" in (tmp_path / "added").read_text()
    assert "is an agent and may not call" in (tmp_path / "accepted").read_text()
    assert "is noted; you may end" in (tmp_path / "signalled").read_text()


async def test_a_definition_may_forbid_to_add_tasks(probes: Probes) -> None:
    (answer,) = await probes.made_by_agent(("add_task", {"new_task": {"task": "more", "hold": True}}), agent="quiet")
    assert answer["code"] == "forbidden", answer


@pytest.mark.parametrize("words", [(), ("env", "-i"), ("setsid", "env", "-i")], ids=["plain", "env -i", "setsid"])
async def test_a_command_agent_is_recognised_without_its_environment(probes: Probes, words: tuple[str, ...]) -> None:
    signal, accept = await probes.made_by_agent(
        ("signal", {"name": "complete"}), ("accept", {"task": "OWN"}), words=words
    )
    assert (signal.get("ok", {}).get("task"), accept["code"]) == (f"P{probes.number}", "forbidden"), signal


async def test_a_process_that_lowers_its_bound_further_is_no_person(probes: Probes) -> None:
    lower = ["prlimit", "--locks=7"]
    if shutil.which("prlimit") is None:
        pytest.skip("this machine has no prlimit")
    (answer,) = await probes.made_by_agent(("create_token", {"name": "mine"}), words=tuple(lower))
    assert answer["code"] == "forbidden"


async def test_the_token_of_a_person_is_not_handed_on(probes: Probes, tmp_path: Path) -> None:
    words = ("env", ">", str(tmp_path / "env"), ";")
    await probes.made_by_agent(words=words)
    assert "OSTLER_HOME=" in (tmp_path / "env").read_text()
    assert "OSTLER_TOKEN" not in (tmp_path / "env").read_text()
    with pytest.raises(DaemonError, match="env must not hold OSTLER_TOKEN"):
        await probes.call("spawn", spawn={"command": ["env"], "options": {"env": {"OSTLER_TOKEN": "x"}}})


async def test_a_person_is_the_owner(probes: Probes) -> None:
    made = await probes.call("create_token", name="person")
    assert made["token"]
    with pytest.raises(DaemonError, match="no agent of this home"):
        await probes.call("signal", name="complete")


async def test_a_program_that_an_agent_inside_the_daemon_has_started_is_no_person(probes: Probes) -> None:
    """At levels none and thread an agent has no process of its own; what it starts is a child of the daemon."""
    words = ("-m", "ostler", "--home", str(probes.home), "token", "create", "mine")
    child = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
    _, complaint = await child.communicate()
    assert child.returncode == ExitCode.NOT_ALLOWED
    assert b"agent:unknown is an agent and may not call create_token" in complaint
