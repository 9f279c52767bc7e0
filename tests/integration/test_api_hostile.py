"""What a careless or hostile client does: odd headers and numbers, half a request, too many connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from api_served import Served, problem, serving

from ostler.api.routes import events
from ostler.api.table import ROUTE_OF
from ostler.client.blocking import BlockingClient, DaemonError, connect_to
from ostler.daemon import listen
from ostler.home import SOCKET_FILE

pytestmark = pytest.mark.anyio
HUGE = "9" * 30
_SECONDS = 30.0


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("home")) as daemon:
        yield daemon


async def call(served: Served, verb: str, **parameters: Any) -> Any:
    def ask() -> Any:
        client = BlockingClient(served.home)
        try:
            return client.call(verb, **parameters)
        finally:
            client.close()  # a connection that is kept would count

    return await asyncio.to_thread(ask)


# --- headers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:7311@evil.com", "evil.com@127.0.0.1", "localhost:", "localhost:x", "[::1"])
async def test_a_host_that_is_not_exactly_ours_is_refused(served: Served, host: str) -> None:
    response = await served.ask(ROUTE_OF["status"], token=served.tokens["admin"], host=host)
    assert response.status_code == 403
    assert "is not this machine" in problem(response)["detail"]


@pytest.mark.parametrize(
    "origin", ["http://[", "null", "http://localhost:1", "https://{host}", "http://{host}@evil.com", "http://{host}/x"]
)
async def test_an_origin_must_be_the_host(served: Served, origin: str) -> None:
    host = served.address.removeprefix("http://")
    response = await served.ask(ROUTE_OF["status"], token=served.tokens["admin"], origin=origin.format(host=host))
    assert response.status_code == 403
    assert "is another site" in problem(response)["detail"]


async def test_a_page_of_the_daemon_itself_is_served(served: Served) -> None:
    response = await served.ask(ROUTE_OF["status"], token=served.tokens["admin"], origin=served.address)
    assert response.status_code == 200


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1e308, -5, 0, float("nan")])
async def test_a_token_expires_at_a_time_that_exists(served: Served, seconds: float) -> None:
    with pytest.raises(DaemonError, match="expires_in") as refusal:
        await call(served, "create_token", name="odd", expires_in=seconds)
    assert refusal.value.code == "invalid"


@pytest.mark.parametrize(
    ("verb", "parameters"),
    [
        ("pull_request", {"number": HUGE}),
        ("pull_request", {"number": "9" * 5000}),
        ("merge", {"number": f"-{HUGE}"}),
        ("crew_scale", {"crew": "x", "count": int(HUGE)}),
        ("events", {"after": HUGE}),
        ("events", {"limit": HUGE}),
        ("instances", {"limit": HUGE}),
        ("instances", {"offset": HUGE}),
        ("tasks", {"offset": HUGE}),
        ("audit", {"limit": HUGE}),
        ("logs", {"instance": "x", "tail": HUGE}),
        ("logs", {"instance": "x", "attempt": HUGE}),
        ("instance", {"instance": HUGE}),
        ("task", {"task": HUGE}),
        ("revoke_token", {"token_id": HUGE}),
    ],
)
async def test_a_huge_number_is_a_fault_of_the_caller(served: Served, verb: str, parameters: dict[str, Any]) -> None:
    try:
        await call(served, verb, **parameters)
    except DaemonError as error:
        assert error.code in {"invalid", "not_found"}, error  # noqa: PT017 - an answer is as good


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize(("verb", "more"), [("events", {}), ("events", {"after": 0}), ("audit", {}), ("tasks", {})])
async def test_a_page_has_at_least_one_place(served: Served, verb: str, more: dict[str, Any], limit: int) -> None:
    with pytest.raises(DaemonError, match=f"limit must be .*1.*, was {limit}") as refusal:
        await call(served, verb, limit=limit, **more)
    assert refusal.value.code == "invalid"


async def test_events_after_a_number_are_chosen_by_type_before_they_are_counted(served: Served) -> None:
    newest = await call(served, "events", limit=1)  # of the tests before, in whatever order they run
    before = newest[-1]["sequence"] if newest else 0
    spawned = [await call(served, "spawn", spawn={"command": ["sleep", "600"]}) for _ in range(2)]
    (first, last) = await call(served, "events", after=before, types="agent_spawned", limit=2)
    assert [first["instance_id"], last["instance_id"]] == [instance["instance_id"] for instance in spawned]
    assert await call(served, "events", after=first["sequence"], types="agent_spawned", limit=1) == [last]
    for instance in spawned:
        await call(served, "terminate", instance=instance["instance_id"], options={"graceful_timeout": 0})


# --- the same key ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"model": "opus"}, {"checks": ["true"]}, {"priority": "high"}, {"hold": True}, {"task": "b"}]
)
async def test_an_idempotency_key_with_another_task_is_a_conflict(served: Served, change: dict[str, Any]) -> None:
    body, key = {"task": "a", "near": "/"}, f"task-{'-'.join(change)}"
    first = await call(served, "add_task", new_task=body, key=key)
    assert (await call(served, "add_task", new_task=body, key=key))["task_id"] == first["task_id"]
    with pytest.raises(DaemonError) as refusal:
        await call(served, "add_task", new_task={**body, **change}, key=key)
    assert refusal.value.code == "conflict"


async def test_an_idempotency_key_with_another_command_is_a_conflict(served: Served) -> None:
    body: dict[str, Any] = {"command": ["sleep", "600"], "cwd": "/"}
    first = await call(served, "spawn", spawn=body, key="spawn-1")
    assert (await call(served, "spawn", spawn=body, key="spawn-1"))["instance_id"] == first["instance_id"]
    for change in ({"command": ["sleep", "601"]}, {"cwd": "/tmp"}, {"context": {"a": 1}}):  # noqa: S108 - any directory
        with pytest.raises(DaemonError) as refusal:
            await call(served, "spawn", spawn={**body, **change}, key="spawn-1")
        assert refusal.value.code == "conflict"
    await call(served, "terminate", instance=first["instance_id"])


# --- streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_a_stream_ends_with_its_token(served: Served, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CHECK_SECONDS", 0.05)
    lifetime = {"expires_in": 1} if how == "expired" else {}
    made = await call(served, "create_token", name=f"of-a-stream-{how}", **lifetime)
    headers = {"authorization": f"Bearer {made['token']}"}
    async with (
        asyncio.timeout(_SECONDS),
        httpx2.AsyncClient(base_url=served.address, timeout=None) as client,
        client.stream("GET", "/v1/events", params={"follow": "true"}, headers=headers) as response,
    ):
        assert response.status_code == 200
        if how == "revoked":
            await call(served, "revoke_token", token_id=made["token_id"])
        async for _ in response.aiter_lines():
            pass
    assert (await served.ask(ROUTE_OF["events"], token=made["token"])).status_code == 401


async def test_the_check_of_a_stream_comes_soon_enough() -> None:
    assert events.CHECK_SECONDS < 5


# --- connections -------------------------------------------------------------------------------------


def connected(served: Served) -> socket.socket:
    host, _, port = served.address.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_SECONDS)


@pytest.mark.parametrize(
    "half",
    [b"", b"GET /v1/status HTTP/1.1\r\nHo", b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"],
)
async def test_half_a_request_times_out(served: Served, half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "REQUEST_SECONDS", 0.2)

    def answer() -> bytes:
        with connected(served) as sock:
            sock.sendall(half)
            received = b""
            while chunk := sock.recv(1000):
                received += chunk
            return received

    assert b"HTTP/1.1 2" not in await asyncio.to_thread(answer)


async def test_connections_are_limited_and_the_socket_of_the_home_has_its_own(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "MAX_CONNECTIONS", 5)
    idle = [await asyncio.to_thread(connected, served) for _ in range(5)]
    try:
        refused = await asyncio.to_thread(connected, served)
        with refused:
            assert b"503" in await asyncio.to_thread(refused.recv, 1000)
        assert (await call(served, "status"))["pid"]
    finally:
        for sock in idle:
            sock.close()


async def test_the_socket_of_the_home_keeps_places_for_people(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "is_agent", lambda *_: True)
    monkeypatch.setattr(listen, "MAX_AGENT_CONNECTIONS", 3)

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_SECONDS)
        connect_to(sock, served.home / SOCKET_FILE)
        return sock

    idle = [await asyncio.to_thread(connect) for _ in range(3)]
    try:
        with await asyncio.to_thread(connect) as refused:
            assert b"503" in await asyncio.to_thread(refused.recv, 1000)
        monkeypatch.setattr(listen, "is_agent", lambda *_: False)
        assert (await call(served, "status"))["pid"]
    finally:
        for sock in idle:
            sock.close()
