"""What things are: frozen records, named values, transition tables. No I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostler.lazily import opener

if TYPE_CHECKING:
    from ostler.model.audit import GENESIS, AuditEntry, AuditHead, AuditReport, chain_hash
    from ostler.model.context import ContextData
    from ostler.model.events import (
        EVENT_CLASSES,
        AgentAttemptStartedEvent,
        AgentErrorEvent,
        AgentEvent,
        AgentHealthChangedEvent,
        AgentMetricsUpdatedEvent,
        AgentProgressEvent,
        AgentRestartingEvent,
        AgentSignalEvent,
        AgentSpawnedEvent,
        AgentStateChangedEvent,
        AgentTerminatedEvent,
        Event,
        TaskCreatedEvent,
        TaskEvent,
        TaskStateChangedEvent,
        TaskUpdatedEvent,
        event_class,
        event_from_json,
    )
    from ostler.model.health import AgentHealthStatus, AgentMetrics, HealthCheckConfig
    from ostler.model.instance import AgentInstance
    from ostler.model.ledger import Attempt, AttemptOutcome, Lease, Wait, WaitKind
    from ostler.model.limits import Enforcement, ResourceLimits
    from ostler.model.moments import Moment, from_micros, micros
    from ostler.model.observation import EventsMissed, SuspendDepth
    from ostler.model.people import HOME_WORKSPACE_ID, Definition, Permission, Principal, Role, Token, Workspace
    from ostler.model.query import GetInstancesFilter, LifecycleStatistics, ObservationOptions, TaskFilter
    from ostler.model.record import Record
    from ostler.model.restart import RestartPolicy
    from ostler.model.simulation import RunState, SimulationRun, SimulationTurn
    from ostler.model.spawn import AgentSpawnOptions, SpawnRequest
    from ostler.model.states import (
        ACTIVE_STATES,
        AGENT_TRANSITIONS,
        FINISHED_TASK_STATES,
        FREEZE_TRANSITIONS,
        INACTIVE_STATES,
        TASK_TRANSITIONS,
        AgentPriority,
        AgentState,
        AgentStateTransitions,
        HealthState,
        IsolationLevel,
        ProbeType,
        RestartPolicyType,
        TaskState,
        TaskStateTransitions,
        Tier,
    )
    from ostler.model.task import Task
    from ostler.model.termination import TerminationOptions, TerminationResult
    from ostler.model.text import clean_text, clipped, fold_tags
    from ostler.model.validation import Fault, ValidationResult, duration_text, shown
    from ostler.model.why import Why
else:  # a type checker would believe in any name
    __getattr__, __dir__ = opener(
        __name__,
        {
            "audit": "GENESIS AuditEntry AuditHead AuditReport chain_hash",
            "context": "ContextData",
            "events": (
                "EVENT_CLASSES AgentAttemptStartedEvent AgentErrorEvent AgentEvent AgentHealthChangedEvent "
                "AgentMetricsUpdatedEvent AgentProgressEvent AgentRestartingEvent AgentSignalEvent "
                "AgentSpawnedEvent AgentStateChangedEvent AgentTerminatedEvent Event TaskCreatedEvent TaskEvent "
                "TaskStateChangedEvent TaskUpdatedEvent event_class event_from_json"
            ),
            "health": "AgentHealthStatus AgentMetrics HealthCheckConfig",
            "instance": "AgentInstance",
            "ledger": "Attempt AttemptOutcome Lease Wait WaitKind",
            "limits": "Enforcement ResourceLimits",
            "moments": "Moment from_micros micros",
            "observation": "EventsMissed SuspendDepth",
            "people": "HOME_WORKSPACE_ID Definition Permission Principal Role Token Workspace",
            "query": "GetInstancesFilter LifecycleStatistics ObservationOptions TaskFilter",
            "record": "Record",
            "restart": "RestartPolicy",
            "simulation": "RunState SimulationRun SimulationTurn",
            "spawn": "AgentSpawnOptions SpawnRequest",
            "states": (
                "ACTIVE_STATES AGENT_TRANSITIONS FINISHED_TASK_STATES FREEZE_TRANSITIONS INACTIVE_STATES "
                "TASK_TRANSITIONS AgentPriority AgentState AgentStateTransitions HealthState IsolationLevel "
                "ProbeType RestartPolicyType TaskState TaskStateTransitions Tier"
            ),
            "task": "Task",
            "termination": "TerminationOptions TerminationResult",
            "text": "clean_text clipped fold_tags",
            "validation": "Fault ValidationResult duration_text shown",
            "why": "Why",
        },
    )

__all__ = [
    "ACTIVE_STATES",
    "AGENT_TRANSITIONS",
    "EVENT_CLASSES",
    "FINISHED_TASK_STATES",
    "FREEZE_TRANSITIONS",
    "GENESIS",
    "HOME_WORKSPACE_ID",
    "INACTIVE_STATES",
    "TASK_TRANSITIONS",
    "AgentAttemptStartedEvent",
    "AgentErrorEvent",
    "AgentEvent",
    "AgentHealthChangedEvent",
    "AgentHealthStatus",
    "AgentInstance",
    "AgentMetrics",
    "AgentMetricsUpdatedEvent",
    "AgentPriority",
    "AgentProgressEvent",
    "AgentRestartingEvent",
    "AgentSignalEvent",
    "AgentSpawnOptions",
    "AgentSpawnedEvent",
    "AgentState",
    "AgentStateChangedEvent",
    "AgentStateTransitions",
    "AgentTerminatedEvent",
    "Attempt",
    "AttemptOutcome",
    "AuditEntry",
    "AuditHead",
    "AuditReport",
    "ContextData",
    "Definition",
    "Enforcement",
    "Event",
    "EventsMissed",
    "Fault",
    "GetInstancesFilter",
    "HealthCheckConfig",
    "HealthState",
    "IsolationLevel",
    "Lease",
    "LifecycleStatistics",
    "Moment",
    "ObservationOptions",
    "Permission",
    "Principal",
    "ProbeType",
    "Record",
    "ResourceLimits",
    "RestartPolicy",
    "RestartPolicyType",
    "Role",
    "RunState",
    "SimulationRun",
    "SimulationTurn",
    "SpawnRequest",
    "SuspendDepth",
    "Task",
    "TaskCreatedEvent",
    "TaskEvent",
    "TaskFilter",
    "TaskState",
    "TaskStateChangedEvent",
    "TaskStateTransitions",
    "TaskUpdatedEvent",
    "TerminationOptions",
    "TerminationResult",
    "Tier",
    "Token",
    "ValidationResult",
    "Wait",
    "WaitKind",
    "Why",
    "Workspace",
    "chain_hash",
    "clean_text",
    "clipped",
    "duration_text",
    "event_class",
    "event_from_json",
    "fold_tags",
    "from_micros",
    "micros",
    "shown",
]
