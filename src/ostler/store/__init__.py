"""What is remembered: the only writer of records and events."""

from ostler.store.actor import SYSTEM, Actor
from ostler.store.base import EventPage, Store, SweepResult
from ostler.store.commands.instances import AgentError
from ostler.store.engine import EngineStore
from ostler.store.life import Backend, Lifelike, Seams
from ostler.store.opening import open_store
from ostler.store.port import Head
from ostler.store.viewing import view_store

__all__ = [
    "SYSTEM",
    "Actor",
    "AgentError",
    "Backend",
    "EngineStore",
    "EventPage",
    "Head",
    "Lifelike",
    "Seams",
    "Store",
    "SweepResult",
    "open_store",
    "view_store",
]
