"""The application: every route of the table, errors as problem+json."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ostler.api.context import Context
from ostler.api.gate import AUTHENTICATE, GuardedRoute, problem
from ostler.api.routes import HANDLERS
from ostler.api.table import BROWSER_PATHS, ROUTES
from ostler.errors import TOO_LARGE, UNAUTHENTICATED, NotFoundError, OstlerError, ValidationError, document
from ostler.version import __version__

_log = logging.getLogger("ostler.api")
_CODES = {401: UNAUTHENTICATED, 404: NotFoundError.code, 413: TOO_LARGE}


def create_app(context: Context) -> FastAPI:
    app = FastAPI(title="Ostler", version=__version__, openapi_url=None, redirect_slashes=False)
    app.state.context = context
    app.router.route_class = GuardedRoute
    for route in ROUTES:
        app.add_api_route(
            route.path,
            HANDLERS[route.name],
            methods=[route.method],
            status_code=route.status,
            name=route.name,
            response_model=None,
        )
    app.add_exception_handler(OstlerError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    del request
    if not isinstance(error, OstlerError):
        raise error
    return JSONResponse(document(error), status_code=error.status, media_type="application/problem+json")


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """What FastAPI itself finds wrong in a request, in the same words as our own faults."""
    del request
    details = error.errors() if isinstance(error, RequestValidationError) else []
    faults = [f"{'.'.join(str(part) for part in item['loc'][1:]) or 'body'}: {item['msg']}" for item in details]
    text = "; ".join(faults) or "the request is not valid"
    return problem(422, ValidationError.code, text, faults=faults)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    status, detail = error.status_code, str(error.detail)
    if status in {404, 405}:  # of the router: no row has this path, or none with this method
        status, detail = 404, f"there is no {request.method} {request.url.path}; see docs/guides/http-api.md"
    if status == 404 and request.scope["principal"] is None:
        status, detail = 401, AUTHENTICATE
    answer = problem(status, _CODES.get(status, OstlerError.code), detail)
    if status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
        if request.url.path in BROWSER_PATHS:
            answer.headers.append("WWW-Authenticate", 'Basic realm="Ostler: the token as the password"')
    return answer


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    _log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, OstlerError.code, f"internal error: {type(error).__name__}; the log of the daemon says where")
