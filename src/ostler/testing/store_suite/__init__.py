"""The one contract of every store, as tests. A backend proves itself by subclassing `StoreContract`:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def open_store(self, tmp_path: Path) -> OpenStore:
            return lambda seams: my_store(tmp_path, seams)

Every call of what the fixture returns must give a store over the same content. The suite needs pytest, and
anyio for its plugin; it is the only part of `ostler.testing` that does.
"""

from ostler.testing.store_suite.asking import AskingContract
from ostler.testing.store_suite.beside import BesideContract
from ostler.testing.store_suite.crashing import CrashingContract
from ostler.testing.store_suite.ground import OpenStore
from ostler.testing.store_suite.guarding import GuardingContract
from ostler.testing.store_suite.history import HistoryContract
from ostler.testing.store_suite.lives import LivesContract
from ostler.testing.store_suite.mistyped import MistypedContract
from ostler.testing.store_suite.owning import OwningContract
from ostler.testing.store_suite.playing import PlayingContract
from ostler.testing.store_suite.quota import QuotaContract
from ostler.testing.store_suite.refusing import RefusingContract
from ostler.testing.store_suite.retention import RetentionContract
from ostler.testing.store_suite.rows import RowsContract
from ostler.testing.store_suite.sharing import SharingContract
from ostler.testing.store_suite.simulations import SimulationsContract
from ostler.testing.store_suite.speaking import SpeakingContract
from ostler.testing.store_suite.tasks import TasksContract
from ostler.testing.store_suite.turnreading import TurnReadingContract

__all__ = ["OpenStore", "StoreContract"]


class StoreContract(
    LivesContract,
    BesideContract,
    SpeakingContract,
    OwningContract,
    QuotaContract,
    AskingContract,
    TasksContract,
    SimulationsContract,
    PlayingContract,
    TurnReadingContract,
    HistoryContract,
    RetentionContract,
    RowsContract,
    RefusingContract,
    MistypedContract,
    GuardingContract,
    SharingContract,
    CrashingContract,
):
    """All of it."""
