"""The one table of routes. A resource is a module with its handlers and its rows."""

from __future__ import annotations

from ostler.api.gate import Route
from ostler.api.routes import (
    audit,
    crews,
    daemon,
    definitions,
    events,
    instances,
    loops,
    requests,
    tasks,
    tokens,
    waits,
)

ROUTES: tuple[Route, ...] = (
    *daemon.ROUTES,
    *definitions.ROUTES,
    *instances.ROUTES,
    *requests.ROUTES,
    *waits.ROUTES,
    *tasks.ROUTES,
    *loops.ROUTES,
    *crews.ROUTES,
    *events.ROUTES,
    *audit.ROUTES,
    *tokens.ROUTES,
)
