"""What a user writes: agents as classes, functions or commands, and the registry that knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostler.lazy_imports import opener

if TYPE_CHECKING:
    from ostler.agents.base import Agent, AgentMaker, agent
    from ostler.agents.commandspec import CommandSpec, ExitMeaning, HomeKind, PromptBy
    from ostler.agents.context import AgentContext
    from ostler.agents.messages import (
        Message,
        MetricReported,
        Progress,
        Signal,
        TokensUsed,
        Voice,
        WaitAnswer,
        WaitAsked,
    )
    from ostler.agents.registry import AgentFactory, AgentKind, AgentManifest, AgentRegistry, definition_id
    from ostler.agents.runner import AgentRunner
else:  # a type checker would believe in any name
    __getattr__, __dir__ = opener(
        __name__,
        {
            "base": "Agent AgentMaker agent",
            "commandspec": "CommandSpec ExitMeaning HomeKind PromptBy",
            "context": "AgentContext",
            "messages": "Message MetricReported Progress Signal TokensUsed Voice WaitAnswer WaitAsked",
            "registry": "AgentFactory AgentKind AgentManifest AgentRegistry definition_id",
            "runner": "AgentRunner",
        },
    )

__all__ = [
    "Agent",
    "AgentContext",
    "AgentFactory",
    "AgentKind",
    "AgentMaker",
    "AgentManifest",
    "AgentRegistry",
    "AgentRunner",
    "CommandSpec",
    "ExitMeaning",
    "HomeKind",
    "Message",
    "MetricReported",
    "Progress",
    "PromptBy",
    "Signal",
    "TokensUsed",
    "Voice",
    "WaitAnswer",
    "WaitAsked",
    "agent",
    "definition_id",
]
