"""Turn-based populations: agents that join, leave, pause and resume, and decide one turn at a time."""

from ostler.model.simulation import OnFailure, OnIdle, RunState, SimulationRun, SimulationSettings
from ostler.simulation.brains import Brain, Brains, Managed
from ostler.simulation.compare import Comparison, compare_run
from ostler.simulation.export import export_turns
from ostler.simulation.history import PlayedTurn, replay, state_at
from ostler.simulation.membership import AddResult, LifecycleManager, LifecycleValidator, PauseTracker, Verdict
from ostler.simulation.orchestrator import SimulationOrchestrator
from ostler.simulation.runs import KeptRun, begin_run, fork_run, remove_run, resume_run
from ostler.simulation.scenario import AgentGroup, Scenario
from ostler.simulation.scenario_file import load_scenario, scenario_of_run
from ostler.simulation.state import Member, SimulationState
from ostler.simulation.turn import Failure, Performed, RunReport, TurnReport
from ostler.simulation.view import AgentView, Decisions, Engine, MergeEngine, World

__all__ = [
    "AddResult",
    "AgentGroup",
    "AgentView",
    "Brain",
    "Brains",
    "Comparison",
    "Decisions",
    "Engine",
    "Failure",
    "KeptRun",
    "LifecycleManager",
    "LifecycleValidator",
    "Managed",
    "Member",
    "MergeEngine",
    "OnFailure",
    "OnIdle",
    "PauseTracker",
    "Performed",
    "PlayedTurn",
    "RunReport",
    "RunState",
    "Scenario",
    "SimulationOrchestrator",
    "SimulationRun",
    "SimulationSettings",
    "SimulationState",
    "TurnReport",
    "Verdict",
    "World",
    "begin_run",
    "compare_run",
    "export_turns",
    "fork_run",
    "load_scenario",
    "remove_run",
    "replay",
    "resume_run",
    "scenario_of_run",
    "state_at",
]
