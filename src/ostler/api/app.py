"""The application: every route of the table, errors as problem+json."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ostler.api.context import Context
from ostler.api.gate import Route
from ostler.api.routes import ROUTES
from ostler.errors import TOO_LARGE, OstlerError, document
from ostler.version import __version__

_log = logging.getLogger("ostler.api")
_PROBLEM = "application/problem+json"


def create_app(context: Context, routes: Sequence[Route] = ROUTES) -> FastAPI:
    app = FastAPI(title="Ostler", version=__version__, docs_url=None, redoc_url=None)
    app.state.context = context
    for route in routes:
        app.add_api_route(
            route.path,
            route.handler,
            methods=[route.method],
            status_code=route.status,
            name=route.handler.__name__,
            response_model=None,
        )
    app.add_exception_handler(OstlerError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


def _answer(status: int, body: dict[str, Any]) -> JSONResponse:
    return JSONResponse(body, status_code=status, media_type=_PROBLEM)


def _plain(status: int, code: str, detail: str, **more: Any) -> JSONResponse:
    body = {"type": f"about:blank#{code}", "code": code, "status": status, "title": detail, "detail": detail, **more}
    return _answer(status, body)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    del request
    if not isinstance(error, OstlerError):
        raise error
    body = document(error)
    return _answer(body["status"], body)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """What FastAPI itself finds wrong in a request, in the same words as our own faults."""
    del request
    details = error.errors() if isinstance(error, RequestValidationError) else []
    faults = [f"{'.'.join(str(part) for part in one['loc'][1:]) or 'body'}: {one['msg']}" for one in details]
    return _plain(422, "invalid", "; ".join(faults) or "the request is not valid", faults=faults)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    del request
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "not_found", 413: TOO_LARGE}.get(status, "failed")
    return _plain(status, code, str(getattr(error, "detail", error)))


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    _log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return _plain(500, "failed", f"internal error: {type(error).__name__}; the log of the daemon says where")
