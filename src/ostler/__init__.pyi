from ostler.agents import (
    Agent as Agent,
)
from ostler.agents import (
    AgentContext as AgentContext,
)
from ostler.agents import (
    AgentFactory as AgentFactory,
)
from ostler.agents import (
    AgentKind as AgentKind,
)
from ostler.agents import (
    AgentManifest as AgentManifest,
)
from ostler.agents import (
    AgentRegistry as AgentRegistry,
)
from ostler.agents import (
    CommandSpec as CommandSpec,
)
from ostler.agents import (
    ExitMeaning as ExitMeaning,
)
from ostler.agents import (
    PromptBy as PromptBy,
)
from ostler.agents import (
    WaitAnswer as WaitAnswer,
)
from ostler.agents import (
    agent as agent,
)
from ostler.agents.files import register_files as register_files
from ostler.errors import (
    AgentBusyError as AgentBusyError,
)
from ostler.errors import (
    AgentExecutionError as AgentExecutionError,
)
from ostler.errors import (
    AgentGoneError as AgentGoneError,
)
from ostler.errors import (
    AgentInitializationError as AgentInitializationError,
)
from ostler.errors import (
    AgentNotFoundError as AgentNotFoundError,
)
from ostler.errors import (
    AuditBrokenError as AuditBrokenError,
)
from ostler.errors import (
    AuthorizationError as AuthorizationError,
)
from ostler.errors import (
    ConflictError as ConflictError,
)
from ostler.errors import (
    CursorGoneError as CursorGoneError,
)
from ostler.errors import (
    DamagedRowError as DamagedRowError,
)
from ostler.errors import (
    DeadlineError as DeadlineError,
)
from ostler.errors import (
    DefinitionError as DefinitionError,
)
from ostler.errors import (
    ExecutionTimeoutError as ExecutionTimeoutError,
)
from ostler.errors import (
    HistoryBrokenError as HistoryBrokenError,
)
from ostler.errors import (
    IdempotencyConflictError as IdempotencyConflictError,
)
from ostler.errors import (
    InitializationTimeoutError as InitializationTimeoutError,
)
from ostler.errors import (
    InvalidOperationError as InvalidOperationError,
)
from ostler.errors import (
    LeaseHeldError as LeaseHeldError,
)
from ostler.errors import (
    LicenseError as LicenseError,
)
from ostler.errors import (
    MissingExtraError as MissingExtraError,
)
from ostler.errors import (
    NotFoundError as NotFoundError,
)
from ostler.errors import (
    OstlerError as OstlerError,
)
from ostler.errors import (
    OutcomeUnknownError as OutcomeUnknownError,
)
from ostler.errors import (
    SimulationError as SimulationError,
)
from ostler.errors import (
    SimulationNotFoundError as SimulationNotFoundError,
)
from ostler.errors import (
    StaleWriterError as StaleWriterError,
)
from ostler.errors import (
    StoreBusyError as StoreBusyError,
)
from ostler.errors import (
    StoreClosedError as StoreClosedError,
)
from ostler.errors import (
    StoreError as StoreError,
)
from ostler.errors import (
    StoreFailedError as StoreFailedError,
)
from ostler.errors import (
    StoreFullError as StoreFullError,
)
from ostler.errors import (
    StoreTooNewError as StoreTooNewError,
)
from ostler.errors import (
    TaskNotFoundError as TaskNotFoundError,
)
from ostler.errors import (
    TerminationTimeoutError as TerminationTimeoutError,
)
from ostler.errors import (
    ValidationError as ValidationError,
)
from ostler.errors import (
    VersionConflictError as VersionConflictError,
)
from ostler.errors import (
    WorkspaceNotFoundError as WorkspaceNotFoundError,
)
from ostler.lifecycle import (
    AgentLifecycleManager as AgentLifecycleManager,
)
from ostler.lifecycle import (
    LifecycleSettings as LifecycleSettings,
)
from ostler.lifecycle import (
    Observation as Observation,
)
from ostler.lifecycle import (
    open_manager,
)
from ostler.model import (
    ACTIVE_STATES as ACTIVE_STATES,
)
from ostler.model import (
    AGENT_TRANSITIONS as AGENT_TRANSITIONS,
)
from ostler.model import (
    FINISHED_TASK_STATES as FINISHED_TASK_STATES,
)
from ostler.model import (
    FREEZE_TRANSITIONS as FREEZE_TRANSITIONS,
)
from ostler.model import (
    HOME_WORKSPACE_ID as HOME_WORKSPACE_ID,
)
from ostler.model import (
    INACTIVE_STATES as INACTIVE_STATES,
)
from ostler.model import (
    TASK_TRANSITIONS as TASK_TRANSITIONS,
)
from ostler.model import (
    AgentAttemptStartedEvent as AgentAttemptStartedEvent,
)
from ostler.model import (
    AgentErrorEvent as AgentErrorEvent,
)
from ostler.model import (
    AgentEvent as AgentEvent,
)
from ostler.model import (
    AgentHealthChangedEvent as AgentHealthChangedEvent,
)
from ostler.model import (
    AgentHealthStatus as AgentHealthStatus,
)
from ostler.model import (
    AgentInstance as AgentInstance,
)
from ostler.model import (
    AgentMetrics as AgentMetrics,
)
from ostler.model import (
    AgentMetricsUpdatedEvent as AgentMetricsUpdatedEvent,
)
from ostler.model import (
    AgentPriority as AgentPriority,
)
from ostler.model import (
    AgentProgressEvent as AgentProgressEvent,
)
from ostler.model import (
    AgentRestartingEvent as AgentRestartingEvent,
)
from ostler.model import (
    AgentSignalEvent as AgentSignalEvent,
)
from ostler.model import (
    AgentSpawnedEvent as AgentSpawnedEvent,
)
from ostler.model import (
    AgentSpawnOptions as AgentSpawnOptions,
)
from ostler.model import (
    AgentState as AgentState,
)
from ostler.model import (
    AgentStateChangedEvent as AgentStateChangedEvent,
)
from ostler.model import (
    AgentStateTransitions as AgentStateTransitions,
)
from ostler.model import (
    AgentTerminatedEvent as AgentTerminatedEvent,
)
from ostler.model import (
    Attempt as Attempt,
)
from ostler.model import (
    AttemptOutcome as AttemptOutcome,
)
from ostler.model import (
    AuditEntry as AuditEntry,
)
from ostler.model import (
    AuditHead as AuditHead,
)
from ostler.model import (
    AuditReport as AuditReport,
)
from ostler.model import (
    ContextData as ContextData,
)
from ostler.model import (
    Definition as Definition,
)
from ostler.model import (
    Enforcement as Enforcement,
)
from ostler.model import (
    Event as Event,
)
from ostler.model import (
    EventsMissed as EventsMissed,
)
from ostler.model import (
    Fault as Fault,
)
from ostler.model import (
    GetInstancesFilter as GetInstancesFilter,
)
from ostler.model import (
    HealthCheckConfig as HealthCheckConfig,
)
from ostler.model import (
    HealthState as HealthState,
)
from ostler.model import (
    IsolationLevel as IsolationLevel,
)
from ostler.model import (
    Lease as Lease,
)
from ostler.model import (
    LifecycleStatistics as LifecycleStatistics,
)
from ostler.model import (
    ObservationOptions as ObservationOptions,
)
from ostler.model import (
    Permission as Permission,
)
from ostler.model import (
    Principal as Principal,
)
from ostler.model import (
    ProbeType as ProbeType,
)
from ostler.model import (
    Record as Record,
)
from ostler.model import (
    ResourceLimits as ResourceLimits,
)
from ostler.model import (
    RestartPolicy as RestartPolicy,
)
from ostler.model import (
    RestartPolicyType as RestartPolicyType,
)
from ostler.model import (
    Role as Role,
)
from ostler.model import (
    RunState as RunState,
)
from ostler.model import (
    SimulationRun as SimulationRun,
)
from ostler.model import (
    SimulationTurn as SimulationTurn,
)
from ostler.model import (
    SpawnRequest as SpawnRequest,
)
from ostler.model import (
    SuspendDepth as SuspendDepth,
)
from ostler.model import (
    Task as Task,
)
from ostler.model import (
    TaskCreatedEvent as TaskCreatedEvent,
)
from ostler.model import (
    TaskEvent as TaskEvent,
)
from ostler.model import (
    TaskFilter as TaskFilter,
)
from ostler.model import (
    TaskState as TaskState,
)
from ostler.model import (
    TaskStateChangedEvent as TaskStateChangedEvent,
)
from ostler.model import (
    TaskStateTransitions as TaskStateTransitions,
)
from ostler.model import (
    TaskUpdatedEvent as TaskUpdatedEvent,
)
from ostler.model import (
    TerminationOptions as TerminationOptions,
)
from ostler.model import (
    TerminationResult as TerminationResult,
)
from ostler.model import (
    Tier as Tier,
)
from ostler.model import (
    Token as Token,
)
from ostler.model import (
    ValidationResult as ValidationResult,
)
from ostler.model import (
    Wait as Wait,
)
from ostler.model import (
    WaitKind as WaitKind,
)
from ostler.model import (
    Why as Why,
)
from ostler.model import (
    Workspace as Workspace,
)
from ostler.model import (
    event_from_json as event_from_json,
)
from ostler.policy import (
    PLANS as PLANS,
)
from ostler.policy import (
    AccessDecision as AccessDecision,
)
from ostler.policy import (
    Plan as Plan,
)
from ostler.policy import (
    ProbeOutcome as ProbeOutcome,
)
from ostler.policy import (
    ProbeResult as ProbeResult,
)
from ostler.policy import (
    Refusal as Refusal,
)
from ostler.policy import (
    RestartDecision as RestartDecision,
)
from ostler.policy import (
    RestartFacts as RestartFacts,
)
from ostler.policy import (
    RestartReason as RestartReason,
)
from ostler.policy import (
    RetentionPolicy as RetentionPolicy,
)
from ostler.policy import (
    decide_access as decide_access,
)
from ostler.policy import (
    decide_restart as decide_restart,
)
from ostler.policy import (
    gate_refusals as gate_refusals,
)
from ostler.policy import (
    next_health as next_health,
)
from ostler.policy import (
    require_access as require_access,
)
from ostler.policy import (
    slot_refusal as slot_refusal,
)
from ostler.seams import (
    Clock as Clock,
)
from ostler.seams import (
    IdSource as IdSource,
)
from ostler.seams import (
    SystemClock as SystemClock,
)
from ostler.seams import (
    Uuid7Source as Uuid7Source,
)
from ostler.store import (
    Actor as Actor,
)
from ostler.store import (
    AgentError as AgentError,
)
from ostler.store import (
    EventPage as EventPage,
)
from ostler.store import (
    Head as Head,
)
from ostler.store import (
    Seams as Seams,
)
from ostler.store import (
    Store as Store,
)
from ostler.store import (
    SweepResult as SweepResult,
)
from ostler.store import (
    open_store as open_store,
)
from ostler.store import (
    view_store as view_store,
)
from ostler.store.commands import (
    AttemptEnd as AttemptEnd,
)
from ostler.store.commands import (
    Beside as Beside,
)
from ostler.store.commands import (
    Command as Command,
)
from ostler.store.commands import (
    CreateRun as CreateRun,
)
from ostler.store.commands import (
    CreateTask as CreateTask,
)
from ostler.store.commands import (
    EndAttempt as EndAttempt,
)
from ostler.store.commands import (
    EndWait as EndWait,
)
from ostler.store.commands import (
    Idempotency as Idempotency,
)
from ostler.store.commands import (
    MoveInstance as MoveInstance,
)
from ostler.store.commands import (
    MoveRun as MoveRun,
)
from ostler.store.commands import (
    MoveTask as MoveTask,
)
from ostler.store.commands import (
    NewAttempt as NewAttempt,
)
from ostler.store.commands import (
    OpenWait as OpenWait,
)
from ostler.store.commands import (
    PutRecord as PutRecord,
)
from ostler.store.commands import (
    RecordAudit as RecordAudit,
)
from ostler.store.commands import (
    RecordIdentity as RecordIdentity,
)
from ostler.store.commands import (
    RecordTurn as RecordTurn,
)
from ostler.store.commands import (
    ReportHealth as ReportHealth,
)
from ostler.store.commands import (
    ReportMetrics as ReportMetrics,
)
from ostler.store.commands import (
    ReportProgress as ReportProgress,
)
from ostler.store.commands import (
    ReportSignal as ReportSignal,
)
from ostler.store.commands import (
    ReportSignals as ReportSignals,
)
from ostler.store.commands import (
    ReserveInstance as ReserveInstance,
)
from ostler.store.commands import (
    Restarting as Restarting,
)
from ostler.store.commands import (
    RestartInstance as RestartInstance,
)
from ostler.store.commands import (
    UpdateTask as UpdateTask,
)
from ostler.version import __version__ as __version__

open = open_manager  # noqa: A001 - what users write is `ostler.open`

__all__: list[str]  # noqa: PYI035 - the list itself stands in __init__.py
