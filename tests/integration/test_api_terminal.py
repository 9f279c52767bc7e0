"""Terminals over HTTP: a stream for each viewer, input with a right of its own, sizes; and never for another agent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from api_served import Served, serving

import ostler
from ostler.client.blocking import BlockingClient, DaemonError
from ostler.home import HOME_NAME

pytestmark = pytest.mark.anyio
_SECONDS = 60.0
SIZE = {"rows": 24, "columns": 80}
PROBE = """
import base64, os, sys
from pathlib import Path
from ostler.client.blocking import BlockingClient, DaemonError
client = BlockingClient(Path(sys.argv[1]))
for verb, more in (("write_input", {"data": "eA=="}), ("resize", {"rows": 9, "columns": 9}), ("terminal", {})):
    try:
        client.call(verb, instance=sys.argv[2], **more)
    except DaemonError as error:
        print(verb, error.code)
"""


class Helper(ostler.Agent):
    async def process(self, request: Any) -> Any:
        return request


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path / HOME_NAME) as daemon:
        yield daemon


class Agents:
    """Commands of one daemon."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.client = BlockingClient(served.home)

    async def call(self, verb: str, **parameters: Any) -> Any:
        return await asyncio.to_thread(self.client.call, verb, **parameters)

    async def start(self, name: str, *words: str, **options: Any) -> None:
        body = {"command": list(words), "cwd": "/", "job": {"request": ""}, "options": {"name": name, **options}}
        await self.call("spawn", spawn=body)

    async def type(self, name: str, data: bytes, **more: Any) -> dict[str, Any]:
        reply: dict[str, Any] = await self.call(
            "write_input", instance=name, data=base64.b64encode(data).decode(), **more
        )
        return reply

    async def ended(self, name: str) -> None:
        while (await self.call("instance", instance=name))["state"] != "terminated":  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.02)

    async def see(self, name: str, text: bytes, *, after: str | None = None) -> tuple[bytes, str]:
        """What the stream gives up to the text, and the cursor behind it."""

        def read() -> tuple[bytes, str]:
            shown = b""
            for item in BlockingClient(self.served.home).stream("terminal", instance=name, after=after):
                shown += base64.b64decode(item.data["data"])
                if text in shown:
                    return shown, str(item.id)
            raise AssertionError(shown)

        async with asyncio.timeout(_SECONDS):
            return await asyncio.to_thread(read)


@pytest.fixture
async def agents(served: Served) -> Agents:
    return Agents(served)


async def test_two_viewers_see_the_same_and_go_on_from_their_cursor(agents: Agents) -> None:
    await agents.start("cat", "sh", "-c", "echo begun; stty -echo; cat", terminal=SIZE)
    (first, cursor), (second, _) = await asyncio.gather(*(agents.see("cat", b"begun\r\n") for _ in range(2)))
    assert first == second == b"begun\r\n"
    assert (await agents.type("cat", b"word\r"))["taken"] == 5
    shown, _ = await agents.see("cat", b"word\r\n", after=cursor)
    assert b"begun" not in shown


async def test_what_ended_before_it_was_looked_at_is_seen_all_the_same(agents: Agents) -> None:
    await agents.start("quick", "echo", "quick as that", terminal=SIZE)
    assert (await agents.see("quick", b"quick as that\r\n"))[0] == b"quick as that\r\n"
    async with asyncio.timeout(_SECONDS):
        await agents.ended("quick")
    assert (await agents.type("quick", b"x")) == {"taken": 0, "closed": True}


async def test_a_restart_has_a_terminal_of_its_own_and_the_stream_goes_on(agents: Agents) -> None:
    script = "echo attempt $OSTLER_ATTEMPT; test $OSTLER_ATTEMPT = 2 || exit 1; sleep 1000"
    await agents.start("again", "sh", "-c", script, terminal=SIZE, restart_policy="immediate")
    shown, _ = await agents.see("again", b"attempt 2\r\n")
    assert shown.startswith(b"attempt 1\r\n")


async def test_the_log_shows_text_and_raw_what_was_written(agents: Agents) -> None:
    await agents.start("colour", "printf", r"\033[2J\033[1mbold\033[0m\n", terminal=SIZE)
    await agents.see("colour", b"bold")
    async with asyncio.timeout(_SECONDS):
        await agents.ended("colour")
    assert [line["text"] for line in await agents.call("logs", instance="colour")] == ["bold"]
    assert "\x1b[1m" in (await agents.call("logs", instance="colour", raw=True))[0]["text"]


async def test_standard_input_is_passed_on_and_closed(agents: Agents) -> None:
    await agents.start("sum", "sh", "-c", "wc -c", stdin=True)
    at = 0
    for data in (b"abc", b"defg"):
        at += (await agents.type("sum", data, writer="me", at=at))["taken"]
    assert at == 7
    assert (await agents.type("sum", b"", writer="me", at=at, close=True))["closed"]
    async with asyncio.timeout(_SECONDS):
        await agents.ended("sum")
    lines = await agents.call("logs", instance="sum")
    assert lines[0]["text"].strip() == "7"


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(0, 80), (24, 0), (24, 100_000)])
async def test_a_size_that_no_window_has_is_refused_with_its_range(agents: Agents, rows: int, columns: int) -> None:
    await agents.start("window", "sleep", "1000", terminal=SIZE)
    with pytest.raises(DaemonError, match="must be 1 to 9999"):
        await agents.call("resize", instance="window", rows=rows, columns=columns)
    with pytest.raises(DaemonError, match="must be 1 to 9999"):
        await agents.start("other", "true", terminal={"rows": rows, "columns": columns})


async def test_an_agent_without_a_terminal_says_what_to_do(agents: Agents) -> None:
    await agents.start("plain", "sleep", "1000")
    for verb, more in (("terminal", {}), ("resize", SIZE)):
        with pytest.raises(DaemonError, match="`ostler logs -f plain` follows what it writes") as refusal:
            await agents.call(verb, instance="plain", **more)
        assert refusal.value.code == "wrong_state"
    with pytest.raises(DaemonError, match="plain reads no input; start it with `ostler run -i`"):
        await agents.type("plain", b"x")


async def test_in_the_library_only_commands_have_terminals(tmp_path: Path) -> None:
    async with ostler.open(tmp_path / HOME_NAME) as manager:
        definition = manager.registry.register(Helper, name="helper").id
        for options in (ostler.AgentSpawnOptions(terminal=ostler.TerminalSize()), ostler.AgentSpawnOptions(stdin=True)):
            with pytest.raises(ostler.ValidationError, match="is for commands at level process"):
                await manager.spawn(ostler.SpawnRequest(agent_definition_id=definition, options=options))
        command = manager.registry.register(ostler.CommandSpec(argv=("cat",)), name="cat").id
        options = ostler.AgentSpawnOptions(
            isolation_level=ostler.IsolationLevel.PROCESS, terminal=ostler.TerminalSize()
        )
        instance = await manager.spawn(
            ostler.SpawnRequest(agent_definition_id=command, options=options, job={"request": ""})
        )
        assert await manager.write_input(instance.instance_id, b"word\r") == (5, False)
        shown = b""
        async with asyncio.timeout(_SECONDS), contextlib.aclosing(manager.terminal(instance.instance_id)) as parts:
            async for part in parts:
                shown += part.data
                if shown.count(b"word\r\n") == 2:  # the echo, and the answer of cat
                    break


async def test_nonsense_is_refused_with_its_field(agents: Agents) -> None:
    await agents.start("cat", "cat", terminal=SIZE)
    for fields, sentence in (
        ({"data": "%%"}, "data must be base64"),
        ({"data": "", "writer": ""}, "writer must have 1 to 64"),
        ({"data": "", "size": {"rows": 0}}, "rows must be 1 to 9999"),
    ):
        with pytest.raises(DaemonError, match=sentence):
            await agents.call("write_input", instance="cat", **fields)
    with pytest.raises(DaemonError, match="type ctrl-d"):
        await agents.call("write_input", instance="cat", close=True)
    async with httpx2.AsyncClient(
        base_url=agents.served.address, headers={"authorization": f"Bearer {agents.served.tokens['viewer']}"}
    ) as client:
        answer = await client.get("/v1/instances/cat/terminal", params={"after": "nonsense"})
        assert (answer.status_code, answer.json()["detail"][:5]) == (422, "after")


# --- rights ------------------------------------------------------------------------------------------


async def test_who_may_only_read_sees_the_screen_and_types_nothing(agents: Agents) -> None:
    await agents.start("cat", "sh", "-c", "echo begun; cat", terminal=SIZE)
    await agents.see("cat", b"begun")
    headers = {"authorization": f"Bearer {agents.served.tokens['viewer']}"}
    async with httpx2.AsyncClient(base_url=agents.served.address, headers=headers, timeout=_SECONDS) as client:
        async with client.stream("GET", "/v1/instances/cat/terminal") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    assert b"begun" in base64.b64decode(json.loads(line[6:])["data"])
                    break
        for path, body in (("input", {"data": "eA=="}), ("terminal/size", SIZE)):
            assert (await client.post(f"/v1/instances/cat/{path}", json=body)).status_code == 403


async def test_typing_into_the_agent_of_another_is_in_the_audit_once(agents: Agents) -> None:
    await agents.start("cat", "cat", terminal=SIZE)
    await agents.type("cat", b"own\r")
    headers = {"authorization": f"Bearer {agents.served.tokens['admin']}"}
    async with httpx2.AsyncClient(base_url=agents.served.address, headers=headers, timeout=_SECONDS) as client:
        for _ in range(3):
            await client.post("/v1/instances/cat/input", json={"data": "eA=="})
    acts = [act for act in await agents.call("audit") if act["action"] == "write_input"]
    assert [(act["actor"], act["outcome"]) for act in acts] == [("admin", "ok")]


async def test_an_agent_neither_sees_nor_types_into_another(agents: Agents) -> None:
    await agents.start("victim", "cat", terminal=SIZE)
    await agents.start("prober", sys.executable, "-c", PROBE, str(agents.served.home), "victim")
    async with asyncio.timeout(_SECONDS):
        await agents.ended("prober")
    lines = await agents.call("logs", instance="prober")
    assert [line["text"] for line in lines] == [f"{verb} forbidden" for verb in ("write_input", "resize", "terminal")]
