"""What the calls of an instance mean for its state and for its clock."""

from __future__ import annotations

from ostler.lifecycle.instance import Instance
from ostler.lifecycle.messages import Call, CallDue
from ostler.lifecycle.phases import Adopting, Pausing, Serving
from ostler.model.states import AgentState
from ostler.store import reports as commands
from ostler.store.moves import Move


def start_clock(instance: Instance, call: Call) -> None:
    """Run down its execution time. The clock stands still while it waits for an answer or is frozen."""
    stop_clock(instance, call)
    if call.waits or call.ended:
        return
    clock = instance.runtime.clock
    call.armed_at = clock.mono()
    call.timer = clock.call_later(max(call.left, 0.0), lambda: instance.post(CallDue(call=call)))


def stop_clock(instance: Instance, call: Call) -> None:
    if call.timer is not None:
        call.timer.cancel()
        call.timer = None
    if call.armed_at is not None:
        call.left -= instance.runtime.clock.mono() - call.armed_at
        call.armed_at = None


def state_move(instance: Instance) -> Move | None:
    """The state follows the calls: processing while any of them works, waiting afterwards."""
    if not isinstance(instance.phase, Serving | Pausing | Adopting):
        return None
    works = any(call.works for call in instance.calls.values())
    if works and instance.state is not AgentState.PROCESSING:
        to = AgentState.PROCESSING
    elif not works and instance.state is AgentState.PROCESSING:
        to = AgentState.WAITING
    else:
        return None
    return Move(to=to, catch_up=True, metrics=instance.metrics_now())


def follow(instance: Instance) -> None:
    """Write the state where the calls have changed it."""
    move = state_move(instance)
    if move is not None:
        instance.write_lazily(commands.begin_call, move, None)
        instance.moved_to(move.to)
