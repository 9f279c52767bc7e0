"""What stands before every route: generated from the table, so that a new route is tested with the others."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from api_served import Served, problem, serving

from ostler.api.routes import HANDLERS
from ostler.api.table import PUBLIC, ROUTE_OF, ROUTES, Route
from ostler.client.blocking import BlockingClient
from ostler.daemon.run import serve
from ostler.errors import ValidationError
from ostler.home import SOCKET_FILE
from ostler.model.access import Permission, Role
from ostler.policy.access import ROLE_PERMISSIONS

pytestmark = pytest.mark.anyio
WRONG = "ostler_" + "x" * 43
GUARDED = [route for route in ROUTES if route.permission != PUBLIC]
IDS = [f"{route.method} {route.path}" for route in GUARDED]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.mark.parametrize("route", GUARDED, ids=IDS)
async def test_without_a_token_it_is_refused(served: Served, route: Route) -> None:
    response = await served.ask(route)
    assert response.status_code == 401
    assert "ostler token create" in problem(response)["detail"]


@pytest.mark.parametrize("route", GUARDED, ids=IDS)
async def test_with_a_wrong_token_it_is_refused(served: Served, route: Route) -> None:
    assert (await served.ask(route, token=WRONG)).status_code == 401


@pytest.mark.parametrize("route", ROUTES, ids=[f"{route.method} {route.path}" for route in ROUTES])
async def test_a_foreign_host_is_refused_also_with_a_token(served: Served, route: Route) -> None:
    response = await served.ask(route, token=served.tokens["admin"], host="evil.example:7177")
    assert response.status_code == 403
    assert "evil.example" in problem(response)["detail"]


@pytest.mark.parametrize("route", ROUTES, ids=[f"{route.method} {route.path}" for route in ROUTES])
async def test_a_foreign_origin_is_refused_also_with_a_token(served: Served, route: Route) -> None:
    response = await served.ask(route, token=served.tokens["admin"], origin="https://evil.example")
    assert response.status_code == 403


@pytest.mark.parametrize("route", GUARDED, ids=IDS)
async def test_a_body_that_is_too_large_is_refused(served: Served, route: Route) -> None:
    body = json.dumps("x" * route.body_limit).encode()
    response = await served.ask(route, token=served.tokens["admin"], content=body)
    assert response.status_code == 413


BEYOND_A_VIEWER = [route for route in GUARDED if Permission(route.permission) not in ROLE_PERMISSIONS[Role.VIEWER]]


@pytest.mark.parametrize("route", BEYOND_A_VIEWER, ids=[f"{route.method} {route.path}" for route in BEYOND_A_VIEWER])
async def test_a_viewer_is_refused_what_needs_more(served: Served, route: Route) -> None:
    assert (await served.ask(route, token=served.tokens["viewer"])).status_code == 403


async def test_every_route_but_the_health_of_the_daemon_has_a_permission() -> None:
    assert [route.path for route in ROUTES if route.permission == PUBLIC] == ["/healthz"]
    assert {Permission(route.permission) for route in GUARDED} <= set(Permission)


async def test_every_route_has_its_handler_and_its_own_name() -> None:
    assert sorted(route.name for route in ROUTES) == sorted(HANDLERS)


async def test_an_unknown_path_is_told_only_to_who_is_known(served: Served) -> None:
    unknown = Route("nothing", "GET", "/v1/nothing", "agents.read")
    assert (await served.ask(unknown)).status_code == 401
    assert (await served.ask(unknown, token=served.tokens["viewer"])).status_code == 404
    wrong_method = ROUTE_OF["status"]._replace(method="PUT")
    assert (await served.ask(wrong_method)).status_code == 401
    response = await served.ask(wrong_method, token=served.tokens["viewer"])
    assert "there is no PUT /v1/status" in problem(response)["detail"]


async def test_a_revoked_token_is_refused_at_once(served: Served) -> None:
    client = BlockingClient(served.home)
    made = await asyncio.to_thread(client.call, "create_token", name="short")
    route = ROUTE_OF["status"]
    assert (await served.ask(route, token=made["token"])).status_code == 200
    await asyncio.to_thread(client.call, "revoke_token", token_id="short")  # noqa: S106
    assert (await served.ask(route, token=made["token"])).status_code == 401


async def test_a_body_without_a_length_is_bounded_too(served: Served) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 64 * 1024

    async with httpx2.AsyncClient(base_url=served.address) as client:
        headers = {"authorization": f"Bearer {served.tokens['admin']}"}
        response = await client.post("/v1/tokens", content=pieces(), headers=headers)
    assert response.status_code == 413


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("opened", [False, True], ids=["rights of the file", "peer credentials"])
async def test_another_user_is_kept_from_the_socket(served: Served, opened: bool) -> None:
    place = served.home / SOCKET_FILE
    assert place.stat().st_mode & 0o777 == 0o600
    if opened:  # even where somebody has opened all the doors
        place.chmod(0o666)
        for folder in (served.home, *served.home.parents):
            if folder != Path("/"):
                folder.chmod(0o755)
    try:
        assert await asyncio.to_thread(_as_nobody, str(place)) == "refused"
    finally:
        place.chmod(0o600)
        served.home.chmod(0o700)


def _as_nobody(place: str) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"answered"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(60)
                sock.connect(place)
                sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                said = b"answered" if sock.recv(100) else b"refused"
        except OSError:
            said = b"refused"
        finally:
            os.write(writing, said)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    return found


async def test_any_other_address_than_loopback_is_refused(tmp_path: Path) -> None:

    for address in ("0.0.0.0:7177", "192.168.1.4:7177", "example.org:7177", "7177x"):
        with pytest.raises(ValidationError, match="loopback"):
            await serve(tmp_path / "home", listen=address, strict=True)
