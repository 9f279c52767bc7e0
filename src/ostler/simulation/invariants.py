"""The five rules of a population, looked up one by one."""

from __future__ import annotations

from collections.abc import Iterator

from ostler.model import Fault, shown
from ostler.simulation.state import SimulationState


def broken_invariants(state: SimulationState, max_agents: int) -> Iterator[Fault]:
    """Nothing for a sound state. Looks at every agent, so it is for tests and for what comes from outside."""
    numbers = {member.number for member in state.members.values()}
    named = all(name == member.name for name, member in state.members.items())
    if not named or len(numbers) != len(state.members):
        yield Fault(field="agents", bound="must have names and numbers of their own")
    for name in sorted(state.paused - state.members.keys()):
        yield Fault(field="paused_agents", bound="must name only agents", value=shown(name))
    for name in sorted(set(state.countdown) - state.paused):
        yield Fault(field="auto_resume", bound="must name only paused agents", value=shown(name))
    if len(state.members) > max_agents:
        yield Fault(field="agents", bound=f"must be at most {max_agents}", value=str(len(state.members)))
    for sentence in state.countdown.faults():
        yield Fault(field="auto_resume", bound=f"must count down to one: {sentence}")
