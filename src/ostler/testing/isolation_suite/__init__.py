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

from ostler.testing.isolation_suite.calling import CallingContract
from ostler.testing.isolation_suite.crashing import CrashingContract
from ostler.testing.isolation_suite.freezing import FreezingContract
from ostler.testing.isolation_suite.ground import RecordingListener, Start
from ostler.testing.isolation_suite.leaving import LeavingContract
from ostler.testing.isolation_suite.recovering import RecoveringContract
from ostler.testing.isolation_suite.speaking import SpeakingContract
from ostler.testing.isolation_suite.starting import StartingContract
from ostler.testing.isolation_suite.stopping import StoppingContract

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
