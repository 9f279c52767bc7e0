"""A list of tasks in YAML, as `ostler task add -f` reads it: checked as a whole, with the line of every mistake."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar

from ostler.definitions.keys import FileRecord
from ostler.definitions.load import CheckedFile, file_faults
from ostler.definitions.parse import read_yaml
from ostler.errors import DefinitionError
from ostler.model.record import record
from ostler.model.states import AgentPriority
from ostler.model.types import Duration, Parsed

_TOP = "tasks"
#: How a list begins, at the beginning of a line.
_LIST = re.compile(rf"^(?:-(?:\s|$)|\[|{_TOP}[ \t]*:)", re.MULTILINE)
_NUMBER = re.compile(rf"^{_TOP}\.\d+\.")
_ITEM = re.compile(r"^tasks\.(\d+)\.?(.*)$")


def _listed(value: Any) -> Any:
    """One text stands for a list of one."""
    return [value] if isinstance(value, str) else value


_Texts = Annotated[tuple[str, ...], Parsed(_listed, schema={"type": ["string", "array"]})]


@record
class TaskEntry(FileRecord):
    """One task. The keys are the options of `ostler task add`."""

    KEYS: ClassVar[Mapping[str, str]] = {"depends_on": "after"}

    task: str
    key: str | None = None
    agent: str | None = None
    model: str | None = None
    checks: _Texts = ()
    setup: str | None = None
    #: Keys of tasks that must be accepted before; of those in the same list only earlier ones.
    depends_on: _Texts = ()
    priority: AgentPriority = AgentPriority.NORMAL
    tags: _Texts = ()
    hold: bool = False
    timeout: Duration | None = None
    max_failures: int | None = None
    backoff: Duration | None = None


@record
class _Entries(FileRecord):
    tasks: tuple[TaskEntry, ...] = field(default_factory=tuple)


class TaskList:
    """The tasks of a text. Making one raises `DefinitionError` with every fault and its line."""

    def __init__(self, name: str, text: str) -> None:
        """`name` is that of the file in sentences. The text is a list, whose items are tasks with keys, or their text
        alone; it may stand below the key `tasks`.
        """
        self._file = CheckedFile(name)
        data = self._file.read(read_yaml, *_with_top(text), "the list") if _LIST.search(text) else {}
        items = data.get(_TOP)
        if not isinstance(items, list) or not items:
            self._file.stop(1, "there is no list of tasks; write one, each task beginning with `- task: TEXT`")
        data[_TOP] = [{"task": item} if isinstance(item, str) else item for item in items]
        checked = self._file.check(_Entries, data)
        try:
            self._file.raise_faults()
        except DefinitionError as error:  # the line says which of the tasks it is
            faults = [replace(fault, sentence=_NUMBER.sub("", fault.sentence)) for fault in file_faults(error)]
            raise DefinitionError(faults) from None
        entries = () if checked is None else checked.tasks
        #: The arguments of `TaskOrchestrator.submit` for each.
        self.entries: list[dict[str, Any]] = [_given(entry) for entry in entries]

    def place(self, sentence: str) -> str:
        """The sentence of a fault whose field is `tasks.NUMBER.FIELD`, with the line of it instead."""
        path, _, bound = sentence.partition(" ")
        match = _ITEM.match(path)
        if match is None:
            return sentence
        label = TaskEntry.spelled(match[2]) if match[2] else ""
        line = self._file.line_of(f"{_TOP}.{match[1]}.{label}")
        return f"{self._file.path}:{line}: {f'{label} {bound}'.strip()}"


def _with_top(text: str) -> tuple[str, int]:
    """The text with the key above its list, and the number of its first line."""
    body = re.sub(r"\A(\ufeff?)---[ \t]*$", "", text, flags=re.MULTILINE)
    if re.search(rf"^{_TOP}[ \t]*:", body, flags=re.MULTILINE):
        return body, 1
    if body.lstrip().startswith("["):  # JSON
        return f"{_TOP}: {body.lstrip()}", 1 + body[: len(body) - len(body.lstrip())].count("\n")
    return f"{_TOP}:\n{body}", 0


def _given(entry: TaskEntry) -> dict[str, Any]:
    """What was written, in JSON."""
    values = entry.to_dict()
    return {name: value for name, value in values.items() if value not in (None, [], (), False)}
