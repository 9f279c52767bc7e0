"""What can be done to the record: each command is data, and one function that applies it to a unit of work."""

from ostler.store.commands.attempts import AttemptEnd, EndAttempt, RecordIdentity
from ostler.store.commands.base import Command, Idempotency
from ostler.store.commands.beside import Beside, Restarting
from ostler.store.commands.instances import MoveInstance, ReserveInstance
from ostler.store.commands.leases import ReleaseLease, RenewLease, TakeLease
from ostler.store.commands.records import EndWait, OpenWait, PutRecord, RecordAudit
from ostler.store.commands.reports import (
    ReportError,
    ReportHealth,
    ReportMetrics,
    ReportProgress,
    ReportSignal,
    ReportSignals,
)
from ostler.store.commands.retention import (
    PruneAudit,
    PruneEvents,
    RemoveAnswers,
    RemoveInstances,
    RemoveTasks,
    RemoveWaits,
)
from ostler.store.commands.simulations import CreateRun, MoveRun, RecordTurn, RemoveRun
from ostler.store.commands.starts import NewAttempt, RestartInstance
from ostler.store.commands.tasks import CreateTask, MoveTask, UpdateTask

__all__ = [
    "AttemptEnd",
    "Beside",
    "Command",
    "CreateRun",
    "CreateTask",
    "EndAttempt",
    "EndWait",
    "Idempotency",
    "MoveInstance",
    "MoveRun",
    "MoveTask",
    "NewAttempt",
    "OpenWait",
    "PruneAudit",
    "PruneEvents",
    "PutRecord",
    "RecordAudit",
    "RecordIdentity",
    "RecordTurn",
    "ReleaseLease",
    "RemoveAnswers",
    "RemoveInstances",
    "RemoveRun",
    "RemoveTasks",
    "RemoveWaits",
    "RenewLease",
    "ReportError",
    "ReportHealth",
    "ReportMetrics",
    "ReportProgress",
    "ReportSignal",
    "ReportSignals",
    "ReserveInstance",
    "RestartInstance",
    "Restarting",
    "TakeLease",
    "UpdateTask",
]
