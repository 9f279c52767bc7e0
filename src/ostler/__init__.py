"""Ostler keeps AI agents alive: one durable record per agent, a numbered log, and decisions that can be read.

Every public name can be imported from here. Each is loaded at its first use, so that a program which needs a state or
an error pays for neither the database driver nor the validation library. `__init__.pyi`, which `scripts/stub` writes,
shows type checkers the same names.
"""

from typing import Any

from ostler.lazy_imports import opener
from ostler.version import __version__ as __version__

#: Public names by the module that holds them.
_NAMES = {
    "agents.base": "Agent agent",
    "agents.commandspec": "CommandSpec ExitMeaning HomeKind PromptBy",
    "agents.context": "AgentContext",
    "agents.messages": "WaitAnswer",
    "agents.registry": "AgentFactory AgentKind AgentManifest AgentRegistry",
    "client.client": "Client",
    "crews.scope": "Scope",
    "crews.supervisor": "Supervisor",
    "definitions.discover": "register_file register_files",
    "definitions.project": "ProjectSettings get_config",
    "errors": (
        "AgentBusyError AgentExecutionError AgentGoneError AgentInitializationError AgentNotFoundError "
        "AuditBrokenError AuthorizationError CheckoutBlockedError ConflictError CursorGoneError DamagedRowError "
        "DeadlineError DefinitionError ExecutionTimeoutError GitError HistoryBrokenError IdempotencyConflictError "
        "InitializationTimeoutError InvalidOperationError LeaseHeldError LicenseError MergeConflictError "
        "MissingExtraError NotFoundError OstlerError OutcomeUnknownError SimulationError SimulationNotFoundError "
        "StaleWriterError StoreBusyError StoreClosedError StoreError StoreFailedError StoreFullError "
        "StoreTooNewError TaskNotFoundError UsageLimitError ValidationError VaultError VersionConflictError "
        "WorkspaceNotFoundError"
    ),
    "loop": (
        "AgentLifecycleLoop Breakpoint BreakpointType ContextBuilder ContextSnapshot LoopResult LoopResultType "
        "LoopSettings"
    ),
    "model.log": "LogLine",
    "lifecycle.manager": "AgentHandle AgentLifecycleManager",
    "lifecycle.observe": "Observation",
    "lifecycle.open": "open_manager",
    "lifecycle.settings": "LifecycleSettings",
    "model.context": "ContextData",
    "model.crew": "CrewAction CrewPolicy CrewSettings CrewStrategy CrewView MemberState MemberView",
    "model.disk": "DiskUsage TaskDisk",
    "model.events": (
        "AgentErrorEvent AgentEvent AgentHealthChangedEvent AgentMetricsUpdatedEvent AgentProgressEvent "
        "AgentRestartingEvent AgentSignalEvent AgentSpawnedEvent AgentStateChangedEvent AgentTerminatedEvent "
        "AgentWaitEndedEvent AgentWaitOpenedEvent CrewChangedEvent CrewEvent Event EventsMissed TaskEvent "
        "TaskStateChangedEvent TaskWaitEndedEvent TaskWaitOpenedEvent"
    ),
    "model.validation": "Fault ValidationResult",
    "model.instance": "AgentHealthStatus AgentInstance AgentMetrics TerminationResult Why",
    "model.attempt": "Attempt AttemptOutcome Lease Request RequestState",
    "model.wait": "Wait WaitKind",
    "model.audit": "AuditEntry AuditHead AuditReport",
    "model.access": ("HOME_WORKSPACE_ID Actor Permission Principal Role Token Workspace"),
    "model.query": "GetInstancesFilter InboxKind InboxRow LifecycleStatistics ObservationOptions Report",
    "model.record": "Record",
    "model.spawn": (
        "AgentSpawnOptions Definition HealthCheckConfig ResourceLimits RestartPolicy SpawnRequest TerminalSize "
        "TerminationOptions"
    ),
    "model.states": (
        "AgentPriority AgentState AgentStateTransitions Enforcement HealthState IsolationLevel ProbeType "
        "RestartPolicyType SuspendDepth Tier"
    ),
    "model.task": "Receipt Task TaskFilter TaskSettings TaskState TaskStatistics TaskWhy",
    "policy.retention": "RetentionPolicy",
    "clock": "Clock SystemClock",
    "failpoints": "Seams",
    "ids": "IdSource Uuid7Source",
    "home": "default_home",
    "simulation": "LifecycleManager LifecycleValidator PauseTracker SimulationOrchestrator SimulationState",
    "store.store": "Store",
    "tasks.orchestrator": "AgentLifecycle TaskOrchestrator",
    "workdirs.records": "Workdir WorkdirKind",
}
_load, _list = opener(__name__, _NAMES)

#: `ostler.open` reads well; inside the package the name is the built-in's.
__all__ = sorted(  # noqa: PLE0605 - made from the table above
    {*" ".join(_NAMES.values()).split(), "open", "__version__"} - {"open_manager"}
)


def __getattr__(name: str) -> Any:
    return _load("open_manager" if name == "open" else name)


def __dir__() -> list[str]:
    return sorted({*_list(), *__all__})
