from ostler.agents.base import (
    Agent as Agent,
)
from ostler.agents.base import (
    agent as agent,
)
from ostler.agents.commandspec import (
    CommandSpec as CommandSpec,
)
from ostler.agents.commandspec import (
    ExitMeaning as ExitMeaning,
)
from ostler.agents.commandspec import (
    HomeKind as HomeKind,
)
from ostler.agents.commandspec import (
    PromptBy as PromptBy,
)
from ostler.agents.context import (
    AgentContext as AgentContext,
)
from ostler.agents.messages import (
    WaitAnswer as WaitAnswer,
)
from ostler.agents.registry import (
    AgentFactory as AgentFactory,
)
from ostler.agents.registry import (
    AgentKind as AgentKind,
)
from ostler.agents.registry import (
    AgentManifest as AgentManifest,
)
from ostler.agents.registry import (
    AgentRegistry as AgentRegistry,
)
from ostler.client.client import (
    Client as Client,
)
from ostler.clock import Clock as Clock
from ostler.clock import SystemClock as SystemClock
from ostler.crews.scope import (
    Scope as Scope,
)
from ostler.crews.supervisor import (
    Supervisor as Supervisor,
)
from ostler.definitions import (
    register_file as register_file,
)
from ostler.definitions import (
    register_files as register_files,
)
from ostler.definitions.project import (
    ProjectSettings as ProjectSettings,
)
from ostler.definitions.project import (
    get_config as get_config,
)
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
    CheckoutBlockedError as CheckoutBlockedError,
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
    GitError as GitError,
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
    MergeConflictError as MergeConflictError,
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
    UsageLimitError as UsageLimitError,
)
from ostler.errors import (
    ValidationError as ValidationError,
)
from ostler.errors import (
    VaultError as VaultError,
)
from ostler.errors import (
    VersionConflictError as VersionConflictError,
)
from ostler.errors import (
    WorkspaceNotFoundError as WorkspaceNotFoundError,
)
from ostler.failpoints import Seams as Seams
from ostler.home import (
    default_home as default_home,
)
from ostler.ids import IdSource as IdSource
from ostler.ids import Uuid7Source as Uuid7Source
from ostler.lifecycle.handle import (
    AgentHandle as AgentHandle,
)
from ostler.lifecycle.logs import (
    LogLine as LogLine,
)
from ostler.lifecycle.manager import (
    AgentLifecycleManager as AgentLifecycleManager,
)
from ostler.lifecycle.observe import (
    Observation as Observation,
)
from ostler.lifecycle.open import (
    open_manager,
)
from ostler.lifecycle.settings import (
    LifecycleSettings as LifecycleSettings,
)
from ostler.model.access import HOME_WORKSPACE_ID as HOME_WORKSPACE_ID
from ostler.model.access import Actor as Actor
from ostler.model.access import Permission as Permission
from ostler.model.access import Principal as Principal
from ostler.model.access import Role as Role
from ostler.model.access import Token as Token
from ostler.model.access import Workspace as Workspace
from ostler.model.attempt import Attempt as Attempt
from ostler.model.attempt import AttemptOutcome as AttemptOutcome
from ostler.model.attempt import Lease as Lease
from ostler.model.attempt import Request as Request
from ostler.model.attempt import RequestState as RequestState
from ostler.model.audit import AuditEntry as AuditEntry
from ostler.model.audit import AuditHead as AuditHead
from ostler.model.audit import AuditReport as AuditReport
from ostler.model.context import (
    ContextData as ContextData,
)
from ostler.model.crew import (
    CrewAction as CrewAction,
)
from ostler.model.crew import (
    CrewPolicy as CrewPolicy,
)
from ostler.model.crew import (
    CrewSettings as CrewSettings,
)
from ostler.model.crew import (
    CrewStrategy as CrewStrategy,
)
from ostler.model.crew import (
    CrewView as CrewView,
)
from ostler.model.crew import (
    MemberState as MemberState,
)
from ostler.model.crew import (
    MemberView as MemberView,
)
from ostler.model.events import (
    AgentErrorEvent as AgentErrorEvent,
)
from ostler.model.events import (
    AgentEvent as AgentEvent,
)
from ostler.model.events import (
    AgentHealthChangedEvent as AgentHealthChangedEvent,
)
from ostler.model.events import (
    AgentMetricsUpdatedEvent as AgentMetricsUpdatedEvent,
)
from ostler.model.events import (
    AgentProgressEvent as AgentProgressEvent,
)
from ostler.model.events import (
    AgentRestartingEvent as AgentRestartingEvent,
)
from ostler.model.events import (
    AgentSignalEvent as AgentSignalEvent,
)
from ostler.model.events import (
    AgentSpawnedEvent as AgentSpawnedEvent,
)
from ostler.model.events import (
    AgentStateChangedEvent as AgentStateChangedEvent,
)
from ostler.model.events import (
    AgentTerminatedEvent as AgentTerminatedEvent,
)
from ostler.model.events import (
    AgentWaitEndedEvent as AgentWaitEndedEvent,
)
from ostler.model.events import (
    AgentWaitOpenedEvent as AgentWaitOpenedEvent,
)
from ostler.model.events import (
    CrewChangedEvent as CrewChangedEvent,
)
from ostler.model.events import (
    CrewEvent as CrewEvent,
)
from ostler.model.events import (
    Event as Event,
)
from ostler.model.events import (
    EventsMissed as EventsMissed,
)
from ostler.model.events import (
    TaskEvent as TaskEvent,
)
from ostler.model.events import (
    TaskStateChangedEvent as TaskStateChangedEvent,
)
from ostler.model.events import (
    TaskWaitEndedEvent as TaskWaitEndedEvent,
)
from ostler.model.events import (
    TaskWaitOpenedEvent as TaskWaitOpenedEvent,
)
from ostler.model.faults import (
    Fault as Fault,
)
from ostler.model.faults import (
    ValidationResult as ValidationResult,
)
from ostler.model.instance import (
    AgentHealthStatus as AgentHealthStatus,
)
from ostler.model.instance import (
    AgentInstance as AgentInstance,
)
from ostler.model.instance import (
    AgentMetrics as AgentMetrics,
)
from ostler.model.instance import (
    TerminationResult as TerminationResult,
)
from ostler.model.instance import (
    Why as Why,
)
from ostler.model.query import (
    GetInstancesFilter as GetInstancesFilter,
)
from ostler.model.query import (
    LifecycleStatistics as LifecycleStatistics,
)
from ostler.model.query import (
    ObservationOptions as ObservationOptions,
)
from ostler.model.record import (
    Record as Record,
)
from ostler.model.spawn import (
    AgentSpawnOptions as AgentSpawnOptions,
)
from ostler.model.spawn import Definition as Definition
from ostler.model.spawn import (
    HealthCheckConfig as HealthCheckConfig,
)
from ostler.model.spawn import (
    ResourceLimits as ResourceLimits,
)
from ostler.model.spawn import (
    RestartPolicy as RestartPolicy,
)
from ostler.model.spawn import (
    SpawnRequest as SpawnRequest,
)
from ostler.model.spawn import (
    TerminationOptions as TerminationOptions,
)
from ostler.model.states import (
    AgentPriority as AgentPriority,
)
from ostler.model.states import (
    AgentState as AgentState,
)
from ostler.model.states import (
    AgentStateTransitions as AgentStateTransitions,
)
from ostler.model.states import (
    Enforcement as Enforcement,
)
from ostler.model.states import (
    HealthState as HealthState,
)
from ostler.model.states import (
    IsolationLevel as IsolationLevel,
)
from ostler.model.states import (
    ProbeType as ProbeType,
)
from ostler.model.states import (
    RestartPolicyType as RestartPolicyType,
)
from ostler.model.states import (
    SuspendDepth as SuspendDepth,
)
from ostler.model.states import (
    Tier as Tier,
)
from ostler.model.task import (
    Receipt as Receipt,
)
from ostler.model.task import (
    Task as Task,
)
from ostler.model.task import (
    TaskFilter as TaskFilter,
)
from ostler.model.task import (
    TaskSettings as TaskSettings,
)
from ostler.model.task import (
    TaskState as TaskState,
)
from ostler.model.task import (
    TaskStatistics as TaskStatistics,
)
from ostler.model.wait import Wait as Wait
from ostler.model.wait import WaitKind as WaitKind
from ostler.policy.retention import (
    RetentionPolicy as RetentionPolicy,
)
from ostler.store.store import (
    Store as Store,
)
from ostler.tasks.orchestrator import (
    AgentLifecycle as AgentLifecycle,
)
from ostler.tasks.orchestrator import (
    TaskOrchestrator as TaskOrchestrator,
)
from ostler.version import __version__ as __version__
from ostler.workdirs.records import (
    Workdir as Workdir,
)
from ostler.workdirs.records import (
    WorkdirKind as WorkdirKind,
)

open = open_manager  # noqa: A001 - `ostler.open` reads well
