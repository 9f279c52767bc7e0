"""The handler of each route of the table. A resource is a module with its handlers."""

from __future__ import annotations

from ostler.api.context import Handlers
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
    terminal,
    tokens,
    waits,
    workspace,
)

#: By the name of the route.
HANDLERS: Handlers = {
    **daemon.HANDLERS,
    **definitions.HANDLERS,
    **instances.HANDLERS,
    **requests.HANDLERS,
    **waits.HANDLERS,
    **tasks.HANDLERS,
    **loops.HANDLERS,
    **crews.HANDLERS,
    **events.HANDLERS,
    **terminal.HANDLERS,
    **audit.HANDLERS,
    **tokens.HANDLERS,
    **workspace.HANDLERS,
}
