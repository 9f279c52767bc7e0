"""The workspace over HTTP: who sees which agents, and the plan, the flag and the token share that bound them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_served import Served, problem, serving

from ostler.api.table import ROUTE_OF
from ostler.client.blocking import BlockingClient, DaemonError

pytestmark = pytest.mark.anyio
SLEEP: dict[str, Any] = {"command": ["sleep", "600"]}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("home")) as daemon:
        yield daemon


async def call(served: Served, verb: str, **parameters: Any) -> Any:
    return await asyncio.to_thread(BlockingClient(served.home).call, verb, **parameters)


async def test_a_list_shows_what_its_caller_may_see(served: Served) -> None:
    await call(served, "spawn", spawn=SLEEP)
    seen = {}
    for name, more in (
        ("narrow", {"role": "viewer", "permissions": []}),
        ("viewer", {"role": "viewer"}),
        ("operator", {"role": "operator"}),
    ):
        token = (await call(served, "create_token", name=f"{name}-list", **more))["token"]
        response = await served.ask(ROUTE_OF["instances"], token=token)
        seen[name] = len(response.json())
    assert seen == {"narrow": 0, "viewer": 1, "operator": 1}


async def test_the_plan_is_set_shown_and_held(served: Served) -> None:
    assert (await call(served, "workspace"))["tier"] == "enterprise"
    agents = [await call(served, "spawn", spawn=SLEEP) for _ in range(3)]
    changed = await call(served, "change_workspace", tier="core")
    assert (changed["tier"], changed["plan"]["max_concurrent"]) == ("core", 2)
    assert (changed["active_instances"], changed["is_over_limit"]) == (3, True)
    for agent in agents:
        assert (await call(served, "instance", instance=agent["instance_id"]))["state"] == "ready", "it ends nothing"
    with pytest.raises(DaemonError) as refusal:
        await call(served, "spawn", spawn=SLEEP)
    assert refusal.value.code == "plan_limit"
    entries = await call(served, "audit")
    assert [entry["detail"] for entry in entries if entry["action"] == "workspace.put"] == ["tier core"]


async def test_the_flag_switches_spawning_off_and_on(served: Served) -> None:
    await call(served, "change_workspace", disabled_features=["agents.lifecycle.spawn"])
    with pytest.raises(DaemonError, match="spawning is switched off"):
        await call(served, "spawn", spawn=SLEEP)
    await call(served, "change_workspace", disabled_features=[], max_tokens_per_minute=5000)
    assert (await call(served, "spawn", spawn=SLEEP))["state"] == "ready"
    assert (await call(served, "workspace"))["max_tokens_per_minute"] == 5000


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tier": "gold"}, "tier"),
        ({"disabled_features": ["flying"]}, "disabled_features"),
        ({"max_tokens_per_minute": -1}, "max_tokens_per_minute"),
        ({"workspace_id": "x"}, "workspace_id"),
    ],
)
async def test_a_wrong_value_is_refused(served: Served, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(DaemonError, match=field) as refusal:
        await call(served, "change_workspace", **changes)
    assert refusal.value.code == "invalid"
    assert (await call(served, "workspace"))["tier"] == "enterprise"


async def test_only_an_administrator_changes_it(served: Served) -> None:
    response = await served.ask(ROUTE_OF["change_workspace"], token=served.tokens["viewer"], content=b"{}")
    assert problem(response)["code"] == "forbidden"
    assert (await served.ask(ROUTE_OF["workspace"], token=served.tokens["viewer"])).status_code == 200
