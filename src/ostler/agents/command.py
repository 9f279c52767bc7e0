"""An agent that is a program: the input of one run, and the meaning of its end.

Nothing is started here. Level process has a keeper run the program, once per request, and goes by these functions.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

from ostler.agents.base import Agent
from ostler.agents.commandspec import KIB, PLACEHOLDERS, WORKDIR, CommandSpec, ExitMeaning, PromptBy
from ostler.agents.context import AgentContext
from ostler.errors import AgentExecutionError, InvalidOperationError, ValidationError
from ostler.model.text import clean_text, unkeepable_faults
from ostler.model.validation import Fault, shown

#: Between SIGTERM and SIGKILL; in seconds.
STOP_GRACE_S = 2.0

_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 2000
#: What Linux allows for one argument, with its end mark.
_MAX_ARGUMENT = 128 * KIB - 1
UNKNOWN_EXIT = "ended, and its exit code is not known"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_BASE_ENV: Mapping[str, str] = MappingProxyType({"PATH": DEFAULT_PATH, "LANG": "C.UTF-8"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What to start and where."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    #: What it reads; without it there is nothing to read.
    stdin: bytes | None = None
    pty: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a run ended: by a code, by a signal, or neither of them is known."""

    code: int | None = None
    signal_name: str | None = None
    #: It was killed because it used more memory than this limit.
    memory_limit_mb: int | None = None

    @property
    def failure(self) -> str | None:
        """What a run did that did not end by its own exit code."""
        if self.memory_limit_mb is not None:
            return f"used more memory than its limit of {self.memory_limit_mb} MB and was killed (oom)"
        if self.signal_name is not None:
            return f"was killed by {self.signal_name}"
        return UNKNOWN_EXIT if self.code is None else None


#: How the names of prompt files begin.
_PROMPT = ".ostler-prompt-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one run happens."""

    cwd: Path
    workdir: Path
    prompt_file: Path | None = None
    #: Its TMPDIR, where it has one of its own.
    temp: Path | None = None
    #: The directory that was made for this run alone.
    made: Path | None = None

    def remove(self) -> None:
        """What was made for it. Never raises: the program may have taken it away, or put something in its place."""
        if self.prompt_file is not None:
            with suppress(OSError):
                self.prompt_file.unlink()
        for made in (self.temp, self.made):
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class CommandMaker:
    """Stands in the registry where a Python agent has its maker. A command has no object, so calling it raises."""

    program: str

    def __call__(self) -> Agent:
        raise InvalidOperationError(
            f"the command {self.program} runs only at isolation level process; spawn it at that level"
        )


def require_runnable(spec: CommandSpec, context: AgentContext) -> None:
    """Refuse now what would keep every run from starting."""
    spec.checked()
    words = spec.fill(dict.fromkeys(PLACEHOLDERS, ""), context.data)
    if "{" not in spec.argv[0]:
        _require_program(words[0], environment(spec, context)["PATH"], None if spec.cwd == WORKDIR else spec.cwd)


def start_of(spec: CommandSpec, context: AgentContext, place: Place, prompt: str) -> Start:
    """One run in full: its words, its environment, what it reads."""
    values = {
        "prompt": prompt,
        "prompt_file": str(place.prompt_file or ""),
        "workdir": str(place.workdir),
        "instance_id": str(context.instance_id),
        "attempt": str(context.attempt),
        "name": context.name,
    }
    argv = spec.fill(values, context.data)
    if spec.prompt_by is PromptBy.ARGUMENT and not spec.uses("prompt"):
        argv = (*argv, prompt)
    for word in argv:
        _require_argument(word)
    env = environment(spec, context, place)
    stdin = prompt.encode() if spec.prompt_by is PromptBy.STDIN else None
    return Start(argv=argv, env=env, cwd=place.cwd, stdin=stdin, pty=spec.pty)


def answer_of(
    spec: CommandSpec, ending: Ending, output: KeptOutput, seconds: float, dropped: int = 0
) -> dict[str, Any]:
    """What the agent answers for one run; `dropped` bytes never reached us. Raises for a run that failed.

    A run that a signal ended has failed, so no answer tells of a signal: the error does.
    """
    meaning = _meaning(spec, ending, output)
    return {
        "exit_code": ending.code,
        "meaning": meaning.value,
        "output": output.text(),
        "dropped_bytes": output.dropped + dropped,
        "duration_seconds": seconds,
    }


def environment(spec: CommandSpec, context: AgentContext, place: Place | None = None) -> dict[str, str]:
    """All that the program gets to see of our environment, and its identity. The spawn's own variables win."""
    inherited = {name: os.environ[name] for name in ("HOME", *spec.env) if name in os.environ}
    ours = {
        **identity(context.instance_id, context.attempt, None if place is None else place.workdir),
        "OSTLER_MAX_WORKER_THREADS": str(context.limits.max_worker_threads),
    }
    if place is not None and place.prompt_file is not None:
        ours["OSTLER_PROMPT_FILE"] = str(place.prompt_file)
    return {
        **_BASE_ENV,
        "TERM": "xterm-256color" if spec.pty else "dumb",
        "HOME": "/",
        **inherited,
        **(spec.set_env or {}),
        **context.env,
        **ours,
    }


def identity(instance_id: UUID, attempt: int, workdir: Path | None) -> dict[str, str]:
    """The variables by which a program knows which agent it is."""
    variables = {"OSTLER_INSTANCE": str(instance_id), "OSTLER_ATTEMPT": str(attempt)}
    return variables if workdir is None else {**variables, "OSTLER_WORKDIR": str(workdir)}


def place_of(spec: CommandSpec, context: AgentContext, prompt: str, key: str) -> Place:
    """The directory of one run and, if the program reads one, its prompt file, which `key` tells from others.

    The caller removes it when the run is over. Raises `OSError` when it cannot be made.
    """
    workdir = context.workdir
    made = None
    if workdir is None:
        # Never the manager's own directory: what runs here may do as it likes with it.
        workdir = made = Path(tempfile.mkdtemp(prefix="ostler-"))
    file = None
    if spec.prompt_by is PromptBy.FILE or spec.uses("prompt_file"):
        file = _write_prompt(prompt_file_of(workdir, key), prompt)
    cwd = workdir if spec.cwd == WORKDIR else Path(spec.cwd)
    temp = None if spec.driver is None else _make_temp(temp_of(key))
    return Place(cwd=cwd, workdir=workdir, prompt_file=file, temp=temp, made=made)


def temp_of(key: str) -> Path:
    """The TMPDIR of a run. Short: programs make sockets in it, and an address has room for 107 bytes."""
    return Path(tempfile.gettempdir()) / f"ostler-{key}"


def _make_temp(temp: Path) -> Path:
    if temp.exists():  # of a start that was cut off
        shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(mode=0o700)
    return temp


def prompt_file_of(workdir: Path, key: str) -> Path:
    return workdir / f"{_PROMPT}{key}.md"


def remove_without_work(workdir: Path) -> bool:
    """Remove a private workdir in which no agent has written; whether it is gone. A prompt that was left there, by a
    run that was cut off, is a file of ours and no work.
    """
    with suppress(OSError):
        entries = list(workdir.iterdir())
        if all(entry.match(f"{_PROMPT}*.md") and entry.is_file() and not entry.is_symlink() for entry in entries):
            for entry in entries:
                entry.unlink(missing_ok=True)
            workdir.rmdir()
    return not workdir.exists()


def _write_prompt(file: Path, prompt: str) -> Path:
    """Made anew and readable by its owner alone: the program, which writes there too, may have put something there."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as opened:
        opened.write(prompt)
    return file


def prompt_of(request: Any, instructions: str | None) -> str:
    """A request is a text, or a mapping with a text under "prompt". `instructions` stand before every prompt."""
    words = request.get("prompt") if isinstance(request, Mapping) else request
    if words is None and instructions is not None and (request is None or isinstance(request, Mapping)):
        words = ""
    if not isinstance(words, str):
        bound = 'must be a text, or a mapping with a text under "prompt"'
        raise ValidationError([Fault(field="request", bound=bound, value=shown(request))])
    faults = tuple(unkeepable_faults("prompt", words))
    if faults:
        raise ValidationError(faults)
    return "\n\n".join(part for part in (instructions, words) if part)


def _meaning(spec: CommandSpec, ending: Ending, output: KeptOutput) -> ExitMeaning:
    """The meaning of the exit; a failure is raised, with the last lines of the output."""
    how = ending.failure
    if how is None:
        meaning = spec.meaning(ending.code or 0)
        if meaning is not ExitMeaning.FAILED:
            return meaning
        how = f"failed with exit code {ending.code}"
    last = output.last_lines(_SHOWN_LINES, _SHOWN_CHARACTERS)
    raise AgentExecutionError(
        f"{spec.argv[0]} {how}" + (f"; its last lines:\n{last}" if last else " and said nothing"),
        exit_code=ending.code,
        signal=ending.signal_name,
        out_of_memory=ending.memory_limit_mb is not None,
    )


def _require_program(program: str, path: str, cwd: str | None) -> None:
    if os.sep in program and not program.startswith(os.sep):
        # Else relative to a directory that may not exist yet.
        if cwd is not None and shutil.which(os.path.join(cwd, program)) is None:  # noqa: PTH118 - no more than a path
            raise AgentExecutionError(f"there is no program {shown(program)} in {cwd}; write its full path")
        return
    if shutil.which(program, path=path) is None:
        raise AgentExecutionError(
            f"there is no program {shown(program)} on the agent's PATH ({path}); "
            "write its full path, or set PATH in its env"
        )


def _require_argument(word: str) -> None:
    if len(word.encode()) > _MAX_ARGUMENT:
        bound = f"must be shorter than {_MAX_ARGUMENT // KIB + 1} KiB; pass a long prompt by file or stdin"
        raise ValidationError([Fault(field="argument", bound=bound, value=f"{len(word.encode()) // KIB} KiB")])


# --- output ------------------------------------------------------------------------------------------


class KeptOutput:
    """The output of a program within a bound: its beginning, its end, and how much was dropped between them.

    Takes any amount and never holds more than twice its limit.
    """

    __slots__ = ("_half", "_head", "_tail", "_tail_dropped")

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self._tail_dropped = 0

    def feed(self, chunk: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        # Trimmed only now and then: moving the whole tail for every chunk would cost more than it saves.
        if len(self._tail) > 3 * self._half:
            self._trim()

    @property
    def dropped(self) -> int:
        return self._tail_dropped + max(len(self._tail) - self._half, 0)

    def text(self) -> str:
        self._trim()
        if not self._tail_dropped:
            return _decoded(self._head + self._tail)
        mark = f"\n… ({self._tail_dropped} bytes left out) …\n"
        return _decoded(self._head) + mark + _decoded(self._tail)

    def last_lines(self, count: int, limit: int) -> str:
        """The end of it, for an error message."""
        lines = self.text()[-limit:].rstrip().splitlines()
        return "\n".join(lines[-count:])

    def _trim(self) -> None:
        over = len(self._tail) - self._half
        if over > 0:
            del self._tail[:over]
            self._tail_dropped += over


def _decoded(data: bytes | bytearray) -> str:
    return clean_text(data.decode("utf-8", "replace"))
