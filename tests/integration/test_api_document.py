"""The API as a document, for who has a token: OpenAPI for programs, a page that loads nothing for people."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from api_served import Served, serving

from ostler import Client
from ostler.api.table import ROUTE_OF, ROUTES

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("home")) as served:
        yield served


@pytest.fixture(scope="module")
async def document(served: Served) -> dict[str, Any]:
    response = await served.ask(ROUTE_OF["openapi"], token=served.tokens["viewer"])
    assert response.status_code == 200
    document: dict[str, Any] = response.json()
    return document


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


async def test_every_route_is_in_the_document(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    operations = {
        (method.upper(), path): operation
        for path, by_method in document["paths"].items()
        for method, operation in by_method.items()
    }
    assert set(operations) == {(route.method, route.path) for route in ROUTES}
    for route in ROUTES:
        operation = operations[route.method, route.path]
        assert operation["operationId"] == route.name
        assert operation["x-permission"] == route.permission
        assert str(route.status) in operation["responses"]


async def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    missing = {name for name in references(document) if name.removeprefix("#/components/schemas/") not in schemas}
    assert not missing
    assert "max_memory_mb" in schemas["ResourceLimits"]["properties"]


async def test_the_page_loads_nothing_and_runs_nothing(served: Served) -> None:
    response = await served.ask(ROUTE_OF["docs"], token=served.tokens["viewer"])
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "<script" not in response.text
    assert not re.search(r"(src|href)=.?https?:", response.text)
    for route in ROUTES:
        assert f"<b>{route.method}</b>{route.path}<" in response.text


@pytest.mark.parametrize("name", ["openapi", "docs"])
async def test_a_browser_is_asked_for_the_token_as_a_password(served: Served, name: str) -> None:
    route = ROUTE_OF[name]
    refused = await served.ask(route)
    assert refused.status_code == 401
    assert {value.split()[0] for value in refused.headers.get_list("www-authenticate")} == {"Bearer", "Basic"}
    for password, status in ((served.tokens["viewer"], 200), ("wrong", 401), ("", 401)):
        words = base64.b64encode(f"me:{password}".encode()).decode()
        assert (await served.ask(route, authorization=f"Basic {words}")).status_code == status
    assert (await served.ask(route, authorization="Basic %%%")).status_code == 401


async def test_a_password_is_taken_nowhere_else(served: Served) -> None:
    words = base64.b64encode(f"me:{served.tokens['admin']}".encode()).decode()
    refused = await served.ask(ROUTE_OF["status"], authorization=f"Basic {words}")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"


async def test_many_who_ask_at_once_get_the_same(served: Served) -> None:
    async with Client(served.home) as client:
        documents = await asyncio.gather(*(client.call("openapi") for _ in range(5)))
    assert all(document == documents[0] for document in documents)
