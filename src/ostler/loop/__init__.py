"""Fresh starts: one task, driven from breakpoint to breakpoint until it is proven done."""

from ostler.loop.context import ContextBuilder
from ostler.loop.loop import AgentLifecycleLoop
from ostler.loop.parts import BranchManager, CiProvider, Plan, TerminalManager, WorkspaceManager
from ostler.model.loop import Breakpoint, BreakpointType, ContextSnapshot, LoopResult, LoopResultType

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
    "Plan",
    "TerminalManager",
    "WorkspaceManager",
]
