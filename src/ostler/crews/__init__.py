"""Many agents: a supervisor keeps the members of crews at work, replaces them, and stops them in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostler.lazy_imports import opener

if TYPE_CHECKING:
    from ostler.agents.registry import AgentFactory
    from ostler.crews.scope import Scope
    from ostler.crews.supervisor import Supervisor
    from ostler.model.crew import CrewAction, CrewPolicy, CrewSettings, CrewStrategy, CrewView, MemberState, MemberView
else:  # a type checker would believe in any name
    __getattr__, __dir__ = opener(
        __name__,
        {
            "ostler.agents.registry": "AgentFactory",
            "ostler.model.crew": "CrewAction CrewPolicy CrewSettings CrewStrategy CrewView MemberState MemberView",
            "scope": "Scope",
            "supervisor": "Supervisor",
        },
    )

__all__ = [
    "AgentFactory",
    "CrewAction",
    "CrewPolicy",
    "CrewSettings",
    "CrewStrategy",
    "CrewView",
    "MemberState",
    "MemberView",
    "Scope",
    "Supervisor",
]
