"""The one contract of every isolation level, as tests. A level proves itself by subclassing `IsolationContract`:

    class TestMyLevel(IsolationContract):
        @pytest.fixture
        def isolation(self, clock: ManualClock) -> Isolation:
            return MyLevel(clock)

A level whose agents outlive their manager gives the fixture `successor` as well: see `RecoveringContract`. What depends
on the capabilities of a level is asked according to what it declares. The agents of the suite really block, spin, crash
and refuse to end; they are let go by a file in the directory that the plan names. The suite needs pytest, and anyio for
its plugin.
"""

from isolation.calling import CallingContract
from isolation.crashing import CrashingContract
from isolation.freezing import FreezingContract
from isolation.ground import RecordingListener, Start
from isolation.leaving import LeavingContract
from isolation.recovering import RecoveringContract
from isolation.speaking import SpeakingContract
from isolation.starting import StartingContract
from isolation.stopping import StoppingContract

__all__ = ["IsolationContract", "RecordingListener", "Start"]


class IsolationContract(
    StartingContract,
    CallingContract,
    SpeakingContract,
    CrashingContract,
    StoppingContract,
    LeavingContract,
    FreezingContract,
    RecoveringContract,
):
    """All of it."""
