"""The terminal and the standard input of a command over a holder."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar
from uuid import UUID

from ostler.errors import AgentGoneError, InvalidOperationError
from ostler.isolation.base import Input, Screen
from ostler.isolation.holder import Holder, HolderError

T = TypeVar("T")


class HeldConsole:
    def __init__(self, holder: Holder, instance_id: UUID) -> None:
        self._holder = holder
        self._name = instance_id.hex

    async def read(self, after: Screen | None) -> Screen:
        return await self._ask(self._holder.read_terminal(self._name, after))

    async def write(self, data: Input) -> tuple[int, bool]:
        return await self._ask(self._holder.write_input(self._name, data))

    async def resize(self, size: tuple[int, int] | None, *, redraw: bool = False) -> None:
        await self._ask(self._holder.resize(self._name, size, redraw=redraw))

    async def _ask(self, request: Coroutine[Any, Any, T]) -> T:
        try:
            return await request
        except HolderError as error:
            if error.kind in {"lost", "unknown"}:
                raise AgentGoneError from error
            raise InvalidOperationError(str(error)) from error
