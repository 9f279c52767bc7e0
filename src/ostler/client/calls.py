"""The HTTP requests of the verbs, and the streams that come back, for both transports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from ostler.api.table import DIRECTORY_HEADER, ROUTE_OF

#: Where the idempotency key of a call goes.
KEY_HEADER = "Idempotency-Key"


class Prepared(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None


def prepare(
    name: str,
    parameters: Mapping[str, Any],
    *,
    key: str | None = None,
    token: str | None = None,
    directory: str | None = None,
) -> Prepared:
    """The HTTP request of a verb; parameters that are None are left out.

    The definitions and settings that count are those of the project which `directory` is in.
    """
    route = ROUTE_OF[name]
    rest = {parameter: value for parameter, value in parameters.items() if value is not None}
    path = route.path
    for parameter in tuple(rest):
        if f"{{{parameter}}}" in path:
            path = path.replace(f"{{{parameter}}}", quote(str(rest.pop(parameter)), safe=""))
    headers = {"Accept": "application/json", "Host": "localhost"}
    if key is not None:
        headers[KEY_HEADER] = key
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    if directory is not None:
        headers[DIRECTORY_HEADER] = quote(directory, safe="/", errors="surrogateescape")
    body = None
    if route.method == "POST":
        headers["Content-Type"] = "application/json"
        body = json.dumps(rest[route.body] if route.body is not None and route.body in rest else rest).encode()
    elif rest:
        path = f"{path}?{urlencode({parameter: _plain(value) for parameter, value in rest.items()})}"
    return Prepared(route.method, path, headers, body)


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
