"""What every message does in every phase. A pair that is not named is the row's default."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ostler.lifecycle import adopt, calls, health, job, leave, pause, retry_writes, start, waits
from ostler.lifecycle.instance import Handler, Instance, Table, refuse_with
from ostler.lifecycle.messages import (
    Answer,
    CallDue,
    CallEnded,
    CallerDue,
    Close,
    Detach,
    Due,
    Exited,
    JobEnded,
    Join,
    Message,
    NextCalls,
    OperationDone,
    OwnerLost,
    Phase,
    Probed,
    Process,
    ReadyToServe,
    Registered,
    Reported,
    Restart,
    Resume,
    Suspend,
    Terminate,
    WaitCancelled,
    WaitDue,
    WaitRequested,
    Withdraw,
    WriteDue,
    WriteFailed,
)
from ostler.lifecycle.phases import (
    Adopting,
    Backoff,
    Detached,
    Ended,
    Leaving,
    Pausing,
    Serving,
    Starting,
    Suspended,
)

_ADVICE = {
    Suspend: ("suspended", "wait until it is ready"),
    Resume: ("resumed", "only a suspended one can be resumed"),
    Restart: ("restarted", "it is starting or ending already; look at why"),
    Terminate: ("terminated", "it has ended"),
    Detach: ("left", "it is ending"),
    Answer: ("answered", "it has ended, and its waits with it"),
}


def refuse(instance: Instance, message: Message) -> None:
    doing, advice = _ADVICE.get(type(message), ("asked", "look at why"))
    refuse_with(message, instance.refusal(doing, advice))


def ignore(instance: Instance, message: Message) -> None:
    del instance, message


def withdraw(instance: Instance, message: Withdraw) -> None:
    """A call is cancelled, a spawn undone, a hold dropped; a termination, restart or resumption goes on."""
    verb = message.of
    if isinstance(verb, Process) and calls.withdraw_call(instance, verb):
        message.finish_with(verb)
        return
    if isinstance(verb, Join) and (ending := start.withdraw_join(instance, verb)) is not None:
        message.finish_with(ending)
        return
    if isinstance(verb, Suspend):
        pause.cancel_pause(instance, verb)
    verb.reply.cancel()
    message.finish()


_ROWS: dict[type[Message], dict[type[Phase] | None, Any]] = {
    Process: {
        Starting: calls.process,
        Adopting: calls.process,
        Serving: calls.process,
        Leaving: calls.process_leaving,
        Backoff: calls.process_backoff,
        None: calls.process_closed,
    },
    Withdraw: {None: withdraw},
    Join: {Starting: start.join, Leaving: start.join_leaving, None: start.joined},
    Suspend: {Serving: pause.suspend, Suspended: pause.suspend_deeper, None: refuse},
    Resume: {Pausing: pause.resume_pausing, Suspended: pause.resume, Leaving: leave.resume_leaving, None: refuse},
    Restart: {
        Adopting: leave.restart,
        Serving: leave.restart,
        Pausing: leave.restart,
        Suspended: leave.restart_suspended,
        Leaving: leave.restart_leaving,
        Backoff: leave.restart_failed,
        None: refuse,
    },
    Terminate: {
        Starting: start.terminate_starting,
        Adopting: leave.terminate,
        Serving: leave.terminate,
        Pausing: leave.terminate,
        Suspended: leave.terminate,
        Leaving: leave.terminate_leaving,
        Backoff: leave.terminate_failed,
        None: refuse,
    },
    Detach: {
        Starting: leave.defer,
        Adopting: leave.detach,
        Serving: leave.detach,
        Pausing: leave.detach,
        Suspended: leave.detach,
        Leaving: leave.defer,
        Backoff: leave.detach,
        None: refuse,
    },
    Close: {
        Starting: start.close_starting,
        Adopting: leave.close,
        Serving: leave.close,
        Pausing: leave.close,
        Suspended: leave.close_suspended,
        Leaving: leave.close_leaving,
        Backoff: leave.detach,
        None: refuse,
    },
    Answer: {
        Starting: waits.answer,
        Adopting: waits.answer,
        Serving: waits.answer,
        Pausing: waits.answer,
        Suspended: waits.answer,
        None: refuse,
    },
    WaitDue: {
        Starting: waits.wait_due,
        Adopting: waits.wait_due,
        Serving: waits.wait_due,
        Pausing: waits.wait_due,
        Suspended: waits.wait_due,
        None: ignore,
    },
    WaitRequested: {
        Starting: waits.wait_requested,
        Adopting: waits.wait_requested,
        Serving: waits.wait_requested,
        Pausing: pause.wait_requested_pausing,
        Suspended: waits.wait_requested,
        None: refuse,
    },
    WaitCancelled: {
        Pausing: pause.wait_cancelled_pausing,
        Leaving: ignore,
        Ended: ignore,
        Detached: ignore,
        None: waits.wait_cancelled,
    },
    Exited: {
        Adopting: leave.exited,
        Serving: leave.exited,
        Pausing: leave.exited,
        Suspended: leave.exited_suspended,
        Leaving: leave.note_exit,
        None: ignore,
    },
    Probed: {Adopting: health.probed, Serving: health.probed, Pausing: health.probed, None: ignore},
    Reported: {
        Adopting: adopt.reported,
        Serving: adopt.reported,
        Pausing: adopt.reported,
        Suspended: adopt.reported_suspended,
        None: ignore,
    },
    OperationDone: {
        Starting: start.started,
        Adopting: pause.thawed,
        Serving: pause.thawed,
        Pausing: pause.paused,
        Leaving: leave.left,
        None: ignore,
    },
    CallEnded: {Pausing: pause.call_ended_pausing, Ended: ignore, Detached: ignore, None: calls.call_ended},
    CallDue: {
        Suspended: calls.queued_call_due,
        Leaving: calls.queued_call_due,
        Ended: ignore,
        Detached: ignore,
        None: calls.call_due,
    },
    CallerDue: {None: calls.caller_due},
    ReadyToServe: {Serving: job.ask_job, None: ignore},
    JobEnded: {
        Starting: ignore,
        Leaving: ignore,
        Backoff: ignore,
        Ended: ignore,
        Detached: ignore,
        None: job.job_ended,
    },
    NextCalls: {Serving: calls.next_calls, None: ignore},
    Due: {
        Pausing: pause.pause_timed_out,
        Suspended: pause.resume_due,
        Leaving: leave.retry_leave,
        Backoff: leave.restart_due,
        None: ignore,
    },
    OwnerLost: {Starting: start.owner_lost_starting, Ended: ignore, Detached: ignore, None: leave.owner_lost},
    Registered: {Backoff: leave.definition_registered, Suspended: adopt.registered_suspended, None: ignore},
    WriteFailed: {Ended: ignore, Detached: ignore, None: retry_writes.write_failed},
    WriteDue: {Ended: ignore, Detached: ignore, None: retry_writes.write_due},
}
TABLE: Table = MappingProxyType(_ROWS)

__all__ = ["TABLE", "Handler", "ignore", "refuse"]
