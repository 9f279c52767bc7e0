"""One life: a file per verb. `open_manager` is the way in."""

from ostler.lifecycle.doors import OWNER
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.observe import Observation
from ostler.lifecycle.opening import open_manager
from ostler.lifecycle.settings import LifecycleSettings

__all__ = ["OWNER", "AgentLifecycleManager", "LifecycleSettings", "Observation", "open_manager"]
