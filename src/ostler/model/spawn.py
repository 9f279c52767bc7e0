"""What a caller asks for when an agent is to be spawned or terminated, and the definition that a spawn names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import urlsplit
from uuid import UUID

from ostler.home import TOKEN_VARIABLE
from ostler.model.access import HOME_WORKSPACE_ID
from ostler.model.context import context_faults, json_faults
from ostler.model.record import PartialRecord, Record, record
from ostler.model.states import AgentPriority, Enforcement, IsolationLevel, ProbeType, RestartPolicyType
from ostler.model.text import MAX_NAME, MAX_REASON, name_faults, plain_text_faults, tag_faults, unkeepable_faults
from ostler.model.types import MAX_COUNT, Duration, Interval, Megabytes, Moment, Parsed
from ostler.model.validation import Fault, named, shown

NIL = UUID(int=0)
MAX_TARGET = 2000
MAX_SOURCE = 4096
MAX_JOB_BYTES = 1024 * 1024
_SECOND = timedelta(seconds=1)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

CpuPercent = Annotated[int, Interval(ge=0, le=102_400)]
InitializationTimeout = Annotated[Duration, Interval(ge=timedelta(milliseconds=100), le=timedelta(hours=1))]


@record
class ResourceLimits(PartialRecord):
    #: "256M" or a number of megabytes. Admission also compares it with the machine's memory.
    max_memory_mb: Annotated[Megabytes, Interval(ge=64, le=16 * 1024 * 1024)] = 512
    #: 100 is one core; 0 means unlimited. Admission also compares it with the machine's cores.
    max_cpu_percent: CpuPercent = 0
    #: A call that ignores its cancellation has 5 s more before the agent is ended.
    execution_timeout: Annotated[Duration, Interval(ge=_SECOND, le=timedelta(days=7))] = timedelta(minutes=5)
    max_worker_threads: Annotated[int, Interval(ge=1, le=32)] = 4
    max_concurrent_tasks: Annotated[int, Interval(ge=1, le=100)] = 10
    #: 0 means the default of the workspace.
    max_tokens_per_minute: Annotated[int, Interval(ge=0)] = 0


@record
class RestartPolicy(Record):
    """Four brakes: retries since it was last healthy, a circuit breaker, a burst window, a budget for life."""

    type: RestartPolicyType = RestartPolicyType.EXPONENTIAL
    max_retries: Annotated[int, Interval(ge=0, le=10)] = 3
    initial_delay: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(minutes=5))] = _SECOND
    max_delay: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(minutes=10))] = timedelta(minutes=1)
    backoff_multiplier: Annotated[float, Interval(ge=1.1, le=5.0)] = 2.0
    use_jitter: bool = True
    #: Failing continuously for this long ends the restarts.
    circuit_breaker_timeout: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(days=1))] = timedelta(minutes=5)
    #: At most this many starts within `burst_window`; a later restart waits. Linear and exponential only.
    burst_limit: Annotated[int, Interval(ge=1, le=100)] = 5
    burst_window: Annotated[Duration, Interval(ge=_SECOND, le=timedelta(hours=1))] = timedelta(seconds=60)
    #: At most this many restarts in the whole life of the instance.
    lifetime_limit: Annotated[int, Interval(ge=0, le=10_000)] = 100

    @classmethod
    def default(cls) -> RestartPolicy:
        return cls()

    @classmethod
    def none(cls) -> RestartPolicy:
        return cls(type=RestartPolicyType.NONE, max_retries=0)

    @classmethod
    def immediate(cls) -> RestartPolicy:
        return cls(type=RestartPolicyType.IMMEDIATE, max_retries=3, initial_delay=timedelta(0))

    def rules(self) -> Iterator[Fault]:
        if self.max_delay < self.initial_delay:
            bound = f"must be at least {self.spelled('initial_delay')} ({shown(self.initial_delay)})"
            yield Fault(field=self.spelled("max_delay"), bound=bound, value=shown(self.max_delay))


def parse_restart(value: Any) -> Any:
    """Read "exponential", "immediate", "no" or "on-failure:3"; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    word, _, number = value.strip().lower().partition(":")
    word = {"no": "none", "never": "none", "on-failure": "exponential"}.get(word, word)
    if word not in {*RestartPolicyType} or (number and not number.isdecimal()):
        words = ", ".join(RestartPolicyType)
        raise ValueError(f"must be a restart policy, or one of {words}, on-failure:N")
    policy = {"none": RestartPolicy.none, "immediate": RestartPolicy.immediate}.get(word, RestartPolicy)()
    return policy.evolve(
        type=RestartPolicyType(word), **({"max_retries": int(number)} if number and word != "none" else {})
    )


# --- health checks -----------------------------------------------------------------------------------

_SCHEMES = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpTarget:
    host: str
    port: int
    tls: bool
    #: Path and query, as they are sent.
    path: str
    #: The host as its header names it: in brackets where it needs them, with the port where it is unusual.
    authority: str


def http_target(text: str) -> HttpTarget:
    """From a URL without credentials, of characters that may stand in a request line."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("must be a URL of printable ASCII characters without spaces")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("must be a URL with a host and a port from 1 to 65535") from None
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ValueError("must be a URL that begins with http:// or https:// and names a host")
    if "@" in parts.netloc:
        raise ValueError("must not contain a user name or password")
    if port == 0:
        raise ValueError("must be a URL with a host and a port from 1 to 65535")
    usual = _SCHEMES[parts.scheme]
    host = parts.hostname
    in_brackets = f"[{host}]" if ":" in host else host
    return HttpTarget(
        host=host,
        port=port or usual,
        tls=parts.scheme == "https",
        path=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        authority=in_brackets if port in {None, usual} else f"{in_brackets}:{port}",
    )


def tcp_target(text: str) -> tuple[str, int]:
    """From host:port; the host in brackets where it holds colons itself."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("must put an IPv6 address into brackets, as in [::1]:80")
    if not colon or not host or not host.isascii() or not host.isprintable() or set(host) & set(" []/@"):
        raise ValueError("must be host:port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise ValueError("must end with a port from 1 to 65535")
    return host, int(port)


def command_target(text: str) -> tuple[str, ...]:
    """From a command line, split as a shell splits it; no shell runs it."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"must be a command line that splits into words ({str(error).lower()})") from None
    if not words or not words[0]:
        raise ValueError("must name a program")
    if any("\0" in word for word in words):
        raise ValueError("must not contain NUL")
    return words


#: How the target of each kind of probe is read. A `ValueError` has the words that follow the name of the field.
_TARGETS: Mapping[ProbeType, Callable[[str], object]] = MappingProxyType(
    {ProbeType.HTTP: http_target, ProbeType.TCP: tcp_target, ProbeType.COMMAND: command_target}
)


@record
class HealthCheckConfig(Record):
    probe: ProbeType = ProbeType.HEARTBEAT
    #: A URL for http, host:port for tcp, a command line for command.
    target: str | None = None
    interval: Annotated[Duration, Interval(ge=_SECOND, le=timedelta(minutes=10))] = timedelta(seconds=5)
    timeout: Annotated[Duration, Interval(ge=timedelta(milliseconds=100), le=timedelta(minutes=5))] = timedelta(
        seconds=3
    )
    failure_threshold: Annotated[int, Interval(ge=1, le=100)] = 3
    success_threshold: Annotated[int, Interval(ge=1, le=100)] = 2
    #: Failures so soon after a start do not count.
    start_period: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(hours=1))] = timedelta(0)

    @property
    def is_custom(self) -> bool:
        return self.probe is not ProbeType.HEARTBEAT

    def rules(self) -> Iterator[Fault]:
        unkeepable = tuple(plain_text_faults("target", self.target, MAX_TARGET))
        yield from unkeepable
        parse = _TARGETS.get(self.probe)
        if parse is not None and not self.target:
            yield Fault(field="target", bound=f"is required for a {self.probe} probe")
        elif parse is not None and self.target is not None and not unkeepable:
            try:
                parse(self.target)
            except ValueError as error:
                yield Fault(field="target", bound=str(error), value=shown(self.target))
        if self.timeout > self.interval:
            bound = f"must be at most the interval ({shown(self.interval)})"
            yield Fault(field="timeout", bound=bound, value=shown(self.timeout))


# --- terminals ---------------------------------------------------------------------------------------


@record
class TerminalSize(Record):
    rows: Annotated[int, Interval(ge=1, le=9999)] = 40
    columns: Annotated[int, Interval(ge=1, le=9999)] = 120


# --- spawn and terminate -----------------------------------------------------------------------------


@record
class AgentSpawnOptions(PartialRecord):
    """A spawn lays the fields that it names over those of the definition."""

    #: An agent that ignores its cancellation has 5 s more before it is ended.
    initialization_timeout: InitializationTimeout = timedelta(seconds=30)
    #: None means the limits of the definition.
    resource_limits: ResourceLimits | None = None
    isolation_level: IsolationLevel = IsolationLevel.THREAD
    #: None means no automatic restart. Text such as "exponential" or "on-failure:3" is understood.
    restart_policy: Annotated[RestartPolicy | None, Parsed(parse_restart)] = None
    #: None means a heartbeat.
    health_check: HealthCheckConfig | None = None
    #: None makes one from the definition's name and a short id.
    name: str | None = None
    tags: tuple[str, ...] | None = None
    priority: AgentPriority = AgentPriority.NORMAL
    #: The weakest hold on a limit that the caller accepts.
    min_enforcement: Enforcement = Enforcement.ADVISORY
    #: The directory to work in. The instance neither makes nor removes it. None: a private one inside the home.
    workdir: str | None = None
    #: Extra variables of the agent's process.
    env: Mapping[str, str] | None = None
    #: The command has a terminal of this size, which people attach to. None: only where its definition says so.
    terminal: TerminalSize | None = None
    #: The standard input of the command stays open for `write_input`.
    stdin: bool = False

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from tag_faults("tags", self.tags or ())
        if self.workdir is not None:
            yield from unkeepable_faults("workdir", self.workdir)
            if not self.workdir.startswith("/"):
                yield Fault(field="workdir", bound="must be an absolute path", value=shown(self.workdir))
        for name, value in (self.env or {}).items():
            if not _VARIABLE.fullmatch(name):
                bound = "must name variables by letters, digits and _"
                yield Fault(field="env", bound=bound, value=shown(name))
            if name == TOKEN_VARIABLE:
                bound = f"must not hold {name}: an agent does not act as the person who starts it"
                yield Fault(field="env", bound=bound)
            yield from unkeepable_faults(f"env.{named(name)}", value)


def parse_definition_id(value: Any) -> Any:
    """Read the text of an id as the id that it is; a name stays a name."""
    if not isinstance(value, UUID | str):
        raise ValueError("must be the id or the name of a definition")  # noqa: TRY004 - becomes a fault
    try:
        return UUID(value) if isinstance(value, str) else value
    except ValueError:
        return value


@record
class SpawnRequest(Record):
    #: The id of a definition, or the name of a registered one.
    agent_definition_id: Annotated[UUID | str, Parsed(parse_definition_id)]
    #: The directory of the project that it is spawned in, where that is not the project of the home.
    project: str | None = None
    options: AgentSpawnOptions | None = None
    #: Keys in any case; JSON values.
    context: Mapping[str, Any] | None = None
    task_id: UUID | None = None
    crew: str | None = None
    #: The id of a crew member, stable over its generations.
    agent_id: str | None = None
    generation: Annotated[int, Interval(ge=0, le=MAX_COUNT)] = 0
    #: A request that the instance works on as soon as it is ready, and again after a restart. When it is answered the
    #: instance is terminated; when it fails the instance fails, and its restart policy decides.
    job: Mapping[str, Any] | None = None

    def is_valid(self) -> bool:
        """Whether a definition is named; `validate()` checks everything."""
        return self.agent_definition_id not in {NIL, ""}

    def rules(self) -> Iterator[Fault]:
        if not self.is_valid():
            yield Fault(field="agent_definition_id", bound="must name a definition")
        yield from plain_text_faults("agent_definition_id", self.agent_definition_id, MAX_NAME)
        yield from plain_text_faults("project", self.project, MAX_SOURCE)
        yield from context_faults("context", self.context)
        yield from json_faults("job", self.job, MAX_JOB_BYTES)
        yield from name_faults("crew", self.crew)
        yield from name_faults("agent_id", self.agent_id)


@record
class TerminationOptions(Record):
    #: 1 s to 5 min; 0 means at once, as `immediate()` has it.
    graceful_timeout: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(minutes=5))] = timedelta(seconds=10)
    force_if_timeout: bool = True
    reason: str | None = None
    persist_final_state: bool = False

    @classmethod
    def default(cls) -> TerminationOptions:
        return cls()

    @classmethod
    def immediate(cls) -> TerminationOptions:
        return cls(graceful_timeout=timedelta(0), force_if_timeout=True, reason="Immediate termination requested")

    def rules(self) -> Iterator[Fault]:
        yield from plain_text_faults("reason", self.reason, MAX_REASON)
        if timedelta(0) < self.graceful_timeout < _SECOND:
            bound = "must be 1 s to 5 min, or 0 for at once"
            yield Fault(field="graceful_timeout", bound=bound, value=shown(self.graceful_timeout))


@record
class Definition(Record):
    """What an agent is: a name, where it comes from, and its whole manifest."""

    definition_id: UUID
    workspace_id: UUID = HOME_WORKSPACE_ID
    name: str
    kind: str
    manifest: Mapping[str, Any]
    source: str | None = None
    created_at: Moment
    updated_at: Moment
    version: Annotated[int, Interval(ge=1, le=MAX_COUNT)] = 1

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from plain_text_faults("source", self.source, MAX_SOURCE)
        yield from json_faults("manifest", self.manifest)
