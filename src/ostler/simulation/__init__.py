"""Turns: populations whose agents decide one turn at a time, with pauses that count down."""

from ostler.simulation.around import Around
from ostler.simulation.asking import Failed
from ostler.simulation.brains import Brain, Brains, Managed
from ostler.simulation.comparing import Comparison, compare_run
from ostler.simulation.engine import Decisions, Engine, MergeEngine
from ostler.simulation.exporting import export_turns
from ostler.simulation.history import kept_at, replay, state_at
from ostler.simulation.keeping import Ground
from ostler.simulation.manager import AddOutcome, LifecycleManager
from ostler.simulation.members import Member
from ostler.simulation.orchestrator import SimulationOrchestrator
from ostler.simulation.pauses import PauseTracker
from ostler.simulation.played import PlayedTurn
from ostler.simulation.removing import remove_run
from ostler.simulation.reports import Failure, Performed, RunReport, TurnReport
from ostler.simulation.requests import Decision, LifecycleRequest, Operation
from ostler.simulation.runs import KeptRun, begin_run, fork_run, resume_run, run_settings
from ostler.simulation.scenario import AgentGroup, Scenario
from ostler.simulation.scenariofile import load_scenario, load_scenario_text, scenario_of_run
from ostler.simulation.settings import OnFailure, OnIdle, SimulationSettings
from ostler.simulation.state import SimulationState
from ostler.simulation.validator import LifecycleValidator, Verdict
from ostler.simulation.view import AgentView, World

__all__ = [
    "AddOutcome",
    "AgentGroup",
    "AgentView",
    "Around",
    "Brain",
    "Brains",
    "Comparison",
    "Decision",
    "Decisions",
    "Engine",
    "Failed",
    "Failure",
    "Ground",
    "KeptRun",
    "LifecycleManager",
    "LifecycleRequest",
    "LifecycleValidator",
    "Managed",
    "Member",
    "MergeEngine",
    "OnFailure",
    "OnIdle",
    "Operation",
    "PauseTracker",
    "Performed",
    "PlayedTurn",
    "RunReport",
    "Scenario",
    "SimulationOrchestrator",
    "SimulationSettings",
    "SimulationState",
    "TurnReport",
    "Verdict",
    "World",
    "begin_run",
    "compare_run",
    "export_turns",
    "fork_run",
    "kept_at",
    "load_scenario",
    "load_scenario_text",
    "remove_run",
    "replay",
    "resume_run",
    "run_settings",
    "scenario_of_run",
    "state_at",
]
