"""From a request to the start of a run: what of the request is for the driver, its home, its command line."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.agents.command import Place, Start, environment, start_of
from ostler.agents.commandspec import CommandSpec, HomeKind
from ostler.agents.context import AgentContext
from ostler.drivers.base import Driver, Order, SessionUsage
from ostler.errors import AgentExecutionError, ValidationError
from ostler.model.text import name_faults
from ostler.model.validation import Fault, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What a request says to the driver beside its prompt."""

    model: str | None = None
    #: A session of the same program that is to go on.
    session: str | None = None
    #: What that session had used, as `session_usage` of its last answer has it.
    session_usage: SessionUsage | None = None
    #: Names a private home that several instances share, one after another; else each has its own.
    home: UUID | None = None

    @classmethod
    def of(cls, request: Any) -> Wishes:
        """Raises `ValidationError` for a name that no program could take as one."""
        fields = request if isinstance(request, Mapping) else {}
        faults = [fault for name in ("model", "session") for fault in _word_faults(name, fields.get(name))]
        home = fields.get("home")
        if home is not None and not _is_id(home):
            faults.append(Fault(field="request.home", bound="must be an id", value=shown(home)))
        if faults:
            raise ValidationError(faults)
        usage = fields.get("session_usage")
        return cls(
            model=fields.get("model"),
            session=fields.get("session"),
            session_usage=None if usage is None else SessionUsage.from_dict(usage),
            home=None if home is None else UUID(home),
        )


def _is_id(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(UUID(value))
    except ValueError:
        return False


def _word_faults(name: str, value: Any) -> Iterator[Fault]:
    if value is None:
        return
    if not isinstance(value, str) or value.startswith("-"):  # else it would be an option of the program
        yield Fault(field=f"request.{name}", bound="must be a name", value=shown(value))
    yield from name_faults(f"request.{name}", value)


def require_installed(driver: Driver, spec: CommandSpec, context: AgentContext) -> None:
    """Say how to install a program that is not there."""
    path = environment(spec, context)["PATH"]
    if shutil.which(spec.argv[0], path=path) is None:
        raise AgentExecutionError(
            f"{spec.argv[0]} is not installed: there is no such program on the agent's PATH ({path}); "
            f"install it with: {driver.install}"
        )


def driven_start(  # noqa: PLR0913, PLR0917 - each is a side of the start
    driver: Driver, spec: CommandSpec, context: AgentContext, place: Place, prompt: str, wishes: Wishes, homes: Path
) -> Start:
    """As `start_of`, with what the driver adds. `homes` is where private homes are."""
    start = start_of(spec, context, place, prompt)
    env = dict(start.env)
    private = None
    if spec.home is HomeKind.PRIVATE and "HOME" not in context.env:
        private = homes / str(wishes.home or context.instance_id)
        env["HOME"] = str(private)
    if place.temp is not None and "TMPDIR" not in context.env:
        env["TMPDIR"] = str(place.temp)
    order = Order(
        program=start.argv[0],
        arguments=tuple(start.argv[1:]),
        model=wishes.model or spec.model,
        session=wishes.session,
        env=env,
        private_home=private,
        is_root=os.geteuid() == 0,
    )
    if private is not None and not private.is_dir():
        _make_home(private, driver.home_files(order))
    env |= driver.environment(order)
    return replace(start, argv=tuple(driver.argv(order)), env=env, stdin=prompt.encode())


def _make_home(home: Path, files: Mapping[str, str]) -> None:
    """All of it or nothing: a home that is there is complete."""
    making = home.with_name(f".{home.name}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(mode=0o700, parents=True)
    for name, text in files.items():
        file = making / name
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o600)
    with contextlib.suppress(FileExistsError):
        making.rename(home)
