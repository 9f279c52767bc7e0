"""What a user writes: agents as classes or commands, and the registry that knows them."""

from ostler.agents.base import Agent
from ostler.agents.command import CommandAgent
from ostler.agents.commandspec import CommandSpec, ExitMeaning, PromptBy
from ostler.agents.context import AgentContext
from ostler.agents.factory import AgentFactory
from ostler.agents.manifest import AgentKind, AgentMaker, AgentManifest
from ostler.agents.marks import agent
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
from ostler.agents.registry import AgentRegistry, definition_id
from ostler.agents.runner import AgentRunner

__all__ = [
    "Agent",
    "AgentContext",
    "AgentFactory",
    "AgentKind",
    "AgentMaker",
    "AgentManifest",
    "AgentRegistry",
    "AgentRunner",
    "CommandAgent",
    "CommandSpec",
    "ExitMeaning",
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
