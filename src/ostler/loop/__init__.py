"""Fresh starts: one task, driven from breakpoint to breakpoint until it is proven done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostler.lazy_imports import opener

if TYPE_CHECKING:
    from ostler.loop.collaborators import BranchManager, CiProvider, Plan, TerminalManager, WorkspaceManager
    from ostler.loop.context import ContextBuilder
    from ostler.loop.loop import AgentLifecycleLoop
    from ostler.loop.service import Loops
    from ostler.model.loop import (
        Breakpoint,
        BreakpointType,
        ContextSnapshot,
        LoopResult,
        LoopResultType,
        LoopSettings,
    )
else:  # a type checker would believe in any name
    __getattr__, __dir__ = opener(
        __name__,
        {
            "context": "ContextBuilder",
            "loop": "AgentLifecycleLoop",
            "service": "Loops",
            "ostler.model.loop": "Breakpoint BreakpointType ContextSnapshot LoopResult LoopResultType LoopSettings",
            "collaborators": "BranchManager CiProvider Plan TerminalManager WorkspaceManager",
        },
    )

__all__ = [
    "AgentLifecycleLoop",
    "BranchManager",
    "Breakpoint",
    "BreakpointType",
    "CiProvider",
    "ContextBuilder",
    "ContextSnapshot",
    "LoopResult",
    "LoopResultType",
    "LoopSettings",
    "Loops",
    "Plan",
    "TerminalManager",
    "WorkspaceManager",
]
