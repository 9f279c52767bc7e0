"""What stands before every route: Host and Origin, authentication, permission, body limit. The default is refusal.

Two listeners share the application. On the Unix socket the peer was checked by its user id, and acts as the owner of
the home. On loopback TCP a token is asked for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostler.errors import TOO_LARGE, UNAUTHENTICATED
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.access import OWNER, Permission, Principal
from ostler.policy.access import decide_access
from ostler.store import workspaces

KIB = 1024
#: Of requests that carry no payload to speak of.
SMALL_BODY = 64 * KIB
#: Of a request to an agent.
LARGE_BODY = 16 * 1024 * KIB
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One row of the table."""

    method: str
    path: str
    handler: Callable[..., Any]
    #: None: any principal that is known.
    permission: Permission | None = None
    #: Answered without authentication.
    public: bool = False
    body_limit: int = SMALL_BODY
    status: int = 200
    pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path)
        object.__setattr__(self, "pattern", re.compile(pattern))


class Gate:
    """ASGI middleware. The principal is left in `scope["principal"]`."""

    def __init__(
        self, app: ASGIApp, routes: Sequence[Route], manager: AgentLifecycleManager, *, is_local_socket: bool
    ) -> None:
        self._app = app
        self._routes = tuple(routes)
        self._manager = manager
        self._is_local_socket = is_local_socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._is_local_socket and (refused := _foreign(headers)) is not None:
            await _refuse(send, 403, "forbidden", refused)
            return
        route = self._find(scope)
        principal = await self._principal(headers)
        if principal is None and not (route is not None and route.public):
            told = "send the token of this daemon as `Authorization: Bearer TOKEN`; make one with `ostler token create`"
            await _refuse(send, 401, UNAUTHENTICATED, told)
            return
        if route is None:
            await _refuse(
                send, 404, "not_found", f"there is no {scope['method']} {scope['path']}; see docs/guides/http-api.md"
            )
            return
        if route.permission is not None and (why := self._denied(principal, route.permission)) is not None:
            await _refuse(send, 403, "forbidden", why)
            return
        too_large = f"the body is larger than {route.body_limit // KIB} KiB"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > route.body_limit:
            await _refuse(send, 413, TOO_LARGE, too_large)
            return
        scope["principal"] = principal
        await self._app(scope, _bounded(receive, route.body_limit), send)

    def _find(self, scope: Scope) -> Route | None:
        path, method = scope["path"], scope["method"]
        return next((one for one in self._routes if one.method == method and one.pattern.fullmatch(path)), None)

    async def _principal(self, headers: dict[str, str]) -> Principal | None:
        if self._is_local_socket:
            return OWNER
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return None
        return await find_principal(self._manager, token.strip())

    def _denied(self, principal: Principal | None, permission: Permission) -> str | None:
        if principal is None:
            return "no principal"
        decision = decide_access(
            principal, permission, principal.workspace_id, tier=self._manager.tier_of(principal.workspace_id)
        )
        return None if decision else decision.reason


async def find_principal(manager: AgentLifecycleManager, token: str) -> Principal | None:
    """The principal behind a token that is valid now. Only its hash is kept, so that is what is looked up."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    found = await manager.store.read(workspaces.find_token, digest, manager.now())
    if found is None:
        return None
    principal = await manager.store.read(workspaces.get_principal, found.principal_id)
    return principal if principal is not None and principal.disabled_at is None else None


def _foreign(headers: dict[str, str]) -> str | None:
    """Why a request is refused that a page of another site may have sent; None where it is ours."""
    host = headers.get("host", "")
    if host.rsplit(":", 1)[0].lower() not in _LOOPBACK:
        return f"the Host {host!a} is not this machine; use http://localhost"
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).hostname not in {"localhost", "127.0.0.1", "::1"}:
        return f"the Origin {origin!a} is another site"
    return None


def _bounded(receive: Receive, limit: int) -> Callable[[], Awaitable[Message]]:
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise HTTPException(413, f"the body is larger than {limit // KIB} KiB")  # it came without its length
        return message

    return bounded


async def _refuse(send: Send, status: int, code: str, detail: str) -> None:
    document = {"type": f"about:blank#{code}", "code": code, "status": status, "title": detail, "detail": detail}
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
