"""A group of commands that are imported when they are called, not when they are listed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where a command lives, and what the list says about it."""

    module: str
    attribute: str
    summary: str


class LazyGroup(click.Group):
    def __init__(self, entries: Mapping[str, Entry], **attributes: Any) -> None:
        super().__init__(**attributes)
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        entry = self._entries.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(import_module(entry.module), entry.attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], self._entries, n=1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]}?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Click would import every command to ask for its help; the entries know it already."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self._entries.items()])
