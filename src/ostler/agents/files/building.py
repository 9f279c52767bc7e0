"""From the values of the `lifecycle` key to the records: what a spawn gets, and how an agent is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from ostler.agents.commandspec import CommandSpec, ExitMeaning, PromptBy
from ostler.agents.files.checking import leaves, required_one
from ostler.agents.files.forms import DRIVERS
from ostler.agents.files.keys import DRIVER, HEALTHCHECK, LIFECYCLE, LIMITS, RESTART, WORKTREE, Key
from ostler.agents.files.page import Page, Trail
from ostler.model.record import Record
from ostler.model.spawn import AgentSpawnOptions, HealthCheckConfig, ResourceLimits, RestartPolicy
from ostler.model.states import IsolationLevel, ProbeType, RestartPolicyType

#: The most that a policy admits. "Always" still ends when an agent fails without ever becoming healthy.
ALWAYS_RETRIES = 10
_POLICIES: Mapping[str, RestartPolicy] = MappingProxyType(
    {
        "no": RestartPolicy.none(),
        "always": RestartPolicy(max_retries=ALWAYS_RETRIES),
        "on-failure": RestartPolicy(),
        "immediate": RestartPolicy.immediate(),
        "linear": RestartPolicy(type=RestartPolicyType.LINEAR),
        "exponential": RestartPolicy(),
    }
)
_ONLY_COMMANDS = ("prompt", "exit-codes", "pty")


class DriverKind(StrEnum):
    ACP = "acp"
    COMMAND = "command"
    PYTHON = "python"


@dataclass(frozen=True, kw_only=True)
class MakerSource(Record):
    """How to make the agent that a file describes. Nothing of it was imported or run yet."""

    kind: DriverKind
    #: The name of an ACP driver, the program of a command, or "module:Class".
    target: str
    command: CommandSpec | None = None
    #: False where the file names no driver and this is what its folder stands for.
    declared: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    source: MakerSource
    options: AgentSpawnOptions | None
    #: The word of the file; a worktree is a process with a workdir of its own.
    isolation: str | None
    kept: dict[str, Any]


def isolation_level(word: str) -> IsolationLevel:
    return IsolationLevel.PROCESS if word == WORKTREE else IsolationLevel(word)


def build(page: Page, values: Mapping[str, Any], trail: Trail, fallback: str) -> Built:
    """`fallback` is the ACP driver of a file that names no driver."""
    source = _source(page, values, trail, fallback)
    isolation = values.get("isolation")
    given: dict[str, Any] = {
        "isolation_level": isolation_level(isolation) if isolation else None,
        "resource_limits": _limits(values.get("limits", {})),
        "restart_policy": _restart(values["restart"]) if "restart" in values else None,
        "health_check": _health(page, values.get("healthcheck", {}), (*trail, "healthcheck")),
    }
    options = {name: value for name, value in given.items() if value is not None}
    return Built(
        source=source,
        options=AgentSpawnOptions(**options) if options else None,
        isolation=isolation,
        kept=_kept(values, source),
    )


def _source(page: Page, values: Mapping[str, Any], trail: Trail, fallback: str) -> MakerSource:
    driver = values.get("driver", {})
    if "driver" in values and not required_one(page, driver, DRIVERS, (*trail, "driver")):
        driver = {}
    if "command" in driver:
        spec = CommandSpec(
            argv=tuple(driver["command"]),
            env=tuple(values.get("env", ())),
            prompt_by=PromptBy(values.get("prompt", PromptBy.FILE)),
            exit_codes={code: ExitMeaning(word) for code, word in values.get("exit-codes", {}).items()} or None,
            pty=values.get("pty", False),
        )
        return MakerSource(kind=DriverKind.COMMAND, target=spec.argv[0], command=spec)
    if not page.is_blamed((*trail, "driver")):
        for name in _ONLY_COMMANDS:
            if name in values:
                page.blame((*trail, name), "is only for a driver that is a command")
    for kind, target in driver.items():
        return MakerSource(kind=DriverKind(kind), target=target)
    return MakerSource(kind=DriverKind.ACP, target=fallback, declared=False)


def _fields(key: Key, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group by the names of the record that they go to."""
    places = {inner.name: inner.field.rpartition(".")[2] for inner in key.keys if inner.field}
    return {places[name]: value for name, value in values.items() if name in places}


def _limits(values: Mapping[str, Any]) -> ResourceLimits | None:
    fields = _fields(LIMITS, values)
    if "max_memory_mb" in fields:
        fields["max_memory_mb"] = math.ceil(fields["max_memory_mb"] / 1024**2)
    return ResourceLimits(**fields) if fields else None


def _restart(values: Mapping[str, Any]) -> RestartPolicy:
    base = _POLICIES[values.get("policy", "on-failure")]
    fields = _fields(RESTART, values)
    fields.pop("type", None)
    # Of the two delays the one that is written counts; the other, unwritten, follows.
    if "initial_delay" in fields:
        fields.setdefault("max_delay", max(base.max_delay, fields["initial_delay"]))
    elif "max_delay" in fields:
        fields["initial_delay"] = min(base.initial_delay, fields["max_delay"])
    return base.evolve(**fields)


def _health(page: Page, values: Mapping[str, Any], trail: Trail) -> HealthCheckConfig | None:
    fields = _fields(HEALTHCHECK, values)
    if not fields:
        return None
    probe = ProbeType(values.get("probe", ProbeType.HEARTBEAT))
    if "heartbeat" in values and "interval" in values:
        page.blame((*trail, "heartbeat"), "and interval are the same; keep one of them")
    elif "heartbeat" in values and probe is not ProbeType.HEARTBEAT:
        page.blame((*trail, "heartbeat"), f"does not go with a {probe} probe; write interval")
    fields["probe"] = probe
    plain = HealthCheckConfig()
    fields.setdefault("timeout", min(plain.timeout, fields.get("interval", plain.interval)))
    return HealthCheckConfig(**fields)


def _kept(values: Mapping[str, Any], source: MakerSource) -> dict[str, Any]:
    """What no record of today holds, as JSON: durations in seconds, sizes in bytes."""
    kept: dict[str, Any] = {}
    for key, trail in leaves(LIFECYCLE):
        if key.field or trail[0] == DRIVER.name:
            continue
        found: Any = values
        for part in trail:
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            _put(kept, trail, found.total_seconds() if isinstance(found, timedelta) else found)
    if values.get("isolation") == WORKTREE:
        kept["isolation"] = WORKTREE
    if values.get("restart", {}).get("policy") == "always":
        kept["restart"] = "always"
    if source.kind is not DriverKind.COMMAND:
        if source.declared:
            kept["driver"] = {source.kind.value: source.target}
        if "env" in values:
            kept["env"] = values["env"]
    return kept


def _put(kept: dict[str, Any], trail: Trail, value: Any) -> None:
    place: Any = kept
    for part in trail[:-1]:
        place = place.setdefault(part, {})
    place[trail[-1]] = value
