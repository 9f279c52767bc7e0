"""One agent from one file: Markdown with front matter, or the TOML of Codex. No module is imported."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ostler.agents.base import AgentMaker
from ostler.agents.registry import MAX_DESCRIPTION, AgentManifest, definition_id, maker_of
from ostler.definitions.keys import CLAUDE, AgentFile, DriverKeys, LifecycleKeys
from ostler.definitions.parse import Document, UnreadableError, read_toml, read_yaml
from ostler.errors import DefinitionError, ValidationError
from ostler.model.record import Record
from ostler.model.validation import Fault, as_written, named

MAX_BYTES = 256 * 1024
#: Faults of one file that are shown.
MAX_FAULTS = 100
#: What runs an agent whose file of Codex names no driver.
CODEX = "codex"

_FENCE = "---"
_LIFECYCLE = "lifecycle"
_CODEX_PROMPT = "developer_instructions"

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFault:
    """One mistake in a file. Line 0 is the file as a whole."""

    path: str
    line: int
    sentence: str

    @property
    def message(self) -> str:
        return f"{self.path}:{self.line}: {self.sentence}" if self.line else f"{self.path}: {self.sentence}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDefinition:
    manifest: AgentManifest
    maker: AgentMaker


class CheckedFile:
    """A file while it is read, and all of its faults."""

    def __init__(self, path: str) -> None:
        self.path = path if path.isprintable() else ascii(path)
        self._faults: list[FileFault] = []
        self._lines: Mapping[str, int] = {}

    def read(self, reader: Callable[..., Document], *arguments: Any) -> dict[str, Any]:
        """The data that `reader` finds; what it cannot read is raised at once."""
        try:
            document = reader(*arguments)
        except UnreadableError as error:
            self.stop(error.line, error.sentence)
        self._lines = document.lines
        for line, sentence in document.duplicates:
            self._add(line, sentence)
        return document.data

    def check(self, cls: type[R], values: Mapping[str, Any]) -> R | None:
        """The record; None where something is wrong with it."""
        try:
            return cls.from_dict(values)
        except ValidationError as error:
            self.add_faults(fault for fault in error.faults if isinstance(fault, Fault))
            return None

    def add_faults(self, faults: Iterable[Fault]) -> None:
        """Each fault with the line of its field, or of the nearest key around it."""
        for fault in faults:
            self._add(self.line_of(fault.field), fault.message)

    def line_of(self, field: str) -> int:
        """The line of a field, or of the nearest key around it."""
        while field and field not in self._lines:
            field = field.rpartition(".")[0]
        return self._lines.get(field, 1 if self._lines else 0)

    def stop(self, line: int, sentence: str) -> NoReturn:
        """Nothing more can be read."""
        self._add(line, sentence)
        raise self._error()

    def raise_faults(self) -> None:
        """Raise one `DefinitionError` with every fault, in the order of the lines."""
        if self._faults:
            raise self._error()

    def _add(self, line: int, sentence: str) -> None:
        self._faults.append(FileFault(path=self.path, line=line, sentence=sentence))

    def _error(self) -> DefinitionError:
        ordered = sorted(dict.fromkeys(self._faults), key=lambda fault: fault.line)
        more = len(ordered) - MAX_FAULTS
        if more > 0:
            rest = FileFault(path=self.path, line=0, sentence=f"{more} more faults are not shown")
            ordered = [*ordered[:MAX_FAULTS], rest]
        return DefinitionError(ordered)


# --- one file ----------------------------------------------------------------------------------------


def load_agent_file(path: str | Path) -> LoadedDefinition:
    """Read one agent; raises one `DefinitionError` that carries every fault of the file.

    `.toml` is read as Codex writes it, everything else as Markdown.
    """
    return read_definition(Path(path), Path(path))


def read_definition(shown: Path, real: Path, *, follow: bool = True) -> LoadedDefinition:
    """`shown` gives the name and stands in the sentences, `real` is opened; without `follow` it may be no link."""
    file = CheckedFile(str(shown))
    text = read_text(file, real, follow=follow)
    data, body, driver = _read_codex(file, text) if shown.suffix == ".toml" else _read_markdown(file, text)
    _find_misspelt_lifecycle(file, data)
    ours = {key: data.pop(key) for key in ("name", "description", _LIFECYCLE) if key in data}
    top = file.check(AgentFile, ours) or AgentFile()
    fields = {"name": top.name or shown.stem, "description": top.description, "prompt": body, "extra": data or None}
    definition = define(file, fields, top.lifecycle, driver=driver)
    file.raise_faults()
    return definition


def define(
    file: CheckedFile, texts: Mapping[str, Any], keys: LifecycleKeys, *, driver: str = CLAUDE
) -> LoadedDefinition:
    """From the keys of `lifecycle` and from `texts`: name, description, prompt and what else the manifest keeps.

    `driver` is for a definition that names none. Faults are added to `file`; the caller raises them.
    """
    runs = keys.driver if "driver" in keys.fields_set else DriverKeys(name=driver)
    fields = keys.manifest_fields()
    manifest = AgentManifest(
        id=definition_id(runs.kind, texts["name"]),
        kind=runs.kind,
        source=file.path,
        command=runs.spec,
        driver=runs.text,
        **{**texts, "description": _clipped(texts["description"]), "prompt": texts["prompt"].strip() or None},
        **fields,
    )
    result = manifest.validate()
    file.add_faults(replace(fault, field=fault.field.removeprefix("extra.")) for fault in result)
    return LoadedDefinition(manifest=result.value or manifest, maker=maker_of(manifest))


def read_lifecycle(source: str, lifecycle: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys on a class in Python, as fields of its manifest; an `AgentRegistry` takes this function."""
    file = CheckedFile(source)
    keys = (file.check(AgentFile, {_LIFECYCLE: lifecycle}) or AgentFile()).lifecycle
    if "driver" in keys.fields_set:
        file.add_faults([Fault(field=f"{_LIFECYCLE}.driver", bound="is not for a class, which runs itself")])
    file.raise_faults()
    return keys.manifest_fields()


# --- the text of a file ------------------------------------------------------------------------------


def file_faults(error: DefinitionError) -> tuple[FileFault, ...]:
    return tuple(fault for fault in error.faults if isinstance(fault, FileFault))


def locate(path: Path, base: Path, *, is_above: bool) -> Path:
    """Where a file or folder under `base` really is.

    Raises `DefinitionError` for a link that leads out of `base`, and for what stands above the project and belongs to
    another user: a directory such as /tmp is everybody's.
    """
    try:
        real = path.resolve(strict=True)
        leads_out, owner = not real.is_relative_to(base.resolve()), real.stat().st_uid
    except (OSError, RuntimeError) as error:
        sentence = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    else:
        if not leads_out and not (is_above and owner not in {0, os.geteuid()}):
            return real
        sentence = "is a link that leads out of the project" if leads_out else "belongs to another user"
        sentence += ", and is not read"
    raise DefinitionError([FileFault(path=str(path), line=0, sentence=sentence)])


def read_text(file: CheckedFile, path: Path, *, follow: bool = True) -> str:
    """The text with plain line ends. Opened without waiting, for a pipe under that name would wait for ever."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
        with open(handle, "rb") as opened:  # noqa: PTH123 - it is open already
            regular = stat.S_ISREG(os.fstat(handle).st_mode)
            raw = opened.read(MAX_BYTES + 1) if regular else b""
    except (OSError, ValueError) as error:
        file.stop(0, f"cannot be read: {getattr(error, 'strerror', None) or error}; check the path and who owns it")
    if not regular:
        file.stop(0, "is not a regular file")
    if len(raw) > MAX_BYTES:
        file.stop(0, f"is larger than {MAX_BYTES // 1024} KiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        file.stop(raw.count(b"\n", 0, error.start) + 1, "this is not UTF-8 text; save the file as UTF-8")
    if "\0" in text:
        file.stop(text.count("\n", 0, text.index("\0")) + 1, "there is a NUL character; remove it")
    return text.replace("\r\n", "\n")


def _read_codex(file: CheckedFile, text: str) -> tuple[dict[str, Any], str, str]:
    data = file.read(read_toml, text)
    prompt = data.pop(_CODEX_PROMPT, "")
    if not isinstance(prompt, str):
        file.add_faults([Fault(field=_CODEX_PROMPT, bound="must be text", value=as_written(prompt))])
        prompt = ""
    return data, prompt, CODEX


def _read_markdown(file: CheckedFile, text: str) -> tuple[dict[str, Any], str, str]:
    if not text.strip():
        file.stop(1, "the file is empty; write what the agent is to do")
    lines = text.split("\n")
    if lines[0].rstrip() != _FENCE:
        return {}, text, CLAUDE
    end = next((number for number, line in enumerate(lines[1:], 1) if line.rstrip() == _FENCE), None)
    if end is None:
        file.stop(1, f"the front matter begins here and never ends; close it with a line of {_FENCE}")
    return file.read(read_yaml, "\n".join(lines[1:end]), 2), "\n".join(lines[end + 1 :]), CLAUDE


def _find_misspelt_lifecycle(file: CheckedFile, data: Mapping[str, Any]) -> None:
    """Unknown keys are kept, but a misspelt `lifecycle` would silently switch off everything below it."""
    for key in data:
        if key != _LIFECYCLE and difflib.get_close_matches(key.lower(), [_LIFECYCLE], n=1, cutoff=0.75):
            file.add_faults([Fault(field=named(key), bound=f"is not known; did you mean {_LIFECYCLE}?")])


def _clipped(text: str) -> str | None:
    """Other tools set no limit to it, so a long one is no fault."""
    return (text if len(text) <= MAX_DESCRIPTION else f"{text[: MAX_DESCRIPTION - 1]}…") or None
