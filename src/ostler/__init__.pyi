# Written by scripts/stub from the table in __init__.py; a test compares the two.
from ostler.agents.base import Agent as Agent, agent as agent
from ostler.agents.commandspec import CommandSpec as CommandSpec, ExitMeaning as ExitMeaning, HomeKind as HomeKind, PromptBy as PromptBy
from ostler.agents.context import AgentContext as AgentContext
from ostler.agents.messages import WaitAnswer as WaitAnswer
from ostler.agents.registry import AgentFactory as AgentFactory, AgentKind as AgentKind, AgentManifest as AgentManifest, AgentRegistry as AgentRegistry
from ostler.client.client import Client as Client
from ostler.clock import Clock as Clock, SystemClock as SystemClock
from ostler.crews.scope import Scope as Scope
from ostler.crews.supervisor import Supervisor as Supervisor
from ostler.definitions.discover import register_file as register_file, register_files as register_files
from ostler.definitions.project import ProjectSettings as ProjectSettings, get_config as get_config
from ostler.errors import AgentBusyError as AgentBusyError, AgentExecutionError as AgentExecutionError, AgentGoneError as AgentGoneError, AgentInitializationError as AgentInitializationError, AgentNotFoundError as AgentNotFoundError, AuditBrokenError as AuditBrokenError, AuthorizationError as AuthorizationError, CheckoutBlockedError as CheckoutBlockedError, ConflictError as ConflictError, CursorGoneError as CursorGoneError, DamagedRowError as DamagedRowError, DeadlineError as DeadlineError, DefinitionError as DefinitionError, ExecutionTimeoutError as ExecutionTimeoutError, GitError as GitError, HistoryBrokenError as HistoryBrokenError, IdempotencyConflictError as IdempotencyConflictError, InitializationTimeoutError as InitializationTimeoutError, InvalidOperationError as InvalidOperationError, LeaseHeldError as LeaseHeldError, LicenseError as LicenseError, MergeConflictError as MergeConflictError, MissingExtraError as MissingExtraError, NotFoundError as NotFoundError, OstlerError as OstlerError, OutcomeUnknownError as OutcomeUnknownError, SimulationError as SimulationError, SimulationNotFoundError as SimulationNotFoundError, StaleWriterError as StaleWriterError, StoreBusyError as StoreBusyError, StoreClosedError as StoreClosedError, StoreError as StoreError, StoreFailedError as StoreFailedError, StoreFullError as StoreFullError, StoreTooNewError as StoreTooNewError, TaskNotFoundError as TaskNotFoundError, UsageLimitError as UsageLimitError, ValidationError as ValidationError, VaultError as VaultError, VersionConflictError as VersionConflictError, WorkspaceNotFoundError as WorkspaceNotFoundError
from ostler.failpoints import Seams as Seams
from ostler.home import default_home as default_home
from ostler.ids import IdSource as IdSource, Uuid7Source as Uuid7Source
from ostler.lifecycle.manager import AgentHandle as AgentHandle, AgentLifecycleManager as AgentLifecycleManager
from ostler.lifecycle.observe import Observation as Observation
from ostler.lifecycle.open import open_manager as open_manager
from ostler.lifecycle.settings import LifecycleSettings as LifecycleSettings
from ostler.loop import AgentLifecycleLoop as AgentLifecycleLoop, Breakpoint as Breakpoint, BreakpointType as BreakpointType, ContextBuilder as ContextBuilder, ContextSnapshot as ContextSnapshot, LoopResult as LoopResult, LoopResultType as LoopResultType, LoopSettings as LoopSettings
from ostler.model.access import HOME_WORKSPACE_ID as HOME_WORKSPACE_ID, Actor as Actor, Permission as Permission, Principal as Principal, Role as Role, Token as Token, Workspace as Workspace
from ostler.model.attempt import Attempt as Attempt, AttemptOutcome as AttemptOutcome, Lease as Lease, Request as Request, RequestState as RequestState
from ostler.model.audit import AuditEntry as AuditEntry, AuditHead as AuditHead, AuditReport as AuditReport
from ostler.model.context import ContextData as ContextData
from ostler.model.crew import CrewAction as CrewAction, CrewPolicy as CrewPolicy, CrewSettings as CrewSettings, CrewStrategy as CrewStrategy, CrewView as CrewView, MemberState as MemberState, MemberView as MemberView
from ostler.model.disk import DiskUsage as DiskUsage, TaskDisk as TaskDisk
from ostler.model.events import AgentErrorEvent as AgentErrorEvent, AgentEvent as AgentEvent, AgentHealthChangedEvent as AgentHealthChangedEvent, AgentMetricsUpdatedEvent as AgentMetricsUpdatedEvent, AgentProgressEvent as AgentProgressEvent, AgentRestartingEvent as AgentRestartingEvent, AgentSignalEvent as AgentSignalEvent, AgentSpawnedEvent as AgentSpawnedEvent, AgentStateChangedEvent as AgentStateChangedEvent, AgentTerminatedEvent as AgentTerminatedEvent, AgentWaitEndedEvent as AgentWaitEndedEvent, AgentWaitOpenedEvent as AgentWaitOpenedEvent, CrewChangedEvent as CrewChangedEvent, CrewEvent as CrewEvent, Event as Event, EventsMissed as EventsMissed, TaskEvent as TaskEvent, TaskStateChangedEvent as TaskStateChangedEvent, TaskWaitEndedEvent as TaskWaitEndedEvent, TaskWaitOpenedEvent as TaskWaitOpenedEvent
from ostler.model.instance import AgentHealthStatus as AgentHealthStatus, AgentInstance as AgentInstance, AgentMetrics as AgentMetrics, TerminationResult as TerminationResult, Why as Why
from ostler.model.log import LogLine as LogLine
from ostler.model.query import GetInstancesFilter as GetInstancesFilter, InboxKind as InboxKind, InboxRow as InboxRow, LifecycleStatistics as LifecycleStatistics, ObservationOptions as ObservationOptions, Report as Report
from ostler.model.record import Record as Record
from ostler.model.spawn import AgentSpawnOptions as AgentSpawnOptions, Definition as Definition, HealthCheckConfig as HealthCheckConfig, ResourceLimits as ResourceLimits, RestartPolicy as RestartPolicy, SpawnRequest as SpawnRequest, TerminalSize as TerminalSize, TerminationOptions as TerminationOptions
from ostler.model.states import AgentPriority as AgentPriority, AgentState as AgentState, AgentStateTransitions as AgentStateTransitions, Enforcement as Enforcement, HealthState as HealthState, IsolationLevel as IsolationLevel, ProbeType as ProbeType, RestartPolicyType as RestartPolicyType, SuspendDepth as SuspendDepth, Tier as Tier
from ostler.model.task import Receipt as Receipt, Task as Task, TaskFilter as TaskFilter, TaskSettings as TaskSettings, TaskState as TaskState, TaskStatistics as TaskStatistics, TaskWhy as TaskWhy
from ostler.model.validation import Fault as Fault, ValidationResult as ValidationResult
from ostler.model.wait import Wait as Wait, WaitKind as WaitKind
from ostler.policy.retention import RetentionPolicy as RetentionPolicy
from ostler.simulation import LifecycleManager as LifecycleManager, LifecycleValidator as LifecycleValidator, PauseTracker as PauseTracker, SimulationOrchestrator as SimulationOrchestrator, SimulationState as SimulationState
from ostler.store.store import Store as Store
from ostler.tasks.orchestrator import AgentLifecycle as AgentLifecycle, TaskOrchestrator as TaskOrchestrator
from ostler.workdirs.records import Workdir as Workdir, WorkdirKind as WorkdirKind
from ostler.version import __version__ as __version__
open = open_manager
