"""What is told of the ends of a keeper's units."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

_log = logging.getLogger("ostler.isolation")


class Tenant(Protocol):
    """A cell, or one run of a command, that has a unit at the keeper."""

    def has_ended(self, record: Mapping[str, Any]) -> None:
        """It and all that it started is gone."""
        raise NotImplementedError

    def was_lost(self) -> None:
        """The keeper was killed and with it all of this; it is proven gone, and how it ended is not known."""
        raise NotImplementedError

    def was_taken(self) -> None:
        """Another manager has taken over; it lives on there."""
        raise NotImplementedError


def tell(tenant: Tenant, status: Mapping[str, Any] | None, *, taken: bool = False) -> None:
    """An error in one tenant is logged, so that the others are told as well."""
    try:
        if taken:
            tenant.was_taken()
        elif status is None:
            tenant.was_lost()
        elif status.get("exit"):
            tenant.has_ended(status["exit"])
        # Else it lives: the keeper had only hung up on us.
    except Exception:  # noqa: BLE001 - logged
        _log.exception("the manager failed to take note of the end of a unit")
