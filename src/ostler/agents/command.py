"""The agent that is a program: runs it once per request, and says what came of it.

The functions below the class are also what the process level goes by, where a keeper runs the program.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ostler.agents.base import Agent
from ostler.agents.child import Child, Ending, Start
from ostler.agents.commandspec import KIB, PLACEHOLDERS, WORKSPACE, CommandSpec, ExitMeaning, PromptBy
from ostler.agents.context import AgentContext
from ostler.agents.output import KeptOutput
from ostler.errors import AgentExecutionError, InvalidOperationError, ValidationError
from ostler.model import Fault, shown
from ostler.model.text import unkeepable_faults

#: How long the program has to end when it is asked to, before it is forced; in seconds.
STOP_GRACE_S = 2.0
#: How long output is awaited from somebody who left the group and outlived the program; in seconds.
DRAIN_S = 1.0

_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 2000
#: What Linux allows for one argument, with its end mark.
_MAX_ARGUMENT = 128 * KIB - 1
_TAKEN = "ended, but somebody else took its exit code; does the program around Ostler ignore SIGCHLD?"
_BASE_ENV: Mapping[str, str] = MappingProxyType({"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one run happens."""

    cwd: Path
    workspace: Path
    prompt_file: Path | None


class CommandAgent(Agent):
    """A request is a text, or a mapping with a text under "prompt". `instructions` stand before every prompt.

    The answer is a mapping: exit_code, meaning, output, dropped_bytes, duration_seconds. A run that failed raises.
    The program gets the variables that its spec names, who it is, and little else.
    """

    def __init__(self, spec: CommandSpec, *, instructions: str | None = None) -> None:
        self.spec = spec
        self._instructions = instructions
        self._context: AgentContext | None = None
        self._children: set[Child] = set()

    def initialize(self, context: AgentContext) -> None:
        """Find out now what would keep every run from starting."""
        require_runnable(self.spec, context)
        self._context = context

    async def process(self, request: Any) -> dict[str, Any]:
        if self._context is None:
            raise InvalidOperationError("a command is initialised before it runs")
        prompt = prompt_of(request, self._instructions)
        output = KeptOutput(self.spec.max_output_bytes)
        began = self._context.clock.mono()
        with place_of(self.spec, self._context, prompt) as place:
            ending = await self._run(start_of(self.spec, self._context, place, prompt), output, self._context)
        return answer_of(self.spec, ending, output, self._context.clock.mono() - began)

    async def shutdown(self) -> None:
        """Nothing that it started is left running."""
        await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in tuple(self._children)))

    async def _run(self, start: Start, output: KeptOutput, context: AgentContext) -> Ending:
        try:
            child = Child(start, output, context.clock)
        except OSError as error:
            raise AgentExecutionError(why_not(error, start)) from error
        self._children.add(child)
        try:
            ending = await child.wait()
            await child.drain(DRAIN_S)
        except asyncio.CancelledError:
            await child.stop(STOP_GRACE_S)
            raise
        finally:
            self._children.discard(child)
            child.close()
        return ending


def require_runnable(spec: CommandSpec, context: AgentContext) -> None:
    """Refuse now what would keep every run from starting."""
    spec.validate().require()
    words = spec.fill(dict.fromkeys(PLACEHOLDERS, ""), context.data)
    if "{" not in spec.argv[0]:
        _require_program(words[0], environment(spec, context)["PATH"])


def start_of(spec: CommandSpec, context: AgentContext, place: Place, prompt: str) -> Start:
    """One run in full: its words, its environment, what it reads."""
    values = {
        "prompt": prompt,
        "prompt_file": str(place.prompt_file or ""),
        "workspace": str(place.workspace),
        "instance_id": str(context.instance_id),
        "attempt": str(context.attempt),
        "name": context.name,
    }
    argv = spec.fill(values, context.data)
    if spec.prompt_by is PromptBy.ARGUMENT and not spec.uses("prompt"):
        argv = (*argv, prompt)
    for word in argv:
        _require_argument(word)
    env = environment(spec, context, place.prompt_file)
    stdin = prompt.encode() if spec.prompt_by is PromptBy.STDIN else None
    return Start(argv=argv, env=env, cwd=place.cwd, stdin=stdin, pty=spec.pty)


def answer_of(
    spec: CommandSpec, ending: Ending, output: KeptOutput, seconds: float, dropped: int = 0
) -> dict[str, Any]:
    """What the agent answers for one run; `dropped` bytes never reached us. Raises for a run that failed."""
    meaning = _meaning(spec, ending, output)
    return {
        "exit_code": ending.code,
        "meaning": meaning.value,
        "output": output.text(),
        "dropped_bytes": output.dropped + dropped,
        "duration_seconds": seconds,
    }


def environment(spec: CommandSpec, context: AgentContext, prompt_file: Path | None = None) -> dict[str, str]:
    """All that the program gets to see of our environment, and who it is."""
    given = {name: os.environ[name] for name in ("HOME", *spec.env) if name in os.environ}
    ours = {"OSTLER_INSTANCE_ID": str(context.instance_id), "OSTLER_ATTEMPT": str(context.attempt)}
    if prompt_file is not None:
        ours["OSTLER_PROMPT_FILE"] = str(prompt_file)
    return {
        **_BASE_ENV,
        "TERM": "xterm-256color" if spec.pty else "dumb",
        "HOME": "/",
        **given,
        **(spec.set_env or {}),
        **ours,
    }


@contextmanager
def place_of(spec: CommandSpec, context: AgentContext, prompt: str) -> Iterator[Place]:
    """The directory of the run and, if the program reads one, its prompt file; what was made here is removed."""
    with ExitStack() as made:
        workspace = context.workspace
        if workspace is None:
            # Never the manager's own directory: what runs here may do as it likes with it.
            directory = tempfile.TemporaryDirectory(prefix="ostler-", ignore_cleanup_errors=True)
            workspace = Path(made.enter_context(directory))
        file = None
        if spec.prompt_by is PromptBy.FILE or spec.uses("prompt_file"):
            file = _write_prompt(workspace, prompt)
            made.callback(_remove, file)
        yield Place(cwd=workspace if spec.cwd == WORKSPACE else Path(spec.cwd), workspace=workspace, prompt_file=file)


def _write_prompt(directory: Path, prompt: str) -> Path:
    # A name that nobody can foresee, made anew and readable by its owner alone.
    descriptor, name = tempfile.mkstemp(prefix=".ostler-prompt-", suffix=".md", dir=directory)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
        file.write(prompt)
    return Path(name)


def _remove(file: Path) -> None:
    # The program may have taken it away, or put something else in its place.
    with suppress(OSError):
        file.unlink()


def prompt_of(request: Any, instructions: str | None) -> str:
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
    """What the exit says; a failure is raised, with the end of what the program said."""
    if ending.signal_name is not None:
        how = f"was killed by {ending.signal_name}"
    elif ending.code is None:
        how = _TAKEN
    else:
        meaning = spec.meaning(ending.code)
        if meaning is not ExitMeaning.FAILED:
            return meaning
        how = f"failed with exit code {ending.code}"
    last = output.last_lines(_SHOWN_LINES, _SHOWN_CHARACTERS)
    raise AgentExecutionError(f"{spec.argv[0]} {how}" + (f"; its last lines:\n{last}" if last else " and said nothing"))


def _require_program(program: str, path: str) -> None:
    if os.sep in program and not program.startswith(os.sep):
        return  # Relative to a directory that may not exist yet.
    if shutil.which(program, path=path) is None:
        bound = f"must be a program on the agent's PATH ({path}); write its full path, or add PATH to env"
        raise ValidationError([Fault(field="argv.0", bound=bound, value=shown(program))])


def _require_argument(word: str) -> None:
    if len(word.encode()) > _MAX_ARGUMENT:
        bound = f"must be shorter than {_MAX_ARGUMENT // KIB + 1} KiB; pass a long prompt by file or stdin"
        raise ValidationError([Fault(field="argument", bound=bound, value=f"{len(word.encode()) // KIB} KiB")])


def why_not(error: OSError, start: Start) -> str:
    program = start.argv[0]
    if error.errno == errno.E2BIG:
        return f"the arguments of {program} are too long together; pass the prompt by file or stdin"
    if str(error.filename) == str(start.cwd):
        return f"{program} cannot run in {start.cwd}: {error.strerror}"
    if error.errno == errno.ESRCH:
        return f"{program} {_TAKEN}"
    return f"{program} cannot be run: {error.strerror}"
