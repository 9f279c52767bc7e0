"""One description of the verbs of the API, for both transports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

#: Where the idempotency key of a call goes.
KEY_HEADER = "Idempotency-Key"


class Call(NamedTuple):
    """One verb. Names in braces are taken from the parameters; the rest go into the query or, for a POST, the body."""

    method: str
    path: str
    #: The one parameter that is the whole body.
    body: str | None = None


class Prepared(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None


CALLS: Mapping[str, Call] = MappingProxyType(
    {
        "status": Call("GET", "/v1/status"),
        "statistics": Call("GET", "/v1/statistics"),
        "stop_daemon": Call("POST", "/v1/daemon/stop"),
        "definitions": Call("GET", "/v1/definitions"),
        "definition": Call("GET", "/v1/definitions/{name}"),
        "spawn": Call("POST", "/v1/instances", body="spawn"),
        "instances": Call("GET", "/v1/instances"),
        "instance": Call("GET", "/v1/instances/{instance}"),
        "remove": Call("DELETE", "/v1/instances/{instance}"),
        "why": Call("GET", "/v1/instances/{instance}/why"),
        "suspend": Call("POST", "/v1/instances/{instance}/suspend"),
        "resume": Call("POST", "/v1/instances/{instance}/resume"),
        "restart": Call("POST", "/v1/instances/{instance}/restart"),
        "terminate": Call("POST", "/v1/instances/{instance}/terminate", body="options"),
        "ask": Call("POST", "/v1/instances/{instance}/requests"),
        "requests": Call("GET", "/v1/instances/{instance}/requests"),
        "request": Call("GET", "/v1/instances/{instance}/requests/{request_id}"),
        "logs": Call("GET", "/v1/instances/{instance}/logs"),
        "waits": Call("GET", "/v1/waits"),
        "answer": Call("POST", "/v1/waits/{wait}/answer"),
        "events": Call("GET", "/v1/events"),
        "audit": Call("GET", "/v1/audit"),
        "verify_audit": Call("GET", "/v1/audit/verify"),
        "add_task": Call("POST", "/v1/tasks", body="new_task"),
        "tasks": Call("GET", "/v1/tasks"),
        "task": Call("GET", "/v1/tasks/{task}"),
        "why_task": Call("GET", "/v1/tasks/{task}/why"),
        "cancel_task": Call("POST", "/v1/tasks/{task}/cancel"),
        "requeue_task": Call("POST", "/v1/tasks/{task}/requeue"),
        "hold_task": Call("POST", "/v1/tasks/{task}/hold"),
        "send_back": Call("POST", "/v1/tasks/{task}/send-back"),
        "diff": Call("GET", "/v1/tasks/{task}/diff"),
        "accept": Call("POST", "/v1/tasks/{task}/accept"),
        "reject": Call("POST", "/v1/tasks/{task}/reject"),
        "undo": Call("POST", "/v1/tasks/{task}/undo"),
        "retire": Call("POST", "/v1/tasks/{task}/retire"),
        "unretire": Call("POST", "/v1/tasks/{task}/unretire"),
        "iterations": Call("GET", "/v1/tasks/{task}/iterations"),
        "put_in_loop": Call("POST", "/v1/tasks/{task}/loop"),
        "wait_graph": Call("GET", "/v1/wait-graph"),
        "signal": Call("POST", "/v1/signals"),
        "report_ci": Call("POST", "/v1/ci"),
        "pull_requests": Call("GET", "/v1/pull-requests"),
        "pull_request": Call("GET", "/v1/pull-requests/{number}"),
        "comment": Call("POST", "/v1/pull-requests/{number}/comment"),
        "approve": Call("POST", "/v1/pull-requests/{number}/approve"),
        "merge": Call("POST", "/v1/pull-requests/{number}/merge"),
        "close": Call("POST", "/v1/pull-requests/{number}/close"),
        "crews": Call("GET", "/v1/crews"),
        "crew_up": Call("POST", "/v1/crews/up"),
        "crew_stop": Call("POST", "/v1/crews/stop"),
        "crew_reload": Call("POST", "/v1/crews/reload"),
        "crew_scale": Call("POST", "/v1/crews/{crew}/scale"),
        "create_token": Call("POST", "/v1/tokens"),
        "tokens": Call("GET", "/v1/tokens"),
        "revoke_token": Call("DELETE", "/v1/tokens/{token_id}"),
    }
)


def prepare(name: str, parameters: Mapping[str, Any], *, key: str | None = None, token: str | None = None) -> Prepared:
    """The HTTP request of a verb; parameters that are None are left out."""
    call = CALLS[name]
    left = {one: value for one, value in parameters.items() if value is not None}
    path = call.path
    for one in tuple(left):
        if f"{{{one}}}" in path:
            path = path.replace(f"{{{one}}}", quote(str(left.pop(one)), safe=""))
    headers = {"Accept": "application/json", "Host": "localhost"}
    if key is not None:
        headers[KEY_HEADER] = key
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    body = None
    if call.method == "POST":
        headers["Content-Type"] = "application/json"
        body = json.dumps(left[call.body] if call.body is not None and call.body in left else left).encode()
    elif left:
        path = f"{path}?{urlencode({one: _plain(value) for one, value in left.items()})}"
    return Prepared(call.method, path, headers, body)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class StreamItem(NamedTuple):
    """One server-sent event; `id` is the cursor from which the stream goes on."""

    id: str | None
    event: str
    data: Any


class StreamParser:
    """Server-sent events from lines of text."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> StreamItem | None:
        """An item when its last line was fed. Comments are passed over."""
        if line:
            name, _, value = line.partition(":")
            if name:
                self._fields[name] = value.removeprefix(" ")
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        return StreamItem(fields.get("id"), fields.get("event", "message"), json.loads(fields["data"]))
