"""An agent that is a program: what to run, with which words, walls and meanings of its exit codes."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated, Any

from ostler.errors import ValidationError
from ostler.model.record import Record, record
from ostler.model.text import environment_faults, name_faults, unkeepable_faults, variable_faults
from ostler.model.types import Interval, Parsed
from ostler.model.validation import Fault, shown

PLACEHOLDERS = frozenset({"prompt", "prompt_file", "workdir", "instance_id", "attempt", "name"})
CONTEXT = "context."
#: The value of `cwd` that stands for the workdir of the instance.
WORKDIR = "workdir"

KIB = 1024
MIB = 1024 * KIB

_CONTEXT_KEY = re.compile(r"context\.[^{}]+", re.DOTALL)
_EXIT_CODE = re.compile(r"0|[1-9][0-9]{0,2}")


class PromptBy(StrEnum):
    """How the program gets its prompt. Placeholders of `argv` are filled in any case."""

    FILE = "file"  #: in a file that only its owner may read: `{prompt_file}`, and $OSTLER_PROMPT_FILE
    STDIN = "stdin"  #: on its standard input, which then ends
    ARGUMENT = "argument"  #: where `{prompt}` stands, or as one more argument


class ExitMeaning(StrEnum):
    """What an exit code says about the work."""

    DONE = "done"
    FAILED = "failed"
    RETRY = "retry"  #: come again with the same request
    BLOCKED = "blocked"  #: cannot go on without help


class HomeKind(StrEnum):
    """Which home directory the program of a driver sees."""

    PRIVATE = "private"  #: one that belongs to the instance
    OWN = "own"  #: the user's own, with the settings and the sign-in of the programs there


_PLAIN_MEANINGS: Mapping[str, ExitMeaning] = MappingProxyType({"0": ExitMeaning.DONE})


def text_keys(value: Any) -> Any:
    """JSON has only text as keys; in Python an exit code is written as a number."""
    if not isinstance(value, Mapping):
        return value
    return {str(code) if type(code) is int else code: meaning for code, meaning in value.items()}


@record
class CommandSpec(Record):
    #: The program and its arguments; never a shell. `{prompt}`, `{prompt_file}`, `{workdir}`, `{instance_id}`,
    #: `{attempt}`, `{name}` and `{context.KEY}` are filled in; `{{` and `}}` stand for themselves.
    argv: tuple[str, ...]
    #: Names of variables that are passed on from the manager's environment. Others are not.
    env: tuple[str, ...] = ()
    set_env: Mapping[str, str] | None = None
    prompt_by: PromptBy = PromptBy.FILE
    #: By exit code, as a number or as text. Of the other codes 0 means done, and the rest mean failed.
    exit_codes: Annotated[Mapping[str, ExitMeaning] | None, Parsed(text_keys)] = None
    #: Whether the program sees a terminal.
    pty: bool = False
    #: "workdir", or an absolute path.
    cwd: str = WORKDIR
    #: How much of the output is kept, half of it from the beginning; the rest is counted.
    max_output_bytes: Annotated[int, Interval(ge=KIB, le=64 * MIB)] = MIB
    #: The driver that knows this program; see `ostler.drivers`. It adds the words that the program needs to `argv`.
    driver: str | None = None
    #: The model that the program of a driver is to use; a request may name another. None leaves it to the program.
    model: str | None = None
    #: Only for the program of a driver; None stands for the user's own.
    home: HomeKind | None = None

    def rules(self) -> Iterator[Fault]:
        yield from _argv_faults(self.argv)
        yield from variable_faults("env", self.env)
        yield from environment_faults("set_env", self.set_env or {})
        for code in self.exit_codes or ():
            if not _EXIT_CODE.fullmatch(code) or int(code) > 255:
                yield Fault(field="exit_codes", bound="must have exit codes of 0 to 255 as keys", value=shown(code))
        yield from _directory_faults(self.cwd)
        yield from name_faults("driver", self.driver)
        yield from name_faults("model", self.model)

    def meaning(self, code: int) -> ExitMeaning:
        return (self.exit_codes or {}).get(str(code)) or _PLAIN_MEANINGS.get(str(code), ExitMeaning.FAILED)

    def uses(self, placeholder: str) -> bool:
        return any(name == placeholder for argument in self.argv for _, name in _parts(argument))

    def fill(self, values: Mapping[str, str], context: Mapping[str, Any]) -> tuple[str, ...]:
        """The arguments with every placeholder filled in. Values are never read as templates."""
        faults: list[Fault] = []
        filled = tuple(
            "".join(text + _value(name, values, context, faults) for text, name in _parts(argument))
            for argument in self.argv
        )
        if faults:
            raise ValidationError(faults)
        return filled


def _directory_faults(cwd: str) -> Iterator[Fault]:
    if any(
        "\ud800" <= character <= "\udfff" for character in cwd
    ):  # as Python has what is no text in the name of a file
        bound = "must be a path that is UTF-8, for it is kept as text; rename the directory, or name a link to it"
        yield Fault(field="cwd", bound=bound, value=shown(cwd))
    else:
        yield from unkeepable_faults("cwd", cwd)
    if cwd != WORKDIR and not PurePath(cwd).is_absolute():
        yield Fault(field="cwd", bound=f"must be {WORKDIR} or an absolute path", value=shown(cwd))


def _parts(argument: str) -> Iterator[tuple[str, str | None]]:
    """Literal text and the placeholder after it; a format or a conversion makes it an unknown one."""
    for text, name, form, conversion in string.Formatter().parse(argument):
        odd = (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
        yield text, None if name is None else name + odd


def _value(name: str | None, values: Mapping[str, str], context: Mapping[str, Any], faults: list[Fault]) -> str:
    if name is None:
        return ""
    if name in values:
        return values[name]
    key = name.removeprefix(CONTEXT)
    if key == name or key not in context:
        faults.append(Fault(field=f"{{{name}}}", bound="is used by the command, but the spawn gave no such context"))
        return ""
    value = context[key]
    if value is None or isinstance(value, list | tuple | dict):
        faults.append(Fault(field=f"{{{name}}}", bound="must be text, a number or a truth value", value=shown(value)))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _argv_faults(argv: tuple[str, ...]) -> Iterator[Fault]:
    if not argv or argv[0] == "":
        yield Fault(field="argv", bound="must begin with a program")
    for index, argument in enumerate(argv):
        yield from unkeepable_faults(f"argv.{index}", argument)
        yield from _template_faults(f"argv.{index}", argument)


def _template_faults(field: str, argument: str) -> Iterator[Fault]:
    try:
        names = [name for _, name in _parts(argument) if name is not None]
    except ValueError:
        bound = "must have its braces in pairs; write {{ or }} for the character itself"
        yield Fault(field=field, bound=bound, value=shown(argument))
        return
    for name in names:
        if name not in PLACEHOLDERS and not _CONTEXT_KEY.fullmatch(name):
            allowed = ", ".join(f"{{{placeholder}}}" for placeholder in sorted(PLACEHOLDERS))
            bound = f"must use only {allowed} and {{context.KEY}}; write {{{{ for a brace"
            yield Fault(field=field, bound=bound, value=shown(f"{{{name}}}"))
