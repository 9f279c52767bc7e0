"""Every route of the API, for both sides: the daemon serves this table and the clients call by its names.

It imports nothing of the server, because each command of the command line loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

#: Where a browser may send the token as a password: it cannot send another header by itself.
BROWSER_PATHS = frozenset({"/docs", "/openapi.json"})
#: Where a call says in which directory its caller stands; percent-encoded.
DIRECTORY_HEADER = "Ostler-Directory"
#: In place of a permission: answered without authentication.
PUBLIC = "public"
#: The most bytes in the body of a request, where the route names no other limit.
SMALL_BODY = 64 * 1024
#: Of a request that carries work for an agent.
LARGE_BODY = 16 * 1024 * 1024


class Route(NamedTuple):
    """One verb. Names in braces are taken from the parameters of a call; the rest go into the query or, for a POST,
    into the body.
    """

    name: str
    method: str
    path: str
    #: A `Permission`, or `PUBLIC`.
    permission: str
    #: The one parameter of a call that is the whole body.
    body: str | None = None
    body_limit: int = SMALL_BODY
    #: Of a success.
    status: int = 200
    #: Whether a process of an agent may call it, about what is its own.
    agent: bool = False


_INSTANCE = "/v1/instances/{instance}"
_TASK = "/v1/tasks/{task}"
_PULL = "/v1/pull-requests/{number}"

ROUTES = (
    Route("health", "GET", "/healthz", PUBLIC, agent=True),
    Route("metrics", "GET", "/metrics", "agents.read"),
    Route("openapi", "GET", "/openapi.json", "agents.read"),
    Route("docs", "GET", "/docs", "agents.read"),
    Route("status", "GET", "/v1/status", "agents.read"),
    Route("statistics", "GET", "/v1/statistics", "agents.read"),
    Route("disk", "GET", "/v1/disk", "agents.read"),
    Route("inbox", "GET", "/v1/inbox", "agents.read"),
    Route("report", "GET", "/v1/report", "agents.read"),
    Route("stop_daemon", "POST", "/v1/daemon/stop", "workspace.admin"),
    Route("definitions", "GET", "/v1/definitions", "agents.read", agent=True),
    Route("definition", "GET", "/v1/definitions/{name}", "agents.read", agent=True),
    Route("spawn", "POST", "/v1/instances", "agents.spawn", body="spawn", body_limit=LARGE_BODY, status=201),
    Route("instances", "GET", "/v1/instances", "agents.read"),
    Route("prune", "POST", "/v1/instances/prune", "agents.terminate"),
    Route("instance", "GET", _INSTANCE, "agents.read", agent=True),
    Route("remove", "DELETE", _INSTANCE, "agents.terminate"),
    Route("why", "GET", f"{_INSTANCE}/why", "agents.read", agent=True),
    Route("suspend", "POST", f"{_INSTANCE}/suspend", "agents.suspend"),
    Route("resume", "POST", f"{_INSTANCE}/resume", "agents.suspend"),
    Route("restart", "POST", f"{_INSTANCE}/restart", "agents.spawn"),
    Route("terminate", "POST", f"{_INSTANCE}/terminate", "agents.terminate", body="options"),
    Route("ask", "POST", f"{_INSTANCE}/requests", "agents.process", body_limit=LARGE_BODY),
    Route("requests", "GET", f"{_INSTANCE}/requests", "agents.read", agent=True),
    Route("request", "GET", f"{_INSTANCE}/requests/{{request_id}}", "agents.read", agent=True),
    Route("logs", "GET", f"{_INSTANCE}/logs", "agents.read", agent=True),
    Route("terminal", "GET", f"{_INSTANCE}/terminal", "agents.read"),
    Route("resize", "POST", f"{_INSTANCE}/terminal/size", "agents.process"),
    Route("write_input", "POST", f"{_INSTANCE}/input", "agents.process"),
    Route("waits", "GET", "/v1/waits", "agents.read", agent=True),
    Route("answer", "POST", "/v1/waits/{wait}/answer", "agents.process"),
    Route("events", "GET", "/v1/events", "agents.read", agent=True),
    Route("audit", "GET", "/v1/audit", "audit.read"),
    Route("verify_audit", "GET", "/v1/audit/verify", "audit.read"),
    Route(
        "add_task", "POST", "/v1/tasks", "tasks.write", body="new_task", body_limit=LARGE_BODY, status=201, agent=True
    ),
    Route("add_tasks", "POST", "/v1/tasks/batch", "tasks.write", body_limit=LARGE_BODY, status=201),
    Route("tasks", "GET", "/v1/tasks", "tasks.read"),
    Route("task", "GET", _TASK, "tasks.read", agent=True),
    Route("why_task", "GET", f"{_TASK}/why", "tasks.read", agent=True),
    Route("cancel_task", "POST", f"{_TASK}/cancel", "tasks.write"),
    Route("requeue_task", "POST", f"{_TASK}/requeue", "tasks.write"),
    Route("hold_task", "POST", f"{_TASK}/hold", "tasks.write"),
    Route("take_over", "POST", f"{_TASK}/take-over", "tasks.write"),
    Route("give_back", "POST", f"{_TASK}/give-back", "tasks.write"),
    Route("hand_in", "POST", f"{_TASK}/hand-in", "tasks.write"),
    Route("send_back", "POST", f"{_TASK}/send-back", "tasks.review"),
    Route("diff", "GET", f"{_TASK}/diff", "tasks.read", agent=True),
    Route("accept", "POST", f"{_TASK}/accept", "tasks.review"),
    Route("reject", "POST", f"{_TASK}/reject", "tasks.review"),
    Route("undo", "POST", f"{_TASK}/undo", "tasks.review"),
    Route("retire", "POST", f"{_TASK}/retire", "tasks.review"),
    Route("unretire", "POST", f"{_TASK}/unretire", "tasks.review"),
    Route("iterations", "GET", f"{_TASK}/iterations", "tasks.read", agent=True),
    Route("put_in_loop", "POST", f"{_TASK}/loop", "tasks.write"),
    Route("wait_graph", "GET", "/v1/wait-graph", "tasks.read"),
    Route("signal", "POST", "/v1/signals", "tasks.write", agent=True),
    Route("report_ci", "POST", "/v1/ci", "tasks.write", body_limit=LARGE_BODY),
    Route("pull_requests", "GET", "/v1/pull-requests", "tasks.read"),
    Route("pull_request", "GET", _PULL, "tasks.read"),
    Route("comment", "POST", f"{_PULL}/comment", "tasks.review"),
    Route("approve", "POST", f"{_PULL}/approve", "tasks.review"),
    Route("merge", "POST", f"{_PULL}/merge", "tasks.review"),
    Route("close", "POST", f"{_PULL}/close", "tasks.review"),
    Route("crews", "GET", "/v1/crews", "tasks.read"),
    Route("crew_up", "POST", "/v1/crews/up", "tasks.write"),
    Route("crew_stop", "POST", "/v1/crews/stop", "tasks.write"),
    Route("crew_reload", "POST", "/v1/crews/reload", "tasks.write"),
    Route("crew_scale", "POST", "/v1/crews/{crew}/scale", "tasks.write"),
    Route("workspace", "GET", "/v1/workspace", "agents.read"),
    Route("change_workspace", "POST", "/v1/workspace", "workspace.admin"),
    Route("create_token", "POST", "/v1/tokens", "workspace.admin", status=201),
    Route("tokens", "GET", "/v1/tokens", "workspace.admin"),
    Route("revoke_token", "DELETE", "/v1/tokens/{token_id}", "workspace.admin"),
)
ROUTE_OF: Mapping[str, Route] = MappingProxyType({route.name: route for route in ROUTES})
