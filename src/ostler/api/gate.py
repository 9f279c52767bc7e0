"""What stands before every handler: Host and Origin, authentication, permission, size of the body. The default is no.

Two listeners share the application. On the Unix socket the peer was checked by its user id: a person acts as the owner
of the home, a process of an agent as that agent. On loopback TCP a token is needed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostler.api.speaker import AGENT, Speaker, find_speaker, require_own
from ostler.api.table import BROWSER_PATHS, PUBLIC, ROUTE_OF
from ostler.errors import AuthorizationError
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.access import OWNER, Permission, Principal
from ostler.policy.access import require_access
from ostler.store import workspaces

_KIB = 1024
_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
AUTHENTICATE = "send the token of this daemon as `Authorization: Bearer TOKEN`; make one with `ostler token create`"


class Gate:
    """ASGI middleware of one listener. The principal is left in `scope["principal"]`, None where there is none.

    A stream asks `scope["still_valid"]` from time to time: its token may be revoked, or expire, while it is open.
    """

    def __init__(self, app: ASGIApp, manager: AgentLifecycleManager, *, is_local_socket: bool) -> None:
        self._app = app
        self._manager = manager
        self._is_local_socket = is_local_socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self._is_local_socket:
            kind, pid = scope["client"]
            speaker = await find_speaker(self._manager, self._manager.require_home(), pid) if kind == AGENT else None
            scope["speaker"] = speaker
            scope["principal"] = OWNER if speaker is None else speaker.principal
        elif (refusal := _foreign(headers)) is not None:
            await problem(403, AuthorizationError.code, refusal)(scope, receive, send)
            return
        else:
            token = _token(headers, is_browser=scope["path"] in BROWSER_PATHS)
            scope["principal"] = await self._principal(token)
            scope["still_valid"] = partial(self._is_valid, token)
        await self._app(scope, receive, send)

    async def _is_valid(self, token: str | None) -> bool:
        return await self._principal(token) is not None

    async def _principal(self, token: str | None) -> Principal | None:
        return None if token is None else await find_principal(self._manager, token)


def _token(headers: dict[str, str], *, is_browser: bool) -> str | None:
    """The token of a request: as a bearer or, from a browser, as the password of any user."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip() or None
    if not is_browser or scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2] or None
    except ValueError:
        return None


class GuardedRoute(APIRoute):
    """A row of the table in the application: permission and size are checked before anything of the body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, row = super().get_route_handler(), ROUTE_OF[self.name]

        async def guarded(request: Request) -> Response:
            manager: AgentLifecycleManager = request.app.state.context.manager
            speaker: Speaker | None = request.scope.get("speaker")
            if speaker is not None:
                await require_own(manager, speaker, row, request)
            elif row.permission != PUBLIC:
                principal = require_principal(request)
                tier = manager.tier_of(principal.workspace_id)
                require_access(principal, Permission(row.permission), principal.workspace_id, tier=tier)
            length = request.headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > row.body_limit:
                raise _too_large(row.body_limit)
            return await handle(Request(request.scope, _bounded(request.receive, row.body_limit)))

        return guarded


def require_principal(request: Request) -> Principal:
    principal: Principal | None = request.scope["principal"]
    if principal is None:
        raise HTTPException(401, AUTHENTICATE)
    return principal


async def find_principal(manager: AgentLifecycleManager, token: str) -> Principal | None:
    """The principal behind a token that is valid now. Only the hash of a token is kept, so the hash is looked up."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    record = await manager.store.read(workspaces.find_token, digest, manager.now())
    if record is None:
        return None
    principal = await manager.store.read(workspaces.get_principal, record.principal_id)
    return principal if principal is not None and principal.disabled_at is None else None


def problem(status: int, code: str, detail: str, **more: Any) -> JSONResponse:
    """An answer as problem+json that no error of the library stands for."""
    body = {"type": f"about:blank#{code}", "code": code, "status": status, "title": detail, "detail": detail, **more}
    return JSONResponse(body, status_code=status, media_type="application/problem+json")


def _foreign(headers: dict[str, str]) -> str | None:
    """Why a request is refused that a page of another site may have sent; None where it is ours."""
    host = headers.get("host", "")
    if not _HOST.fullmatch(host):
        return f"the Host {host!a} is not this machine; use http://localhost"
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        return f"the Origin {origin!a} is another site than the Host {host!a}"
    return None


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {limit // _KIB} KiB")


def _bounded(receive: Receive, limit: int) -> Callable[[], Awaitable[Message]]:
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:  # it came without its length
            raise _too_large(limit)
        return message

    return bounded
