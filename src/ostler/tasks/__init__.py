"""One piece of work: the queue, the attempts of agents at it, the proof, the review, the retirement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostler.lazy_imports import opener

if TYPE_CHECKING:
    from ostler.model.task import Receipt, Task, TaskFilter, TaskSettings, TaskState, TaskStatistics
    from ostler.tasks.orchestrator import AgentLifecycle, TaskOrchestrator
else:  # a type checker would believe in any name
    __getattr__, __dir__ = opener(
        __name__,
        {
            "orchestrator": "AgentLifecycle TaskOrchestrator",
            "ostler.model.task": "Receipt Task TaskFilter TaskSettings TaskState TaskStatistics",
        },
    )

__all__ = [
    "AgentLifecycle",
    "Receipt",
    "Task",
    "TaskFilter",
    "TaskOrchestrator",
    "TaskSettings",
    "TaskState",
    "TaskStatistics",
]
