"""What tests of users need: a scripted model, clocks that tests drive, a PostgreSQL server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostler.lazy_imports import opener

if TYPE_CHECKING:
    from ostler.testing.model_wire import Turn
    from ostler.testing.scripted_model import ModelRequest, ScriptedModel, hang, limit, midhang, run, say, usage_limit
else:  # a type checker would believe in any name
    __getattr__, __dir__ = opener(
        __name__,
        {
            "model_wire": "Turn",
            "scripted_model": "ModelRequest ScriptedModel hang limit midhang run say usage_limit",
        },
    )

__all__ = ["ModelRequest", "ScriptedModel", "Turn", "hang", "limit", "midhang", "run", "say", "usage_limit"]
