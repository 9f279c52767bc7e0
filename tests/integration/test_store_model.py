from __future__ import annotations

from typing import TypeVar

R = TypeVar("R")
