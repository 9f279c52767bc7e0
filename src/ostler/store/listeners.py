"""Who wants to hear that the log has grown."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

Listener = Callable[[int], None]

_LOG = logging.getLogger(__name__)


class _Subscription:
    """One listening; the same listener may have several, and each ends by itself."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener


class Listeners:
    """Added from any thread, called from the one that writes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Replaced as a whole, so that the writer reads it without the lock.
        self._all: tuple[_Subscription, ...] = ()
        #: The number of the newest event that was committed; known before whoever committed it is answered.
        self.newest = 0

    def add(self, listener: Listener) -> Callable[[], None]:
        """Returns what ends it; ending it twice is harmless."""
        one = _Subscription(listener)
        with self._lock:
            self._all = (*self._all, one)
        return lambda: self._drop(one)

    def tell(self, sequence: int) -> None:
        for one in self._all:
            try:
                one.listener(sequence)
            except BaseException:  # noqa: BLE001 - the commit stands, and its callers are waiting to be told so
                self._drop(one)
                _LOG.exception("a listener failed at event %d and will not be called again", sequence)

    def _drop(self, one: _Subscription) -> None:
        with self._lock:
            self._all = tuple(other for other in self._all if other is not one)
