"""The end of a turn: what agents asked for, and what becomes of those who failed, carried out one after the other.

The order is defined. First the failures, in the order of coming. Then the wishes: by who asked, in the order of coming,
and for each in the order of asking. Every wish is checked against the state as the earlier ones have left it. Who was
active in this turn is heard, also when an earlier wish has removed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ostler.errors import OstlerError
from ostler.model import shown
from ostler.simulation.asking import Failed
from ostler.simulation.engine import Decisions
from ostler.simulation.joining import Joining
from ostler.simulation.members import Member
from ostler.simulation.reports import Failure, Performed
from ostler.simulation.requests import LifecycleRequest, Operation
from ostler.simulation.settings import OnFailure, SimulationSettings
from ostler.simulation.view import AgentView, World

_BECAME = {OnFailure.PAUSE: "paused", OnFailure.REMOVE: "removed", OnFailure.KEEP: "kept"}


def deal_with(
    failed: Sequence[tuple[Member, Failed]], settings: SimulationSettings, joining: Joining
) -> tuple[Mapping[str, Failure], list[Performed]]:
    """Pause, remove or keep those who gave no answer."""
    failures: dict[str, Failure] = {}
    performed: list[Performed] = []
    for member, why in failed:
        policy = settings.on_timeout if why.timed_out else settings.on_error
        if not why.asked:
            policy = OnFailure.KEEP
        if policy is OnFailure.REMOVE:
            performed.append(joining.remove(member.name, cause="policy"))
        elif policy is OnFailure.PAUSE:
            performed.append(joining.pause(member.name, settings.failure_pause_turns, cause="policy"))
        joining.tell_failed(member.name, why.error_type, why.message, _BECAME[policy])
        failures[member.name] = Failure(
            timed_out=why.timed_out, error_type=why.error_type, message=why.message, became=_BECAME[policy]
        )
    return failures, performed


def carry_out(decisions: Decisions, world: World, joining: Joining) -> Iterator[Performed]:
    """What was asked for in this turn by those who decided in it.

    Who failed is not heard, nor is one that was not asked, as by a view that it kept from an earlier turn.
    """
    asked, world.asked = world.asked, []
    if not asked:
        return
    heard = {member.number for member, _ in decisions.pairs()}
    asked.sort(key=lambda wish: wish[0].number)  # stable: each agent's own keep their order
    for view, wish, meant in asked:
        if not view.closed and view.number in heard:
            yield _one(view, wish, meant, world, joining)


def _one(view: AgentView, wish: LifecycleRequest, meant: int | None, world: World, joining: Joining) -> Performed:
    by: dict[str, Any] = {"cause": "agent", "by": view.name}
    if wish.operation is Operation.ADD:
        return _add(wish, joining, by)
    now = world.state.members.get(wish.agent_name)
    if now is not None and now.number != meant:
        reason = f"the agent {shown(wish.agent_name)} that was meant has left, and another has its name now"
        if meant is None:
            reason = f"there was no agent {shown(wish.agent_name)} when this was asked; ask in the next turn"
        return joining.refused(wish.operation, wish.agent_name, reason, **by)
    if wish.operation is Operation.REMOVE:
        return joining.remove(wish.agent_name, **by)
    if wish.operation is Operation.PAUSE:
        return joining.pause(wish.agent_name, wish.auto_resume_turns, **by)
    return joining.resume(wish.agent_name, **by)


def _add(wish: LifecycleRequest, joining: Joining, by: dict[str, Any]) -> Performed:
    if wish.agent is None and wish.kind is None:
        known = ", ".join(sorted(joining.brains)) or "none"
        reason = f"it has no brain; give one, or a kind of the run's brains ({known})"
        return joining.refused(Operation.ADD, wish.agent_name, reason, **by)
    try:
        agent = wish.agent if wish.kind is None else joining.brains.make(wish.kind, wish.params)
    except OstlerError as error:
        return joining.refused(Operation.ADD, wish.agent_name, str(error), **by)
    performed, _ = joining.add(wish.agent_name, agent, wish.initial_state, made_by=(wish.kind, wish.params), **by)
    return performed
