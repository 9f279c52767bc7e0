"""Ostler keeps AI agents alive: one durable record per agent, a numbered log, and decisions that can be read.

Every public name can be imported from here. Each is loaded at its first use, so that a program which needs a state or
an error pays for neither the database driver nor the validation library. `__init__.pyi` says the same to type checkers.
"""

from importlib import import_module
from typing import Any

from ostler.version import __version__ as __version__

#: Public names by the module that holds them.
_NAMES = {
    "ostler.agents.base": "Agent agent",
    "ostler.agents.commandspec": "CommandSpec ExitMeaning HomeKind PromptBy",
    "ostler.agents.context": "AgentContext",
    "ostler.agents.messages": "WaitAnswer",
    "ostler.agents.registry": "AgentFactory AgentKind AgentManifest AgentRegistry",
    "ostler.client.client": "Client",
    "ostler.crews.scope": "Scope",
    "ostler.crews.supervisor": "Supervisor",
    "ostler.definitions.discover": "register_file register_files",
    "ostler.definitions.project": "ProjectSettings get_config",
    "ostler.errors": (
        "AgentBusyError AgentExecutionError AgentGoneError AgentInitializationError AgentNotFoundError "
        "AuditBrokenError AuthorizationError CheckoutBlockedError ConflictError CursorGoneError DamagedRowError "
        "DeadlineError DefinitionError ExecutionTimeoutError GitError HistoryBrokenError IdempotencyConflictError "
        "InitializationTimeoutError InvalidOperationError LeaseHeldError LicenseError MergeConflictError "
        "MissingExtraError NotFoundError OstlerError OutcomeUnknownError SimulationError SimulationNotFoundError "
        "StaleWriterError StoreBusyError StoreClosedError StoreError StoreFailedError StoreFullError "
        "StoreTooNewError TaskNotFoundError UsageLimitError ValidationError VaultError VersionConflictError "
        "WorkspaceNotFoundError"
    ),
    "ostler.lifecycle.handle": "AgentHandle",
    "ostler.lifecycle.logs": "LogLine",
    "ostler.lifecycle.manager": "AgentLifecycleManager",
    "ostler.lifecycle.observe": "Observation",
    "ostler.lifecycle.open": "open_manager",
    "ostler.lifecycle.settings": "LifecycleSettings",
    "ostler.model.context": "ContextData",
    "ostler.model.crew": "CrewAction CrewPolicy CrewSettings CrewStrategy CrewView MemberState MemberView",
    "ostler.model.events": (
        "AgentErrorEvent AgentEvent AgentHealthChangedEvent AgentMetricsUpdatedEvent AgentProgressEvent "
        "AgentRestartingEvent AgentSignalEvent AgentSpawnedEvent AgentStateChangedEvent AgentTerminatedEvent "
        "AgentWaitEndedEvent AgentWaitOpenedEvent CrewChangedEvent CrewEvent Event EventsMissed TaskEvent "
        "TaskStateChangedEvent TaskWaitEndedEvent TaskWaitOpenedEvent"
    ),
    "ostler.model.faults": "Fault ValidationResult",
    "ostler.model.instance": "AgentHealthStatus AgentInstance AgentMetrics TerminationResult Why",
    "ostler.model.attempt": "Attempt AttemptOutcome Lease Request RequestState",
    "ostler.model.wait": "Wait WaitKind",
    "ostler.model.audit": "AuditEntry AuditHead AuditReport",
    "ostler.model.access": ("HOME_WORKSPACE_ID Actor Permission Principal Role Token Workspace"),
    "ostler.model.query": "GetInstancesFilter LifecycleStatistics ObservationOptions",
    "ostler.model.record": "Record",
    "ostler.model.spawn": (
        "AgentSpawnOptions Definition HealthCheckConfig ResourceLimits RestartPolicy SpawnRequest TerminationOptions"
    ),
    "ostler.model.states": (
        "AgentPriority AgentState AgentStateTransitions Enforcement HealthState IsolationLevel ProbeType "
        "RestartPolicyType SuspendDepth Tier"
    ),
    "ostler.model.task": "Receipt Task TaskFilter TaskSettings TaskState TaskStatistics",
    "ostler.policy.retention": "RetentionPolicy",
    "ostler.clock": "Clock SystemClock",
    "ostler.failpoints": "Seams",
    "ostler.ids": "IdSource Uuid7Source",
    "ostler.home": "default_home",
    "ostler.store.store": "Store",
    "ostler.tasks.orchestrator": "AgentLifecycle TaskOrchestrator",
    "ostler.workdirs.records": "Workdir WorkdirKind",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
#: `ostler.open` reads well; inside the package the name is the built-in's.
_HOMES["open"] = _HOMES.pop("open_manager")

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605 - made from the table above


def __getattr__(name: str) -> Any:
    module = _HOMES.get(name)
    if module is None:
        raise AttributeError(f"module 'ostler' has no attribute {name!r}")
    found = getattr(import_module(module), "open_manager" if name == "open" else name)
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
